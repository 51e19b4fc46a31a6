"""The effect of `pipeline.schedule` on learning on this machine: success over env steps and seconds, three seeds.

    python -m benchmarks.learning.schedules ppo [--seeds 0 1 2] [--schedules sync async async-decoupled] [--resume]

Cases: ppo is maniskill_ppo; grpo is maniskill_grpo from a partially successful policy, with one gradient step an
iteration, as periodic needs; libero is libero_grpo in the same way, with rollouts as the largest cost. Its success is
measured on held-out episodes after every iteration, without noise. Every schedule gets its placement from
`placement=auto`. Writes results/schedules/CASE-SCHEDULE-seed-S.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

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
from benchmarks.learning.grpo_gain import CASES as STARTS
from benchmarks.learning.grpo_gain import find_start, weights_digest
from benchmarks.learning.seeds import TIMEOUT_S, evaluate, new_folder, once, parser, rate

PLACE, RUNS = RESULTS / "schedules", ROOT / "runs" / "schedules"
UNJUDGED = ("eval.episodes=8", "eval.videos=0")  # without the first if training is judged by evaluations
GOAL = 0.9
ONE_STEP = ("algo.epochs=1", "algo.minibatch_size=null", "algo.surplus=discard")


@dataclass(frozen=True)
class Case:
    recipe: str
    schedules: tuple[str, ...]
    options: tuple[str, ...] = ()
    start: str = ""  # in grpo_gain
    judged: bool = False  # by held-out episodes after every iteration, not counted in the seconds


OVER = 3  # consecutive iterations whose episodes count for the goal if not judged
LIBERO = ("algo.lr=1e-4", "run.eval_every=1", "eval.episodes=64")

ARMS = {
    "sync": ("pipeline.schedule=sync",),
    "periodic": ("pipeline.schedule=periodic",),
    "async": ("pipeline.schedule=async",),
    "async-decoupled": ("pipeline.schedule=async", "algo.decoupled=true"),
}
CASES = {
    "ppo": Case("maniskill_ppo", ("sync", "async", "async-decoupled")),
    "grpo": Case("maniskill_grpo", ("sync", "periodic", "async"), (*ONE_STEP, "algo.lr=1e-3"), "pushcube"),
    "libero": Case("libero_grpo", ("sync", "periodic", "async"), (*ONE_STEP[:2], *LIBERO), "libero", judged=True),
}


def main() -> None:
    ask = parser(__doc__, (0, 1, 2))
    ask.add_argument("case", choices=CASES)
    ask.add_argument("--schedules", nargs="+", choices=ARMS)
    options = ask.parse_args()
    case, env, done = CASES[options.case], environment(), []
    for seed in options.seeds:  # in turns, so that a busy hour affects all schedules
        for schedule in options.schedules or case.schedules:
            name = f"{options.case}-{schedule}-seed-{seed}"
            given = [*case.options, *ARMS[schedule]]
            about = {"seed": seed, "schedule": schedule, "config": config_hash(resolved(case.recipe, *given))}
            if case.start:
                start = find_start(case.start, STARTS[case.start], seed, env)
                about["start"] = weights_digest(start)
                given.append(f"run.start_from={start}")
            train = lambda name=name, seed=seed, given=given: trained(name, seed, case, given, env)  # noqa: E731
            result = once(PLACE / f"{name}.json", about, options.resume, train)
            done.append(result)
            print(f"{name}: {rate(result['success_once'])}, {result['train_s']:.1f} s", flush=True)
    print(report(done, 1 if case.judged else OVER))


def trained(name: str, seed: int, case: Case, options: Sequence[str], env: dict) -> dict:
    """Train, then evaluate the final checkpoint on separate episodes, unless training has done so."""
    asked = [f"seed={seed}", f"run.dir={RUNS}", f"run.name={name}", *UNJUDGED[int(case.judged) :], *options]
    run = new_folder(RUNS, name, lambda: measure(train_command(case.recipe, *asked), env, TIMEOUT_S))
    rows = read_metrics(run)
    rates = evaluations(run) if case.judged else [row["success_once"] for row in rows]
    found = json.loads(results_of(run)[-1].read_text())["overall"] if case.judged else evaluate(run, env)["overall"]
    return {
        "placement": placement_of(run),
        "success_once": found["success_once"],
        "success_at_end": found["success_at_end"],
        "env_steps": rows[-1]["env_steps"],
        "train_s": rows[-1]["train_s"],
        "staleness": max(row.get("train/staleness", 0.0) for row in rows),
        "curve": [[row["env_steps"], row["train_s"], success] for row, success in zip(rows, rates, strict=True)],
    }


def evaluations(run: Path) -> list[float]:
    """Success of each version on the held-out episodes."""
    return [json.loads(path.read_text())["overall"]["success_once"]["rate"] for path in results_of(run)]


def results_of(run: Path) -> list[Path]:
    return sorted(run.glob("eval/v*/results.json"))


def placement_of(run: Path) -> list[str]:
    """The roles on each device."""
    hosts = json.loads((run / "run.json").read_text())["placement"]["hosts"]
    return [f"{'+'.join(host['roles'])} on {host['gpu'] or host['cores']}" for host in hosts]


def reached(curve: Sequence[Sequence[float]], over: int) -> tuple[float, float] | None:
    """Env steps and seconds until training reaches this success rate; None: never."""
    rates = [row[2] or 0.0 for row in curve]
    for at in range(over - 1, len(curve)):
        if sum(rates[at - over + 1 : at + 1]) / over >= GOAL:
            return curve[at][0], curve[at][1]
    return None


def report(done: Sequence[dict], over: int) -> str:
    header = ["schedule", "seeds", "success_once", "success_at_end", "env steps", "training s", f"s to {GOAL:.0%}"]
    rows = []
    for schedule in dict.fromkeys(result["schedule"] for result in done):
        mine = [result for result in done if result["schedule"] == schedule]
        to_goal = [at[1] if (at := reached(result["curve"], over)) else None for result in mine]
        rows.append(
            [
                schedule,
                str(len(mine)),
                ", ".join(rate(result["success_once"], 0) for result in mine),
                ", ".join(rate(result["success_at_end"], 0) for result in mine),
                f"{median(result['env_steps'] for result in mine):,.0f}",
                f"{median(result['train_s'] for result in mine):.1f}",
                ", ".join("never" if seconds is None else f"{seconds:.1f}" for seconds in to_goal),
            ]
        )
    return markdown(header, rows)


if __name__ == "__main__":
    main()
