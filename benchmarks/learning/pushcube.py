"""PushCube-v1 from ten unselected seeds: the final checkpoint on 1,000 new episodes, and the cost of training.

    python -m benchmarks.learning.pushcube [--seeds 201 202] [--resume]

Writes results/pushcube/seed-S.json after each seed. --resume skips seeds measured with the same code and recipe.
"""

from __future__ import annotations

from statistics import fmean, median

from benchmarks.common import (
    RESULTS,
    ROOT,
    config_hash,
    environment,
    markdown,
    measure,
    read_metrics,
    resolved,
    train_command,
)
from benchmarks.learning.seeds import TIMEOUT_S, held_out, last_results, new_folder, once, parser, rate

RECIPE = "maniskill_ppo"
SEEDS = tuple(range(201, 211))  # not used for tuning the recipe
EPISODES = 1_000
PLACE = RESULTS / "pushcube"
RUNS = ROOT / "runs" / "pushcube"


def measure_seed(seed: int, env: dict) -> dict:
    """Train, and evaluate the final checkpoint, in one command."""
    name = f"seed-{seed}"
    command = train_command(RECIPE, f"seed={seed}", f"run.dir={RUNS}", f"run.name={name}", *held_out(EPISODES))
    run = new_folder(RUNS, name, lambda: measure(command, env, TIMEOUT_S))
    results, last = last_results(run, EPISODES), read_metrics(run)[-1]
    assert results["policy_version"] == last["policy_version"], "this is not the final checkpoint"
    return {
        "env_steps": last["env_steps"],
        "train_s": last["train_s"],
        "success_once": results["overall"]["success_once"],
        "success_at_end": results["overall"]["success_at_end"],
    }


def report(done: list[dict]) -> str:
    header = ["seed", "success_once", "success_at_end", "env steps", "training s"]
    rows = [
        [
            str(result["seed"]),
            rate(result["success_once"]),
            rate(result["success_at_end"]),
            f"{result['env_steps']:,}",
            f"{result['train_s']:.1f}",
        ]
        for result in sorted(done, key=lambda result: result["success_once"]["rate"])
    ]
    solved = sum(result["success_once"]["rate"] >= 0.95 for result in done)
    mean = fmean(result["success_once"]["rate"] for result in done)
    middle = median(result["train_s"] for result in done)
    return (
        f"{markdown(header, rows)}\n\n{solved} of {len(done)} seeds at 95% or more, mean {mean:.1%}; "
        f"median {middle:.1f} s of training"
    )


def main() -> None:
    options = parser(__doc__, SEEDS).parse_args()
    env, config, done = environment(), config_hash(resolved(RECIPE)), []
    for seed in options.seeds:
        about = {"seed": seed, "config": config}
        result = once(PLACE / f"seed-{seed}.json", about, options.resume, lambda seed=seed: measure_seed(seed, env))
        done.append(result)
        print(f"seed {seed}: success_once {rate(result['success_once'])}, {result['train_s']:.1f} s", flush=True)
    print(report(done))


if __name__ == "__main__":
    main()
