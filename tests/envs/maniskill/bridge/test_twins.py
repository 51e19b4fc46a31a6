"""The bridge twins: real scenes of real files where these are here, and what is said where they are not."""

import os
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from bridge_files import needs
from expert_episodes import played_by_expert
from needed import requires, without_files

from embodied.core.errors import MissingAsset
from embodied.core.types import EpisodeSpec
from embodied.envs import env_class
from embodied.envs.capabilities import choose_protocol
from embodied.envs.env_checker import check_vector_env
from embodied.envs.maniskill.bridge import CAMERA, TWINS
from embodied.envs.maniskill.config import ManiSkillConfig

pytestmark = pytest.mark.filterwarnings("ignore")  # ManiSkill's and SAPIEN's own
requires("mani_skill")

CARROT = "PutCarrotOnPlateInScene-v1"
KIND = env_class(ManiSkillConfig())


def config(**options):
    return KIND.resolve(ManiSkillConfig(**{"task": CARROT, **options}))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"control_mode": "pd_joint_delta_pos"}, "env.control_mode=null"),
        ({"image_fov": 60}, "photograph"),
        ({"task": "PushCube-v1", "action_units": (0.05, 0.2)}, "for bridge tasks"),
        ({"task": "PushCube-v1", "image_region": (0, 0, 0.5, 0.5)}, "such as env.image_fov=60"),
        ({"object_set": "test"}, "has one set of things"),
        ({"image_region": (0.8, 0, 0.2, 1)}, r"image_region\n.*is empty: left and top come first"),
    ],
)
def test_options_that_mean_nothing_for_a_task_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        config(**options)


def test_missing_files_are_named_with_where_they_come_from(monkeypatch, tmp_path):
    without_files(monkeypatch, tmp_path)
    with pytest.raises(MissingAsset, match=r"(?s)download_asset widowx250s.*download_asset bridge_v2_real2sim"):
        KIND.check(config())


def test_an_evaluation_takes_the_twins_own_initial_states_in_turn():
    for task, states in TWINS.items():
        protocol = choose_protocol(KIND, config(task=task), None)
        assert (protocol.name, protocol.stored_states) == ("bridge-v1", states)
    assert choose_protocol(KIND, config(task="PushCube-v1"), None).name == "maniskill-v1"


def test_a_smaller_picture_shows_the_same_part_of_the_scene():
    from embodied.envs.maniskill.bridge.scene import FOCAL, scaled_intrinsics

    small = scaled_intrinsics(120, 320)
    np.testing.assert_allclose(small[0], [FOCAL / 2, 0, 319.501 / 2])
    np.testing.assert_allclose(small[1], [0, FOCAL / 4, 239.545 / 4])


def test_a_region_is_seen_as_it_is_in_the_whole_picture():
    from embodied.envs.maniskill.bridge.scene import scaled_intrinsics

    whole, part = scaled_intrinsics(480, 640), scaled_intrinsics(240, 320, (0.25, 0.5, 0.75, 1.0))
    shift = [[0, 0, 160], [0, 0, 240], [0, 0, 0]]  # a quarter of 640 and half of 480; as many pixels per angle
    np.testing.assert_allclose(part + shift, whole)


def build(num_envs=2, **options):
    from embodied.envs.maniskill.env import ManiSkillEnv

    options = {"cameras": (CAMERA,), "image_size": 64, "state": "proprio", "max_episode_steps": 4, **options}
    return ManiSkillEnv(config(**options), num_envs)


def reset(env, states, seed=0):
    episodes = [EpisodeSpec("task", state, seed + i, i) for i, state in enumerate(states)]
    return env.reset(options={"episodes": episodes})[0]


@pytest.mark.parametrize(("named", "found"), [(None, "shared/assets"), ("mine", "mine")])
def test_files_beside_the_checkout_are_found_unless_a_folder_is_named(named, found, tmp_path, monkeypatch):
    (tmp_path / "shared" / "assets" / "data").mkdir(parents=True)
    here = tmp_path / "checkout" / "tests" / "conftest.py"
    here.parent.mkdir(parents=True)
    here.write_text((Path(__file__).parents[3] / "conftest.py").read_text())
    monkeypatch.setattr("sys.path", sys.path[:])
    monkeypatch.setenv("MS_ASSET_DIR", str(tmp_path / str(named)))
    if not named:
        monkeypatch.delenv("MS_ASSET_DIR")
    runpy.run_path(str(here))
    assert os.environ["MS_ASSET_DIR"] == str(tmp_path / found)


