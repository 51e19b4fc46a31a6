"""Transcripts as sim workers write them, side by side, killed half way, and as they are read."""

import json
import os
import signal
import subprocess
import sys

import numpy as np

from embodied.core.types import EpisodeResult
from embodied.records.transcripts import (
    PARTS,
    TRANSCRIPTS,
    TranscriptWriter,
    join_transcripts,
    read_transcripts,
    remove_transcripts,
)


def result(index, success=True, **more):
    return EpisodeResult(
        index, "add2", index, 7, 1, float(success), success, success, truncated=False, tokens=2, **more
    )


def turn(answer="95", **more):
    about = {"said": "37+58=", "answer": answer, "tokens": [*answer], "logprobs": [-0.1] * len(answer)}
    return about | {"truncated": False, "reward": 1.0, "facts": {"expected": "95"}} | more


def write(folder, source, *episodes, **more):
    with TranscriptWriter(folder / PARTS, source) as writer:
        for index in episodes:
            writer.add(result(index), [turn(f"{source} {index}", **more)])


def answers(folder, wanted=None):
    return {index: found["turns"][0]["answer"] for index, found in read_transcripts(folder, wanted).items()}


def test_a_conversation_comes_back_as_it_was_written(tmp_path):
    with TranscriptWriter(tmp_path / PARTS, "sim-0") as writer:
        messages = ({"role": "user", "content": "naïve\n\u2028 \U0001f600"},)
        writer.add(result(3), [turn(said=messages, logprobs=np.array([-0.5, np.nan]), facts={"number": np.int64(4)})])
        found = read_transcripts(tmp_path)  # while the worker still writes
    assert list(found[3]) == ["index", "task", "init_state_id", "success", "reward", "error", "turns"]
    (told,) = found[3]["turns"]
    assert told["said"] == list(messages) and told["facts"] == {"number": 4}
    assert told["logprobs"] == [-0.5, None]


def test_several_writers_write_side_by_side_and_their_lines_are_joined_in_order(tmp_path):
    write(tmp_path, "sim-0", 0, 2, 4)
    write(tmp_path, "sim-1", 3, 1)
    assert list(answers(tmp_path)) == [0, 1, 2, 3, 4]
    assert answers(tmp_path, {1, 4}) == {1: "sim-1 1", 4: "sim-0 4"}
    join_transcripts(tmp_path, {0, 1, 2, 4})
    lines = (tmp_path / TRANSCRIPTS).read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1, 2, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [TRANSCRIPTS]


def test_half_a_line_of_a_killed_worker_is_skipped_and_its_successor_writes_on(tmp_path):
    write(tmp_path, "sim-0", 0, 1)
    path = tmp_path / PARTS / "sim-0.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert list(answers(tmp_path)) == [0]
    write(tmp_path, "sim-0", 1, 2)
    assert list(answers(tmp_path)) == [0, 1, 2]


def test_the_later_line_of_an_episode_counts(tmp_path):
    write(tmp_path, "sim-0", 0)
    join_transcripts(tmp_path, {0})
    write(tmp_path, "sim-1", 0)
    assert answers(tmp_path) == {0: "sim-1 0"}


def test_lines_that_are_no_transcripts_are_skipped(tmp_path):
    write(tmp_path, "sim-0", 0)
    with (tmp_path / PARTS / "sim-0.jsonl").open("a") as file:
        file.write('\n[]\n7\n{"index": true, "turns": []}\n{"index": 1}\n' + "[" * 100_000 + "\n\x00\n")
    write(tmp_path, "sim-0", 2)
    assert list(answers(tmp_path)) == [0, 2]


def test_facts_of_any_kind_and_half_characters_are_written(tmp_path):
    facts = {"raw": b"\xff\xfe", "kinds": {1}, ("a", 2): float("inf"), "path": os}
    with TranscriptWriter(tmp_path / PARTS, "sim-0") as writer:
        writer.add(result(0), [turn("\udc80", facts=facts)])
    (told,) = read_transcripts(tmp_path)[0]["turns"]
    assert told["answer"] == "\udc80"
    assert told["facts"] == {"raw": "b'\\xff\\xfe'", "kinds": "{1}", "('a', 2)": None, "path": str(os)}


def test_transcripts_of_an_earlier_evaluation_can_be_removed(tmp_path):
    write(tmp_path, "sim-0", 0)
    join_transcripts(tmp_path, {0})
    write(tmp_path, "sim-0", 1)
    remove_transcripts(tmp_path)
    assert not list(tmp_path.iterdir())
    remove_transcripts(tmp_path)
    join_transcripts(tmp_path, {0})  # a robot's evaluation has none
    assert read_transcripts(tmp_path) == {}


WRITE_ON = """
from itertools import count
from pathlib import Path
import sys
from embodied.core.types import EpisodeResult
from embodied.records.transcripts import TranscriptWriter
turn = {"said": "x" * 50_000, "answer": "", "tokens": [], "logprobs": [], "truncated": False, "reward": 0, "facts": {}}
with TranscriptWriter(Path(sys.argv[1]), "sim-0") as writer:
    for index in count():
        writer.add(EpisodeResult(index, "t", index, 0, 1, 0.0, False, False), [turn])
        print(index, flush=True)
"""


def test_transcripts_added_before_a_kill_can_be_read(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITE_ON, tmp_path / PARTS], stdout=subprocess.PIPE)
    told = [int(process.stdout.readline()) for _ in range(20)]
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    process.stdout.close()
    found = read_transcripts(tmp_path)
    assert list(found) == list(range(len(found))) and len(found) >= len(told)
