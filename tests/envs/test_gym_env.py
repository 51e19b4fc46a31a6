"""Gymnasium envs as rows: `gym:<id>` and the user's own gymnasium.Env class."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from pydantic import TypeAdapter

from embodied.core.errors import ConfigError, EmbodiedError, WrongShape
from embodied.core.types import EpisodeSpec
from embodied.envs import make_env
from embodied.envs.common_config import played_task
from embodied.envs.config import EnvConfig
from embodied.envs.env_checker import check_vector_env


def make(name, num_envs=2, **kwargs):
    return make_env(TypeAdapter(EnvConfig).validate_python({"name": name, **kwargs}), num_envs)


class Corridor(gymnasium.Env):
    """Walk right to the end. Reports success the way robot suites do, and draws itself."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012
    action_space = spaces.Box(np.array([0.0, -2.0]), np.array([1.0, 2.0]), dtype=np.float64)
    observation_space = spaces.Dict({"place": spaces.Box(-9, 9, (2,), np.float64), "door": spaces.Discrete(3)})

    def __init__(self, length=3.0, render_mode=None):
        self.length, self.render_mode = length, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = np.array([0.0, self.np_random.uniform()])
        return self._seen(), {"is_success": False}

    def step(self, action):
        self.action = action
        self.place = self.place + action
        won = bool(self.place[0] >= self.length)
        return self._seen(), float(action[0]), won, False, {"is_success": np.float64(won)}

    def render(self):
        return np.full((24, 32, 3), 200, np.uint8)

    def _seen(self):
        return {"place": self.place, "door": 1}


HERE = "gymcorridor:Corridor"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """As if this file were the user's module gymcorridor.py."""
    import sys
    import types

    module = types.ModuleType("gymcorridor")
    module.Corridor = Corridor
    monkeypatch.setitem(sys.modules, "gymcorridor", module)


def test_episodes_are_those_of_gymnasium_with_the_same_seed():
    env, reference = make("gym:Pendulum-v1"), gymnasium.make("Pendulum-v1")
    specs = [EpisodeSpec("Pendulum-v1", -1, seed, seed) for seed in (11, 12)]
    obs, _ = env.reset(options={"episodes": specs})
    seen, _ = reference.reset(seed=12)
    assert obs["state"][1] == pytest.approx(seen)
    for _ in range(5):
        obs, rewards, *_ = env.step(np.full((2, 1), 0.25))
        seen, reward, *_ = reference.step(np.array([0.5]))  # the torque limit is 2
        assert obs["state"][1] == pytest.approx(seen)
        assert rewards[1] == pytest.approx(reward)


def test_the_registered_step_limit_is_applied_and_can_be_changed():
    assert make("gym:CartPole-v1").env_spec.max_episode_steps == 500
    env = make("gym:Pendulum-v1", max_episode_steps=7)
    env.reset(seed=0)
    assert env.step_chunk(np.zeros((2, 9, 1))).truncated.argmax(axis=1).tolist() == [6, 6]


def test_a_limit_longer_than_the_registered_one_is_kept():
    env = make("gym:MountainCar-v0", 1, max_episode_steps=210)
    env.reset(seed=0)
    assert env.step_chunk(np.ones((1, 215, 1), int)).mask.sum() == 210


def test_discrete_observations_become_one_hot():
    env = make("gym:FrozenLake-v1")
    obs, _ = env.reset(seed=0)
    assert obs["state"].tolist() == [[1.0] + [0.0] * 15] * 2


def test_a_users_gymnasium_env_is_wrapped():
    env = make(HERE, 3, max_episode_steps=10, kwargs={"length": 2.0}, on_success="terminate")
    assert (env.env_spec.state_dim, env.env_spec.action.dim, env.env_spec.control_hz) == (5, 2, 5.0)
    assert env.config.task == "Corridor" and played_task(HERE, "Corridor") == HERE
    env.reset(seed=0)
    _, rewards, *_ = env.step(np.array([[1.0, 1.0], [-1.0, -1.0], [0.0, 0.5]]))
    assert rewards.tolist() == [1.0, 0.0, 0.5]
    assert [single.action.tolist() for single in env._envs] == [[1, 2], [0, -2], [0.5, 1]]
    check_vector_env(env)


