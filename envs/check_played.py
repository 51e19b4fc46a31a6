"""What an env gave, kept so that `check_vector_env` can compare it with what it gives another time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embodied.core.types import Observation


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
    return {
        k: copied(v) if isinstance(v, dict) else list(v) if isinstance(v, list) else np.array(v) for k, v in obs.items()
    }


def rows_of(obs: Observation, rows: np.ndarray) -> Observation:
    take = lambda part: [part[row] for row in rows] if isinstance(part, list) else part[rows]  # noqa: E731
    return {name: rows_of(part, rows) if isinstance(part, dict) else take(part) for name, part in obs.items()}


def flat(obs: Observation, row: int) -> np.ndarray:
    """Everything one row sees as one vector of numbers (texts do not change inside an episode)."""
    parts = [part for name in obs for part in (obs[name].values() if isinstance(obs[name], dict) else [obs[name]])]
    return np.concatenate([np.asarray(part[row], float).ravel() for part in parts if not isinstance(part, list)])


def far(one: Observation, other: Observation) -> float:
    """The largest difference of two observations; infinite where texts differ."""
    largest = 0.0
    for name, part in one.items():
        if isinstance(part, dict):
            largest = max(largest, far(part, other[name]))
        elif isinstance(part, list):
            largest = max(largest, 0.0 if part == list(other[name]) else np.inf)
        elif part.size:
            largest = max(largest, float(np.abs(part.astype(float) - other[name].astype(float)).max()))
    return largest


def cut(played: Played, rows: np.ndarray) -> Played:
    success = None if played.success is None else played.success[rows]
    obs = [rows_of(obs, rows) for obs in played.obs]
    return Played(played.rewards[rows], played.terminated[rows], played.truncated[rows], success, obs)


def cut_steps(played: Played, steps: slice) -> Played:
    arrays = (played.rewards, played.terminated, played.truncated, played.success)
    return Played(*(None if array is None else array[:, steps] for array in arrays), played.obs[steps])
