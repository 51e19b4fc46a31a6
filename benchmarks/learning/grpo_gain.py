"""What GRPO with a sparse reward adds to a policy that succeeds at times: paired gain on 200 held-out episodes.

    python -m benchmarks.learning.grpo_gain pickcube [--seeds 0 1 2] [--resume]
    python -m benchmarks.learning.grpo_gain pushcube [--start FOLDER]

pickcube begins with the imitating policies of benchmarks.learning.pickcube_start (seed S with seed S), pushcube with a
policy that PPO has half trained (made here unless --start names one). Each seed trains on one core, then the start and
the result play the same episodes, sampling nothing; control is the first seed once more with lr=0. Writes
results/grpo_CASE/seed-S.json and control.json as each is done; --resume leaves out what was measured with the same
code, recipe and start.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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
from benchmarks.learning.pushcube import EVAL_SEED, newest_results, rate, read_done

EPISODES = 200
RESAMPLES = 10_000
GOAL = 0.2, 0.7  # of the start's success rate: something to reward, something to gain
TIMEOUT_S = 3600.0
HELD_OUT = [f"eval.episodes={EPISODES}", f"eval.seed={EVAL_SEED}", "eval.videos=0"]
ONE_CORE = ["cluster.backend=inline", 'placement={"sim,policy": "cpu:0", "learner": "cpu:0"}']


@dataclass(frozen=True)
class Case:
    recipe: str
    options: tuple[str, ...]
    start: str  # where the policies to start from lie: a pattern below runs/, {seed} being the seed


CASES = {
    "pickcube": Case("pickcube_grpo", (), "pickcube_start/seed-{seed}-*"),
    "pushcube": Case("maniskill_grpo", ("algo.groups=8", "run.iterations=10"), "grpo_pushcube/start-*"),
}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("case", choices=CASES)
    ask.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    ask.add_argument("--start", type=Path, help="the policy to start from, for all seeds")
    ask.add_argument("--resume", action="store_true", help="leave out what was measured with this code and recipe")
    options = ask.parse_args()

    case, env, done = CASES[options.case], environment(), []
    folder = RESULTS / f"grpo_{options.case}"
    plan = [(f"seed-{seed}", seed, ()) for seed in options.seeds] + [("control", options.seeds[0], ("algo.lr=0",))]
    for name, seed, changes in plan:
        start = options.start or find_start(options.case, case, seed, env)
        identity = {
            "commit": code_commit(),
            "config": config_hash(resolved(case.recipe, *settled(case.options, changes))),
            "start": digest(start),
        }
        path = folder / f"{name}.json"
        result = read_done(path, identity) if options.resume else None
        if result is None:
            about = {"seed": seed, **identity, "machine": machine(), "packages": packages()}
            result = about | gain(options.case, case, name, seed, start, changes, env)
            write_json(path, result)
        done.append((name, result))
        print(describe(name, result), flush=True)
    print(report(done))


def find_start(name: str, case: Case, seed: int, env: dict) -> Path:
    """The newest one there is; pushcube's is made where it is missing."""
    found = newest(case.start.format(seed=seed))
    if found is None and name == "pushcube":
        half = ["run.env_steps=48000", f"run.dir={ROOT / 'runs' / 'grpo_pushcube'}", "run.name=start"]
        measure(train_command("maniskill_ppo", "seed=0", *half, *ONE_CORE, "eval.videos=0"), env, TIMEOUT_S)
        found = newest(case.start)
    if found is None:
        raise SystemExit(f"runs/{case.start.format(seed=seed)} does not exist; make it, or name a policy with --start")
    return found


def newest(pattern: str) -> Path | None:
    return max((ROOT / "runs").glob(pattern), key=lambda path: path.stat().st_mtime_ns, default=None)


def digest(start: Path) -> str:
    """Of the weights to start from."""
    from embodied.checkpoints import locate

    weights = locate(str(start))[0] / "model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest()[:16]


