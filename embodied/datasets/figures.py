"""Write meta/stats.json, with quantiles, of a dataset that has none: python -m embodied.datasets.figures FOLDER

LeRobot 2.1 stores no quantiles, and some models need them (`policy.statistics=FOLDER`). Only actions and states count.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

from embodied.core.errors import EmbodiedError
from embodied.datasets.episode_buffer import as_lists
from embodied.datasets.feature_stats import of_values
from embodied.datasets.lerobot_layout import ACTION, STATE, STATS
from embodied.datasets.reader import read_dataset


def write_figures(folder: Path) -> Path:
    """Compute and write stats.json; returns its path."""
    if (folder / STATS).exists():
        raise EmbodiedError(f"{folder / STATS} is there already")
    actions, states = [], []
    for episode in read_dataset(folder, images=False):
        actions.append(episode.actions)
        states.append(episode.obs.get("state"))
    found = {ACTION: of_values(np.concatenate(actions))}
    if states[0] is not None:
        found[STATE] = of_values(np.concatenate(states))
    draft = folder / f"{STATS}.{os.getpid()}"
    draft.write_text(json.dumps(as_lists(found), indent=4) + "\n", encoding="utf-8")
    os.replace(draft, folder / STATS)
    return folder / STATS


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python -m embodied.datasets.figures FOLDER", file=sys.stderr)
        return 2
    try:
        print(f"written {write_figures(Path(argv[0]))}")
    except EmbodiedError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
