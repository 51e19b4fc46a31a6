"""Helpers of the learning benchmarks: one stored result per seed, and 200 held-out episodes.

A seed's result is in results/NAME/seed-S.json with its commit and recipe; --resume skips results of the same code and
recipe.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common import code_commit, machine, measure, packages, write_json

EPISODES = 200
EVAL_SEED = 1_000  # episodes of neither training nor its evaluations
ONE_CORE = ("cluster.backend=inline", 'placement={"sim,policy": "cpu:0", "learner": "cpu:0"}')
START = 0.2, 0.7  # success rate of a start policy: enough to reward, room to gain
TIMEOUT_S = 2 * 3600.0


def parser(doc: str | None, seeds: Sequence[int]) -> argparse.ArgumentParser:
    ask = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--seeds", type=int, nargs="+", default=seeds)
    ask.add_argument("--resume", action="store_true", help="leave out what was measured with this code and recipe")
    return ask


def once(path: Path, recipe: dict, resume: bool, measured: Callable[[], dict], any_code: bool = False) -> dict:
    """The result at this path, measured if it is missing. It depends on `recipe` and the code; with `any_code` results
    of earlier code are accepted (the result names it)."""
    identity = {"commit": code_commit(), **recipe}
    result = read_done(path, recipe if any_code else identity) if resume else None
    if result is None:
        result = {**identity, "machine": machine(), "packages": packages()} | measured()
        write_json(path, result)
    return result


def read_done(path: Path, identity: dict) -> dict | None:
    """An earlier result, if it comes from the same code and recipe."""
    if not path.is_file():
        return None
    done = json.loads(path.read_text())
    return done if all(done.get(key) == value for key, value in identity.items()) else None


def program(name: str, *options: str) -> list[str]:
    return [sys.executable, "-m", f"embodied.{name}", *options]


def new_folder(parent: Path, name: str, make: Callable[[], object]) -> Path:
    """The new folder `name-DATE`."""
    before = set(parent.glob(f"{name}-*"))
    make()
    (made,) = set(parent.glob(f"{name}-*")) - before
    return made


def held_out(episodes: int = EPISODES) -> tuple[str, ...]:
    """The options of an evaluation on the held-out episodes."""
    return f"eval.episodes={episodes}", f"eval.seed={EVAL_SEED}", "eval.videos=0"


def evaluate(run: Path, env: dict) -> dict:
    """results.json of the final checkpoint on the held-out episodes, from a separate process."""
    measure(program("evaluate", f"checkpoint={run}", *held_out()), env, TIMEOUT_S)
    return last_results(run)


def last_results(run: Path, episodes: int = EPISODES) -> dict:
    """The results of the newest evaluation, which was of the held-out episodes."""
    newest = max(run.glob("eval/*/results.json"), key=lambda path: path.stat().st_mtime_ns)
    results = json.loads(newest.read_text())
    assert results["overall"]["episodes"] == episodes, results["overall"]
    return results


def outcomes(folder: Path, episodes: int = EPISODES) -> list[bool]:
    """Success of every held-out episode, in the order of their seeds."""
    with (folder / "episodes.csv").open() as file:
        rows = sorted(csv.DictReader(file), key=lambda row: int(row["seed"]))
    assert len(rows) == episodes and not any(row["error"] for row in rows), folder
    return [row["success_once"] == "true" for row in rows]


def rate(measured: dict | None, digits: int = 1) -> str:
    """`95.5% [91.7%, 97.6%]`"""
    if measured is None:
        return ""
    low, high = measured["interval"]
    return f"{measured['rate']:.{digits}%} [{low:.{digits}%}, {high:.{digits}%}]"


def begin_well(rates: Sequence[float]) -> str:
    low, high = START
    return f"{sum(low <= one <= high for one in rates)} of {len(rates)} begin between {low:.0%} and {high:.0%}"