def gain(name: str, case: Case, run: str, seed: int, start: Path, changes: Sequence[str], env: dict) -> dict:
    """Train from the start, and compare with it."""
    runs = ROOT / "runs" / f"grpo_{name}"
    before = play(start, case, runs, env)
    given = [
        f"seed={seed}",
        f"run.start_from={start}",
        f"run.dir={runs}",
        f"run.name={run}",
        *settled(case.options, changes),
    ]
    there = set(runs.glob(f"{run}-*"))
    cost = measure(train_command(case.recipe, *given, *HELD_OUT, *ONE_CORE), env, TIMEOUT_S)
    (trained,) = set(runs.glob(f"{run}-*")) - there
    after = episodes_of(trained)
    rows = read_metrics(trained)
    return {
        "start_success": summary(before),
        "final_success": summary(after),
        "gain": paired_gain([b == "true" for b in before.values()], [after[key] == "true" for key in before]),
        "iterations": len(rows),
        "env_steps": rows[-1]["env_steps"],
        "train_s": rows[-1]["train_s"],
        "cpu_s": round(cost.cpu_s, 1),
        "curve": [[row["env_steps"], row["success_once"], row["groups/used"]] for row in rows],
    }


def play(start: Path, case: Case, runs: Path, env: dict) -> dict[str, str]:
    """The held-out episodes with the policy to start from: a training run of one iteration that changes nothing."""
    there = set(runs.glob("before-*"))
    given = [f"run.start_from={start}", f"run.dir={runs}", "run.name=before"]
    quick = settled(case.options, ["run.iterations=1", "algo.lr=0", "algo.groups=4", "algo.max_rounds=1"])
    measure(train_command(case.recipe, *given, *quick, *HELD_OUT, *ONE_CORE), env, TIMEOUT_S)
    (run,) = set(runs.glob("before-*")) - there
    return episodes_of(run)


def settled(*options: Sequence[str]) -> list[str]:
    """All of them, the last word on each key."""
    said = {option.partition("=")[0]: option for part in options for option in part}
    return list(said.values())


def episodes_of(run: Path) -> dict[str, str]:
    """Episode -> success_once of the last evaluation."""
    newest_results(run)
    newest = max(run.glob("eval/*/episodes.csv"), key=lambda path: path.stat().st_mtime_ns)
    with newest.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == EPISODES and not any(row["error"] for row in rows), newest
    return {row["seed"]: row["success_once"] for row in rows}


def summary(episodes: dict[str, str]) -> dict:
    from embodied.reporting.stats import measure as of

    return of([success == "true" for success in episodes.values()])


def paired_gain(before: Sequence[bool], after: Sequence[bool]) -> dict:
    """Mean difference, and its 95% interval over resampled episodes."""
    difference = np.array(after, float) - np.array(before, float)
    draws = np.random.default_rng(0).integers(len(difference), size=(RESAMPLES, len(difference)))
    low, high = np.percentile(difference[draws].mean(axis=1), [2.5, 97.5])
    return {"mean": float(difference.mean()), "bootstrap_interval": [float(low), float(high)]}


def describe(name: str, result: dict) -> str:
    low, high = result["gain"]["bootstrap_interval"]
    begin, end = rate(result["start_success"]), rate(result["final_success"])
    return f"{name}: {begin} -> {end}, gain {result['gain']['mean']:+.1%} [{low:+.1%}, {high:+.1%}]"


def report(done: list[tuple[str, dict]]) -> str:
    header = ["run", "start", "after GRPO", "gain on the same episodes", "env steps", "CPU s"]
    rows = []
    for name, result in done:
        low, high = result["gain"]["bootstrap_interval"]
        gained = f"{result['gain']['mean']:+.1%} [{low:+.1%}, {high:+.1%}]"
        begin, end = rate(result["start_success"]), rate(result["final_success"])
        rows.append([name, begin, end, gained, f"{result['env_steps']:,}", f"{result['cpu_s']:.0f}"])
    seeds = [result for name, result in done if name != "control"]
    above = sum(result["gain"]["bootstrap_interval"][0] > 0 for result in seeds)
    low, high = GOAL
    inside = sum(low <= result["start_success"]["rate"] <= high for result in seeds)
    return (
        f"{markdown(header, rows)}\n\n{above} of {len(seeds)} seeds gain for certain; {inside} begin between {low:.0%} "
        f"and {high:.0%}"
    )


if __name__ == "__main__":
    main()
