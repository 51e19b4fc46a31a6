"""Envs whose state is saved as the open episodes' seeds and actions, and restored by playing these again.

A physics engine remembers more than positions and velocities: contact points, friction anchors, the solver's last
answer. PushCube-v1 put back into its positions and velocities differs by 1e-7 after one env step and by 1e-6 after ten,
while an episode repeated from its seed is equal bit for bit. Restoring costs the open episodes' env steps, without
policy, observations and images.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from embodied.core.arrays import on_host
from embodied.core.types import Array, EnvSpec, EpisodeSpec
from embodied.envs.vector_env import VectorEnv

KEYS = ("init_state_id", "seed", "index")  # of an episode, beside its task; -1: the row has none


class ReplayedEnv(VectorEnv):
    """Base of plug-ins whose episodes follow, bit for bit, from their seeds and actions."""

    def __init__(self, config: Any, num_envs: int, env_spec: EnvSpec, dtype: type = np.float32) -> None:
        super().__init__(config, num_envs, env_spec, dtype)
        self._episodes = [EpisodeSpec("", -1, -1, -1)] * num_envs
        self._taken = np.zeros(num_envs, np.int64)  # env steps of each row's episode
        self._actions: deque[Array] = deque(maxlen=env_spec.max_episode_steps)  # [N, A] of the last env steps

    def _begin(self, rows: np.ndarray, episodes: list[EpisodeSpec]) -> Array | None:
        for row, episode in zip(rows.tolist(), episodes, strict=True):
            self._episodes[row] = episode
        self._taken[rows] = 0
        return super()._begin(rows, episodes)

    def _advance(self, actions: Any, moved: np.ndarray, *flags: np.ndarray) -> np.ndarray:
        self._actions.append(actions)
        self._taken += moved
        return super()._advance(actions, moved, *flags)

    def _get_state(self) -> dict[str, np.ndarray]:
        steps = on_host(list(self._actions))
        shape = (self.num_envs, self.env_spec.max_episode_steps, self.env_spec.action.dim)
        actions = np.zeros(shape, np.result_type(np.float32, *steps))
        for back, step in enumerate(reversed(steps), 1):
            actions[:, -back] = step
        keys = {key: np.array([getattr(episode, key) for episode in self._episodes]) for key in KEYS}
        tasks = np.array([episode.task for episode in self._episodes])
        return {"actions": actions, "taken": self._taken, "task": tasks, **keys}

    def _set_state(self, state: dict[str, np.ndarray]) -> None:
        """Play the open episodes again. Rows with fewer env steps begin later, so that all end together: a row that has
        arrived would get actions that are not its own."""
        keys = (state[name].tolist() for name in ("task", *KEYS))
        self._episodes = [EpisodeSpec(*key) for key in zip(*keys, strict=True)]
        self._taken = state["taken"]
        self._actions.clear()
        left = np.where(self._live, self._taken, 0)  # a row that is done shows its initial state
        for back in range(int(left.max(initial=0)), -1, -1):
            rows = np.flatnonzero((left == back) & (state["seed"] >= 0))
            if len(rows):
                self._reset_rows(rows, [self._episodes[row] for row in rows])
            if back:
                self._actions.append(state["actions"][:, -back])
                self._step(self._actions[-1], left >= back)
