"""`check_vector_env` passes every env we ship and names the rule each of these broken envs breaks."""

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from pydantic import TypeAdapter

from embodied.core.types import ChunkResult
from embodied.envs import make_env
from embodied.envs.config import EnvConfig
from embodied.envs.env_checker import ContractViolation, check_vector_env
from embodied.envs.pointmass.env import PointMassEnv
from embodied.envs.vector_env import StepResult, VectorEnv


def config(name="pointmass", **kwargs):
    return TypeAdapter(EnvConfig).validate_python({"name": name, **kwargs})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "on_success": "continue",
            "dtype": "float64",
            "cameras": ["near", "top"],
            "image_size": [12, 16],
            "instruction": True,
        },
        {"on_success": "terminate", "discrete": True, "size": 3.0},
        {"max_episode_steps": 1},
        {"name": "gym:CartPole-v1"},
        {"name": "gym:MountainCar-v0", "max_episode_steps": 30},
        {"name": "gym:FrozenLake-v1"},
    ],
    ids=str,
)
def test_our_envs_keep_the_contract(options):
    env = make_env(config(**options), 4)
    check_vector_env(env)
    env.close()


class ResetsEverybody(PointMassEnv):
    def _reset_rows(self, rows, episodes):
        self._velocity[:] = 0
        return super()._reset_rows(rows, episodes)


class StartDependsOnCompany(PointMassEnv):
    def _reset_rows(self, rows, episodes):
        rng = np.random.default_rng(episodes[0].seed)
        super()._reset_rows(rows, episodes)
        self._position[rows] = rng.uniform(-1, 1, (len(rows), 2))


class RestartsByItself(PointMassEnv):
    """As envs with autoreset do: at its own step limit the simulator shows the next start."""

    def _reset_rows(self, rows, episodes):
        success = super()._reset_rows(rows, episodes)
        if not hasattr(self, "steps"):
            self.steps, self.start = np.zeros(self.num_envs, int), np.zeros((self.num_envs, 2))
        self.steps[rows], self.start[rows] = 0, self._position[rows]
        return success

    def _step(self, actions, active):
        result = super()._step(actions, active)
        self.steps += active
        over = self.steps == self.env_spec.max_episode_steps
        self._position[over], self._velocity[over] = self.start[over], 0
        return result


class NeverTruncates(PointMassEnv):
    def _advance(self, *args):
        self._elapsed[:] = 0
        return super()._advance(*args)


class HandsOutItsBuffer(PointMassEnv):
    def _observe(self):
        if not hasattr(self, "buffer"):
            self.buffer = super()._observe()["state"]
        self.buffer[:] = super()._observe()["state"]
        return {"state": self.buffer}


class SuccessWithoutEnd(PointMassEnv):
    def _advance(self, *args):
        done = super()._advance(*args)
        self._success |= self._elapsed > 10
        return done


class ForgetsItsSpeed(PointMassEnv):
    def _get_state(self):
        return {name: array for name, array in super()._get_state().items() if name != "velocity"}

    def _set_state(self, state):
        super()._set_state({**state, "velocity": np.zeros_like(self._velocity)})


class FilmingPushes(PointMassEnv):
    def render_rows(self, rows):
        self._position[rows] += 0.01
        return super().render_rows(rows)


class NaNReward(PointMassEnv):
    def _step(self, actions, active):
        result = super()._step(actions, active)
        return StepResult(np.full(self.num_envs, np.nan), result.terminated, result.success)


class IgnoresTheSeed(PointMassEnv):
    def _reset_rows(self, rows, episodes):
        super()._reset_rows(rows, episodes)
        self._position[rows] = np.random.default_rng().uniform(-1, 1, (len(rows), 2))


class PaintsEveryStep(PointMassEnv):
    def _step(self, actions, active):
        self._paint(np.flatnonzero(active))
        return super()._step(actions, active)


def kind(**members):
    return type("Broken", (PointMassEnv,), members)


def chunks(change):
    def step_chunk(self, actions, on_frame=None):
        result = PointMassEnv.step_chunk(self, actions, on_frame)
        return ChunkResult(**vars(result) | change(self, result, on_frame))

    return kind(step_chunk=step_chunk)


def pushed(change):
    return kind(_step=lambda self, actions, active: PointMassEnv._step(self, actions + change(self), active))


def observes(change):
    return kind(_observe=lambda self: change(self, PointMassEnv._observe(self)))


def paints(change):
    return kind(_paint=lambda self, rows: change(rows, PointMassEnv._paint(self, rows)))


def checks(change):
    return kind(_prepare_actions=change)


def first_of_all(rewards):
    return np.pad(rewards.sum(1, keepdims=True), ((0, 0), (0, rewards.shape[1] - 1)))


