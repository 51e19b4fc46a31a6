"""LIBERO in MuJoCo Warp, on cores: in an interpreter that has the packages of `python -m embodied.sims libero_warp`."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from embodied.core.types import EpisodeSpec
from embodied.envs import env_class, make_env
from embodied.envs.capabilities import choose_protocol
from embodied.envs.env_checker import check_vector_env
from embodied.envs.libero.config import LiberoConfig

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # robosuite's, numba's and bddl's own
    pytest.mark.skipif(importlib.util.find_spec("mujoco_warp") is None, reason="needs mujoco-warp"),
]
SPATIAL, OBJECT = "libero_spatial/5", "libero_object/0"


@pytest.fixture
def env():
    made = []

    def make(num_envs=2, backend="warp", **options):
        config = LiberoConfig(name="libero", backend=backend, num_envs=num_envs, **options)
        made.append(make_env(config, num_envs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def start(env, *specs):
    mask = np.array([spec is not None for spec in specs])
    return env.reset(options={"reset_mask": mask, "episodes": list(specs)})[0]["state"]


def test_results_of_libero_in_warp_have_their_own_protocol():
    for task, name in ((SPATIAL, "libero-warp-v1"), ("libero_goal_swap", "libero-pro-warp-v1")):
        config = LiberoConfig(name="libero", task=task, backend="warp")
        protocol = choose_protocol(env_class(config), config, None)
        assert protocol.name == name and "simulates otherwise" in protocol.rules and protocol.stored_states == 50


def test_the_torques_are_robosuite_s(env):
    import mujoco
    import mujoco_warp

    from embodied.envs.libero.scene import SceneRow
    from embodied.envs.libero.warp_batch import Batch, begun

    scene = env(1, task=OBJECT)._scene(OBJECT)
    batch, row, rng = Batch(scene, 1, "cpu"), SceneRow(scene), np.random.default_rng(0)
    scene.begin(row, 3, None, 0)
    data = row.data._data
    for _ in range(4):
        scene.step(row, rng.uniform(-1, 1, 7))  # the first physics step of an episode takes what the reset has seen
        action = rng.uniform(-1, 1, 7)
        batch.put(np.arange(1), begun(scene, row))
        batch.actions.assign(action[None])
        mujoco_warp.step1(batch.m, batch.d)
        batch.control(True)
        mujoco.mj_forward(scene.model, data)
        scene.env._pre_action(action, True)
        assert np.abs(data.ctrl[:7]).max() > 1  # newton metres
        np.testing.assert_allclose(batch.d.ctrl.numpy()[0], data.ctrl, atol=2e-3)


@pytest.mark.parametrize("stored", [-1, 25])
def test_episodes_begin_in_the_states_of_the_benchmark_s_env_and_go_on_like_it(env, stored):
    episodes = [EpisodeSpec(OBJECT, stored, seed, seed) for seed in range(2)]
    (ours, theirs) = (env(2, backend, task=OBJECT, settling_steps=0) for backend in ("warp", "mujoco"))
    np.testing.assert_allclose(start(ours, *episodes), start(theirs, *episodes), atol=1e-5)
    actions = np.random.default_rng(1).uniform(-1, 1, (2, 3, 7)).astype(np.float32)
    hands = [each.step_chunk(actions).obs["state"][:, :3] for each in (ours, theirs)]
    np.testing.assert_allclose(*hands, atol=2e-3)


def test_a_task_file_of_the_user_s_own_is_played(env, tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "libero.md").read_text()
    task = tmp_path / "my_task.bddl"
    task.write_text(page.partition("```lisp\n")[2].partition("```")[0])
    ours, theirs = (env(2, backend, task=str(task), settling_steps=0) for backend in ("warp", "mujoco"))
    episodes = [EpisodeSpec(str(task), -1, seed, seed) for seed in range(2)]
    np.testing.assert_allclose(start(ours, *episodes), start(theirs, *episodes), atol=1e-5)
    protocol = choose_protocol(env_class(ours.config), ours.config, None)
    assert protocol.name == "libero-own-warp-v1" and not protocol.stored_states
    row, scene = ours.row(1), ours.row(1).scene
    (ketchup, basket) = (scene.model.joint(f"{name}_1_joint0").qposadr[0] for name in ("ketchup", "basket"))
    arrays = row.batch.rows(np.array([row.slot]))
    arrays["qpos"][:, ketchup : ketchup + 3] = arrays["qpos"][:, basket : basket + 3] + [0, 0, 0.12]
    row.batch.put(np.array([row.slot]), arrays)
    assert ours.step_chunk(np.zeros((2, 1, 7), np.float32)).success.tolist() == [[False], [True]]


def test_furniture_stands_where_each_episode_puts_it(env):
    one, places = env(1, task="libero_goal/0", settling_steps=0), []
    for seed in range(2):
        start(one, EpisodeSpec("libero_goal/0", 0, seed, 0))
        model, shown = one.row(0).scene.model, one.row(0).shown
        fixed = model.body_weldid[model.geom_bodyid] == 0
        places.append(shown["geom_xpos"][fixed].copy())
        one.step_chunk(np.zeros((1, 1, 7), np.float32))
        np.testing.assert_allclose(shown["geom_xpos"][fixed], places[-1], atol=1e-6)
    assert np.abs(places[0] - places[1]).max() > 0.001


def test_rows_of_several_tasks_and_limits_keep_out_of_each_other_s_way(env):
    env = env(3, task=[SPATIAL, OBJECT], max_episode_steps=2)
    specs = [EpisodeSpec(env.config.task, 0, seed, seed) for seed in range(3)]
    first = start(env, *specs)
    moved = env.step_chunk(np.full((3, 1, 7), 0.3, np.float32)).obs["state"]
    again = start(env, specs[0], None, None)
    np.testing.assert_array_equal(again[0], first[0])
    np.testing.assert_array_equal(again[1:], moved[1:])
    other = start(env, specs[1], None, None)  # the row changes its task, and that task's batch grows
    np.testing.assert_array_equal(other[1:], moved[1:])
    np.testing.assert_array_equal(other[0], first[1])
    assert env.step_chunk(np.zeros((3, 1, 7), np.float32)).truncated.tolist() == [[False], [True], [True]]


@pytest.mark.parametrize("when", ["settling", "an episode"])
def test_a_row_without_room_for_its_contacts_ends_its_episode_with_an_error(env, when, monkeypatch):
    monkeypatch.setattr("embodied.envs.libero.warp_batch.CONTACTS", 4)
    env = env(1, task=OBJECT, settling_steps=2 if when == "settling" else 0)
    before = start(env, EpisodeSpec(OBJECT, 0, 0, 0))
    result = env.step_chunk(np.zeros((1, 2, 7), np.float32))
    assert result.mask.sum() == result.truncated.sum() == 1 and not result.success.any()
    assert [row for row, why in result.errors if "no room: BROADPHASE" in why] == [0]
    np.testing.assert_array_equal(result.obs["state"], before)


@pytest.mark.slow
def test_libero_in_warp_keeps_the_contract(env):
    check_vector_env(env(3, task=SPATIAL, max_episode_steps=6, settling_steps=1))


def test_warp_draws_its_rows_nearly_as_mujoco_does(env):
    drawn = env(2, task=OBJECT, renderer="warp", cameras=("wrist", "agentview"), image_size=32, mirrored=True)
    start(drawn, *(EpisodeSpec(OBJECT, -1, seed, seed) for seed in (1, 2)))
    frames = [drawn.step_chunk(np.full((2, 2, 7), 0.3, np.float32)).obs["images"] for _ in range(2)][-1]
    drawn.config = drawn.config.model_copy(update={"renderer": "cores"})
    drawn.row(0).scene.model.tex_colorspace[:] = 1  # else MuJoCo 3.10 draws floors darker than the benchmark's MuJoCo
    expected = drawn._paint(np.arange(2))
    for camera, frame in frames.items():
        assert np.abs(frame.astype(int) - expected[camera]).mean() < 10.0  # small pictures are mostly edges
    assert not np.array_equal(*frames["wrist"])
