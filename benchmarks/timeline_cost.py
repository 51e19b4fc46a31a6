"""What measuring a timeline costs: pieces recorded per second of training times the price of one.

Comparing whole runs with and without it would show the noise of the machine instead: the cost is far below 1%.

    python -m benchmarks.timeline_cost
    python -m benchmarks.timeline_cost --recipe maniskill_ppo --iterations 5
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.common import ROOT, environment, markdown, only_run, train_command
from embodied.reporting.timeline import DRIVER, TimedSpan, read_trace
from embodied.runtime import Timers

ROUNDS, LOOPS = 50, 2000


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--recipe", default="pointmass_ppo")
    arguments.add_argument("--iterations", type=int, default=10)
    given = arguments.parse_args()
    price = price_of_a_piece()
    with tempfile.TemporaryDirectory() as parent:
        quick = [f"run.iterations={given.iterations}", f"run.trace={given.iterations}", f"run.dir={parent}"]
        command = train_command(given.recipe, *quick, "eval.episodes=1", "eval.videos=0")
        subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=900, capture_output=True)
        spans = [span for span in read_trace(only_run(Path(parent)) / "trace.json") if span.iteration > 1]
    print(f"one measured piece costs {price * 1e6:.2f} us\n")
    print(markdown(["worker", "pieces per second", "cost"], [row(w, spans, price) for w in workers(spans)]))


def price_of_a_piece() -> float:
    """Seconds of a measured, recorded and empty piece of work."""
    timers, seconds = Timers(), []
    for _ in range(ROUNDS):
        timers.record(True)
        start = perf_counter()
        for _ in range(LOOPS):
            with timers.measure("act"):
                pass
        seconds.append((perf_counter() - start) / LOOPS)
    return median(seconds)


def workers(spans: list[TimedSpan]) -> list[str]:
    return list(dict.fromkeys(span.worker for span in spans if span.worker != DRIVER))


def row(worker: str, spans: list[TimedSpan], price: float) -> list[str]:
    """How often this worker measured, while training went on (its evaluation and saving included)."""
    wall_s = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    rate = sum(span.worker == worker for span in spans) / wall_s
    return [worker, f"{rate:.0f}", f"{rate * price:.3%}"]


if __name__ == "__main__":
    main()
