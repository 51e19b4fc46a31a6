"""What recipes learn, seed by seed: each seed trains, then its start and its result play the same held-out episodes.

    python -m benchmarks.learning maniskill_ppo --seeds 201 202 203 --episodes 1000
    python -m benchmarks.learning sums_grpo --given pipeline.schedule=async --control
    python -m benchmarks.learning pullcube_ppo pullcubetool_ppo --resume

A start is the recipe's imitation, made anew for each seed, or its published model. The control repeats the first seed
for a few iterations with lr=0, which must change neither weights nor outcomes. Writes
results/learning/RECIPE-seed-S.json; --resume skips results of the same code and settings.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

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
from embodied.policies.policy_folder import read_weights
from embodied.run.run_folder import locate

SEEDS = tuple(range(101, 111))  # not used for tuning recipes
EVAL_SEED = 1_000  # episodes of neither training nor its evaluations
CONTROL = ("algo.lr=0", "run.iterations=3")
UNUSED = ("eval.episodes=8", "eval.videos=0")  # the evaluation at the end of training
TIMEOUT_S, RESAMPLES = 2 * 3600.0, 10_000


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("recipes", nargs="+")
    ask.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    ask.add_argument("--episodes", type=int, default=200)
    ask.add_argument("--given", nargs="+", default=(), help="options for the recipes, as key=value")
    ask.add_argument("--control", action="store_true")
    ask.add_argument("--resume", action="store_true")
    asked, env, done = ask.parse_args(), environment(), []
    plan = [(recipe, f"seed-{seed}", seed, ()) for seed in asked.seeds for recipe in asked.recipes]
    plan += [(recipe, "control", asked.seeds[0], CONTROL) for recipe in asked.recipes if asked.control]
    for recipe, name, seed, changes in plan:
        given = last_of_each_key(*asked.given, *changes)
        about = {"recipe": recipe, "seed": seed, "episodes": asked.episodes, "commit": code_commit()}
        about["settings"] = config_hash(resolved(recipe, *given) | {"start": start_settings(recipe)})
        path = RESULTS / "learning" / f"{recipe}-{name}.json"
        result = json.loads(path.read_text()) if asked.resume and path.is_file() else {}
        if not about.items() <= result.items():
            made = {"given": given, "machine": machine(), "packages": packages()}
            result = about | made | learned(recipe, name, seed, given, asked.episodes, env)
            write_json(path, result)
        done.append((name, result))
        print(markdown(HEADER, [row_of(name, result)]), flush=True)
    print(report(done))


def last_of_each_key(*words: str) -> list[str]:
    return list({word.partition("=")[0]: word for word in words}.values())


def start_settings(recipe: str) -> dict:
    """The settings of the recipe's imitation; {} without imitation."""
    from embodied.config.recipe import load

    start = resolved(recipe)["run"]["start_from"]
    return load([f"recipe={start}"], entry="sft").config.model_dump(mode="json") if start else {}


def learned(recipe: str, name: str, seed: int, given: Sequence[str], episodes: int, env: dict) -> dict:
    """Train in a new folder, then evaluate start and result in a separate process."""
    parent = ROOT / "runs" / "learning"
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{recipe}-{name}-", dir=parent))
    options = last_of_each_key(*UNUSED, *given)
    command = train_command(recipe, f"seed={seed}", f"run.dir={folder}", f"run.name={recipe}", *options)
    cost = measure(command, env, TIMEOUT_S)
    (run,) = folder.glob(f"{recipe}-*")
    published = resolved(recipe)["policy"].get("pretrained")
    imitation = next((path for path in folder.glob("sft-*") if (path / "run.json").is_file()), None)
    start = imitation or (Path(published).resolve() if published else None)  # demonstrations are beside it
    env_options = [word for word in given if word.startswith("env.")]
    both = evaluated(recipe, [policy for policy in (start, run) if policy], folder, episodes, env, env_options)
    rows, final = read_metrics(run), both[-1]
    return {
        "env_steps": rows[-1]["env_steps"],
        "train_s": round(rows[-1]["train_s"], 1),
        "wall_s": round(cost.wall_s, 1),
        "cpu_s": round(cost.cpu_s, 1),
        "start": both[0][0]["success_once"] if start else None,
        "start_at_end": both[0][0]["success_at_end"] if start else None,
        **{key: final[0][key] for key in ("success_once", "success_at_end", "return")},
        "gain": paired_gain(both[0][1], final[1]) if start else None,
        "weights_changed": not same_weights(start, run) if start else None,
        "curve": [[row["env_steps"], row["success_once"], row["return"]] for row in rows],
    }


