"""Runs a program once for each rank, as processes that meet each other. They fork from one server, which has imported
torch and transformers and stays until the tests are over."""

import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["embodied.learners.learner_worker", "embodied.policies.language.policy"])
LONGEST_S = 580


def run_ranks(program, folder, ranks, *arguments, cells=4):
    """The lines that all ranks print and that have so many cells."""
    until = time.monotonic() + LONGEST_S
    with tempfile.TemporaryDirectory(prefix="ranks-") as out:
        files = [Path(out, str(rank)) for rank in range(ranks)]
        words = [[str(word) for word in (program, folder, rank, ranks, *arguments)] for rank in range(ranks)]
        processes = [PROCESSES.Process(target=run_rank, args=each) for each in zip(words, files, strict=True)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(until - time.monotonic(), 0.1))
        late = [process.kill() for process in processes if process.is_alive()]
        told = "".join(file.read_text() for file in files)
    assert not late and not any(process.exitcode for process in processes), told
    return [line.split(",") for line in told.splitlines() if line.count(",") == cells - 1]


def run_rank(words, output):
    with output.open("w") as file:
        for place in (1, 2):
            os.dup2(file.fileno(), place)
    sys.argv = words
    sys.path[:1] = [str(Path(words[0]).parent), str(Path(__file__).parent)]
    runpy.run_path(words[0], run_name="__main__")
