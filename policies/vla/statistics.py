"""The ranges of the numbers a model was trained on, and how its [-1, 1] become the robot's units and back.

Of a model that was not published the ranges are those of some demonstrations, or plain ones. They are buffers of the
policy and so travel with its weights, from imitation to RL and to acting.

What surprises: some families add a small number to the width of a range (`slack`), others do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from embodied.core.arrays import host
from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.types import EnvSpec
from embodied.policies.policy_folder import read_json

BOUNDS = {"quantiles": ("q01", "q99"), "extremes": ("min", "max")}

GRIPPERS = {
    "as_is": lambda x: x,
    "libero": lambda x: -np.sign(2 * x - 1),  # stored 0 closed, 1 open; the robot takes 1 to close
    "bridge": lambda x: np.where(x > 0.5, 1.0, -1.0),
}
STORED_GRIPPERS = {"as_is": lambda x: x, "libero": lambda x: (1 - x) / 2, "bridge": lambda x: (1 + x) / 2}  # and back
DATA_SET = Path("meta", "stats.json")  # in LeRobot's layout
FEATURES = {"action": "action", "proprio": "observation.state"}
FIGURES = ("q01", "q99", "min", "max")
OWN = "own"
RANGES = "ranges."  # how the names of these buffers begin
Figures = dict[str, dict[str, Any]]  # "action" and "proprio" -> FIGURES -> numbers


@dataclass(frozen=True)
class Statistics:
    """The range that [-1, 1] stands for; numbers whose mask is False are not scaled. `slack` widens every range."""

    low: np.ndarray
    high: np.ndarray
    mask: np.ndarray
    slack: float = 0.0

    @property
    def width(self) -> np.ndarray:
        return self.high - self.low + self.slack

    def from_unit(self, numbers: np.ndarray) -> np.ndarray:
        return np.where(self.mask, 0.5 * (numbers + 1) * self.width + self.low, numbers)

    def to_unit(self, numbers: np.ndarray) -> np.ndarray:
        """Cut off at -1 and 1; -1 where a range has no width."""
        width = np.where(self.width == 0, 1.0, self.width)
        return np.clip(np.where(self.mask, 2 * (numbers - self.low) / width - 1, numbers), -1, 1)


def choose_key(norm_stats: dict[str, Any], key: str | None, where: str) -> str:
    """The data set named `key`, which may be left out where there is only one."""
    if key is None and len(norm_stats) > 1:
        raise ConfigError(
            f"{where} was trained on several data sets; choose one: policy.statistics="
            f"{'|'.join(sorted(norm_stats)[:8])}"
        )
    key = next(iter(norm_stats)) if key is None else key
    found = next((name for name in (key, f"{key}_no_noops") if name in norm_stats), None)
    if found is None:
        raise ConfigError(f"policy.statistics={key!r} is not in {where}; there are: {', '.join(sorted(norm_stats))}")
    return found


def statistics_of(
    norm_stats: dict[str, Any],
    key: str | None,
    where: str,
    part: str = "action",
    bounds: str = "quantiles",
    slack: float = 0.0,
) -> Statistics:
    """The ranges of the actions (or of another `part`) of the data set `key`."""
    found = choose_key(norm_stats, key, where)
    what = f"{where}: the statistics of {found}"
    try:
        numbers = norm_stats[found][part]
        low, high = (np.array(numbers[name], np.float64) for name in BOUNDS[bounds])
        mask = np.array(numbers.get("mask") or [True] * len(low), bool)
    except KeyError as err:
        raise CheckpointError(f"{what} lack {err} of {part}") from None
    except (TypeError, ValueError, AttributeError) as err:
        raise CheckpointError(f"{what} are damaged at {part}: {err}") from None
    if not low.shape == high.shape == mask.shape == (len(low),):
        sizes = f"{low.shape}, {high.shape} and {mask.shape}"
        raise CheckpointError(f"{what} are damaged: {' and '.join(BOUNDS[bounds])} and mask of {part} are {sizes}")
    if not (np.isfinite(low) & np.isfinite(high) & (low <= high))[mask].all():
        raise CheckpointError(f"{what} are damaged: {part} has a range that is none, {low.tolist()} to {high.tolist()}")
    return Statistics(low, high, mask, slack)


class Ranges(nn.Module):
    """The ranges of a model that was not published."""

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
