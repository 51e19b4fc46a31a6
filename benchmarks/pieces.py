"""The gain of sending rollouts in pieces, so that learners encode them during the rollout.

    python -m benchmarks.pieces benchmarks/delays_frozen.yaml --granularity 4

Runs iterations of the recipe with whole rollouts and with pieces, in turns, sims and policies on one core and the
learner on another, and prints seconds of an iteration and until its first backward pass. Writes
benchmarks/results/pieces-RECIPE.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import RESULTS, code_commit, machine
from embodied.config.recipe import load
from embodied.profiling.timed_run import Round, TimedRun
from embodied.reporting.benchmark_page import paired_ratio
from embodied.run import launch

PLACEMENT = '{"sim,policy": "cpu:0", learner: "cpu:1"}'
WARM_UP = 1


def in_turns(recipe: str, arms: dict[str, str], more: list[str], turns: int) -> dict[str, list[Round]]:
    """Run `turns` iterations of the recipe with each arm's key=value, in turns."""
    rounds: dict[str, list[Round]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory() as logs, ExitStack() as stack:
        timed_runs = {}
        for name, option in arms.items():
            config = load([f"recipe={recipe}", f"placement={PLACEMENT}", option, *more]).config
            timed_runs[name] = stack.enter_context(TimedRun(*launch.planned(config), Path(logs) / name))
        for turn in range(WARM_UP + turns):
            for name, timed_run in timed_runs.items():
                done = timed_run.iterate()
                rounds[name] += [done] if turn >= WARM_UP else []
            print(f"round {turn + 1} of {WARM_UP + turns}", flush=True)
    return rounds


def compare(rounds: dict[str, list[Round]], what: str) -> tuple[float, float, float]:
    """Print the speed-up of the last arm over the first (`what` names it); returns it with its 95% interval."""
    first, *_, last = rounds.values()
    ratio = paired_ratio(last, first)
    print(f"{what} {ratio[1]:.2f} times as fast (95% interval {ratio[0]:.2f} to {ratio[2]:.2f})")
    return ratio


def parser_of(text: str) -> argparse.ArgumentParser:
    """The arguments of a benchmark with arms in turns."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("more", nargs="*", help="key=value of the recipe")
    parser.add_argument("--rounds", type=int, default=7)
    return parser


def write(name: str, asked: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write the results and their conditions into benchmarks/results/NAME-RECIPE.json."""
    about = {**vars(asked), "placement": PLACEMENT, "machine": machine(), "commit": code_commit()}
    path = RESULTS / f"{name}-{Path(asked.recipe).stem}.json"
    path.write_text(json.dumps(about | found, indent=1) + "\n")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--granularity", type=int, required=True)
    asked = parser.parse_args()
    arms = {"whole": "pipeline.granularity=null", "pieces": f"pipeline.granularity={asked.granularity}"}
    rounds = in_turns(asked.recipe, arms, asked.more, asked.rounds)
    for name, found in rounds.items():
        whole, first = (median(getattr(r, key) for r in found) for key in ("seconds", "first_backward_s"))
        print(f"{name}: {whole:.3f} s an iteration, {first:.3f} s until the first backward pass")
    ratio = compare(rounds, "pieces are")
    write("pieces", asked, {"ratio": ratio, "rounds": {name: list(map(asdict, each)) for name, each in rounds.items()}})


if __name__ == "__main__":
    main()
