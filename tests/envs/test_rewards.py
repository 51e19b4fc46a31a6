"""`env.reward`: what a step earns, whatever the simulator says."""

import sys

import numpy as np
import pytest

from embodied.core.errors import ConfigError, WrongShape
from embodied.core.types import ActionSpec, EnvSpec, EpisodeSpec
from embodied.envs import make_env
from embodied.envs.capabilities import EvaluationProtocol
from embodied.envs.gym.config import GymConfig
from embodied.envs.pointmass.config import PointMassConfig
from embodied.envs.vector_env import StepResult, VectorEnv

SAYS = [0.2, 0.5, 0.5, 1.0, 0.5]  # the simulator's rewards, step by step
SOLVED = [False, False, True, False, True]


def twice_the_action(env, actions, step):
    return 2 * actions[:, 0] + step.rewards


class Scaled:
    """Some multiple of the simulator's reward."""

    def __init__(self, scale):
        if scale < 0:
            raise ValueError("a negative scale")
        self.scale = scale

    def __call__(self, env, actions, step):
        return self.scale * step.rewards


class Silent:
    """It cannot be called."""


class Scripted(VectorEnv):
    """Every row gets the same, as long as it moves."""

    def __init__(self, has_success=True, **options):
        config = PointMassConfig(**{"name": "pointmass", "on_success": "continue"} | options)
        super().__init__(config, 2, EnvSpec(ActionSpec(1), state_dim=1, max_episode_steps=5, has_success=has_success))
        self.at = np.zeros(2, int)

    def _reset_rows(self, rows, episodes):
        self.at[rows] = 0

    def _step(self, actions, active):
        at = np.minimum(self.at, 4)
        self.at = self.at + active
        success = np.array(SOLVED)[at] if self.env_spec.has_success else None
        return StepResult(np.array(SAYS, np.float32)[at], np.zeros(2, bool), success)

    def _observe(self):
        return {"state": self.at[:, None].astype(np.float32)}

    def _get_state(self):
        return {"at": self.at}

    def _set_state(self, state):
        self.at = state["at"]


@pytest.fixture
def mine(monkeypatch):
    """This file as the user's module."""
    monkeypatch.setitem(sys.modules, "my_rewards", sys.modules[__name__])


def begin(env, *rows):
    mask = np.isin(np.arange(2), rows or (0, 1))
    env.reset(options={"reset_mask": mask, "episodes": [EpisodeSpec("reach", -1, 0, 0)] * 2})
    return env


def earned(env, steps=5, action=0.0):
    return env.step_chunk(np.full((2, steps, 1), action, np.float32)).rewards


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("own", SAYS),
        ("success", [0, 0, 1, 0, 0]),  # once, though success comes and goes
        ("difference", [0.2, 0.3, 0.0, 0.5, -0.5]),
    ],
)
def test_the_reward_of_a_step_follows_the_reward_option(reward, expected):
    env = begin(Scripted(reward=reward))
    for _ in range(2):
        np.testing.assert_allclose(earned(env), [expected, expected], atol=1e-7)
        begin(env)  # nothing is remembered from one episode to the next


@pytest.mark.parametrize("reward", ["own", "my_rewards:twice_the_action"])
def test_actions_cost_in_training_alone(mine, reward):
    config = Scripted(reward=reward, action_cost=0.1).config
    free = begin(Scripted(**EvaluationProtocol("any", "").apply(config).model_dump()))
    costs = earned(free, 2, action=0.5) - earned(begin(Scripted(reward=reward, action_cost=0.1)), 2, action=0.5)
    np.testing.assert_allclose(costs, np.full((2, 2), 0.025), atol=1e-7)


@pytest.mark.parametrize("reward", ["success", "difference"])
def test_chunks_rows_and_saved_states_change_nothing(reward):
    whole = earned(begin(Scripted(reward=reward)))
    env = begin(Scripted(reward=reward))
    first = earned(env, 2)
    state = env.get_state()
    other = begin(Scripted(reward=reward))
    other.set_state(state)
    np.testing.assert_array_equal(np.hstack([first, earned(other, 3)]), whole)
    begin(env, 1)  # row 0 goes on, row 1 begins anew
    found = earned(env, 3)
    np.testing.assert_array_equal(found, [whole[0, 2:], whole[1, :3]])


def test_a_function_of_ones_own_is_the_reward(mine):
    env = begin(Scripted(reward="my_rewards:twice_the_action"))
    np.testing.assert_allclose(earned(env, 2, action=0.25), [[0.7, 1.0]] * 2, atol=1e-7)


def test_a_class_of_ones_own_is_made_with_its_arguments(mine):
    env = begin(Scripted(reward="my_rewards:Scaled", reward_kwargs={"scale": 3}))
    np.testing.assert_allclose(earned(env, 2), [[0.6, 1.5]] * 2, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("my_rewards:twice_the_acton", {}, "my_rewards.*has no twice.*did you mean"),
        ("my_rewards:twice_the_action", {"scale": 3}, "is no class, and env.reward_kwargs=.*leave it out"),
        ("my_rewards:Scaled", {}, "does not take env.reward_kwargs={}: missing a required argument: 'scale'"),
        ("my_rewards:Scaled", {"scale": -1}, r"cannot be made: ValueError: a negative scale \(.*test_rewards.py, line"),
        ("my_rewards:Silent", {}, r"a class without a method __call__\(self, env, actions, step\)"),
    ],
)
def test_a_reward_that_cannot_be_made_is_refused(mine, name, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        Scripted(reward=name, reward_kwargs=kwargs)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (lambda env: 0, ConfigError, "env.reward=my_rewards:twice_the_action cannot be called: TypeError"),
        (lambda *_: 1 / 0, ConfigError, r"cannot be called: ZeroDivisionError: .* \(.*test_rewards.py, line"),
        (lambda *_: 1.0, WrongShape, r"returns float64 \[\], it must return a number for each env row, \[2\]"),
        (lambda *_: ["1", "2"], WrongShape, r"returns <U1 \[2\]"),
    ],
)
def test_a_mistake_in_a_reward_is_said_with_its_place(mine, monkeypatch, given, error, message):
    monkeypatch.setattr(sys.modules[__name__], "twice_the_action", given)
    with pytest.raises(error, match=message):
        earned(begin(Scripted(reward="my_rewards:twice_the_action")), 1)


def test_success_must_be_known_to_be_rewarded():
    with pytest.raises(ConfigError, match=r"this env does not report success; try env.reward=own"):
        Scripted(has_success=False, reward="success")


def test_a_sparse_return_is_the_success_of_the_episode():
    config = PointMassConfig(name="pointmass", reward="success", max_episode_steps=50)
    env = make_env(config, 64)
    env.reset(options={"episodes": [EpisodeSpec("reach", -1, seed, seed) for seed in range(64)]})
    result = env.step_chunk(np.random.default_rng(0).uniform(-1, 1, (64, 50, 2)).astype(np.float32))
    returns = result.rewards.sum(axis=1)
    assert 0 < returns.sum() < 64
    np.testing.assert_array_equal(returns > 0, (result.success & result.mask).any(axis=1))


def test_discrete_actions_cost_nothing():
    with pytest.raises(ConfigError, match="action_cost is for continuous actions"):
        make_env(GymConfig(name="gym:CartPole-v1", action_cost=0.1), 1)
