"""Gymnasium envs as rows: `gym:<id>` and the user's own gymnasium.Env class."""

import re

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from pydantic import TypeAdapter

from embodied.core.errors import ConfigError, Unusable, WrongShape
from embodied.core.types import EpisodeSpec
from embodied.envs import make_env
from embodied.envs.config import EnvConfig, played_task
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


@pytest.mark.parametrize(
    ("render", "told"),
    [
        (gymnasium.Env.render, "has no method render"),
        (lambda self: np.zeros((9, 9, 3)), r"float64 \[9, 9, 3\], it must be uint8"),
        (lambda self: self.pygame, "cannot be recorded here: .*pygame"),
    ],
)
def test_an_env_that_cannot_be_recorded_says_why(monkeypatch, render, told):
    monkeypatch.setattr(Corridor, "render", render)
    assert re.search(told, make(HERE, 1, max_episode_steps=10).video_problem())


def observing(space, seen=None):
    """The name of an env that observes this space: the same value at all times, a sample unless one is given."""
    import gymcorridor

    space.seed(0)
    value = space.sample() if seen is None else seen
    kind = type("Seer", (Corridor,), {"observation_space": space, "_seen": lambda self: value})
    gymcorridor.Seer = kind
    return "gymcorridor:Seer", value


def pixels(*shape, high=255, dtype=np.uint8):
    return spaces.Box(0, high, shape, dtype)


@pytest.mark.parametrize(
    ("space", "image"),
    [
        (pixels(9, 12, 3), lambda seen: seen),
        (pixels(9, 12, 4), lambda seen: seen[..., :3]),
        (pixels(9, 12, 1), lambda seen: seen.repeat(3, 2)),
        (pixels(9, 12), lambda seen: seen[..., None].repeat(3, 2)),
        (pixels(3, 9, 12), lambda seen: seen.transpose(1, 2, 0)),
        (pixels(1, 9, 12), lambda seen: seen[0, :, :, None].repeat(3, 2)),
        (pixels(9, 12, 3, high=1, dtype=np.float32), lambda seen: np.rint(seen * 255).astype(np.uint8)),
        (pixels(3, 9, 12, high=255, dtype=np.float64), lambda seen: np.rint(seen).transpose(1, 2, 0).astype(np.uint8)),
    ],
    ids=lambda value: str(value) if isinstance(value, spaces.Space) else "",
)
def test_a_box_in_the_shape_of_a_picture_is_an_image(space, image):
    name, seen = observing(space)
    env = make(name, 3, max_episode_steps=5)
    assert env.env_spec.images == {"camera": (9, 12, 3)} and env.env_spec.state_dim is None
    assert (env.reset(seed=0)[0]["images"]["camera"] == image(seen)).all()
    check_vector_env(env)


def test_a_stack_of_pictures_is_as_many_cameras_and_a_small_grid_is_numbers():
    env = make(observing(spaces.Dict({"last": pixels(4, 9, 12), "grid": pixels(7, 7, 3)}))[0], max_episode_steps=5)
    assert env.env_spec.images == {f"last_{i}": (9, 12, 3) for i in range(4)} and env.env_spec.state_dim == 147


NESTED = spaces.Dict(
    {
        "arm": spaces.Dict({"wrist.rgb": pixels(9, 12, 3), "joints": spaces.Box(-np.inf, np.inf, (2,), np.float64)}),
        "door": spaces.Discrete(3, start=5),
        "mission": spaces.Text(40),
        "switches": spaces.Tuple([spaces.MultiBinary(2), spaces.MultiDiscrete([2, 3])]),
        7: spaces.Box(-1, 1, ()),
    }
)


def test_the_parts_of_a_nested_observation_become_images_state_and_instruction():
    picture = np.arange(324, dtype=np.uint8).reshape(9, 12, 3)
    arm = {"wrist.rgb": picture, "joints": [0.5, -3.0]}
    switches = (np.array([True, False]), [1, 2])
    name, _ = observing(NESTED, {"arm": arm, "door": 6, "mission": "open it", "switches": switches, 7: 0.25})
    env = make(name, 3, max_episode_steps=5)
    obs, _ = env.reset(seed=0)
    assert (obs["images"]["arm_wrist_rgb"] == picture).all()
    assert obs["instruction"] == ["open it"] * 3
    order = {"arm": [0.5, -3], "door": [0, 1, 0], "switches": [1, 0, 0, 1, 0, 0, 1], 7: [0.25]}  # as the space has it
    assert obs["state"].tolist() == [[number for key in NESTED if key in order for number in order[key]]] * 3
    check_vector_env(env)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            spaces.Dict({"seen": spaces.Sequence(pixels(2))}),
            r"observation\['seen'\] is Sequence.*padded Box.*leave it out",
        ),
        (spaces.Graph(pixels(2), None), "observation is Graph"),
        (spaces.Dict({"city": spaces.Discrete(2**40)}), r"observation\['city'\] .*1,099,511,627,776 numbers"),
        (spaces.Dict({"a": spaces.Dict({"b": pixels(9, 9)}), "a_b": pixels(9, 9)}), "share one of the names a_b"),
        (spaces.Dict({}), "observes nothing"),
    ],
)
def test_an_observation_without_a_place_is_refused_with_its_key(space, message):
    with pytest.raises(ConfigError, match=message):
        make(observing(space)[0], max_episode_steps=5)


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        ({"a": 1.5}, r"observation\['b'\] cannot be read \(KeyError: 'b'\)"),
        ({"a": [0.0, 1.0], "b": 1}, r"observation\['a'\] is float64 \[2\], not in Box"),
        ({"a": 0.0, "b": 1.0}, r"observation\['b'\] is array\(1.\), not in Discrete\(3\)"),
        ({"a": 0.0, "b": 1, "c": "x", "d": np.full((9, 9), np.nan)}, "NaN"),
        ({"a": 0.0, "b": 1, "c": "x", "d": np.full((9, 9), 7.0)}, "from 7 to 7, it must be from 0 to 1"),
    ],
)
def test_an_observation_outside_its_space_is_an_error_with_its_key(seen, message):
    parts = {"a": spaces.Box(-1, 1, ()), "b": spaces.Discrete(3), "c": spaces.Text(3)}
    space = spaces.Dict(parts | {"d": pixels(9, 9, high=1, dtype=np.float32)})
    with pytest.raises(Unusable, match=message):
        make(observing(space, {"c": "x", "d": np.zeros((9, 9)), **seen})[0], max_episode_steps=5).reset(seed=0)


