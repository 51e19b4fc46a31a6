"""Start policies for RL with a sparse reward: imitation of a scripted expert, partially successful.

    python -m benchmarks.learning.starts pickcube [--seeds 0 1 2] [--resume]
    python -m benchmarks.learning.starts libero --seeds 0
    python -m benchmarks.learning.starts libero_two --seeds 0       # two tasks, one policy

Collects demonstrations, imitates them, and evaluates the result on 200 held-out episodes. Writes
results/start_CASE/seed-S.json after each seed; --resume skips seeds measured with the same code and recipe. The runs
stay in runs/start_CASE, from which benchmarks.learning.grpo_gain continues.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import RESULTS, ROOT, config_hash, environment, markdown, measure, resolved
from benchmarks.learning.seeds import (
    EVAL_SEED,
    ONE_CORE,
    TIMEOUT_S,
    begin_well,
    held_out,
    last_results,
    new_folder,
    once,
    parser,
    program,
    rate,
)


@dataclass(frozen=True)
class Start:
    """Imitation with one recipe, for RL with another recipe, which may have shorter episodes."""

    sft: str
    rl: str
    tasks: tuple[str, ...] = ()  # options of collecting, imitation and RL
    shown: tuple[str, ...] = ()  # options of collecting only


STARTS = {
    "pickcube": Start("pickcube_sft", "pickcube_grpo"),
    "libero": Start("libero_sft", "libero_grpo"),
    "libero_two": Start(
        "libero_sft", "libero_grpo", ("env.task=[libero_object/2,libero_object/9]",), ("collect.episodes=16",)
    ),
}


def measure_seed(case: str, seed: int, env: dict) -> dict:
    start, runs = STARTS[case], ROOT / "runs" / f"start_{case}"
    return imitate(start.sft, runs, f"seed-{seed}", seed, options_of(case), env, (*start.tasks, *start.shown))


def options_of(case: str) -> list[str]:
    """Additional options of imitation."""
    return [in_time(case), *STARTS[case].tasks]


def imitate(
    recipe: str, runs: Path, name: str, seed: int, options: Sequence[str], env: dict, shown: Sequence[str] = ()
) -> dict:
    """For every seed: collect demonstrations with the options `shown`, imitate them with `options`, and evaluate.
    `{demos}` in an option stands for the folder of demonstrations."""
    runs.mkdir(parents=True, exist_ok=True)
    demos = runs / f"demos-{seed}"
    shutil.rmtree(demos, ignore_errors=True)
    asked = (f"recipe={recipe}", f"seed={seed}", *ONE_CORE)
    costs = [measure(program("collect", *asked, *shown, f"out={demos}"), env, TIMEOUT_S)]
    given = [option.format(demos=demos) for option in options]
    command = program("sft", *asked, *given, f"sft.data={demos}", f"run.dir={runs}", f"run.name={name}", *held_out())
    run = new_folder(runs, name, lambda: costs.append(measure(command, env, TIMEOUT_S)))
    results, (collected, imitated) = last_results(run), costs
    return {
        "run": run.name,
        "collect_cpu_s": round(collected.cpu_s, 1),
        "imitate_cpu_s": round(imitated.cpu_s, 1),  # includes the evaluation
        "success_once": results["overall"]["success_once"],
        "success_at_end": results["overall"]["success_at_end"],
    }


def in_time(case: str) -> str:
    """The episode length of RL; imitation itself does not depend on it."""
    steps = resolved(STARTS[case].rl)["env"]["max_episode_steps"]
    return f"env.max_episode_steps={'null' if steps is None else steps}"


def report(done: list[dict]) -> str:
    rows = [
        [
            str(one["seed"]),
            rate(one["success_once"]),
            rate(one["success_at_end"]),
            f"{one['collect_cpu_s']:.0f}",
            f"{one['imitate_cpu_s']:.0f}",
        ]
        for one in done
    ]
    header = ["seed", "success_once", "success_at_end", "CPU s of the expert", "CPU s of imitation"]
    return f"{markdown(header, rows)}\n\n{begin_well([one['success_once']['rate'] for one in done])}"


def main() -> None:
    ask = parser(__doc__, (0, 1, 2))
    ask.add_argument("case", choices=STARTS)
    options = ask.parse_args()
    case, env, done = options.case, environment(), []
    about = {"config": config_hash(resolved(STARTS[case].sft, *options_of(case))), "eval_seed": EVAL_SEED}
    for seed in options.seeds:
        path = RESULTS / f"start_{case}" / f"seed-{seed}.json"
        result = once(path, {"seed": seed, **about}, options.resume, lambda seed=seed: measure_seed(case, seed, env))
        done.append(result)
        print(f"seed {seed}: success_once {rate(result['success_once'])}", flush=True)
    print(report(done))


if __name__ == "__main__":
    main()
