"""Transcripts of a language policy's evaluation: the messages and answers, one line of JSON per conversation.

Each sim worker appends to a file of its own in `transcripts/`, so no worker waits for another. At the end the files are
joined to `transcripts.jsonl`, in the order of the episodes. A killed worker may leave half a line: its successor begins
a new line, and readers skip damaged lines. Of an episode that was played twice, the later line counts.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from embodied.core.files import encode, replace_text
from embodied.core.types import EpisodeResult, Recording

TRANSCRIPTS = "transcripts.jsonl"  # of all conversations, beside results.json
SAMPLES = "samples.jsonl"  # some conversations of every iteration of training, beside metrics.jsonl
ANSWERS = "answers.jsonl"  # length and end time of every iteration's conversations, beside metrics.jsonl
MOST_ENDS = 256  # conversations of an iteration in ANSWERS, at most
PARTS = "transcripts"  # the folder of the sim workers' files


class TranscriptWriter:
    """Appends a sim worker's conversations to `folder`/`source`.jsonl; a context manager."""

    def __init__(self, folder: Path, source: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{source}.jsonl"
        self.file = path.open("ab")
        if not ends_a_line(path):
            self.file.write(b"\n")

    def add(self, result: EpisodeResult, turns: Sequence[dict[str, Any]]) -> None:
        """Write a finished conversation. A turn is {"said", "answer", "tokens" (a string each), "logprobs",
        "truncated", "reward", "facts"}; numbers that are not finite become null."""
        line = {
            "index": result.index,
            "task": result.task,
            "init_state_id": result.init_state_id,
            "success": result.success_once,
            "reward": result.total_reward,
            "error": result.error,
            "turns": list(turns),
        }
        self.file.write(as_line(line))
        self.file.flush()

    def close(self) -> None:
        """Close the file, with all added conversations in it."""
        self.file.close()

    def __enter__(self) -> TranscriptWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def record_transcripts(recording: Recording, source: str) -> TranscriptWriter:
    """Writes the evaluation conversations of a sim worker, `source`, beside the folder of videos."""
    return TranscriptWriter(recording.videos.parent / PARTS, source)


def ends_a_line(path: Path) -> bool:
    """True if the file is empty or ends with a newline."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def as_line(entry: dict[str, Any]) -> bytes:
    """A line of JSON."""
    text = json.dumps(as_json_value(entry), ensure_ascii=False, allow_nan=False)
    return encode(text) + b"\n"


def read_samples(run: Path) -> list[dict[str, Any]]:
    """The conversations of training in a run's samples.jsonl, without half-written lines."""
    path = run / SAMPLES
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    samples = [json.loads(line) for line in lines if episode_of(line) is not None]
    return [sample for sample in samples if type(sample.get("iteration")) is int]


def add_samples(run: Path, iteration: int, samples: Sequence[dict[str, Any]]) -> None:
    """Add conversations of an iteration to samples.jsonl."""
    with (run / SAMPLES).open("ab", buffering=0) as file:
        file.write(b"".join(as_line({"iteration": iteration, **sample}) for sample in samples))


def add_ends(run: Path, iteration: int, ends: Sequence[tuple[int, float]]) -> None:
    """Add a line to answers.jsonl: tokens and end times of an iteration's conversations, each sorted. Of more than
    MOST_ENDS conversations, evenly spaced ones are kept, with the longest."""
    count = min(len(ends), MOST_ENDS)
    places = [round((number + 1) * len(ends) / count) - 1 for number in range(count)]
    tokens, seconds = (sorted(column) for column in zip(*ends, strict=True))
    shown = {"tokens": [tokens[at] for at in places], "ended_s": [round(seconds[at], 3) for at in places]}
    with (run / ANSWERS).open("ab", buffering=0) as file:
        file.write(as_line({"iteration": iteration, "conversations": len(ends), **shown}))


def keep_conversations(run: Path, iteration: int) -> None:
    """Drop the conversations of iterations after `iteration` from samples.jsonl and answers.jsonl."""
    for name, read in ((SAMPLES, read_samples), (ANSWERS, read_ends)):
        if (run / name).is_file():
            kept = [line for line in read(run) if line["iteration"] <= iteration]
            replace_text(run / name, b"".join(map(as_line, kept)).decode())


def read_ends(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's answers.jsonl, without damaged lines; of a repeated iteration the later line."""
    path, lines = run / ANSWERS, {}
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError, TypeError, KeyError):
            row = json.loads(line)
            numbers = [list(map(float, row[name])) for name in ("tokens", "ended_s")]
            if type(row["iteration"]) is int and numbers[0] and len(numbers[0]) == len(numbers[1]):
                lines[row["iteration"]] = row
    return [lines[iteration] for iteration in sorted(lines)]


def as_json_value(value: Any) -> Any:
    """The value as JSON: arrays as lists, not-a-number as null, other objects as text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): as_json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_json_value(inner) for inner in value]
    return as_json_value(value.tolist()) if hasattr(value, "tolist") else str(value)


def read_transcripts(folder: Path, wanted: Collection[int] | None = None) -> dict[int, dict[str, Any]]:
    """The conversations of the evaluation in `folder` by episode, in order: all, or the `wanted` ones."""
    return {index: json.loads(line) for index, line in transcript_lines(folder, wanted)}


def join_transcripts(folder: Path, episodes: Collection[int]) -> None:
    """Write transcripts.jsonl of these episodes of the evaluation in `folder`, if it has any, and remove its parts."""
    if (folder / PARTS).is_dir():
        partly = folder / f".{TRANSCRIPTS}"
        with partly.open("wb") as file:
            file.writelines(line for _, line in transcript_lines(folder, episodes))
        partly.replace(folder / TRANSCRIPTS)
        shutil.rmtree(folder / PARTS)


def remove_transcripts(folder: Path) -> None:
    """Remove the transcripts of an earlier evaluation in this folder."""
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    (folder / TRANSCRIPTS).unlink(missing_ok=True)


def transcript_lines(folder: Path, wanted: Collection[int] | None = None) -> Iterator[tuple[int, bytes]]:
    """The lines of these episodes (None: all) in order, with one line in memory at a time."""
    places: dict[int, tuple[Path, int]] = {}
    for path in (folder / TRANSCRIPTS, *sorted((folder / PARTS).glob("*.jsonl"))):
        if path.is_file():
            places |= {index: (path, start) for start, index in starts_in(path) if index is not None}
    for index in sorted(places):
        if wanted is None or index in wanted:
            path, start = places[index]
            with path.open("rb") as file:
                file.seek(start)
                yield index, file.readline()


def starts_in(path: Path) -> Iterator[tuple[int, int | None]]:
    """The offset of each line in the file, and its episode."""
    start = 0
    with path.open("rb") as file:
        for line in file:
            yield start, episode_of(line)
            start += len(line)


def episode_of(line: bytes) -> int | None:
    """The episode of a line; None if it is not a whole transcript."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = line.endswith(b"\n") and isinstance(content, dict) and isinstance(content.get("turns"), list)
    return content["index"] if whole and type(content.get("index")) is int else None
