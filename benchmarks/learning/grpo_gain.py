"""The gain of GRPO with a sparse reward from a partially successful policy, paired on 200 held-out episodes.

    python -m benchmarks.learning.grpo_gain pickcube [--seeds 0 1 2] [--resume]
    python -m benchmarks.learning.grpo_gain libero --seeds 0 1
    python -m benchmarks.learning.grpo_gain libero_ppo --seeds 0 1
    python -m benchmarks.learning.grpo_gain libero_two --seeds 0 1
    python -m benchmarks.learning.grpo_gain pushcube [--start FOLDER]

pickcube and libero start from the imitation policies of benchmarks.learning.starts (pickcube's seed S from seed S, all
of libero's from seed 0; libero_ppo is the same with PPO, libero_two has two tasks). pushcube starts from a policy half
trained by PPO (trained here unless --start names one). Each seed trains on one core, then start and result play the
same episodes without sampling. The control repeats the first seed for a few iterations with lr=0. Writes
results/grpo_CASE/seed-S.json and control.json; --resume skips results of the same code, recipe and start.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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
from benchmarks.learning.seeds import (
    EPISODES,
    ONE_CORE,
    TIMEOUT_S,
    begin_well,
    held_out,
    new_folder,
    once,
    outcomes,
    parser,
    program,
    rate,
)
from benchmarks.learning.starts import STARTS

UNJUDGED = ("eval.episodes=8", "eval.videos=0")  # the evaluation at the end of training is not used
RESAMPLES = 10_000
CONTROL = ("algo.lr=0", "run.iterations=2")


@dataclass(frozen=True)
class Case:
    recipe: str
    options: tuple[str, ...]
    start: str  # start policies: a pattern below runs/ with {seed}


@dataclass(frozen=True)
class Trained:
    """One training: its recipe, start and folder."""

    case: Case
    runs: Path
    name: str
    seed: int
    start: Path
    options: list[str]
    episodes: int = EPISODES  # held-out episodes of start and result


CASES = {
    "pickcube": Case("pickcube_grpo", (), "start_pickcube/seed-{seed}-*"),
    "libero": Case("libero_grpo", (), "start_libero/seed-0-*"),  # other tasks are a step or two faster: nothing to gain
    "libero_ppo": Case("libero_ppo_from_sft", (), "start_libero/seed-0-*"),
    "libero_two": Case("libero_grpo", STARTS["libero_two"].tasks, "start_libero_two/seed-0-*"),
    "pushcube": Case("maniskill_grpo", ("algo.groups=8", "run.iterations=10"), "grpo_pushcube/start-*"),
}


def main() -> None:
    ask = parser(__doc__, (0, 1, 2))
    ask.add_argument("case", choices=CASES)
    ask.add_argument("--start", type=Path, help="the policy to start from, for all seeds")
    options = ask.parse_args()

    case, env, done = CASES[options.case], environment(), []
    folder = RESULTS / f"grpo_{options.case}"
    plan = [(f"seed-{seed}", seed, ()) for seed in options.seeds] + [("control", options.seeds[0], CONTROL)]
    for name, seed, changes in plan:
        start = options.start or find_start(options.case, case, seed, env)
        given = settled(case.options, changes)
        about = {"seed": seed, "config": config_hash(resolved(case.recipe, *given)), "start": weights_digest(start)}
        trained = Trained(case, ROOT / "runs" / f"grpo_{options.case}", name, seed, start, given)
        result = once(folder / f"{name}.json", about, options.resume, lambda trained=trained: gain(trained, env))
        done.append((name, result))
        print(describe(name, result), flush=True)
    print(report(done))


def find_start(name: str, case: Case, seed: int, env: dict) -> Path:
    """The newest start policy; pushcube's is trained if it is missing."""
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


def weights_digest(start: Path) -> str:
    """The digest of the weights to start from."""
    from embodied.run.checkpoints import digest, locate

    return digest(locate(str(start))[0] / "model.safetensors")[:16]