IMAGES = {
    "every step": (PaintsEveryStep, "images"),
    "everybody": (observes(lambda self, obs: {**obs, "images": self._paint(np.arange(self.num_envs))}), "images"),
    "one camera": (paints(lambda rows, shown: {"top": shown["top"]}), "observation"),
    "darker where alone": (
        paints(lambda rows, shown: {camera: one - (len(rows) == 1) for camera, one in shown.items()}),
        "same-initial-state",
    ),
    "nothing": (kind(_paint=VectorEnv._paint), "methods"),
}
ONE_STREAM = np.random.default_rng(0)
NoiseFromOneStream = pushed(lambda self: ONE_STREAM.normal(0, 0.1, (self.num_envs, 2)))
BROKEN = {
    "says that it autoresets": (kind(metadata={"autoreset_mode": AutoresetMode.NEXT_STEP}), "autoreset"),
    "restarts by itself": (RestartsByItself, "autoreset"),
    "wrong dtype": (observes(lambda self, obs: {"state": obs["state"].astype(np.float64)}), "observation"),
    "hides success": (kind(_info=lambda self: {}), "success"),
    "success without end": (SuccessWithoutEnd, "success"),
    "ignores the seed": (IgnoresTheSeed, "reset-without-mask"),
    "resets everybody": (ResetsEverybody, "reset-mask"),
    "start depends on company": (StartDependsOnCompany, "same-initial-state"),
    "noise from one stream": (NoiseFromOneStream, "same-trajectory"),
    "rows push each other": (pushed(lambda self: 0.01 * self._position.mean(axis=0)), "same-trajectory"),
    "hands out its buffer": (HandsOutItsBuffer, "fresh-arrays"),
    "does not clip": (
        checks(lambda self, a: a if a.ndim == 3 and np.isfinite(a).all() else PointMassEnv._prepare_actions(self, a)),
        "action-range",
    ),
    "accepts anything": (
        checks(lambda self, a: np.clip(np.nan_to_num(np.resize(a, (self.num_envs, a.shape[1], 2))), -1, 1)),
        "action-errors",
    ),
    "never truncates": (NeverTruncates, "truncation"),
    "observes at the border only": (chunks(lambda self, result, _: {"obs": self._observe()}), "final-observation"),
    "sums rewards at the border": (
        chunks(lambda self, result, _: {"rewards": first_of_all(result.rewards)}),
        "step-chunk",
    ),
    "rewards after the end": (
        chunks(
            lambda self, result, _: {
                "rewards": np.where(result.mask | (result.mask.shape[1] < 3), result.rewards, np.float32(0.25))
            }
        ),
        "mask",
    ),
    "forgets the mask": (chunks(lambda self, result, _: {"mask": np.ones_like(result.mask)}), "frozen"),
    "films twice": (
        chunks(lambda self, result, film: {} if film is None else film(result.mask[:, -1]) or {}),
        "on-frame",
    ),
    "filming pushes": (FilmingPushes, "frames"),
    "grey frames": (kind(render_rows=lambda self, rows: PointMassEnv.render_rows(self, rows)[..., 0]), "frames"),
    "forgets its speed": (ForgetsItsSpeed, "saved-state"),
    "NaN rewards": (NaNReward, "finite"),
}


@pytest.mark.parametrize(
    ("broken", "rule", "options"),
    [
        *((*case, {"cameras": ["top", "near"], "image_size": 8, "max_episode_steps": 12}) for case in IMAGES.values()),
        *((*case, {}) for case in BROKEN.values()),
    ],
    ids=[*IMAGES, *BROKEN],
)
def test_a_broken_vector_env_is_refused_with_the_name_of_the_rule(broken, rule, options):
    with pytest.raises(ContractViolation) as caught:
        check_vector_env(broken(config(**options), 3 if options else 4))
    assert caught.value.rule == rule, caught.value


def test_a_tolerance_covers_differences_between_numbers_of_rows_but_not_between_repeats():
    almost = pushed(lambda self: 1e-4 * self._position.mean(axis=0))
    check_vector_env(almost(config(max_episode_steps=10), 4), atol=1e-3)
    with pytest.raises(ContractViolation, match="same-trajectory"):
        check_vector_env(NoiseFromOneStream(config(max_episode_steps=10), 4), atol=1e-3)


def test_a_tolerance_is_relative_for_large_numbers():
    """Float32 in millimetres rounds by more than 1e-5, and other rows in the batch round otherwise."""
    large = observes(lambda self, obs: {"state": 1e4 * obs["state"] * (1 + 1e-6 * self._position.mean())})
    check_vector_env(large(config(max_episode_steps=10), 4), atol=1e-5)
    with pytest.raises(ContractViolation):
        check_vector_env(large(config(max_episode_steps=10), 4), atol=1e-7)
