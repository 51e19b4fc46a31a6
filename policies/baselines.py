"""Policies without weights, as baselines: uniformly random actions, and zero actions."""

from __future__ import annotations

import numpy as np

from embodied.core.types import NoiseSpec, Observation, PolicyOutput
from embodied.policies.base import Policy


class RandomPolicy(Policy):
    def initialise(self, rng: np.random.Generator) -> None:
        """Nothing to draw."""

    def noise_spec(self) -> NoiseSpec:
        return NoiseSpec("uniform", self.spec.action.dim)

    def act(self, obs: Observation, noise: np.ndarray, temperature: float = 1.0) -> PolicyOutput:
        return self._output(self._actions(noise))

    def value(self, obs: Observation) -> np.ndarray:
        raise NotImplementedError("a policy without weights has no value function")

    def _actions(self, noise: np.ndarray) -> np.ndarray:
        if self.spec.action.discrete:
            return (noise * self.spec.action.num_choices).astype(np.int64)
        return (2.0 * noise - 1.0).astype(np.float32)

    def _output(self, actions: np.ndarray) -> PolicyOutput:
        return PolicyOutput(actions[:, None, :], np.zeros((len(actions), 1, actions.shape[1])), np.zeros(len(actions)))


class ZeroPolicy(RandomPolicy):
    """Zero of every action dimension, or choice 0."""

    def _actions(self, noise: np.ndarray) -> np.ndarray:
        return super()._actions(noise) * 0