@pytest.mark.parametrize(
    ("on_success", "ends"), [("terminate", "terminated"), ("truncate", "truncated"), ("continue", "terminated")]
)
def test_success_of_a_single_env_ends_as_the_option_says(on_success, ends):
    """An env that ends itself at success cannot go on: with `continue` its own termination stays."""
    env = make(HERE, 1, max_episode_steps=10, kwargs={"length": 2.0}, on_success=on_success)
    env.reset(seed=0)
    result = env.step_chunk(np.ones((1, 4, 2)))
    assert result.success[0].tolist() == [False, True, True, True]
    assert getattr(result, ends)[0].tolist() == [False, True, False, False]
    assert result.mask[0].tolist() == [True, True, False, False]


def test_an_env_without_success_reports_none():
    env = make("gym:CartPole-v1")
    assert not env.env_spec.has_success
    _, info = env.reset(seed=0)
    assert info == {}
    assert env.step_chunk(np.zeros((2, 1, 1), int)).success is None


def test_an_env_that_draws_itself_can_be_recorded():
    env = make(HERE, 3, max_episode_steps=10)
    assert env.video_problem() == ""
    env.reset(seed=0)
    assert env.render_rows(np.array([0, 2])).shape == (2, 24, 32, 3)


def test_an_env_that_cannot_be_recorded_says_why(monkeypatch):
    def needs_pygame(self):
        raise gymnasium.error.DependencyNotInstalled("pygame is not installed")

    monkeypatch.setattr(Corridor, "render", gymnasium.Env.render)
    assert "has no method render" in make(HERE, 1, max_episode_steps=10).video_problem()
    monkeypatch.setattr(Corridor, "render", needs_pygame)
    env = make(HERE, 1, max_episode_steps=10)
    assert "pygame is not installed" in env.video_problem()
    env.reset(seed=0)
    with pytest.raises(EmbodiedError, match="cannot be recorded here: pygame"):
        env.render_rows(np.array([0]))


@pytest.mark.parametrize("colours", [3, 4])
def test_images_stay_images_and_lose_their_fourth_colour(colours):
    class Seer(Corridor):
        observation_space = spaces.Box(0, 255, (8, 6, colours), np.uint8)

        def _seen(self):
            return np.full((8, 6, colours), 7, np.uint8)

    import gymcorridor

    gymcorridor.Seer = Seer
    env = make("gymcorridor:Seer", max_episode_steps=5)
    assert env.env_spec.images == {"camera": (8, 6, 3)}
    assert env.reset(seed=0)[0]["images"]["camera"].shape == (2, 8, 6, 3)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("gym:CartPol-v1", {}, "knows no env 'CartPol-v1'; did you mean 'CartPole-v1'"),
        ("gym:CartPole-v9", {}, "did you mean 'CartPole-v1'"),
        ("gym:nosuchmodule:Env-v0", {}, "nosuchmodule"),
        ("gym:Blackjack-v1", {}, "no step limit of its own; set env.max_episode_steps"),
        ("gym:../../x", {}, "cannot be made: .*Malformed environment ID"),
        ("gym:CartPole-v1", {"kwargs": {"render_mode": 3}}, "does not take env.kwargs={'render_mode': 3}"),
        ("gym:CartPole-v1", {"kwargs": {"colour": 1}}, "does not take env.kwargs={'colour': 1}"),
    ],
)
def test_mistakes_are_explained(name, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        make(name, **kwargs)


@pytest.mark.parametrize("odd", [float("nan"), "yes", None, 2, [0, 1]])
def test_a_flag_that_is_no_flag_is_an_error(monkeypatch, odd):
    env = make(HERE, max_episode_steps=5)
    env.reset(seed=0)
    monkeypatch.setattr(Corridor, "step", lambda self, action: (self._seen(), 0.0, odd, False, {}))
    with pytest.raises(WrongShape, match=r"terminated is .*, it must be true or false"):
        env.step(env.action_space.sample())


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Box(0, np.inf, (2,)), "unbounded actions"),
        (spaces.MultiDiscrete([2, 3]), "one Discrete or one floating-point Box"),
        (spaces.Box(0, 3, (2,), np.int64), "one Discrete or one floating-point Box"),
    ],
)
def test_action_spaces_that_have_no_meaning_in_minus_one_to_one_are_refused(monkeypatch, space, message):
    monkeypatch.setattr(Corridor, "action_space", space)
    monkeypatch.setattr(Corridor, "step", lambda self, action: (self._seen(), 0.0, False, False, {}))
    with pytest.raises(ConfigError, match=message):
        make(HERE, max_episode_steps=5)
