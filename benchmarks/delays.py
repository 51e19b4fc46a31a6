"""An env whose steps take a known time: is a plan's prediction right when what it plans with is?

    python -m embodied.benchmark recipe=benchmarks/delays.yaml

Every step sleeps `fixed_s` and `row_s` for each of its rows, so that other work on the machine hardly matters.
"""

from __future__ import annotations

import time

import numpy as np

from embodied.data import ActionSpec, EnvSpec
from embodied.envs.base import StepResult, VectorEnv

STEPS = 8


class Delayed(VectorEnv):
    """The reward is the action; episodes end after eight steps."""

    def __init__(self, config, num_envs: int) -> None:
        super().__init__(config, num_envs, EnvSpec(ActionSpec(1), state_dim=1, max_episode_steps=STEPS))
        self.steps = np.zeros((num_envs, 1), np.float32)
        self.delay_s = config.kwargs["fixed_s"] + config.kwargs["row_s"] * num_envs

    def _reset_rows(self, rows, episodes):
        self.steps[rows] = 0

    def _step(self, actions, active):
        time.sleep(self.delay_s)
        self.steps = self.steps + active[:, None]
        return StepResult(actions[:, 0], np.zeros(self.num_envs, bool), None)

    def _observe(self):
        return {"state": self.steps.copy()}
