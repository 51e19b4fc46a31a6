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
        {"max_episode_steps": 3},
        {"name": "gym:CartPole-v1"},
        {"name": "gym:Pendulum-v1"},
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


class NoiseFromOneStream(PointMassEnv):
    rng = np.random.default_rng(0)

    def _step(self, actions, active):
        return super()._step(actions + self.rng.normal(0, 0.1, actions.shape), active)


class RowsPushEachOther(PointMassEnv):
    def _step(self, actions, active):
        return super()._step(actions + 0.01 * self._position.mean(axis=0), active)


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


class SaysItAutoresets(PointMassEnv):
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012


class ObservesAtTheBorderOnly(PointMassEnv):
    def step_chunk(self, actions, on_frame=None):
        result = super().step_chunk(actions, on_frame)
        return ChunkResult(**{**vars(result), "obs": self._observe()})


class RewardsAfterTheEnd(PointMassEnv):
    def step_chunk(self, actions, on_frame=None):
        result = super().step_chunk(actions, on_frame)
        if result.mask.shape[1] > 2:
            result.rewards[~result.mask] = 0.25
        return result


class ForgetsTheMask(PointMassEnv):
    def step_chunk(self, actions, on_frame=None):
        result = super().step_chunk(actions, on_frame)
        result.mask[:] = True
        return result


class SumsRewardsAtTheBorder(PointMassEnv):
    def step_chunk(self, actions, on_frame=None):
        result = super().step_chunk(actions, on_frame)
        total = result.rewards.sum(axis=1)
        result.rewards[:] = 0
        result.rewards[:, 0] = total
        return result


class NeverTruncates(PointMassEnv):
    def _advance(self, *args):
        self._elapsed[:] = 0
        return super()._advance(*args)


class DoesNotClip(PointMassEnv):
    def _checked(self, actions):
        return actions if actions.ndim == 3 and np.isfinite(actions).all() else super()._checked(actions)


class AcceptsAnything(PointMassEnv):
    def _checked(self, actions):
        return np.clip(np.nan_to_num(np.resize(actions, (self.num_envs, actions.shape[1], 2))), -1, 1)


class WrongDtype(PointMassEnv):
    def _observe(self):
        return {"state": super()._observe()["state"].astype(np.float64)}


class WrongWidth(PointMassEnv):
    def _observe(self):
        return {"state": super()._observe()["state"][:, :5]}


class HandsOutItsBuffer(PointMassEnv):
    def _observe(self):
        if not hasattr(self, "buffer"):
            self.buffer = super()._observe()["state"]
        self.buffer[:] = super()._observe()["state"]
        return {"state": self.buffer}


class HidesSuccess(PointMassEnv):
    def _info(self):
        return {}


class SuccessWithoutEnd(PointMassEnv):
    def _advance(self, *args):
        done = super()._advance(*args)
        self._success |= self._elapsed > 10
        return done


class LosesSuccessAfterTheEnd(PointMassEnv):
    def _reset_rows(self, rows, episodes):
        if not hasattr(self, "steps_dead"):
            self.steps_dead = np.zeros(self.num_envs, int)
        self.steps_dead[rows] = 0
        return super()._reset_rows(rows, episodes)

    def _advance(self, *args):
        self.steps_dead += ~self._live
        return super()._advance(*args)

    def _info(self):
        return {"success": self._success ^ (self.steps_dead > 0)}


class ForgetsItsSpeed(PointMassEnv):
    def _get_state(self):
        return {name: array for name, array in super()._get_state().items() if name != "velocity"}

    def _set_state(self, state):
        super()._set_state({**state, "velocity": np.zeros_like(self._velocity)})


class FilmingPushes(PointMassEnv):
    def render_rows(self, rows):
        self._position[rows] += 0.01
        return super().render_rows(rows)


class GreyFrames(PointMassEnv):
    def render_rows(self, rows):
        return super().render_rows(rows)[..., 0]


class NeverPaints(PointMassEnv):
    _paint = VectorEnv._paint


