"""An env whose success is the policy's choice, and policies that choose by a script: `scripted:Switch` and the rest.

An env step is a success where the action is positive. The state is how many steps an episode has taken, and its seed.
"""

import numpy as np

from embodied.core.types import ActionSpec, EnvSpec, NoiseSpec, PolicyOutput
from embodied.envs.vector_env import StepResult, VectorEnv
from embodied.policies.base import Policy

STEPS = 6


class Switch(VectorEnv):
    """`kwargs`: `at_reset`, every episode begins as a success; `images`, there is a camera that counts steps too."""

    rendered = painted = 0  # frames drawn for videos and for the policy, since the last one of these was made

    def __init__(self, config, num_envs: int) -> None:
        images = {"eye": (16, 16, 3)} if config.kwargs.get("images") else {}
        spec = EnvSpec(ActionSpec(1), 2, images=images, max_episode_steps=STEPS, has_success=True, control_hz=10.0)
        super().__init__(config, num_envs, spec)
        self.seen = np.zeros((num_envs, 2), np.float32)
        self.stepped: list[list[int]] = []
        Switch.rendered = Switch.painted = 0

    def _reset_rows(self, rows, episodes):
        self.seen[rows] = [[0, episode.seed % 1000] for episode in episodes]
        return np.full(len(rows), bool(self.config.kwargs.get("at_reset")))

    def _step(self, actions, active):
        self.stepped.append(np.flatnonzero(active).tolist())
        self.seen = self.seen + np.array([1, 0], np.float32) * active[:, None]
        return StepResult(actions[:, 0], np.zeros(self.num_envs, bool), actions[:, 0] > 0)

    def _observe(self):
        return {"state": self.seen.copy()}

    def _paint(self, rows):
        Switch.painted += len(rows)
        return {"eye": self.grey(rows, 16)}

    def render_rows(self, rows):
        Switch.rendered += len(rows)
        return self.grey(rows, 32)

    def grey(self, rows, size):
        frames = np.zeros((len(rows), size, size, 3), np.uint8)
        frames[:] = (self.seen[rows, 0] * 30).astype(np.uint8)[:, None, None, None]
        return frames


class Undrawn(Switch):
    render_rows = VectorEnv.render_rows


class Undrawable(Switch):
    def render_rows(self, rows):
        raise RuntimeError("the display is gone")


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


class DecidesThreeSteps(SucceedsOnEvenSeeds):
    def act(self, obs, noise, temperature=1.0):
        one = super().act(obs, noise, temperature)
        actions = one.actions * np.array([1.0, 0.5, 3.0], np.float32)[:, None]
        return PolicyOutput(actions, np.zeros_like(actions), one.values)


class Reaches(Scripted):
    """Pushes the point of pointmass to its target."""

    def act(self, obs, noise, temperature=1.0):
        _, velocity, target = np.split(obs["state"], 3, axis=1)
        actions = np.clip(20 * target - 40 * velocity, -1, 1).astype(np.float32)[:, None]
        return PolicyOutput(actions, np.zeros_like(actions), np.zeros(len(actions)))