def gain(asked: Trained, env: dict) -> dict:
    """Train from the start, then evaluate both on the same episodes in the same env."""
    given = [f"seed={asked.seed}", f"run.start_from={asked.start}", f"run.dir={asked.runs}", f"run.name={asked.name}"]
    command, costs = train_command(asked.case.recipe, *given, *asked.options, *UNJUDGED, *ONE_CORE), []
    run = new_folder(asked.runs, asked.name, lambda: costs.append(measure(command, env, TIMEOUT_S)))
    both, env_options = f"checkpoint=[{asked.start},{run}]", [told for told in asked.options if told.startswith("env.")]
    told = (f"recipe={asked.case.recipe}", *env_options, f"run.dir={run}", *held_out(asked.episodes))
    play = program("evaluate", both, *told, *ONE_CORE)
    measure(play, env, TIMEOUT_S)
    before, after = (outcomes(folder, asked.episodes) for folder in in_order(run / "compare"))
    rows = read_metrics(run)
    return {
        "start_success": summary(before),
        "final_success": summary(after),
        "gain": paired_gain(before, after),
        "iterations": len(rows),
        "env_steps": rows[-1]["env_steps"],
        "train_s": rows[-1]["train_s"],
        "cpu_s": round(costs[0].cpu_s, 1),
        "curve": [[row["env_steps"], row["success_once"], row.get("groups/used")] for row in rows],
    }


def in_order(folder: Path) -> list[Path]:
    """The folders with the results of the compared policies."""
    return [folder / name for name in json.loads((folder / "comparison.json").read_text())["policies"]]


def settled(*options: Sequence[str]) -> list[str]:
    """All arguments, the last value of each key."""
    said = {option.partition("=")[0]: option for part in options for option in part}
    return list(said.values())


def summary(outcomes: Sequence[bool]) -> dict:
    from embodied.reporting.success_stats import measure as of

    return of(list(outcomes))


def paired_gain(before: Sequence[bool], after: Sequence[bool]) -> dict:
    """Mean difference, and its 95% interval over resampled episodes."""
    difference = np.array(after, float) - np.array(before, float)
    draws = np.random.default_rng(0).integers(len(difference), size=(RESAMPLES, len(difference)))
    low, high = np.percentile(difference[draws].mean(axis=1), [2.5, 97.5])
    return {"mean": float(difference.mean()), "bootstrap_interval": [float(low), float(high)]}


def runs_of(folder: Path) -> list[tuple[str, dict]]:
    """The runs of a case: its seeds in order, then the control."""
    paths = sorted(folder.glob("*.json"), key=lambda path: (path.stem == "control", path.stem))
    return [(path.stem, json.loads(path.read_text())) for path in paths]


def interval(gain: dict) -> str:
    """`+52.5% [+45.0%, +60.0%]`"""
    low, high = gain["bootstrap_interval"]
    return f"{gain['mean']:+.1%} [{low:+.1%}, {high:+.1%}]"


def describe(name: str, result: dict) -> str:
    begin, end = rate(result["start_success"]), rate(result["final_success"])
    return f"{name}: {begin} -> {end}, gain {interval(result['gain'])}"


def report(done: list[tuple[str, dict]]) -> str:
    header = ["run", "start", "after GRPO", "gain on the same episodes", "env steps", "CPU s"]
    rows = []
    for name, result in done:
        begin, end = rate(result["start_success"]), rate(result["final_success"])
        rows.append([name, begin, end, interval(result["gain"]), f"{result['env_steps']:,}", f"{result['cpu_s']:.0f}"])
    seeds = [result for name, result in done if name != "control"]
    above = sum(result["gain"]["bootstrap_interval"][0] > 0 for result in seeds)
    begun = begin_well([result["start_success"]["rate"] for result in seeds])
    return f"{markdown(header, rows)}\n\n{above} of {len(seeds)} seeds gain for certain; {begun}"


if __name__ == "__main__":
    main()
