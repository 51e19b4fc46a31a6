"""An env whose episodes take different times: `env.name=uneven_env:Uneven`, with these `env.kwargs`:

    {pauses: drawn, least_s: 0.0, most_s: 0.003, dtype: float64}

It is the point mass; how long a step takes, between these bounds, follows from the episode: it is drawn, or the first
of each dozen takes longest (`falling`), so that later ones overtake it on any machine, or the last three of the first
dozen do (`waiting`), while all others take no time.
"""

import time

import numpy as np

from embodied.core.rng import generator
from embodied.envs.pointmass.config import PointMassConfig
from embodied.envs.pointmass.env import PointMassEnv
from embodied.envs.vector_env import StepResult


def drawn(episode: int) -> float:
    return generator(0, "pause", episode).uniform() ** 3


def falling(episode: int) -> float:
    return 1 - episode % 12 / 12


def waiting(episode: int) -> float:
    return float(9 <= episode < 12)


class Uneven(PointMassEnv):
    def __init__(self, config, num_envs: int) -> None:
        self.share = {"drawn": drawn, "falling": falling, "waiting": waiting}[config.kwargs["pauses"]]
        self.least_s, self.most_s = config.kwargs["least_s"], config.kwargs["most_s"]
        self.pause_s = np.zeros(num_envs)
        common = {name: getattr(config, name) for name in ("num_envs", "max_episode_steps", "on_success")}
        super().__init__(PointMassConfig(name="pointmass", dtype=config.kwargs["dtype"], **common), num_envs)

    def _reset_rows(self, rows: np.ndarray, episodes: list) -> np.ndarray:
        shares = [self.share(episode.index) for episode in episodes]
        self.pause_s[rows] = self.least_s + np.array(shares) * (self.most_s - self.least_s)
        return super()._reset_rows(rows, episodes)

    def _step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        time.sleep(self.pause_s[active].max(initial=0.0))
        return super()._step(actions, active)
