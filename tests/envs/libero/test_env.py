"""Real LIBERO on the CPU: two tasks in one process, states only (rendering is tested in test_images.py)."""

import subprocess
import sys

import numpy as np
import pytest

from embodied.core.errors import ConfigError
from embodied.core.types import EpisodeSpec
from embodied.envs import env_class, make_env
from embodied.envs.capabilities import choose_protocol
from embodied.envs.config import ENV_CONFIGS
from embodied.envs.libero.config import SUITES, LiberoConfig, tasks_of
from embodied.envs.libero.tasks import files_of

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # robosuite's, numba's and bddl's own
    pytest.mark.usefixtures("plain_scenes"),
]
needs_libero = pytest.mark.skipif("not __import__('importlib.util').util.find_spec('libero')", reason="needs LIBERO")
OBJECT, SPATIAL = "libero_object/0", "libero_spatial/3"


@pytest.fixture(scope="module")
def env():
    config = LiberoConfig(name="libero", task=(OBJECT, SPATIAL), max_episode_steps=4, num_envs=3)
    env = make_env(config, 3)
    yield env
    env.close()


def start(env, *specs):
    mask = np.array([spec is not None for spec in specs])
    return env.reset(options={"reset_mask": mask, "episodes": list(specs)})[0]


def actions(seed, steps=5, num_envs=3):
    return np.random.default_rng(seed).uniform(-1, 1, (num_envs, steps, 7)).astype(np.float32)


def test_a_task_option_names_a_task_a_suite_or_a_list_of_both():
    assert tasks_of("libero_10/3") == ("libero_10/3",)
    assert tasks_of("libero_90")[::89] == ("libero_90/0", "libero_90/89")
    assert tasks_of(["libero_goal/9", "libero_spatial"])[:2] == ("libero_goal/9", "libero_spatial/0")
    assert LiberoConfig(name="libero", task=["libero_goal/9"]).task == ("libero_goal/9",)


def test_the_protocol_plays_the_stored_states_whatever_the_recipe_trains_on():
    for trained_on, words in (("drawn", "never begins in one of these"), ("stored", "begins in the same states")):
        config = LiberoConfig(name="libero", initial_states=trained_on, on_success="continue", max_episode_steps=9)
        protocol = choose_protocol(env_class(config), config, None)
        assert (protocol.name, protocol.stored_states) == ("libero-v1", 50)
        assert words in protocol.rules
        played = protocol.apply(config)
        assert (played.on_success, played.max_episode_steps) == ("terminate", None)


@pytest.mark.parametrize(
    ("task", "name", "states"),
    [
        ("libero_goal_swap", "libero-pro-v1", 50),
        (["libero_spatial/1", "libero_spatial_with_milk/1"], "libero-pro-v1", 10),
    ],
)
def test_perturbed_suites_have_a_protocol_of_their_own(task, name, states):
    config = LiberoConfig(name="libero", task=task)
    protocol = choose_protocol(env_class(config), config, None)
    assert (protocol.name, protocol.stored_states) == (name, states)
    assert f"benchmark's {states} stored" in protocol.rules


@needs_libero
def test_every_suite_has_its_files_and_its_stored_states():
    for name, suite in SUITES.items():
        for task in (f"{name}/0", f"{name}/{suite.num_tasks - 1}"):
            assert len(files_of(task).initial_states()) == suite.num_states, task


@needs_libero
def test_a_perturbed_suite_says_what_its_task_file_says_where_words_or_the_task_are_changed():
    told = [files_of(f"libero_spatial{suffix}/0").instruction for suffix in ("", "_swap", "_lan", "_task")]
    assert told[0] == told[1] == "pick up the black bowl between the plate and the ramekin and place it on the plate"
    assert told[2] == "lift the black bowl between the plate and ramekin and set it on the plate"
    assert told[3].startswith("Pick the akita black bowl not between")


@pytest.mark.parametrize("installed", ["3.3.2", "3.17.0"])
@pytest.mark.parametrize("config", [{"name": "libero"}, {"name": "robosuite", "task": "Lift"}])
def test_another_mujoco_makes_another_protocol(config, installed, monkeypatch):
    monkeypatch.setattr("embodied.envs.mujoco.env.version", {"mujoco": installed}.__getitem__)
    config = ENV_CONFIGS[config["name"]](**config)
    name = f"{config.name}-v1"
    if installed == "3.3.2":
        assert choose_protocol(env_class(config), config, name).rules.endswith("MuJoCo 3.3.2")
        return
    assert choose_protocol(env_class(config), config, None).name == f"{name}+mujoco3.17.0"
    with pytest.raises(ConfigError, match=rf"eval.protocol='{name}': .* has {name}\+mujoco3.17.0, as-trained-v1"):
        choose_protocol(env_class(config), config, name)


@needs_libero
def test_training_may_ask_for_the_stored_states(env):
    asked = LiberoConfig(name="libero", task=OBJECT, initial_states="stored")
    episode = EpisodeSpec(OBJECT, -1, 1207, 0)
    assert env._initial_state(episode) is None
    env.config, drawn = asked, env.config
    stored = env._initial_state(episode)
    env.config = drawn
    assert np.array_equal(stored, env._initial_state(EpisodeSpec(OBJECT, 1207 % 50, 0, 0)))


