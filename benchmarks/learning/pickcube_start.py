"""Where RL on PickCube-v1 begins: a policy that imitates a scripted expert, good enough to be rewarded at times.

    python -m benchmarks.learning.pickcube_start [--resume]

Collects demonstrations, imitates them, and plays the result on 200 held-out episodes; writes
results/pickcube_start/seed-S.json seed by seed. --resume leaves out seeds that were measured with the same code and
recipe. The runs stay in runs/pickcube_start; what comes next: python -m embodied.train run.start_from=RUN ...
"""

from __future__ import annotations

import shutil

from benchmarks.common import RESULTS, ROOT, config_hash, environment, markdown, measure, resolved
from benchmarks.learning.seeds import (
    EVAL_SEED,
    TIMEOUT_S,
    begin_well,
    evaluate,
    new_folder,
    once,
    parser,
    program,
    rate,
)

RECIPE = "pickcube_sft"
SEEDS = (0, 1, 2)
PLACE = RESULTS / "pickcube_start"
RUNS = ROOT / "runs" / "pickcube_start"
DEMONSTRATIONS = 60


def measure_seed(seed: int, env: dict) -> dict:
    """Demonstrations of its own for every seed, imitation, evaluation in a process of its own."""
    demos = RUNS / f"demos-{seed}"
    shutil.rmtree(demos, ignore_errors=True)
    asked = [f"recipe={RECIPE}", f"out={demos}", f"collect.episodes={DEMONSTRATIONS}", f"seed={seed}"]
    costs = [measure(program("collect", *asked), env, TIMEOUT_S)]
    asked = [f"recipe={RECIPE}", f"sft.data={demos}", f"seed={seed}", f"run.dir={RUNS}", f"run.name=seed-{seed}"]
    imitate = program("sft", *asked)
    run = new_folder(RUNS, f"seed-{seed}", lambda: costs.append(measure(imitate, env, TIMEOUT_S)))
    results, (collected, imitated) = evaluate(run, env), costs
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
    table = markdown(["seed", "success_once", "success_at_end", "CPU s of imitation"], rows)
    return f"{table}\n\n{begin_well([one['success_once']['rate'] for one in done])}"


def main() -> None:
    options = parser(__doc__, SEEDS).parse_args()
    about = {"config": config_hash(resolved(RECIPE)), "demonstrations": DEMONSTRATIONS, "eval_seed": EVAL_SEED}
    env, done = environment(), []
    RUNS.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        path = PLACE / f"seed-{seed}.json"
        result = once(path, {"seed": seed, **about}, options.resume, lambda seed=seed: measure_seed(seed, env))
        done.append(result)
        print(f"seed {seed}: success_once {rate(result['success_once'])}", flush=True)
    print(report(done))


if __name__ == "__main__":
    main()
