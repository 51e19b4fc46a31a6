"""PushCube-v1 from images: success over the run, and the final checkpoint on 200 fresh episodes.

    python -m benchmarks.learning.pushcube_rgb [--seeds 0 1] [--resume]

Writes results/pushcube_rgb/seed-S.json with one point for every evaluation of the run (the same 50 episodes, the best
action). --resume continues runs that were stopped, from their last checkpoint, and leaves out seeds that were measured
with the same code and recipe.
"""

from __future__ import annotations

import json
from pathlib import Path

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
from benchmarks.learning.seeds import evaluate, once, parser, program, rate

RECIPE = "maniskill_ppo_rgb"
SEEDS = (0, 1)
PLACE = RESULTS / "pushcube_rgb"
RUNS = ROOT / "runs" / "pushcube_rgb"
TIMEOUT_S = 4 * 3600.0
PATIENCE = "faults.hang_s=600"  # on a machine with other work a picture may take minutes


def measure_seed(seed: int, env: dict, resume: bool) -> dict:
    run, cpu_s = train(seed, env, resume)
    final = evaluate(run, env)["overall"]["success_once"]
    return {"curve": curve(run), "final": final, "cpu_s": cpu_s}


def train(seed: int, env: dict, resume: bool) -> tuple[Path, float | None]:
    """The run of this seed, finished, and the processor time it took, if all was spent now."""
    before = newest_run(seed)
    if resume and before is not None:
        if state_of(before) != "finished":
            measure(program("train", f"resume={before}"), env, TIMEOUT_S)
        return before, None
    told = [f"seed={seed}", f"run.dir={RUNS}", f"run.name=seed-{seed}", PATIENCE]
    cost = measure(train_command(RECIPE, *told), env, TIMEOUT_S)
    return newest_run(seed), round(cost.cpu_s, 1)


def newest_run(seed: int) -> Path | None:
    """One that can be continued."""
    runs = [path for path in RUNS.glob(f"seed-{seed}-*") if any((path / "checkpoints").glob("v[0-9]*"))]
    return max(runs, key=lambda path: (path / "run.json").stat().st_mtime_ns, default=None)


def state_of(run: Path) -> str:
    return json.loads((run / "run.json").read_text())["state"]


def curve(run: Path) -> list[dict]:
    """Success of every evaluation of the run (those of its checkpoints, made later, have longer names), with what had
    been played and spent by then."""
    at = {row["policy_version"]: row for row in read_metrics(run)}
    points = []
    for path in sorted(run.glob("eval/v??????/results.json")):
        results = json.loads(path.read_text())
        row = at.get(results["policy_version"])
        if row is not None:
            spent = {key: row[key] for key in ("env_steps", "train_s", "return") if key in row}
            points.append({**spent, "success_once": results["overall"]["success_once"]})
    return points


def report(curves: dict[int, list[dict]]) -> str:
    header = ["env steps", *(f"seed {seed}" for seed in curves)]
    steps = sorted({point["env_steps"] for points in curves.values() for point in points})
    found = {seed: {point["env_steps"]: point["success_once"] for point in points} for seed, points in curves.items()}
    rows = [[f"{step:,}", *(rate(found[seed].get(step), digits=0) for seed in curves)] for step in steps]
    return markdown(header, rows)


def main() -> None:
    options = parser(__doc__, SEEDS).parse_args()
    env, config, done = environment(), config_hash(resolved(RECIPE)), {}
    for seed in options.seeds:
        recipe = {"seed": seed, "config": config}
        played = lambda seed=seed: measure_seed(seed, env, options.resume)  # noqa: E731
        done[seed] = once(PLACE / f"seed-{seed}.json", recipe, options.resume, played)
        print(f"seed {seed}: {rate(done[seed]['final'])} of fresh episodes", flush=True)
    print(report({seed: result["curve"] for seed, result in done.items()}))


if __name__ == "__main__":
    main()