MEMORY = """
import psutil
from embodied.envs import make_env
from embodied.envs.config import ENV_CONFIGS
from embodied.envs.libero.config import LiberoConfig

env = make_env(LiberoConfig(name="libero", task="libero_object/0"), 1)
env.reset(seed=0)
print(psutil.Process().memory_info().rss / env.config.worker_bytes(1, num_tasks=1))
"""


@needs_libero
@pytest.mark.slow
def test_one_libero_task_takes_no_more_than_the_predicted_memory():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", MEMORY], capture_output=True, text=True, timeout=200)
    assert float(done.stdout.split()[-1]) < 1.2, done.stderr


@needs_libero
def test_a_step_is_bitwise_libero_s_own(env):
    """The same episode twice: with our loop, and with the step of the env that LIBERO ships."""
    scene, rows = env._scene(OBJECT), env._rows
    start(env, *[EpisodeSpec(OBJECT, 7, 1, 0), EpisodeSpec(OBJECT, 7, 1, 1), None])
    for action in actions(0, 15)[0].astype(np.float64):
        ours = scene.step(rows[0], action)
        scene.attach(rows[1])
        _, _, theirs, _ = scene.env.step(action)
        assert ours == bool(theirs)
        for name in ("qpos", "qvel", "qacc_warmstart", "xpos"):
            assert np.array_equal(getattr(rows[0].data._data, name), getattr(rows[1].data._data, name)), name


@needs_libero
def test_things_settle_as_the_recipe_says_and_in_evaluations_as_the_protocol_does(env, monkeypatch):
    config = LiberoConfig(name="libero", task=OBJECT, settling_steps=3, settling_gripper="still")
    monkeypatch.setattr(env, "config", config)
    played = []
    kind = type(env._scene(OBJECT))
    step = kind.step
    monkeypatch.setattr(kind, "step", lambda scene, row, action: played.append(action) or step(scene, row, action))
    start(env, EpisodeSpec(OBJECT, 0, 1, 0), None, None)
    assert len(played) == 3 and not np.any(played)
    evaluated = choose_protocol(env_class(config), config, None).apply(config)
    assert (evaluated.settling_steps, evaluated.settling_gripper) == (10, "open")


@needs_libero
def test_the_numbered_stored_state_is_restored(env, monkeypatch):
    monkeypatch.setattr(env, "config", env.config.model_copy(update={"settling_steps": 0}))
    start(env, EpisodeSpec(SPATIAL, 31, 0, 0), None, None)
    begun = env.row(0).data._data.qpos
    assert np.array_equal(begun, files_of(SPATIAL).initial_states()[31, 1 : 1 + len(begun)])


@needs_libero
def test_a_state_that_is_not_stored_is_refused(env):
    with pytest.raises(ValueError, match="stored initial states 0 to 49, not 50"):
        start(env, EpisodeSpec(SPATIAL, 50, 0, 0), None, None)


@needs_libero
def test_an_episode_does_not_remember_the_one_before(env):
    """A reset that keeps the model and the robot's objects equals one of a scene just built."""
    first = start(env, *[EpisodeSpec(OBJECT, 3, 5, i) for i in range(3)])["state"]
    env.step_chunk(actions(1))
    again = start(env, *[EpisodeSpec(OBJECT, 3, 5, i) for i in range(3)])["state"]
    assert np.array_equal(first, again)
    fresh = make_env(LiberoConfig(name="libero", task=OBJECT), 1)
    alone = start(fresh, EpisodeSpec(OBJECT, 3, 5, 0))["state"]
    assert np.array_equal(alone[0], first[0, : alone.shape[1]])
    fresh.close()


@needs_libero
def test_open_episodes_are_saved_and_go_on_bit_for_bit(env):
    specs = [EpisodeSpec(task, -1, seed, seed) for seed, task in enumerate([OBJECT, SPATIAL, OBJECT])]
    start(env, *specs)
    env.step_chunk(actions(1, steps=1))
    start(env, None, None, specs[1])  # a row that is one step behind, and has changed its task
    env.step_chunk(actions(2, steps=1))
    state = env.get_state()
    expected = env.step_chunk(actions(3, steps=1))
    start(env, *specs[::-1])
    env.set_state(state)
    found = env.step_chunk(actions(3, steps=1))
    np.testing.assert_array_equal(found.obs["state"], expected.obs["state"])
    assert found.obs["instruction"] == expected.obs["instruction"]


@needs_libero
def test_rows_play_the_task_their_episode_names(env):
    obs = start(env, EpisodeSpec(SPATIAL, 0, 0, 0), EpisodeSpec(OBJECT, 0, 0, 1), EpisodeSpec(SPATIAL, 1, 0, 2))
    bowl = "pick up the black bowl on the cookie box and place it on the plate"
    assert obs["instruction"][0] == obs["instruction"][2] == bowl
    assert obs["instruction"][1] == "pick up the alphabet soup and place it in the basket"
    again = start(env, None, EpisodeSpec(SPATIAL, 0, 0, 0), None)
    assert np.array_equal(again["state"][1], obs["state"][0])


@needs_libero
def test_a_step_limit_is_that_of_the_episodes_own_suite():
    config = LiberoConfig(name="libero", task=(OBJECT, SPATIAL))
    env = make_env(config, 2)
    start(env, EpisodeSpec(OBJECT, 0, 0, 0), EpisodeSpec(SPATIAL, 0, 0, 1))
    env._elapsed[:] = 219
    result = env.step_chunk(np.zeros((2, 1, 7), np.float32))
    assert result.truncated.ravel().tolist() == [False, True]
    assert env.env_spec.max_episode_steps == 280
    env.close()
