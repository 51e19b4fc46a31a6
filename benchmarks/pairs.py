"""Compares the speed of two checkouts that run the same recipe side by side, under the same disturbances.

    python -m benchmarks.pairs ../before recipe=sums_grpo run.iterations=8    # that checkout, beside this one
    python -m benchmarks.pairs . recipe=pointmass_ppo --share                 # alone, beside embodied.share of one run
    python -m benchmarks.pairs . recipe=libero_ppo --other env.python=auto    # beside itself with other options

Both run at the same time; each starts first in turn. If benchmarks/recipes holds a copy of the recipe, both take that.
Prints for each pair the speed-up of the second checkout's median iteration, and the median over pairs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.common import PINNED, ROOT, environment, read_metrics

WAIT_S = 1800.0  # limit for a run


def seconds(run: Path) -> float:
    """Median seconds of an iteration; for conversations per token, since later answers differ in length. The last
    iterations are left out: the other run may have ended."""
    rows = read_metrics(run)[:-1]
    return median((now["train_s"] - before["train_s"]) / now.get("engine/tokens", 1) for before, now in pairwise(rows))


def pinned(recipe: str) -> str:
    """The copy of a recipe for comparisons, if there is one: the shipped recipe may differ between the checkouts."""
    copy = PINNED / f"{recipe}.yaml"
    return str(copy) if copy.is_file() else recipe


def begin(checkout: Path, words: Sequence[str], home: Path, share: bool) -> subprocess.Popen[bytes]:
    recipe = pinned(next(word.removeprefix("recipe=") for word in words if word.startswith("recipe=")))
    keys = [word for word in words if not word.startswith("recipe=")]
    first = ["embodied.share", f"folder={home}/share", recipe] if share else ["embodied.train", f"recipe={recipe}"]
    command = [sys.executable, "-m", *first, *keys, f"run.dir={home}", "eval.episodes=2", "eval.videos=0"]
    env = {**environment(), "PYTHONPATH": str(checkout)}
    return subprocess.Popen(command, cwd=checkout, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def pair(checkouts: Sequence[Path], words: Sequence[str], other: Sequence[str], share: bool, first: int) -> float:
    """The speed-up of the second checkout, which runs with `other` options."""
    with tempfile.TemporaryDirectory() as folder:
        homes = [Path(folder) / name for name in ("one", "other")]
        more = ((), other)
        going = {i: begin(checkouts[i], (*words, *more[i]), homes[i], share and i == 1) for i in (first, 1 - first)}
        try:
            codes = [process.wait(WAIT_S) for process in going.values()]
        finally:
            for process in going.values():
                process.kill()
        if any(codes):
            raise SystemExit(f"a run ended with {max(codes)}; try its command: embodied.train {' '.join(words)}")
        one, other = (seconds(last_run(home)) for home in homes)
        return one / other


def last_run(home: Path) -> Path:
    """The run that ended last; before it, there may be the run of the policy that it starts from."""
    return max(home.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the other checkout, with the packages of this one")
    parser.add_argument("words", nargs="+", help="recipe=NAME and keys that both have")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--share", action="store_true", help="this checkout's run goes on under embodied.share")
    parser.add_argument("--other", nargs="*", default=[], help="keys of this checkout's run alone")
    asked = parser.parse_args()
    found = []
    for number in range(asked.pairs):
        found.append(pair([asked.checkout.resolve(), ROOT], asked.words, asked.other, asked.share, number % 2))
        print(f"{number + 1}: {found[-1]:.3f}", flush=True)
    print(f"median {median(found):.3f}, from {min(found):.3f} to {max(found):.3f}")


if __name__ == "__main__":
    main()
