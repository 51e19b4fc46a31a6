"""The files of evaluations: results.json, episodes.csv, comparison.json, and partial.json of an interrupted one.

The same episodes give the same bytes, independent of the order in which they ended. An interrupted evaluation has its
finished episodes in episodes.csv and no results.json, so that continuing it plays only the missing episodes. It gets no
rates: successful episodes end early, so they are over-represented among the finished ones.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, NotRequired, get_type_hints

import numpy as np
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic requires this version below Python 3.12

from embodied.core.errors import CheckpointError
from embodied.core.files import read_object, reading, replace_text
from embodied.core.types import EpisodeResult
from embodied.policies.policy_folder import read_json
from embodied.records.progress import provenance
from embodied.records.success_stats import compare, figures, of_text
from embodied.records.transcripts import remove_transcripts
from embodied.records.videos import remove_drafts

RESULTS = "results.json"
EPISODES = "episodes.csv"
UNWRITTEN = ("prompt_tokens", "all_tokens", "places")  # used to distribute episodes over learners
FIELDS = {name: kind for name, kind in get_type_hints(EpisodeResult).items() if name not in UNWRITTEN}
TEXT_COLUMNS = ("truncated", "tokens", "rewards")  # of language policies alone
COLUMNS = tuple(name for name in FIELDS if name not in TEXT_COLUMNS)
PARSERS = {
    int: int,
    float: float,
    str: str,
    bool | None: {"": None, "true": True, "false": False}.__getitem__,
    dict[str, float] | None: lambda text: json.loads(text) if text else None,
}
COMPARISON = "comparison.json"
METHODS = {
    "success": "difference of paired rates: Newcombe's 95% interval (1998, method 10), exact McNemar test",
    "return": "mean of paired differences, normal 95% interval",
    "several answers to a prompt": "mean over prompts of the differences of their means, normal 95% interval",
}


def write_results(folder: Path, results: dict[str, Any], episodes: Iterable[EpisodeResult]) -> None:
    """Write results.json and episodes.csv, each whole or not at all."""
    write_episodes(folder, episodes)
    replace_text(folder / RESULTS, json.dumps(results, indent=2, allow_nan=False) + "\n")


def write_episodes(folder: Path, episodes: Iterable[EpisodeResult]) -> None:
    """Write episodes.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / EPISODES, episodes_csv(episodes))


def read_results(folder: Path) -> tuple[dict[str, Any], list[EpisodeResult]]:
    """Read the files of `write_results`; raises EmbodiedError for a damaged file."""
    results = read_object(folder / RESULTS)
    with reading(folder / RESULTS):
        check(results, Results)
    with reading(folder / EPISODES):
        return results, read_episodes(folder)


def read_episodes(folder: Path) -> list[EpisodeResult]:
    """Read episodes.csv."""
    with open(folder / EPISODES, encoding="utf-8", newline="") as file:
        try:
            return [episode(row) for row in csv.DictReader(file)]
        except csv.Error as err:  # for example a field of megabytes
            raise ValueError(str(err)) from None


def episodes_csv(episodes: Iterable[EpisodeResult]) -> str:
    """The text of episodes.csv: a line per episode by index. An empty success means that the env has none."""
    episodes = sorted(episodes, key=lambda result: result.index)
    columns = (*COLUMNS, *TEXT_COLUMNS) if of_text(episodes) else COLUMNS
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for result in episodes:
        writer.writerow(cell(getattr(result, name)) for name in columns)
    return text.getvalue()


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, (bool, np.bool_)) else str(value)


def episode(row: dict[str, str]) -> EpisodeResult:
    names = [name for name in FIELDS if name in row or name not in TEXT_COLUMNS]
    return EpisodeResult(**{name: PARSERS[FIELDS[name]](row[name]) for name in names})


def write_comparison(folder: Path, played: dict[str, list[EpisodeResult]]) -> dict[str, Any]:
    """Write and return comparison.json: every pair of policies in the order they were named, second minus first."""
    pairs = [{"first": a, "second": b, **compare(played[a], played[b])} for a, b in combinations(played, 2)]
    comparison = {"policies": list(played), "methods": METHODS, "pairs": pairs}
    replace_text(folder / COMPARISON, json.dumps(comparison, indent=2, allow_nan=False) + "\n")
    return comparison


# The types of the keys that reports read. Other keys may hold anything.

