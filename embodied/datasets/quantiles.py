"""Write quantiles into meta/stats.json of a dataset without them: python -m embodied.datasets.quantiles FOLDER

LeRobot 2 and the first 3.0 store none, and some models need them (`policy.statistics=FOLDER`). Only the figures of
actions and states are computed; other features keep theirs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from embodied.core.errors import EmbodiedError
from embodied.core.files import replace_text
from embodied.datasets.layout import ACTION, QUANTILES, STATE, STATS, of_values
from embodied.datasets.reader import read_dataset
from embodied.datasets.writer import as_lists


def write_figures(folder: Path, names: dict[str, str]) -> Path:
    """Compute and write stats.json under LeRobot's names; returns its path. `names`: as in sft.names."""
    dataset = read_dataset(folder, images=False, names=names)
    wanted = [name for name in (ACTION, STATE) if name in dataset.features]
    if all(QUANTILES.keys() <= dataset.stats.get(name, {}).keys() for name in wanted):
        raise EmbodiedError(f"{folder / STATS} has quantiles already")
    played = list(dataset)
    stats = dataset.stats | {ACTION: of_values(np.concatenate([episode.actions for episode in played]))}
    if STATE in wanted:
        stats[STATE] = of_values(np.concatenate([episode.obs["state"] for episode in played]))
    replace_text(folder / STATS, json.dumps(as_lists(stats), indent=4) + "\n")
    return folder / STATS


def main(argv: list[str]) -> int:
    names = dict(word.split("=", 1) for word in argv[1:] if "=" in word)
    if not argv or argv[0].startswith("-") or len(names) != len(argv) - 1 or not names.keys() <= {"action", "state"}:
        print("usage: python -m embodied.datasets.quantiles FOLDER [action=NAME] [state=NAME]", file=sys.stderr)
        return 2
    try:
        print(f"written {write_figures(Path(argv[0]), names)}")
    except EmbodiedError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
