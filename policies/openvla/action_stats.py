"""The units of [-1, 1] in a model that was not published: the ranges of some demonstrations, or plain ones.

They are buffers of the policy and so travel with its weights, from imitation to RL and to acting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from embodied.core.arrays import host
from embodied.core.errors import ConfigError
from embodied.core.types import EnvSpec
from embodied.policies.policy_folder import read_json

DATA_SET = Path("meta", "stats.json")  # in LeRobot's layout
FEATURES = {"action": "action", "proprio": "observation.state"}
FIGURES = ("q01", "q99", "min", "max")
OWN = "own"
RANGES = "ranges."  # how the names of these buffers begin
Figures = dict[str, dict[str, Any]]  # "action" and "proprio" -> FIGURES -> numbers


class Ranges(nn.Module):
    def __init__(self, figures: Figures) -> None:
        super().__init__()
        for part, numbers in figures.items():
            for name in FIGURES:
                self.register_buffer(f"{part}_{name}", torch.tensor(numbers[name], dtype=torch.float64))

    def norm_stats(self) -> dict[str, Figures]:
        """The ranges in the layout of published folders."""
        found: Figures = {}
        for key, numbers in self.named_buffers():
            part, _, name = key.rpartition("_")
            found.setdefault(part, {})[name] = host(numbers).tolist()
        return {OWN: found}


def stated_ranges(published: dict[str, Any], asked: str | None, spec: EnvSpec) -> tuple[dict[str, Any], str | None]:
    """Ranges by data set, and the chosen one: `asked` is one of those published, or the folder of a dataset."""
    folder = Path(asked) if asked and asked not in published and (not published or Path(asked).is_dir()) else None
    figures = demonstrated(folder, spec) if folder else {}
    if not published:
        return {OWN: figures or plain(spec)}, None
    return (published | {folder.name: figures}, folder.name) if folder else (published, asked)


def plain(spec: EnvSpec) -> Figures:
    """Actions are from -1 to 1, and what a robot feels within half a turn."""
    limits = {"action": (spec.action.dim, 1.0), "proprio": (spec.state_dim or 0, np.pi)}
    return {
        part: {name: [limit if name in ("q99", "max") else -limit] * count for name in FIGURES}
        for part, (count, limit) in limits.items()
    }


def demonstrated(folder: Path, spec: EnvSpec) -> Figures:
    """The figures of a dataset's actions and states."""
    counted = f"python -m embodied.datasets.quantiles {folder} writes it"
    if not (folder / DATA_SET).is_file():
        if (folder / "meta" / "info.json").is_file():
            raise ConfigError(
                f"policy.statistics={folder} has no {DATA_SET} (LeRobot 2.1 stores no quantiles); {counted}"
            )
        raise ConfigError(
            f"policy.statistics={folder} is neither a data set that the model knows (give policy.pretrained=FOLDER, a "
            f"model trained on it) nor the folder of one in LeRobot's layout, with {DATA_SET} (python -m "
            "embodied.collect writes some)"
        )
    stats, wanted = read_json(folder / DATA_SET), {"action": spec.action.dim, "proprio": spec.state_dim or 0}
    found = plain(spec)
    for part, count in wanted.items():
        numbers = stats.get(FEATURES[part], {})
        if not count:
            continue
        if lost := [name for name in FIGURES if name not in numbers]:
            lacks = f"{folder / DATA_SET} has no {' and no '.join(lost)} of {FEATURES[part]}"
            raise ConfigError(f"{lacks}; {counted.replace(' it', ' them')}")
        if odd := [name for name in FIGURES if not are_finite(numbers[name])]:
            raise ConfigError(f"{folder / DATA_SET} is damaged: {odd[0]} of {FEATURES[part]} is {numbers[odd[0]]}")
        if len(numbers["min"]) != count:
            raise ConfigError(f"policy.statistics={folder}: {part} has {len(numbers['min'])} numbers, the env {count}")
        found[part] = {name: list(numbers[name]) for name in FIGURES}
    return found


def are_finite(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) in (int, float) and np.isfinite(n) for n in numbers)
