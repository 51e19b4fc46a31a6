"""PushCube-v1 from images: success over the run, from two seeds.

    python -m benchmarks.learning.pushcube_rgb [--resume] [--seeds 0 1]

Writes results/pushcube_rgb/seed-S.json with one point for every evaluation of the run (the same 50 episodes, the best
action). --resume continues runs that were stopped, from their last checkpoint, and leaves out those that are finished.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.common import (
    RESULTS,
    ROOT,
    code_commit,
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
from benchmarks.learning.seeds import parser, program, rate

RECIPE = "maniskill_ppo_rgb"
SEEDS = (0, 1)
PLACE = RESULTS / "pushcube_rgb"
RUNS = ROOT / "runs" / "pushcube_rgb"
TIMEOUT_S = 4 * 3600.0


def train(seed: int, env: dict, resume: bool) -> Path:
    """The run of this seed, finished."""
    before = newest_run(seed)
    if resume and before is not None:
        if state_of(before) != "finished":
            measure(program("train", f"resume={before}"), env, TIMEOUT_S)
        return before
    told = [f"seed={seed}", f"run.dir={RUNS}", f"run.name=seed-{seed}"]
    measure(train_command(RECIPE, *told), env, TIMEOUT_S)
    return newest_run(seed)


def newest_run(seed: int) -> Path | None:
    """One that can be continued."""
    runs = [path for path in RUNS.glob(f"seed-{seed}-*") if any((path / "checkpoints").glob("v[0-9]*"))]
    return max(runs, key=lambda path: (path / "run.json").stat().st_mtime_ns, default=None)


def state_of(run: Path) -> str:
    return json.loads((run / "run.json").read_text())["state"]


def curve(run: Path) -> list[dict]:
    """Success of every evaluation, with what had been played and spent by then."""
    at = {row["policy_version"]: row for row in read_metrics(run)}
    points = []
    for path in sorted(run.glob("eval/v*/results.json")):
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
    env, curves = environment(), {}
    for seed in options.seeds:
        run = train(seed, env, options.resume)
        curves[seed] = curve(run)
        about = {"seed": seed, "commit": code_commit(), "machine": machine(), "packages": packages()}
        write_json(PLACE / f"seed-{seed}.json", {**about, "config": resolved(RECIPE), "curve": curves[seed]})
    print(report(curves))


if __name__ == "__main__":
    main()
