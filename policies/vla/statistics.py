"""The ranges of the numbers a model was trained on, and how its [-1, 1] become the robot's units and back.

What surprises: some families add a small number to the width of a range (`slack`), others do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied.core.errors import CheckpointError, ConfigError

BOUNDS = {"quantiles": ("q01", "q99"), "extremes": ("min", "max")}

GRIPPERS = {
    "as_is": lambda x: x,
    "libero": lambda x: -np.sign(2 * x - 1),  # stored 0 closed, 1 open; the robot takes 1 to close
    "bridge": lambda x: np.where(x > 0.5, 1.0, -1.0),
}
STORED_GRIPPERS = {"as_is": lambda x: x, "libero": lambda x: (1 - x) / 2, "bridge": lambda x: (1 + x) / 2}  # and back


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
