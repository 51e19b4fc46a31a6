"""Compares options of a recipe: iterations with each, in turns, so that all meet the same disturbances.

    python -m benchmarks.turns benchmarks/delays_groups.yaml --arms pipeline.schedule={sync,periodic,async}
    python -m benchmarks.turns benchmarks/delays_frozen.yaml --arms pipeline.granularity={null,4}
    python -m benchmarks.turns benchmarks/delays_roles.yaml --arms program=benchmarks.delays:{Together,OneByOne}

Sims and policies have one core, the learner another, unless the recipe places them. Prints the median seconds of an
iteration and of its parts, and each arm's speed-up over the first. Writes benchmarks/results/turns-RECIPE.json.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.common import RESULTS, code_commit, machine, write_json
from embodied.benchmark import paired_ratio
from embodied.config.recipe import load
from embodied.profiling.timed_run import Round, TimedRun
from embodied.run import launch
from embodied.workflows import roles_of_run

PLACEMENT = '{"sim,policy": "cpu:0", learner: "cpu:1"}'
PARTS = ("seconds", "rollout_s", "update_s", "first_backward_s")
WARM_UP = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("more", nargs="*", help="key=value of the recipe")
    parser.add_argument("--arms", nargs="+", required=True, help="key=value of each arm")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    rounds = in_turns(asked.recipe, asked.arms, asked.more, asked.rounds)
    medians = {arm: {part: median(getattr(r, part) for r in each) for part in PARTS} for arm, each in rounds.items()}
    for arm, found in medians.items():
        print(f"{arm}: " + ", ".join(f"{part} {seconds:.3f}" for part, seconds in found.items()))
    first, *others = rounds
    ratios = {arm: paired_ratio(rounds[arm], rounds[first]) for arm in others}
    for arm, (low, middle, high) in ratios.items():
        print(f"{arm} is {middle:.2f} times as fast (95% interval {low:.2f} to {high:.2f})")
    about = {**vars(asked), "machine": machine(), "commit": code_commit()}
    found = {"median": medians, "ratios": ratios, "rounds": {arm: list(map(asdict, r)) for arm, r in rounds.items()}}
    write_json(RESULTS / f"turns-{Path(asked.recipe).stem}.json", about | found)


def in_turns(recipe: str, arms: list[str], more: list[str], turns: int) -> dict[str, list[Round]]:
    """Run `turns` iterations of the recipe with each arm, in turns."""
    rounds: dict[str, list[Round]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as logs, ExitStack() as stack:
        timed_runs = {}
        for number, arm in enumerate(arms):
            program, words = launch.program_of([f"recipe={recipe}", arm, *more])
            config = load(words).config
            if config.placement == "auto":
                config = load([*words, f"placement={PLACEMENT}"]).config
            plan = launch.planned(config, roles=roles_of_run(program, config))
            timed_runs[arm] = stack.enter_context(TimedRun(*plan, Path(logs) / str(number), program))
        for turn in range(WARM_UP + turns):
            for arm, timed_run in timed_runs.items():
                done = timed_run.iterate()
                rounds[arm] += [done] if turn >= WARM_UP else []
            print(f"round {turn + 1} of {WARM_UP + turns}", flush=True)
    return rounds


if __name__ == "__main__":
    main()
