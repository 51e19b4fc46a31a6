"""Actions as tokens: 256 bins of [-1, 1] on the last ids of the vocabulary, and back to the robot's units.

What surprises: 256 ids share 255 bin centres (the two lowest ids mean the same), and ids fall as actions grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied.errors import CheckpointError, ConfigError

GRIPPERS = {
    "as_is": lambda x: x,
    "libero": lambda x: -np.sign(2 * x - 1),  # stored 0 closed, 1 open; the robot takes 1 to close
    "bridge": lambda x: np.where(x > 0.5, 1.0, -1.0),
}


class ActionTokens:
    """Tokens count from 0: `Settings.first_action_id` is added for the vocabulary."""

    def __init__(self, bins: int) -> None:
        self.edges = np.linspace(-1, 1, bins)
        self.centers = (self.edges[:-1] + self.edges[1:]) / 2
        self.bins = bins

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Numbers in [-1, 1]."""
        return self.centers[np.minimum(self.bins - 1 - tokens, self.bins - 2)]

    def encode(self, actions: np.ndarray) -> np.ndarray:
        return self.bins - np.digitize(np.clip(actions, -1, 1), self.edges)


@dataclass(frozen=True)
class Statistics:
    """The range that [-1, 1] stands for; numbers whose mask is False are not scaled."""

    low: np.ndarray
    high: np.ndarray
    mask: np.ndarray

    def from_unit(self, actions: np.ndarray) -> np.ndarray:
        return np.where(self.mask, 0.5 * (actions + 1) * (self.high - self.low) + self.low, actions)

    def to_unit(self, actions: np.ndarray) -> np.ndarray:
        width = np.where(self.high == self.low, 1.0, self.high - self.low)
        return np.where(self.mask, np.clip(2 * (actions - self.low) / width - 1, -1, 1), actions)


def statistics_of(norm_stats: dict[str, Any], key: str | None, where: str) -> Statistics:
    """Those of the data set `key`, which may be left out where there is only one."""
    if key is None and len(norm_stats) > 1:
        raise ConfigError(
            f"{where} was trained on several data sets; choose whose action range to use: policy.statistics="
            f"{'|'.join(sorted(norm_stats)[:8])}"
        )
    key = next(iter(norm_stats)) if key is None else key
    found = next((name for name in (key, f"{key}_no_noops") if name in norm_stats), None)
    if found is None:
        raise ConfigError(f"policy.statistics={key!r} is not in {where}; there are: {', '.join(sorted(norm_stats))}")
    try:
        action = norm_stats[found]["action"]
        low, high = (np.array(action[name], np.float64) for name in ("q01", "q99"))
        return Statistics(low, high, np.array(action.get("mask", [True] * len(low)), bool))
    except (KeyError, TypeError) as err:
        raise CheckpointError(f"{where}: the statistics of {found} lack {err} of their actions") from None
