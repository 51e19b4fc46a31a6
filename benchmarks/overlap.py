"""How much of simulation and acting happens at the same time, with sims on one core and policies on another?

    python -m benchmarks.overlap maniskill_ppo_rgb_privileged

Runs iterations of the recipe with one stage and with two, in turns, and prints (T_sim + T_policy - T) / min(T_sim,
T_policy): T is the rollout, T_sim and T_policy what the workers were at work in it. 1 is perfect overlap, 0 none.
Writes benchmarks/results/overlap-RECIPE.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.common import RESULTS, code_commit, config_hash, machine, resolved
from embodied.config.recipe import load
from embodied.placement import make_plan
from embodied.profiling.timed_run import Round, TimedRun
from embodied.run import launch
from embodied.system.discovery import cores

PLACEMENT = {"sim": "cpu:0", "policy,learner": "cpu:1"}
STAGES = (1, 2)
ROUNDS = 7
WARM_UP = 1


def timed_run(recipe: str, stages: int, more: list[str], logs: Path) -> TimedRun:
    config, _ = launch.planned(load([f"recipe={recipe}", f"pipeline.stages={stages}", *more]).config)
    config = config.model_copy(update={"placement": PLACEMENT})
    return TimedRun(config, make_plan(PLACEMENT, cores(), config.env.num_envs, stages), logs)


def row_of(rounds: list[Round]) -> dict[str, float]:
    """Medians over the rounds."""
    found = []
    for one in rounds:
        sim, policy = (one.busy[role] * one.seconds for role in ("sim", "policy"))
        overlap = (sim + policy - one.rollout_s) / min(sim, policy)
        found.append({"rollout_s": one.rollout_s, "sim_s": sim, "policy_s": policy, "overlap": overlap})
    return {key: median(row[key] for row in found) for key in found[0]} | {"rounds": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="maniskill_ppo_rgb_privileged")
    parser.add_argument("more", nargs="*", help="key=value of the recipe")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    about = {"recipe": asked.recipe, "more": asked.more, "placement": PLACEMENT, "machine": machine()}
    about |= {"commit": code_commit(), "config": config_hash(resolved(asked.recipe, *asked.more))}
    rounds: dict[int, list[Round]] = {stages: [] for stages in STAGES}
    with tempfile.TemporaryDirectory() as logs, ExitStack() as stack:
        timed_runs = {
            n: stack.enter_context(timed_run(asked.recipe, n, asked.more, Path(logs) / str(n))) for n in STAGES
        }
        for turn in range(WARM_UP + asked.rounds):
            for stages, one in timed_runs.items():
                done = one.iterate()
                rounds[stages] += [done] if turn >= WARM_UP else []
            print(f"round {turn + 1} of {WARM_UP + asked.rounds}", flush=True)
    rows = {str(stages): row_of(found) for stages, found in rounds.items()}
    for stages, row in rows.items():
        told = ", ".join(f"{key} {row[key]:.2f}" for key in ("rollout_s", "sim_s", "policy_s", "overlap"))
        print(f"{stages} stages: {told}")
    (RESULTS / f"overlap-{asked.recipe}.json").write_text(json.dumps({**about, "stages": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