@needs(CARROT)
@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=[] if task == CARROT else [pytest.mark.slow]) for task in TWINS]
)
def test_a_twin_shows_its_scene_and_says_what_is_wanted(task):
    env = build(1, task=task, max_episode_steps=None)
    assert env.env_spec.max_episode_steps == (120 if "Eggplant" in task else 60)
    first, other = reset(env, [0]), reset(env, [5])
    picture = first["images"][CAMERA][0].astype(int)
    assert picture.std() > 30 and np.abs(picture - other["images"][CAMERA][0]).max() > 60  # the thing lies elsewhere
    words = {"Carrot": "carrot on plate", "Spoon": "spoon on", "Stack": "green block", "Eggplant": "eggplant into"}
    assert next(said for name, said in words.items() if name in task) in first["instruction"][0]
    assert env.step_chunk(np.zeros((1, 2, 7), np.float32)).success.shape == (1, 2)
    env.close()


@needs(CARROT)
def test_a_region_of_the_picture_is_that_part_of_it():
    whole = build(1, image_size=(480, 640), max_episode_steps=None)
    seen = reset(whole, [0])["images"][CAMERA][0, 120:360, 160:480].astype(int)
    whole.close()
    part = build(1, image_size=(240, 320), image_region=(0.25, 0.25, 0.75, 0.75), max_episode_steps=None)
    found = reset(part, [0])["images"][CAMERA][0].astype(int)
    part.close()
    assert seen.std() > 30 and (np.abs(found - seen) > 8).mean() < 0.01


@needs(CARROT)
@pytest.mark.slow
def test_the_carrot_task_keeps_the_contract():
    """An eggplant does not: it rolls in its sink, never twice alike."""
    env = build(3, action_units=(0.05, 0.2))
    check_vector_env(env, atol=1e-5)
    env.close()


@needs(CARROT)
@pytest.mark.slow
def test_an_episode_begins_alike_whatever_was_played_before():
    env = build(1, max_episode_steps=60, action_units=(0.05, 0.2))
    before = reset(env, [-1], seed=3)
    down = np.zeros((1, 8, 7), np.float32)
    down[..., :3] = [0.5, -0.5, -1]
    env.step_chunk(down)  # the arm ends among the things
    again = reset(env, [-1], seed=3)
    np.testing.assert_allclose(again["state"], before["state"], atol=1e-6)
    np.testing.assert_array_equal(again["images"][CAMERA], before["images"][CAMERA])
    env.close()


@needs(CARROT)
@pytest.mark.slow
def test_many_scenes_at_once_begin_where_single_ones_do():
    """What a GPU does, on the CPU's batch."""
    options = {"state": "full", "reward_mode": "dense", "action_units": (0.05, 0.2)}
    many, single = build(3, backend="cpu_batched", **options), build(3, backend="cpu", **options)
    states = [3, 10, 17]
    a, b = reset(many, states), reset(single, states)
    np.testing.assert_allclose(a["state"], b["state"], atol=1e-5)
    assert np.abs(a["images"][CAMERA].astype(int) - b["images"][CAMERA]).mean() < 0.5
    half_sizes = [float(env.episode_source_obj_bbox_world[2, 0]) for env in single.envs]
    np.testing.assert_allclose(many.envs[0].episode_source_obj_bbox_world[2].numpy(), half_sizes, atol=1e-4)
    assert many.step_chunk(np.zeros((3, 2, 7), np.float32)).rewards.shape == (3, 2)
    many.close()
    single.close()


@needs(CARROT)
def test_the_expert_puts_the_carrot_on_its_plate():
    env = build(2, cameras=(), max_episode_steps=40, action_units=(0.05, 0.35))
    episodes = [EpisodeSpec(CARROT, state, state, number) for number, state in enumerate((0, 1, 10, 23))]
    assert all(result.success_once for result in played_by_expert(env, episodes))
    env.close()
