"""Our PPO beside stable-baselines3's, in one run: same task, network, minibatches and gradient steps per env step.
And the recipe as it is shipped, whose rollouts are not ManiSkill's own physics; all are evaluated with that.

    python -m benchmarks.compare_sb3 [--rounds 3] [--steps 24000] [--seconds-to-95 0 1 2]

Rounds go round the contestants (ours, shipped, 2, 4, 8 processes, ours, ...), so that a machine that changes its speed
changes it for all. The first iteration of each run is left out. `seconds to 95%` are seconds of rollouts and updates
until an evaluation between iterations finds `success_once` >= 95%.
"""

from __future__ import annotations

import argparse
from statistics import median

from benchmarks.common import (
    RESULTS,
    code_commit,
    environment,
    machine,
    markdown,
    packages,
    resolved,
    write_json,
)
from benchmarks.contestants import ALIKE, OPTIONS, OURS, RECIPE, SHIPPED, Speed, one_speed, our_run, sb3_run
from benchmarks.peers import PEERS
from benchmarks.sb3_settings import gradient_steps, items, sb3_settings

PROCESSES = (2, 4, 8)
ENOUGH = 0.95
NAMES = {OURS: "Embodied Loop, all else alike", SHIPPED: f"Embodied Loop, recipe={RECIPE}"}


def seconds_to_enough(evaluations: list[dict]) -> float | None:
    """Training seconds at the first evaluation that is good enough; None where none is."""
    return next((at["train_s"] for at in evaluations if at["success_once"] >= ENOUGH), None)


def our_evaluations(rows: list[dict], found: list[dict]) -> list[dict]:
    """Evaluations in order, each with the training seconds of the version it judged."""
    at = {row["policy_version"]: row for row in rows}
    return [
        {
            "env_steps": at[results["policy_version"]]["env_steps"],
            "train_s": at[results["policy_version"]]["train_s"],
            "success_once": results["overall"]["success_once"]["rate"],
        }
        for results in sorted(found, key=lambda results: results["policy_version"])
    ]


def learning(seed: int, processes: int, options: argparse.Namespace, config: dict, env: dict) -> dict:
    """All sides' evaluations for one seed."""
    evaluation = {"every": options.eval_every, "episodes": options.eval_episodes, "seed": 10_000, "enough": ENOUGH}
    steps = options.learn_steps or config["run"]["env_steps"]
    ours = {who: our_evaluations(*our_run(who, seed, steps, env, evaluation)[:2]) for who in OPTIONS}
    told, _ = sb3_run(sb3_settings(config, processes, seed, steps, evaluation), env)
    return {"seed": seed, **ours, "sb3": told["evaluations"]}


def medians(speeds: dict[str, list[Speed]]) -> dict[str, Speed]:
    fields = Speed.__dataclass_fields__
    return {
        who: Speed(**{name: median(getattr(run, name) for run in runs) for name in fields})
        for who, runs in speeds.items()
    }


def best_peer(middle: dict[str, Speed]) -> str:
    return max((who for who in middle if who not in OPTIONS), key=lambda who: middle[who].steps_per_s)


def report(speeds: dict[str, list[Speed]], learned: list[dict]) -> str:
    """The one table, and the ratios below it."""
    middle = medians(speeds)
    best = best_peer(middle)
    ours = [who for who in OPTIONS if who in middle]
    seconds = {who: [seconds_to_enough(seed[who]) for seed in learned] for who in ours}
    seconds[best] = [seconds_to_enough(seed["sb3"]) for seed in learned]
    header = ["PPO", "env steps/s", "rollout s", "update s", "whole run s", "peak MB", "seconds to 95%"]
    rows = [
        [
            NAMES.get(who, f"stable-baselines3, {who} processes"),
            f"{speed.steps_per_s:,.0f}",
            f"{speed.rollout_s:.2f}",
            f"{speed.update_s:.2f}",
            f"{speed.wall_s:.1f}",
            f"{speed.peak_bytes / 1e6:,.0f}",
            ", ".join("never" if at is None else f"{at:.0f}" for at in seconds.get(who, ())) or "-",
        ]
        for who, speed in middle.items()
    ]
    ratios = [
        f"{who} / stable-baselines3 at its best ({best} processes): "
        f"{middle[who].steps_per_s / middle[best].steps_per_s:.2f}x env steps/s"
        for who in ours
    ]
    return "\n\n".join([markdown(header, rows), *ratios])


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--rounds", type=int, default=3, help="runs of every contestant")
    ask.add_argument("--steps", type=int, default=24_000, help="env steps of each run")
    ask.add_argument("--seconds-to-95", type=int, nargs="*", default=[], metavar="SEED", help="also compare learning")
    ask.add_argument("--learn-steps", type=int, help="env steps of a learning run (default: the recipe's)")
    ask.add_argument("--eval-every", type=int, default=5, help="iterations between evaluations of a learning run")
    ask.add_argument("--eval-episodes", type=int, default=56, help="episodes of each evaluation")
    options = ask.parse_args()

    config, env, where = resolved(RECIPE, *ALIKE), environment(), machine()
    steps = gradient_steps(config)
    print(
        f"both: {items(config)} env steps and {steps} gradient steps of {config['algo']['minibatch_size']} items an "
        f"iteration, two MLPs {config['policy']['hidden']}, one torch thread in each process"
    )
    speeds: dict[str, list[Speed]] = {}
    for seed in range(options.rounds):
        for who in (*OPTIONS, *PROCESSES):
            speed = one_speed(who, seed, options.steps, config, env)
            speeds.setdefault(str(who), []).append(speed)
            print(f"round {seed + 1}  {who!s:>7}  {speed.steps_per_s:,.0f} env steps/s", flush=True)
    sizes = {run.parameters for who, runs in speeds.items() for run in runs if who != SHIPPED}
    assert len(sizes) == 1, f"networks of different sizes: {sizes}"
    best = best_peer(medians(speeds))
    learned = [learning(seed, int(best), options, config, env) for seed in options.seconds_to_95]
    content = {
        "commit": code_commit(),
        "machine": where,
        "packages": packages() | dict(peer.split("==") for peer in PEERS),
        "config": config,
        "gradient_steps_per_iteration": steps,
        "parameters": sizes.pop(),
        "speeds": {who: [vars(run) for run in runs] for who, runs in speeds.items()},
        "learning": learned,
    }
    write_json(RESULTS / "compare_sb3.json", content)
    print(report(speeds, learned))


if __name__ == "__main__":
    main()
