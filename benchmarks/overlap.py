"""How much of simulation and acting happens at the same time, with sims on one core and policies on another?

    python -m benchmarks.overlap maniskill_ppo_rgb

Runs iterations of the recipe with one and two stages and prints (T_sim + T_policy - T) / min(T_sim, T_policy): T is
the rollout, T_sim and T_policy what the workers were at work in it. 1 is perfect overlap, 0 none.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from embodied import commands
from embodied.config import load
from embodied.discovery import cores
from embodied.placement import make_plan
from embodied.trial import Trial

PLACEMENT = {"sim": "cpu:0", "policy,learner": "cpu:1"}
ROUNDS = 4  # the first warms up


def overlap(recipe: str, stages: int, more: list[str]) -> tuple[float, float, float, float]:
    """Medians of T, T_sim, T_policy and the overlap."""
    config, _ = commands.planned(load([f"recipe={recipe}", f"pipeline.stages={stages}", *more]).config)
    config = config.model_copy(update={"placement": PLACEMENT})
    plan = make_plan(PLACEMENT, cores(), config.env.num_envs, stages)
    with tempfile.TemporaryDirectory() as logs, Trial(config, plan, Path(logs)) as trial:
        rounds = [trial.iterate() for _ in range(ROUNDS)][1:]
    whole = median(r.rollout_s for r in rounds)
    sim, policy = (median(r.busy[role] * r.seconds for r in rounds) for role in ("sim", "policy"))
    return whole, sim, policy, (sim + policy - whole) / min(sim, policy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="maniskill_ppo_rgb")
    parser.add_argument("more", nargs="*", help="key=value of the recipe")
    asked = parser.parse_args()
    for stages in (1, 2):
        whole, sim, policy, share = overlap(asked.recipe, stages, asked.more)
        print(f"{stages} stages: rollout {whole:.2f} s, sim {sim:.2f} s, policy {policy:.2f} s, overlap {share:.2f}")


if __name__ == "__main__":
    main()
