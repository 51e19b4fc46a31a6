"""Writes what RL added to imitation into docs/demonstrations.md, from results/grpo_CASE/*.json and nothing else.

python -m benchmarks.learning.page
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from benchmarks.common import RESULTS, ROOT, markdown
from benchmarks.learning.grpo_gain import interval, runs_of
from benchmarks.learning.seeds import rate

PAGE = ROOT / "docs" / "demonstrations.md"
CASES = {"pickcube": "PickCube-v1", "libero": "libero_object/2"}
PARTS = 6  # of a run, between which its training curve is told
BLOCK = re.compile(r"(<!-- gains: begin -->\n).*(<!-- gains: end -->)", re.DOTALL)


def tables(results: Path = RESULTS) -> str:
    rows, curves = [], []
    for case, task in CASES.items():
        for name, done in runs_of(results / f"grpo_{case}"):
            steps, minutes = f"{done['env_steps']:,}", f"{done['train_s'] / 60:.0f}"
            begin, end = rate(done["start_success"]), rate(done["final_success"])
            rows.append([task, name, begin, end, interval(done["gain"]), steps, minutes])
            if name != "control":
                curves.append([task, name, *(f"{part:.0%}" for part in course(done["curve"]))])
    header = ["task", "run", "imitation", "after GRPO", "gain on the same episodes", "env steps", "minutes"]
    parts = [f"{part + 1}/{PARTS}" for part in range(PARTS)]
    return f"{markdown(header, rows)}\n\n{markdown(['task', 'run', *parts], curves)}"


def course(curve: list[list[float]]) -> list[float]:
    """Mean success in training, its actions being random, in so many parts of the run."""
    return [float(np.mean(part)) for part in np.array_split([success for _, success, _ in curve], PARTS)]


def told(page: str, text: str) -> str:
    """The page with this text between its two marks."""
    return BLOCK.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page)


def main() -> None:
    PAGE.write_text(told(PAGE.read_text(), tables()))
    print(f"written into {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