Count = Annotated[int, Field(ge=0, lt=2**63)]
LARGEST = 1e100
Share = Annotated[float, Field(ge=-1e-6, le=1 + 1e-6)]  # rounding may leave the unit interval


class PromptRate(TypedDict):
    rate: Share
    interval: Annotated[list[Share], Field(min_length=2, max_length=2)]
    of: Count


class Measure(PromptRate):
    count: Count


TextFigures = TypedDict(
    "TextFigures",
    {
        "prompts": Count,
        "samples": Count,
        "avg": PromptRate | None,
        "pass": dict[Annotated[str, Field(pattern=r"^\d+$")], PromptRate | None],
        "truncated": Measure | None,
        "tokens": FiniteFloat | None,
        "rewards": NotRequired[dict[str, FiniteFloat]],
    },
)


class AtReset(TypedDict):
    count: Count


Figures = TypedDict(
    "Figures",
    {
        "success_once": Measure | None,
        "success_at_end": Measure | None,
        "success_at_reset": AtReset | None,
        "episodes": Count,
        "errors": Count,
        "return": FiniteFloat | None,
        "length": FiniteFloat | None,
        "text": NotRequired[TextFigures],
    },
)


class EvalOptions(TypedDict):
    seed: NotRequired[int]
    temperature: NotRequired[FiniteFloat]


class EvalProtocol(TypedDict):
    name: NotRequired[str]
    eval: NotRequired[EvalOptions]
    env: NotRequired[dict[str, Any]]


class Reference(TypedDict):
    name: str
    task: str
    hub: str
    source: str
    published: PromptRate
    difference: NotRequired[FiniteFloat]
    interval: NotRequired[Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]]
    differs: list[str]


class Results(TypedDict):
    policy_version: Count
    overall: Figures
    per_task: dict[str, Figures]
    per_suite: NotRequired[dict[str, Figures]]
    protocol: NotRequired[EvalProtocol]
    provenance: NotRequired[dict[str, Any]]
    reference: NotRequired[Reference]


class HostEntry(TypedDict):
    name: str
    roles: list[str]


class PlacementEntry(TypedDict):
    hosts: list[HostEntry]


class RunInfo(TypedDict, total=False):
    state: str
    cause: str
    command: str
    started: str
    ended: str
    provenance: dict[str, Any]
    placement: PlacementEntry
    resumed: list[dict[str, Any]]
    started_from: dict[str, Any] | None


class MetricsRow(TypedDict):
    iteration: Count
    env_steps: Count
    policy_version: Count
    train_s: Annotated[FiniteFloat, Field(ge=0)]


_reader = cache(TypeAdapter)  # making one takes longer than reading a row of metrics


def check(content: Any, shape: Any) -> None:
    """Raise ValueError for the first part of `content` that does not have this type."""
    try:
        _reader(shape).validate_python(content, strict=True)
    except ValidationError as err:
        first = err.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg'].lower()}") from None


def check_info(info: dict[str, Any]) -> None:
    """Raise ValueError if a report cannot show this run.json."""
    check(info, RunInfo)
    for key in ("started", "ended"):
        if key in info:
            datetime.fromisoformat(info[key])


def check_row(row: Any) -> None:
    """Raise ValueError if a report cannot show this line of metrics.jsonl."""
    check(row, MetricsRow)
    if odd := [key for key, value in row.items() if type(value) not in (int, float, type(None))]:
        raise ValueError(f"{odd[0]} is not a number")
    if odd := [key for key, value in row.items() if value and LARGEST < abs(value) < float("inf")]:
        raise ValueError(f"{odd[0]}={row[odd[0]]:g} is more than a chart can show")


PARTIAL = "partial.json"
BUFFERS = "episode_buffers"  # the folder of the dataset's episodes
TELL_EVERY_S = 15.0
EVERY_S = 1.0  # minimum time between two writes
SHARE = 1 / 50  # largest share of the time spent on writing


