"""An env whose success is the policy's choice, and policies that choose by a script: `scripted:Switch` and the rest.

An env step is a success where the action is positive. The state is how many steps an episode has taken, and its seed.
"""

import numpy as np

from embodied.data import ActionSpec, EnvSpec, NoiseSpec, PolicyOutput
from embodied.envs.base import StepResult, VectorEnv
from embodied.policies.base import Policy

STEPS = 6


class Switch(VectorEnv):
    """`kwargs`: `at_reset`, every episode begins as a success; `fail_seed`, the simulator of this episode breaks."""

    def __init__(self, config, num_envs: int) -> None:
        spec = EnvSpec(ActionSpec(1), state_dim=2, max_episode_steps=STEPS, has_success=True, control_hz=10.0)
        super().__init__(config, num_envs, spec)
        self.seen = np.zeros((num_envs, 2), np.float32)
        self.stepped: list[list[int]] = []

    def _reset_rows(self, rows, episodes):
        self.seen[rows] = [[0, episode.seed % 1000] for episode in episodes]
        return np.full(len(rows), bool(self.config.kwargs.get("at_reset")))

    def _step(self, actions, active):
        self.stepped.append(np.flatnonzero(active).tolist())
        self.seen = self.seen + np.array([1, 0], np.float32) * active[:, None]
        return StepResult(actions[:, 0], np.zeros(self.num_envs, bool), actions[:, 0] > 0)

    def _observe(self):
        return {"state": self.seen.copy()}

    def render_rows(self, rows):
        frames = np.zeros((len(rows), 32, 32, 3), np.uint8)
        frames[:] = (self.seen[rows, 0] * 30).astype(np.uint8)[:, None, None, None]
        return frames


class Scripted(Policy):
    asked: list[int] = []  # noqa: RUF012 - how many rows each question was about

    def initialise(self, rng):
        """Nothing to draw."""

    def noise_spec(self):
        return NoiseSpec("uniform", 1)

    def act(self, obs, noise, temperature=1.0):
        steps, seeds = obs["state"].T
        self.asked.append(len(steps))
        actions = np.where(self.succeeds(steps, seeds), 1.0, -1.0).astype(np.float32)[:, None, None]
        return PolicyOutput(actions, np.zeros_like(actions), np.zeros(len(steps)))

    def succeeds(self, steps, seeds):
        raise NotImplementedError


class Succeeds(Scripted):
    def succeeds(self, steps, seeds):
        return steps >= 0


class Fails(Scripted):
    def succeeds(self, steps, seeds):
        return steps < 0


class SucceedsThenDrops(Scripted):
    def succeeds(self, steps, seeds):
        return steps < STEPS // 2


class SucceedsOnEvenSeeds(Scripted):
    def succeeds(self, steps, seeds):
        return seeds % 2 == 0
