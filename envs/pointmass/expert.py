"""The expert of the toy: push towards the target, the less the faster the point already is."""

from __future__ import annotations

import numpy as np

from embodied.envs.pointmass.env import DIRECTIONS, PointMassEnv

TOWARDS, BRAKE = 6.0, 10.0  # force per distance, and per distance moved in an env step, in world sizes


class PointMassExpert:
    def __init__(self, env: PointMassEnv) -> None:
        self._env = env

    def begin(self, rows: np.ndarray) -> None:
        """Nothing to remember."""

    def act(self) -> np.ndarray:
        env = self._env
        state = env.get_state()
        away = (state["target"] - state["position"]) / env.config.size
        force = np.clip(TOWARDS * away - BRAKE * state["velocity"] / env.config.size, -1, 1)
        if env.env_spec.action.discrete:
            return (force @ DIRECTIONS.T).argmax(axis=1)[:, None]
        return force.astype(np.float32)
