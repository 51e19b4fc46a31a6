"""Where RL on PickCube-v1 begins: a policy that imitates a scripted expert, good enough to be rewarded at times.

    python -m benchmarks.learning.pickcube_start [--resume]

Collects demonstrations, imitates them, and plays the result on 200 held-out episodes; writes
results/pickcube_start/seed-S.json seed by seed. --resume leaves out seeds that were measured with the same code and
recipe. The runs stay in runs/pickcube_start; what comes next: python -m embodied.train run.start_from=RUN ...
"""

from __future__ import annotations

import argparse
import shutil
import sys

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
    resolved,
    write_json,
)
from benchmarks.learning.pushcube import EPISODES, EVAL_SEED, evaluate, newest_results, rate, read_done

RECIPE = "pickcube_sft"
SEEDS = (0, 1, 2)
GOAL = 0.20, 0.70  # of the success rate: something to reward, something to gain
PLACE = RESULTS / "pickcube_start"
RUNS = ROOT / "runs" / "pickcube_start"
DEMONSTRATIONS = 60
TIMEOUT_S = 3600.0


def measure_seed(seed: int, env: dict) -> dict:
    """Demonstrations of its own for every seed, imitation, evaluation in a process of its own."""
    demos = RUNS / f"demos-{seed}"
    shutil.rmtree(demos, ignore_errors=True)
    program = [sys.executable, "-m"]
    asked = [f"recipe={RECIPE}", f"out={demos}", f"collect.episodes={DEMONSTRATIONS}", f"seed={seed}"]
    collected = measure([*program, "embodied.collect", *asked], env, TIMEOUT_S)
    before = set(RUNS.glob(f"seed-{seed}-*"))
    asked = [f"recipe={RECIPE}", f"sft.data={demos}", f"seed={seed}", f"run.dir={RUNS}", f"run.name=seed-{seed}"]
    imitated = measure([*program, "embodied.sft", *asked], env, TIMEOUT_S)
    (run,) = set(RUNS.glob(f"seed-{seed}-*")) - before
    evaluate(run, env)
    results = newest_results(run)
    assert results["overall"]["episodes"] == EPISODES, results["overall"]
    return {
        "run": run.name,
        "collect_cpu_s": round(collected.cpu_s, 1),
        "imitate_cpu_s": round(imitated.cpu_s, 1),
        "success_once": results["overall"]["success_once"],
        "success_at_end": results["overall"]["success_at_end"],
    }


def report(done: list[dict]) -> str:
    rows = [
        [str(one["seed"]), rate(one["success_once"]), rate(one["success_at_end"]), f"{one['imitate_cpu_s']:.0f}"]
        for one in done
    ]
    low, high = GOAL
    between = sum(low <= one["success_once"]["rate"] <= high for one in done)
    table = markdown(["seed", "success_once", "success_at_end", "CPU s of imitation"], rows)
    return f"{table}\n\n{between} of {len(done)} seeds begin between {low:.0%} and {high:.0%} of {EPISODES} episodes"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--resume", action="store_true", help="leave out what was measured with this code and recipe")
    ask.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options = ask.parse_args()

    identity = {
        "commit": code_commit(),
        "config": config_hash(resolved(RECIPE)),
        "demonstrations": DEMONSTRATIONS,
        "eval_seed": EVAL_SEED,
    }
    env, done = environment(), []
    RUNS.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        path = PLACE / f"seed-{seed}.json"
        result = read_done(path, identity) if options.resume else None
        if result is None:
            about = {"seed": seed, **identity, "machine": machine(), "packages": packages()}
            result = about | measure_seed(seed, env)
            write_json(path, result)
        done.append(result)
        print(f"seed {seed}: success_once {rate(result['success_once'])}", flush=True)
    print(report(done))


if __name__ == "__main__":
    main()