def evaluated(
    recipe: str, policies: Sequence[Path], folder: Path, episodes: int, env: dict, given: Sequence[str] = ()
) -> list[tuple[dict, list[bool]]]:
    """For each policy its results on the held-out episodes, and the success of each episode, in order."""
    asked = (f"recipe={recipe}", f"eval.episodes={episodes}", f"eval.seed={EVAL_SEED}", "eval.videos=0", *given)
    named = f"checkpoint=[{','.join(map(str, policies))}]" if len(policies) > 1 else f"checkpoint={policies[0]}"
    measure([sys.executable, "-m", "embodied.evaluate", named, f"run.dir={folder}", *asked], env, TIMEOUT_S)
    if len(policies) > 1:
        compared = folder / "compare"
        places = [compared / name for name in json.loads((compared / "comparison.json").read_text())["policies"]]
    else:
        places = [max(policies[0].glob("eval/*"), key=lambda path: path.stat().st_mtime_ns)]
    found = []
    for place in places:
        with (place / "episodes.csv").open() as file:
            rows = sorted(csv.DictReader(file), key=lambda row: int(row["seed"]))
        assert len(rows) == episodes and not any(row["error"] for row in rows), place
        results = json.loads((place / "results.json").read_text())["overall"]
        found.append((results, [row["success_once"] == "true" for row in rows]))
    return found


def same_weights(start: Path, run: Path) -> bool:
    """True if a run has the weights of its start, a run or a model's folder, without PPO's value head."""
    one, other = (read_weights(folder_of(path)) for path in (start, run))
    return one.keys() <= other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def folder_of(path: Path) -> Path:
    return path if (path / "config.json").is_file() else locate(str(path))[0]


def paired_gain(before: Sequence[bool], after: Sequence[bool]) -> dict:
    """Mean difference, and its 95% interval over resampled episodes."""
    difference = np.array(after, float) - np.array(before, float)
    draws = np.random.default_rng(0).integers(len(difference), size=(RESAMPLES, len(difference)))
    low, high = np.percentile(difference[draws].mean(axis=1), [2.5, 97.5])
    return {"mean": float(difference.mean()), "bootstrap_interval": [float(low), float(high)]}


HEADER = ["recipe", "run", "start once", "at the end", "success once", "at the end", "return", "gain"]
HEADER += ["env steps", "training s", "CPU s"]


def row_of(name: str, result: dict) -> list[str]:
    gain = result["gain"]
    gained = (
        f"{gain['mean']:+.1%} [{gain['bootstrap_interval'][0]:+.1%}, {gain['bootstrap_interval'][1]:+.1%}]"
        if gain
        else ""
    )
    rates = [rate(result[key]) for key in ("start", "success_once", "success_at_end")]
    numbers = (f"{result[key]:,.0f}" for key in ("env_steps", "train_s", "cpu_s"))
    return [result["recipe"], name, *rates, f"{result['return']:.2f}", gained, *numbers]


def rate(measured: dict[str, Any] | None) -> str:
    """`95.5% [91.7%, 97.6%]`"""
    return f"{measured['rate']:.1%} [{measured['interval'][0]:.1%}, {measured['interval'][1]:.1%}]" if measured else ""


def report(done: Sequence[tuple[str, dict]]) -> str:
    """A table, the worst seed of each recipe first, then controls; and a line for each recipe."""
    worth = lambda result: result["success_once"]["rate"] if result["success_once"] else result["return"]  # noqa: E731
    ordered = sorted(done, key=lambda each: (each[0] == "control", each[1]["recipe"], worth(each[1])))
    lines = [markdown(HEADER, [row_of(*each) for each in ordered]), ""]
    for recipe in dict.fromkeys(result["recipe"] for _, result in done):
        seeds = [result for name, result in done if name != "control" and result["recipe"] == recipe]
        gains = [result["gain"] for result in seeds if result["gain"]]
        above = f"; {sum(gain['bootstrap_interval'][0] > 0 for gain in gains)} seeds gain for certain" if gains else ""
        lines.append(f"{recipe}: mean {fmean(map(worth, seeds)):.3f} of {len(seeds)} seeds{above}")
    still = {"mean": 0.0, "bootstrap_interval": [0.0, 0.0]}
    flat = [r["gain"] == still and not r["weights_changed"] for name, r in done if name == "control" and r["gain"]]
    return "\n".join(lines + [f"{sum(flat)} of {len(flat)} controls are exactly their start"] * bool(flat))


if __name__ == "__main__":
    main()
