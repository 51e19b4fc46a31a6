"""Each ManiSkill task with its own recipe: trained from fixed seeds, then evaluated on 200 held-out episodes.

    python -m benchmarks.learning.tasks [--tasks pullcube_ppo ...] [--seeds 0 1 2] [--resume]

The cheapest tasks come first, seed 0 of all tasks before the next seed. If a recipe begins with imitation, its policy
is evaluated, too. Writes results/tasks/RECIPE-seed-S.json; --resume skips and prints results of the same recipe. A
result names its commit.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

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
    settings,
    still_says,
    train_command,
    write_json,
)
from benchmarks.learning.seeds import EVAL_SEED, TIMEOUT_S, evaluate, new_folder, parser, rate, read_done
from embodied.config.yaml_values import read_yaml

SEEDS = (0, 1, 2)
PLACE, RUNS = RESULTS / "tasks", ROOT / "runs" / "tasks"
IMITATION = ("env", "policy", "collect", "sft")  # the sections that a recipe of imitation reads
UNJUDGED = ("run.eval_every=null", "eval.episodes=8", "eval.videos=0", "eval.failure_videos=0")


def recipes() -> list[str]:
    """The recipe of every task, in order of env steps."""
    from embodied.config.recipe_files import BY_TASK, recipe_names

    return sorted(["maniskill_ppo", *recipe_names(*BY_TASK)], key=lambda name: resolved(name)["run"]["env_steps"])


def main() -> None:
    ask = parser(__doc__, SEEDS)
    ask.add_argument("--tasks", nargs="+", default=recipes(), choices=recipes(), metavar="RECIPE")
    options = ask.parse_args()
    env, done = environment(), []
    for seed in options.seeds:
        for name in options.tasks:
            about = {"recipe": name, "seed": seed, "eval_seed": EVAL_SEED}
            path = PLACE / f"{name}-seed-{seed}.json"
            result = read_done(path, about) if options.resume else None
            if result is None or not of_today(result):
                made_here = {"commit": code_commit(), "machine": machine(), "packages": packages()}
                made_here["settings"] = settings(resolved(name))
                if first := start_of(name):
                    made_here["start_settings"] = settings(resolved(first))
                result = about | made_here | measure_seed(name, seed, env)
                write_json(path, result)
            done.append(result)
            print(f"{name} seed {seed}: {outcome(result)}, {result['train_s']:.0f} s", flush=True)
    print(report(done))


def start_of(name: str) -> str | None:
    """The recipe of the start."""
    return resolved(name)["run"]["start_from"]


def of_today(result: dict) -> bool:
    """True if recipe and start are unchanged since this measurement."""
    name = result["recipe"]
    if not still_says(name, result.get("settings", {})):
        return False
    if (first := start_of(name)) is None:
        return True
    aside = {key: value for key, value in settings(resolved(first)).items() if key not in IMITATION}
    return "start_settings" in result and still_says(first, result["start_settings"] | aside)


def measure_seed(name: str, seed: int, env: dict) -> dict:
    """Train (from demonstrations if the recipe does), then evaluate the final checkpoint in a separate process."""
    runs, costs = RUNS / f"seed-{seed}", []  # separate, so that each seed makes its own start
    command = train_command(name, f"seed={seed}", f"run.dir={runs}", f"run.name={name}", *UNJUDGED)
    run = new_folder(runs, name, lambda: costs.append(measure(command, env, TIMEOUT_S)))
    results, rows, (trained,) = evaluate(run, env), read_metrics(run), costs
    start = {}
    if start_of(name):
        begun = evaluate(Path(read_yaml((run / "config.yaml").read_text())["run"]["start_from"]), env)["overall"]
        start = {"start": {what: begun[what] for what in ("success_once", "success_at_end")}}
    return start | {
        "task": resolved(name)["env"]["task"],
        "env_steps": rows[-1]["env_steps"],
        "train_s": rows[-1]["train_s"],
        "cpu_s": round(trained.cpu_s, 2),
        "success_once": results["overall"]["success_once"],
        "success_at_end": results["overall"]["success_at_end"],
        "return": results["overall"]["return"],
        "curve": [[row["env_steps"], row["success_once"], row["return"]] for row in rows],
    }


def outcome(result: dict) -> str:
    if result["success_once"] is None:
        return f"return {result['return']:.1f}"
    return f"success_once {rate(result['success_once'], 0)}, at the end {rate(result['success_at_end'], 0)}"


def report(done: list[dict]) -> str:
    """One row per task: every seed's outcome, and the median cost of a seed, with the machine's load."""
    header = ["task", "recipe", "imitation alone", "success_once", "success_at_end", "env steps", "training s"]
    header += ["CPU minutes", "load"]
    rows = []
    for name in dict.fromkeys(result["recipe"] for result in done):
        mine = [result for result in done if result["recipe"] == name]
        rows.append(
            [
                mine[0]["task"],
                f"`{name}`",
                ", ".join(f"{result['start']['success_once']['rate']:.0%}" for result in mine if "start" in result),
                ", ".join(of_seed(result, "success_once") for result in mine),
                ", ".join(of_seed(result, "success_at_end") for result in mine),
                f"{median(result['env_steps'] for result in mine):,.0f}",
                f"{median(result['train_s'] for result in mine):.0f}",
                f"{median(result['cpu_s'] for result in mine) / 60:.0f}",
                f"{median(result['machine']['load_before'] for result in mine):.1f}",
            ]
        )
    return markdown(header, rows)


def of_seed(result: dict, what: str) -> str:
    """A seed's success with its interval; the mean return for tasks without success."""
    if result[what] is not None:
        return rate(result[what], 0)
    return f"return {result['return']:.0f}" if what == "success_once" else "-"


def kept() -> list[dict]:
    """The stored results of unchanged recipes, in the order of measurement."""
    found = [json.loads(path.read_text()) for path in sorted(PLACE.glob("*-seed-*.json"))]
    order = recipes()
    kept = [one for one in found if one["recipe"] in order and of_today(one)]
    return sorted(kept, key=lambda one: order.index(one["recipe"]))


if __name__ == "__main__":
    main()
