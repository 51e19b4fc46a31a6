"""Runs a program once for each rank, as processes that meet each other."""

import subprocess
import sys


def run_ranks(program, folder, ranks, *arguments, cells=4):
    """The lines that all ranks print and that have so many cells."""
    words = [str(word) for word in (program, folder)]
    started = [
        subprocess.Popen(
            [sys.executable, *words, str(rank), str(ranks), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    rows = []
    for process in started:
        output, _ = process.communicate(timeout=580)
        assert process.returncode == 0, output
        rows += [line.split(",") for line in output.splitlines() if line.count(",") == cells - 1]
    return rows
