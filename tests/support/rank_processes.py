"""Runs a program once for each rank, as processes that meet each other. They fork from one that has imported torch."""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path


def run_ranks(program, folder, ranks, *arguments, cells=4):
    """The lines that all ranks print and that have so many cells."""
    words = [str(word) for word in (__file__, program, folder, ranks, *arguments)]
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=580)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    return [line.split(",") for line in output.splitlines() if line.count(",") == cells - 1]


def fork_ranks(program, folder, ranks, *arguments):
    """Returns how many ranks have failed."""
    import embodied.learners.worker  # noqa: F401 - it takes longer than most programs

    children = []
    for rank in range(int(ranks)):
        if (child := os.fork()) == 0:
            sys.argv = [program, folder, str(rank), ranks, *arguments]
            sys.path[:1] = [str(Path(program).parent), str(Path(__file__).parent)]
            sys.stdout.reconfigure(write_through=False)  # whole lines, also where Python is told not to buffer
            runpy.run_path(program, run_name="__main__")
            sys.exit()
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(fork_ranks(*sys.argv[1:]))
