"""PushCube-v1 from five fixed seeds: the final checkpoint on 200 fresh episodes, with what it took to train.

    python -m benchmarks.learning.pushcube [--resume]

Writes results/pushcube/seed-S.json as each seed is done. --resume leaves out seeds that were measured with the same
code and recipe; all others are measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

from benchmarks.common import (
    RESULTS,
    ROOT,
    code_commit,
    config_hash,
    environment,
    machine,
    markdown,
    measure,
    packages,
    read_metrics,
    resolved,
    train_command,
    write_json,
)

RECIPE = "maniskill_ppo"
SEEDS = (0, 1, 2, 3, 4)
EPISODES = 200
EVAL_SEED = 1_000  # fresh: neither training's episodes nor those of the evaluations during training
PLACE = RESULTS / "pushcube"
RUNS = ROOT / "runs" / "pushcube"
TIMEOUT_S = 1800.0


def measure_seed(seed: int, env: dict) -> dict:
    """Train, then evaluate the final checkpoint in a process of its own."""
    before = set(RUNS.glob(f"seed-{seed}-*"))
    trained = measure(train_command(RECIPE, f"seed={seed}", f"run.dir={RUNS}", f"run.name=seed-{seed}"), env, TIMEOUT_S)
    (run,) = set(RUNS.glob(f"seed-{seed}-*")) - before
    evaluate(run, env)
    results = newest_results(run)
    assert results["overall"]["episodes"] == EPISODES, results["overall"]
    last = read_metrics(run)[-1]
    assert results["policy_version"] == last["policy_version"], "this is not the final checkpoint"
    return {
        "env_steps": last["env_steps"],
        "train_s": last["train_s"],
        "wall_s": round(trained.wall_s, 2),
        "cpu_s": round(trained.cpu_s, 2),
        "peak_bytes": trained.peak_bytes,
        "success_once": results["overall"]["success_once"],
        "success_at_end": results["overall"]["success_at_end"],
    }


def evaluate(run: Path, env: dict) -> None:
    told = [f"checkpoint={run}", f"eval.episodes={EPISODES}", f"eval.seed={EVAL_SEED}", "eval.videos=0"]
    measure([sys.executable, "-m", "embodied.evaluate", *told], env, TIMEOUT_S)


def newest_results(run: Path) -> dict:
    newest = max(run.glob("eval/*/results.json"), key=lambda path: path.stat().st_mtime_ns)
    return json.loads(newest.read_text())


def read_done(path: Path, identity: dict) -> dict | None:
    """An earlier result, if it comes from the same code and recipe."""
    if not path.is_file():
        return None
    done = json.loads(path.read_text())
    return done if all(done.get(key) == value for key, value in identity.items()) else None


def report(done: list[dict]) -> str:
    header = ["seed", "success_once", "success_at_end", "env steps", "training s", "whole run s", "CPU s", "peak MB"]
    rows = [
        [
            str(result["seed"]),
            rate(result["success_once"]),
            rate(result["success_at_end"]),
            f"{result['env_steps']:,}",
            f"{result['train_s']:.1f}",
            f"{result['wall_s']:.1f}",
            f"{result['cpu_s']:.0f}",
            f"{result['peak_bytes'] / 1e6:,.0f}",
        ]
        for result in done
    ]
    solved = sum(result["success_once"]["rate"] >= 0.95 for result in done)
    middle = median(result["train_s"] for result in done)
    return (
        f"{markdown(header, rows)}\n\n{solved} of {len(done)} seeds at 95% or more; median {middle:.1f} s of training"
    )


def rate(measured: dict) -> str:
    low, high = measured["interval"]
    return f"{measured['rate']:.1%} [{low:.1%}, {high:.1%}]"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--resume", action="store_true", help="leave out what was measured with this code and recipe")
    options = ask.parse_args()

    identity = {"commit": code_commit(), "config": config_hash(resolved(RECIPE))}
    env, done = environment(), []
    for seed in SEEDS:
        path = PLACE / f"seed-{seed}.json"
        result = read_done(path, identity) if options.resume else None
        if result is None:
            about = {"seed": seed, **identity, "machine": machine(), "packages": packages()}
            result = about | measure_seed(seed, env)
            write_json(path, result)
        done.append(result)
        print(f"seed {seed}: success_once {rate(result['success_once'])}, {result['train_s']:.1f} s", flush=True)
    print(report(done))


if __name__ == "__main__":
    main()