class NaNReward(PointMassEnv):
    def _step(self, actions, active):
        result = super()._step(actions, active)
        return StepResult(np.full(self.num_envs, np.nan), result.terminated, result.success)


class IgnoresTheSeed(PointMassEnv):
    def _reset_rows(self, rows, episodes):
        super()._reset_rows(rows, episodes)
        self._position[rows] = np.random.default_rng().uniform(-1, 1, (len(rows), 2))


class FilmsTwice(PointMassEnv):
    def step_chunk(self, actions, on_frame=None):
        result = super().step_chunk(actions, on_frame)
        if on_frame is not None:
            on_frame(result.mask[:, -1])
        return result


class PaintsEveryStep(PointMassEnv):
    def _step(self, actions, active):
        self._paint(np.flatnonzero(active))
        return super()._step(actions, active)


class PaintsEverybody(PointMassEnv):
    def _observe(self):
        return {**super()._observe(), "images": self._paint(np.arange(self.num_envs))}


class PaintsFloats(PointMassEnv):
    def _paint(self, rows):
        return {camera: frames / 255 for camera, frames in super()._paint(rows).items()}


class PaintsOneCamera(PointMassEnv):
    def _paint(self, rows):
        return {"top": super()._paint(rows)["top"]}


class AlonePaintsDarker(PointMassEnv):
    def _paint(self, rows):
        return {camera: frames - (len(rows) == 1) for camera, frames in super()._paint(rows).items()}


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (PaintsEveryStep, "images"),
        (PaintsEverybody, "images"),
        (PaintsFloats, "observation"),
        (PaintsOneCamera, "observation"),
        (AlonePaintsDarker, "same-initial-state"),
        (NeverPaints, "methods"),
    ],
)
def test_broken_images_are_caught_by_the_name_of_the_rule(broken, rule):
    with pytest.raises(ContractViolation) as caught:
        check_vector_env(broken(config(cameras=["top", "near"], image_size=8, max_episode_steps=12), 3))
    assert caught.value.rule == rule, caught.value


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (SaysItAutoresets, "autoreset"),
        (RestartsByItself, "autoreset"),
        (WrongDtype, "observation"),
        (WrongWidth, "observation"),
        (HidesSuccess, "success"),
        (SuccessWithoutEnd, "success"),
        (IgnoresTheSeed, "reset-without-mask"),
        (ResetsEverybody, "reset-mask"),
        (StartDependsOnCompany, "same-initial-state"),
        (NoiseFromOneStream, "same-trajectory"),
        (RowsPushEachOther, "same-trajectory"),
        (HandsOutItsBuffer, "fresh-arrays"),
        (DoesNotClip, "action-range"),
        (AcceptsAnything, "action-errors"),
        (NeverTruncates, "truncation"),
        (LosesSuccessAfterTheEnd, "frozen"),
        (ObservesAtTheBorderOnly, "final-observation"),
        (SumsRewardsAtTheBorder, "step-chunk"),
        (RewardsAfterTheEnd, "mask"),
        (ForgetsTheMask, "frozen"),
        (FilmsTwice, "on-frame"),
        (FilmingPushes, "frames"),
        (GreyFrames, "frames"),
        (ForgetsItsSpeed, "saved-state"),
        (NaNReward, "finite"),
    ],
)
def test_a_broken_env_is_caught_by_the_name_of_the_rule(broken, rule):
    with pytest.raises(ContractViolation) as caught:
        check_vector_env(broken(config(), 4))
    assert caught.value.rule == rule, caught.value


def test_a_tolerance_is_for_company_only():
    class AlmostExact(PointMassEnv):
        def _step(self, actions, active):
            return super()._step(actions + 1e-4 * self._position.mean(axis=0), active)

    check_vector_env(AlmostExact(config(max_episode_steps=10), 4), atol=1e-3)
    with pytest.raises(ContractViolation, match="same-trajectory"):
        check_vector_env(NoiseFromOneStream(config(max_episode_steps=10), 4), atol=1e-3)


def test_the_check_needs_company():
    with pytest.raises(ValueError, match="3 env rows or more, this env has 2"):
        check_vector_env(make_env(config(), 2))
