"""An env whose episodes take different times: `env.name=uneven_env:Uneven`, with these `env.kwargs`:

    {order: 3, least_s: 0.0, most_s: 0.003, dtype: float64}

It is the point mass; how long a step takes, between these bounds, follows from `order` and the episode.
"""

import time

import numpy as np

from embodied.core.rng import generator
from embodied.envs.pointmass.config import PointMassConfig
from embodied.envs.pointmass.env import PointMassEnv
from embodied.envs.vector_env import StepResult


class Uneven(PointMassEnv):
    def __init__(self, config, num_envs: int) -> None:
        self.order, self.least_s, self.most_s = (config.kwargs[name] for name in ("order", "least_s", "most_s"))
        self.pause_s = np.zeros(num_envs)
        common = {name: getattr(config, name) for name in ("num_envs", "max_episode_steps", "on_success")}
        super().__init__(PointMassConfig(name="pointmass", dtype=config.kwargs["dtype"], **common), num_envs)

    def _reset_rows(self, rows: np.ndarray, episodes: list) -> np.ndarray:
        shares = [generator(self.order, "pause", episode.index).uniform() ** 3 for episode in episodes]
        self.pause_s[rows] = self.least_s + np.array(shares) * (self.most_s - self.least_s)
        return super()._reset_rows(rows, episodes)

    def _step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        time.sleep(self.pause_s[active].max(initial=0.0))
        return super()._step(actions, active)
