"""What does it bring to hand on rollouts in pieces, to learners that look at them meanwhile?

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

from benchmarks.common import RESULTS, code_commit, machine
from embodied.config.recipe import load
from embodied.profiling.timed_run import Round, Trial
from embodied.reporting.benchmark_page import paired_ratio
from embodied.run import launch

PLACEMENT = '{"sim,policy": "cpu:0", learner: "cpu:1"}'
WARM_UP = 1


def trial(recipe: str, granularity: int | None, more: list[str], logs: Path) -> Trial:
    pieces = f"pipeline.granularity={'null' if granularity is None else granularity}"
    config = load([f"recipe={recipe}", f"placement={PLACEMENT}", pieces, *more]).config
    return Trial(*launch.planned(config), logs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("more", nargs="*", help="key=value of the recipe")
    parser.add_argument("--granularity", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    sizes: dict[str, int | None] = {"whole": None, "pieces": asked.granularity}
    rounds: dict[str, list[Round]] = {name: [] for name in sizes}
    about = {"recipe": asked.recipe, "more": asked.more, "granularity": asked.granularity, "placement": PLACEMENT}
    about |= {"machine": machine(), "commit": code_commit()}
    with tempfile.TemporaryDirectory() as logs, ExitStack() as stack:
        trials = {
            name: stack.enter_context(trial(asked.recipe, size, asked.more, Path(logs) / name))
            for name, size in sizes.items()
        }
        for turn in range(WARM_UP + asked.rounds):
            for name, one in trials.items():
                done = one.iterate()
                rounds[name] += [done] if turn >= WARM_UP else []
            print(f"round {turn + 1} of {WARM_UP + asked.rounds}", flush=True)
    for name, found in rounds.items():
        whole, first = (median(getattr(r, key) for r in found) for key in ("seconds", "first_backward_s"))
        print(f"{name}: {whole:.3f} s an iteration, {first:.3f} s until the first backward pass")
    ratio = paired_ratio(rounds["pieces"], rounds["whole"])
    print(f"pieces are {ratio[1]:.2f} times as fast (95% interval {ratio[0]:.2f} to {ratio[2]:.2f})")
    found = {name: [asdict(one) for one in each] for name, each in rounds.items()}
    path = RESULTS / f"pieces-{Path(asked.recipe).stem}.json"
    path.write_text(json.dumps({**about, "ratio": ratio, "rounds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