@pytest.mark.parametrize(
    ("space", "choices", "number", "native"),
    [
        (spaces.Discrete(3, start=5), 3, 2, 7),
        (spaces.MultiDiscrete([3, 4]), 12, 5, [1, 1]),
        (spaces.MultiDiscrete([3, 4], start=[0, 5]), 12, 5, [1, 6]),
        (spaces.MultiBinary(3), 8, 6, [1, 1, 0]),
    ],
)
def test_discrete_actions_are_one_choice(monkeypatch, space, choices, number, native):
    def step(self, action):
        assert space.contains(action)
        self.action = action
        return self._seen(), 0.0, False, False, {}

    monkeypatch.setattr(Corridor, "action_space", space)
    monkeypatch.setattr(Corridor, "step", step)
    env = make(HERE, 3, max_episode_steps=5)
    assert env.env_spec.action.num_choices == choices
    env.reset(seed=0)
    env.step(np.full(3, number))
    assert np.array_equal(env._envs[0].action, native)
    check_vector_env(env)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("gym:CartPol-v1", {}, "knows no env 'CartPol-v1'; did you mean 'CartPole-v1'"),
        ("gym:Door-v7", {}, "did you mean 'a_long_namespace/Door-v7'"),
        ("gym:nosuchmodule:Env-v0", {}, "nosuchmodule"),
        ("gym:Blackjack-v1", {}, "no step limit of its own; set env.max_episode_steps"),
        ("gym:../../x", {}, "cannot be made: .*Malformed environment ID"),
        (
            "gym:CartPole-v1",
            {"kwargs": {"colour": 1}},
            "cannot be made with env.kwargs={'colour': 1}: .*unexpected keyword argument 'colour'",
        ),
    ],
)
def test_mistakes_are_explained(name, kwargs, message, monkeypatch):
    spec = gymnasium.envs.registration.EnvSpec("a_long_namespace/Door-v7")
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    with pytest.raises(ConfigError, match=message):
        make(name, **kwargs)


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("reset", {}, "reset returned a dict, it must return observation, info"),
        ("step", ({}, 0.0, False, {}), "step returned 4 values, it must return observation, reward, terminated"),
        ("step", ({"place": [0, 0], "door": 0}, 0, np.nan, False, {}), "terminated is nan, it must be true or false"),
        ("step", ({"place": [0, 0], "door": 0}, 0, False, False, {"success": True}), "'success' in some steps only"),
    ],
)
def test_a_wrong_return_value_of_an_env_method_is_explained(monkeypatch, method, given, message):
    env = make(HERE, max_episode_steps=5)
    env.reset(seed=0)
    monkeypatch.setattr(env, "_success_key", None)
    monkeypatch.setattr(Corridor, method, lambda self, *_, **__: given)
    with pytest.raises(WrongShape, match=message):
        env.step(env.action_space.sample()) if method == "step" else env.reset(seed=1)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Box(0, np.inf, (2,)), "unbounded actions"),
        (spaces.MultiDiscrete([200, 300]), "60,000 combinations; at most 4,096"),
        (spaces.Dict({"turn": spaces.Discrete(3)}), "one Discrete, .* or one floating-point Box"),
        (spaces.Box(0, 3, (2,), np.int64), "one Discrete, .* or one floating-point Box"),
    ],
)
def test_action_spaces_that_have_no_meaning_in_minus_one_to_one_are_refused(monkeypatch, space, message):
    monkeypatch.setattr(Corridor, "action_space", space)
    monkeypatch.setattr(Corridor, "step", lambda self, action: (self._seen(), 0.0, False, False, {}))
    with pytest.raises(ConfigError, match=message):
        make(HERE, max_episode_steps=5)
