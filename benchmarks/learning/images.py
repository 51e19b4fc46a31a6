"""Tasks from images: success over the run, and the final checkpoint on 200 fresh episodes.

    python -m benchmarks.learning.images pushcube [--seeds 0 1 2] [--resume]
    python -m benchmarks.learning.images pullcube
    python -m benchmarks.learning.images flat          # the control: PushCube-v1 without keypoints
    python -m benchmarks.learning.images privileged    # PushCube-v1 where the learner knows where things are

Writes results/images/CASE-seed-S.json with one point for every evaluation of the run (the same 50 episodes, the best
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
    settings,
    still_says,
    train_command,
)
from benchmarks.learning.seeds import evaluate, once, parser, program, rate

CASES = {
    "pushcube": ("maniskill_ppo_rgb",),
    "pullcube": ("pullcube_ppo_rgb",),
    "flat": ("maniskill_ppo_rgb", "policy.keypoints=false"),
    "privileged": ("maniskill_ppo_rgb_privileged",),
}
SEEDS = (0, 1, 2)
PLACE = RESULTS / "images"
RUNS = ROOT / "runs" / "images"
TIMEOUT_S = 4 * 3600.0
PATIENCE = "faults.hang_s=600"  # on a machine with other work a picture may take minutes


def measure_seed(case: str, seed: int, env: dict, resume: bool) -> dict:
    run, cpu_s = train(case, seed, env, resume)
    found = evaluate(run, env)["overall"]
    final = {"final": found["success_once"], "final_at_end": found["success_at_end"]}
    return {"curve": curve(run), **final, "cpu_s": cpu_s}


def train(case: str, seed: int, env: dict, resume: bool) -> tuple[Path, float | None]:
    """The run of this seed, finished, and the processor time it took, if all was spent now."""
    before = newest_run(case, seed)
    if resume and before is not None:
        if state_of(before) != "finished":
            measure(program("train", f"resume={before}"), env, TIMEOUT_S)
        return before, None
    told = [f"seed={seed}", f"run.dir={RUNS}", f"run.name={case}-seed-{seed}", PATIENCE]
    cost = measure(train_command(*CASES[case], *told), env, TIMEOUT_S)
    return newest_run(case, seed), round(cost.cpu_s, 1)


def newest_run(case: str, seed: int) -> Path | None:
    """One that can be continued."""
    runs = [path for path in RUNS.glob(f"{case}-seed-{seed}-*") if any((path / "checkpoints").glob("v[0-9]*"))]
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


def report(done: list[tuple[str, int, dict]]) -> str:
    """A row for each seed of a case: success of the evaluations during the run, and of the fresh episodes."""
    header = ["case", "seed", "env steps", "success_once over the run", "success_once at last", "success_at_end"]
    header += ["CPU minutes"]
    rows = []
    for case, seed, result in done:
        points = result["curve"]
        over = ", ".join(f"{point['success_once']['rate']:.0%}" for point in points)
        final, at_end = rate(result["final"]), rate(result["final_at_end"])
        minutes = "-" if result["cpu_s"] is None else f"{result['cpu_s'] / 60:.0f}"  # unknown of a resumed run
        rows.append([f"`{case}`", str(seed), f"{points[-1]['env_steps']:,}", over, final, at_end, minutes])
    return markdown(header, rows)


def kept() -> list[tuple[str, int, dict]]:
    """The results that lie there and are of recipes as they are now."""
    found = []
    for case, asked in CASES.items():
        results = (json.loads(path.read_text()) for path in sorted(PLACE.glob(f"{case}-seed-*.json")))
        found += [
            (case, each["seed"], each) for each in results if still_says(asked[0], each.get("settings", {}), *asked[1:])
        ]
    return found


def main() -> None:
    ask = parser(__doc__, SEEDS)
    ask.add_argument("case", choices=CASES)
    options = ask.parse_args()
    case, env, done = options.case, environment(), {}
    config = resolved(*CASES[case])
    for seed in options.seeds:
        recipe = {"seed": seed, "config": config_hash(config), "settings": settings(config)}
        played = lambda seed=seed: measure_seed(case, seed, env, options.resume)  # noqa: E731
        done[seed] = once(PLACE / f"{case}-seed-{seed}.json", recipe, options.resume, played)
        print(f"seed {seed}: {rate(done[seed]['final'])} of fresh episodes", flush=True)
    print(report([(case, seed, result) for seed, result in done.items()]))


if __name__ == "__main__":
    main()
