"""The result of one training command for a small language model on two cores, seed by seed.

    python -m benchmarks.learning.sums [--recipe sums_grpo] [--seeds 101 102 ...] [--schedules sync periodic async]
        [--greedy] [--resume]

Each seed is `python -m embodied.train recipe=sums_grpo`, timed as a whole. It starts from nothing; only `smol_grpo`
needs the model of `python scripts/smollm2.py`. The start of RL (after the recipe's imitation, or that model) and its
result answer the same 200 held-out prompts at temperature 1: imitation and RL end with that evaluation. With --greedy
both also answer them greedily. The control repeats the first seed for a few iterations with lr=0, which must not change
any answer. The default seeds 101 to 110 were not used for tuning; the recipes were tuned on seeds 1 to 4. Writes
results/RECIPE/SCHEDULE-seed-S.json and control.json.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
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
from benchmarks.learning.grpo_gain import in_order, interval, paired_gain, summary
from benchmarks.learning.seeds import TIMEOUT_S, held_out, once, outcomes, parser, program, rate
from embodied.policies.policy_folder import read_weights
from embodied.run.checkpoints import locate

RECIPES = (
    "sums_grpo",
    "sort_grpo",
    "sums_ppo",
    "sums_ppo_critic",
    "sums_judge",
    "calc_grpo",
    "pictures_grpo",
    "smol_grpo",
)
SCHEDULES = ("sync", "periodic", "async")
TEMPERATURES = {"sampled": 1.0, "greedy": 0.0}
SEEDS = tuple(range(101, 111))
CONTROL = ("algo.lr=0", "run.iterations=3")


def main() -> None:
    ask = parser(__doc__, SEEDS)
    ask.add_argument("--greedy", action="store_true", help="evaluate greedily, too")
    ask.add_argument("--recipe", choices=RECIPES, default=RECIPES[0])
    ask.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=("sync",))
    options = ask.parse_args()
    recipe, env, done = options.recipe, environment(), []
    arms = [(f"{schedule}-seed-{seed}", schedule, seed, ()) for seed in options.seeds for schedule in options.schedules]
    for name, schedule, seed, changes in [*arms, ("control", "sync", options.seeds[0], CONTROL)]:
        given = (f"pipeline.schedule={schedule}", *changes)
        about = {"seed": seed, "schedule": schedule, "config": hash_of(recipe, given)}
        run = lambda name=name, seed=seed, given=given: learned(recipe, name, seed, given, env, options.greedy)  # noqa: E731
        result = once(RESULTS / recipe / f"{name}.json", about, options.resume, run)
        done.append((name, result))
        print(describe(name, result), flush=True)
    print(report(done))


def hash_of(recipe: str, given: Sequence[str]) -> str:
    """A hash of the settings of a recipe and of its start."""
    config = resolved(recipe, *given)
    return config_hash(config | {"start": resolved_start(config["run"]["start_from"])})


def resolved_start(recipe: str | None) -> dict:
    """The settings of imitation, if there is any."""
    from embodied.config.recipe import load

    if recipe is None:
        return {}
    config = load([f"recipe={recipe}"], entry="sft").config.model_dump(mode="json")
    return {key: config[key] for key in ("env", "policy", "sft", "learner")}


def learned(recipe: str, name: str, seed: int, given: Sequence[str], env: dict, greedy: bool) -> dict:
    """Run the whole command in a new folder, then evaluate both policies on the held-out prompts."""
    runs = ROOT / "runs" / recipe
    runs.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=runs))
    cost = measure(train_command(recipe, f"seed={seed}", f"run.dir={folder}", *given), env, TIMEOUT_S)
    (run,) = folder.glob(f"{recipe}-*")
    imitating = next(folder.glob("sft-*"), None)
    start = imitating or Path(resolved(recipe)["policy"]["pretrained"]).resolve()
    rows = read_metrics(run)
    compare, alike = {}, asks_alike(recipe)
    for word in TEMPERATURES if greedy else ("sampled",):
        both = last_evaluations(imitating, run) if imitating and alike and word == "sampled" else ()
        compare[word] = gained(*(both or evaluated(recipe, start, run, word, env)))
    return {
        "wall_s": round(cost.wall_s, 1),
        "cpu_s": round(cost.cpu_s, 1),
        "imitation": part_of(read_metrics(imitating)) if imitating else None,
        "rl": part_of(rows),
        **compare,
        "weights_changed": not same_weights(start, run),
        "curve": [[row["train_s"], row["success_once"]] for row in rows],
    }


def asks_alike(recipe: str) -> bool:
    """True if imitation is evaluated on RL's prompts; calc_grpo's imitation has another env."""
    config = resolved(recipe)
    start = resolved_start(config["run"]["start_from"])
    return bool(start) and all(start["env"].get(key) == config["env"].get(key) for key in ("name", "task", "mixture"))


def same_weights(start: Path, run: Path) -> bool:
    """True if a run has the weights of its start, a run or a model's folder, without PPO's value head."""
    one, other = (read_weights(folder_of(path)) for path in (start, run))
    return one.keys() <= other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def folder_of(path: Path) -> Path:
    return path if (path / "config.json").is_file() else locate(str(path))[0]


def part_of(rows: Sequence[dict]) -> dict:
    return {"iterations": len(rows), "train_s": round(rows[-1]["train_s"], 1)}


def last_evaluations(*runs: Path) -> list[list[bool]]:
    """Success on each held-out prompt in the final evaluation of a run; all runs have the same prompts."""
    return [outcomes(max(run.glob("eval/v*"))) for run in runs]


def evaluated(recipe: str, start: Path, run: Path, word: str, env: dict) -> list[list[bool]]:
    """Success of both on each held-out prompt, in a separate evaluation."""
    out = run / word
    asked = (f"recipe={recipe}", f"run.dir={out}", *held_out(), f"eval.temperature={TEMPERATURES[word]}")
    measure(program("evaluate", f"checkpoint=[{start},{run}]", *asked), env, TIMEOUT_S)
    return [outcomes(folder) for folder in in_order(out / "compare")]


def gained(before: list[bool], after: list[bool]) -> dict:
    """The rates of both, and the gain on the same prompts."""
    return {"start": summary(before), "final": summary(after), "gain": paired_gain(before, after)}


def describe(name: str, result: dict) -> str:
    one = result["sampled"]
    return f"{name}: {rate(one['start'])} -> {rate(one['final'])}, gain {interval(one['gain'])}, {result['wall_s']} s"


def report(done: Sequence[tuple[str, dict]]) -> str:
    """A table, the worst result first, and the number of seeds above their start."""
    header = ["run", "start, T=1", "after RL", "gain on the same prompts", "greedy", "whole command s", "CPU s"]
    rows = []
    for name, result in sorted(done, key=lambda each: (each[0] == "control", each[1]["sampled"]["final"]["rate"])):
        one, greedy = result["sampled"], result.get("greedy")
        both = f"{greedy['start']['rate']:.1%} -> {greedy['final']['rate']:.1%}" if greedy else "-"
        costs = [f"{result['wall_s']:.0f}", f"{result['cpu_s']:.0f}"]
        rows.append([name, rate(one["start"]), rate(one["final"]), interval(one["gain"]), both, *costs])
    seeds = [result for name, result in done if name != "control"]
    apart = sum(map(is_apart, seeds))
    controls = ["exactly" if is_flat(result) else "NOT" for name, result in done if name == "control"]
    ends = f"{apart} of {len(seeds)} end with their interval above the start's"
    control = f"; control is {controls[0]} its start" if controls else ""
    return f"{markdown(header, rows)}\n\n{ends}{control}"


def is_apart(result: dict) -> bool:
    """True if the intervals of start and result at temperature 1 are disjoint."""
    return result["sampled"]["final"]["interval"][0] > result["sampled"]["start"]["interval"][1]


def is_flat(result: dict) -> bool:
    """True if neither weights nor any answer's success has changed."""
    still = {"mean": 0.0, "bootstrap_interval": [0.0, 0.0]}
    return not result["weights_changed"] and all(
        result[word]["gain"] == still for word in TEMPERATURES if word in result
    )


if __name__ == "__main__":
    main()
