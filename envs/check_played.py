"""What an env gave, kept so that `check_vector_env` can compare it with what it gives another time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied.core.arrays import Observation, is_text, leaves, map_obs, take_rows, text_arrays


@dataclass
class Played:
    """What T env steps gave: arrays [N, T], and the observation after each step."""

    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray | None
    obs: list[Observation]

    @property
    def done(self) -> np.ndarray:
        return self.terminated | self.truncated

    def last_step(self, row: int) -> int | None:
        """The step at which this row's episode ended."""
        return int(self.done[row].argmax()) if self.done[row].any() else None


def copied(obs: Observation) -> Observation:
    return map_obs(lambda part: np.array(part, object if is_text(part) else None), obs)


def rows_of(obs: Observation, rows: np.ndarray) -> Observation:
    return take_rows(text_arrays(obs), rows)


def flat(obs: Observation, row: int) -> np.ndarray:
    """Everything one row sees as one vector of numbers (texts do not change inside an episode)."""
    return np.concatenate([np.asarray(part[row], float).ravel() for part in leaves(obs) if not is_text(part)])


def far(one: Observation, other: Observation) -> float:
    """The largest difference of two observations; infinite where texts differ."""

    def distance(part: Any, others: Any) -> float:
        if is_text(part):
            return 0.0 if list(part) == list(others) else np.inf
        return float(np.abs(part.astype(float) - others.astype(float)).max(initial=0.0))

    return max(leaves(map_obs(distance, one, other)), default=0.0)


def cut(played: Played, rows: np.ndarray) -> Played:
    success = None if played.success is None else played.success[rows]
    obs = [rows_of(obs, rows) for obs in played.obs]
    return Played(played.rewards[rows], played.terminated[rows], played.truncated[rows], success, obs)


def cut_steps(played: Played, steps: slice) -> Played:
    arrays = (played.rewards, played.terminated, played.truncated, played.success)
    return Played(*(None if array is None else array[:, steps] for array in arrays), played.obs[steps])