class PartialEvaluation:
    """The state of an evaluation. `finished` holds its finished episodes by index, of earlier sessions too."""

    def __init__(
        self,
        folder: Path,
        asked: dict[str, Any],
        policy: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
        notify: Callable[[str], object] = lambda line: None,
    ) -> None:
        """`asked`: everything that decides an episode's outcome. Episodes of earlier sessions with the same `asked` are
        kept. `policy` is the entry in results.json. `notify` gets lines on its progress."""
        self.folder, self.asked, self.policy, self.clock = folder, asked, policy, clock
        self.num_episodes = asked["eval"]["episodes"]
        self.finished: dict[int, EpisodeResult] = {}
        self.earlier: list[dict[str, Any]] = []
        if partial := is_part_of(folder, asked):
            with suppress(OSError, ValueError, KeyError, TypeError):  # else it is played from the start
                self.finished = {episode.index: episode for episode in read_episodes(folder)}
                self.earlier = partial["provenance"]
        if not self.finished:
            remove_transcripts(folder)
        self.session = provenance()
        self.notify, self.began = notify, len(self.finished)
        self.began_s = self.ended_s = clock()  # `ended_s`: the time of the last end of an episode
        self.told, self.told_s = self.began, self.began_s  # episodes that were over at the last line, and when it came
        self.wait_s = TELL_EVERY_S  # seconds until the next line, if no episode ends
        remove_drafts(folder)
        (folder / RESULTS).unlink(missing_ok=True)  # of the same version, evaluated before the run was resumed
        self.write()

    def __str__(self) -> str:
        return f"{len(self.finished)} of {self.num_episodes} episodes"

    def add(self, episodes: Iterable[EpisodeResult]) -> None:
        """Add finished episodes; they are written if the last write is long enough ago."""
        before = len(self.finished)
        self.finished |= {episode.index: episode for episode in episodes}
        if len(self.finished) > before:
            self.changed, self.ended_s = True, self.clock()
        if self.changed and self.clock() >= self.next_s:
            self.write()
        new = len(self.finished) > self.told
        quiet_s = self.clock() - self.told_s
        if quiet_s >= (TELL_EVERY_S if new else self.wait_s) and len(self.finished) < self.num_episodes:
            # Without news the time between two lines doubles.
            self.wait_s = TELL_EVERY_S if new else 2 * self.wait_s
            self.told, self.told_s = len(self.finished), self.clock()
            self.notify(self.progress())

    def progress(self) -> str:
        """The number of finished episodes, their outcomes, the speed, and the remaining time at this speed."""
        over, results = len(self.finished), figures(list(self.finished.values()))
        parts = [f"{over:,} of {self.num_episodes:,} episodes are over"]
        if results["success_once"]:
            parts.append(f"success_once {results['success_once']['rate']:.0%} of these")
        elif results["return"] is not None:
            parts.append(f"return {results['return']:.2f}")
        if played := over - self.began:
            speed = played / (self.clock() - self.began_s)
            left_s = (self.num_episodes - over) / speed
            parts += [f"{speed:.3g} a second", f"about {left_s:,.0f} s left"]
        if (quiet_s := self.clock() - self.ended_s) >= 2 * TELL_EVERY_S:
            parts.append(f"none has ended for {quiet_s:,.0f} s")
        return "evaluation  " + ", ".join(parts)

    def write(self) -> None:
        """Write the finished episodes and partial.json."""
        began = self.clock()
        write_episodes(self.folder, self.finished.values())
        progress = {"over": len(self.finished), "episodes": self.num_episodes}
        mark(self.folder, {**progress, "asked": self.asked, "provenance": [*self.earlier, self.session]})
        self.changed = False
        self.next_s = self.clock() + max(EVERY_S, (self.clock() - began) / SHARE)

    def end(self) -> None:
        """Remove partial.json and the buffers, once results.json is written."""
        shutil.rmtree(self.folder / BUFFERS, ignore_errors=True)
        remove_partial(self.folder)

    def provenance(self) -> dict[str, Any]:
        """The provenance of the results; `earlier` holds that of earlier sessions."""
        return {**self.session, **({"earlier": self.earlier} if self.earlier else {})}


def mark(folder: Path, content: dict[str, Any]) -> None:
    """Write partial.json, which marks the folder as an interrupted evaluation."""
    replace_text(folder / PARTIAL, json.dumps({"state": "partial", **content}, indent=2) + "\n")


def remove_partial(folder: Path) -> None:
    """Remove partial.json."""
    (folder / PARTIAL).unlink()


def is_part_of(folder: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The content of partial.json, if it belongs to the evaluation `asked`."""
    partial = partial_in(folder)
    return partial if partial and partial.get("asked") == json.loads(json.dumps(asked)) else None


def partial_in(folder: Path) -> dict[str, Any] | None:
    """The content of an interrupted evaluation's partial.json; None without one."""
    with suppress(CheckpointError):
        if not (folder / RESULTS).is_file():
            return read_json(folder / PARTIAL)
    return None
