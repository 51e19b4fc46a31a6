"""The gain of learning during the rollout, if rollout and update take equally long.

    python -m benchmarks.schedules benchmarks/delays_groups.yaml --schedules sync periodic async

Runs iterations of the recipe under each schedule, in turns, with sims and policies on one core and the learner on
another. Prints the median seconds of an iteration and of its parts, and each schedule's speed-up over the first. Writes
benchmarks/results/schedules-RECIPE.json.
"""

from __future__ import annotations

from dataclasses import asdict
from statistics import median

from benchmarks.pieces import compare, in_turns, parser_of, write

SCHEDULES = ("sync", "periodic", "async")
PARTS = ("seconds", "rollout_s", "update_s", "first_backward_s")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    asked = parser.parse_args()
    arms = {schedule: f"pipeline.schedule={schedule}" for schedule in asked.schedules}
    rounds = in_turns(asked.recipe, arms, asked.more, asked.rounds)
    medians = {name: {part: median(getattr(r, part) for r in each) for part in PARTS} for name, each in rounds.items()}
    for name, found in medians.items():
        print(f"{name}: " + ", ".join(f"{part} {seconds:.3f}" for part, seconds in found.items()))
    first, *others = asked.schedules
    ratios = {name: compare({first: rounds[first], name: rounds[name]}, f"{name} is") for name in others}
    found = {"median": medians, "ratios": ratios, "rounds": {name: list(map(asdict, r)) for name, r in rounds.items()}}
    write("schedules", asked, found)


if __name__ == "__main__":
    main()
