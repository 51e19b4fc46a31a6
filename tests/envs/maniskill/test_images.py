"""Pictures of real ManiSkill scenes, drawn on the CPU: few, small and coarse, so that the file takes seconds."""

import numpy as np
import pytest
from needed import requires

from embodied.config.recipe import load
from embodied.core.types import EpisodeSpec
from embodied.envs import make_env
from embodied.envs.maniskill.config import ManiSkillConfig

pytestmark = pytest.mark.filterwarnings("ignore")  # ManiSkill's and SAPIEN's own
requires("mani_skill")

OPTIONS = {"cameras": ("base_camera",), "image_size": 32, "state": "proprio", "privileged": True}


def build(num_envs, **options):
    return make_env(ManiSkillConfig(**{**OPTIONS, "fast_images": True, **options}), num_envs)


def reset(env, seeds):
    episodes = [EpisodeSpec("task", -1, seed, seed) for seed in seeds]
    return env.reset(options={"episodes": episodes})[0]


@pytest.fixture(scope="module")
def batched():
    env = build(3, backend="cpu_batched", max_episode_steps=5)
    yield env
    env.close()


def test_batched_rows_look_like_single_envs(batched):
    single = build(1, backend="cpu", max_episode_steps=5)
    many, one = reset(batched, [11, 12, 13]), reset(single, [12])
    np.testing.assert_array_equal(one["images"]["base_camera"][0], many["images"]["base_camera"][1])
    np.testing.assert_allclose(one["state"][0], many["state"][1], atol=1e-6)
    np.testing.assert_allclose(one["privileged"][0], many["privileged"][1], atol=1e-6)
    actions = np.random.default_rng(0).uniform(-1, 1, (3, 5, 8)).astype(np.float32)
    many, one = batched.step_chunk(actions).obs, single.step_chunk(actions[1:2]).obs
    difference = one["images"]["base_camera"][0].astype(int) - many["images"]["base_camera"][1]
    assert np.abs(difference).mean() < 0.5 and (np.abs(difference) > 40).mean() < 0.01
    from embodied.envs.maniskill.images import paint, paint_all

    both = ("base_camera", "render_camera")
    alone, together = paint(single.envs[0], 0, both), paint_all(single.envs[0], both)
    for camera in both:
        np.testing.assert_array_equal(together[camera].numpy()[0], alone[camera])
    assert not np.array_equal(alone["base_camera"], alone["render_camera"])
    single.close()


@pytest.mark.slow
def test_pictures_are_those_with_sapiens_own_table_of_reflections():
    from embodied.envs.maniskill.images import paint, paint_all

    env = build(1, backend="cpu")
    reset(env, [12])
    theirs = paint_all(env.envs[0], ("render_camera",))["render_camera"].numpy()[0]  # nobody has given it another one
    np.testing.assert_array_equal(paint(env.envs[0], 0, ("render_camera",))["render_camera"], theirs)
    env.close()


def test_a_region_is_that_part_of_the_picture():
    whole, part = (
        build(1, backend="cpu", image_fov=60, image_size=64),
        build(1, backend="cpu", image_fov=60, image_size=(32, 48), image_region=(0.25, 0.5, 1.0, 1.0)),
    )
    seen, close = (reset(env, [3])["images"]["base_camera"][0].astype(int) for env in (whole, part))
    assert close.shape == (32, 48, 3)
    assert (np.abs(seen[32:, 16:] - close) > 8).mean() < 0.01
    whole.close(), part.close()


@pytest.mark.parametrize("recipe", ["maniskill_ppo_rgb", "pullcube_ppo_rgb"])
def test_a_recipe_from_images_shows_the_cube_wherever_it_begins(recipe):
    """Tasks have cameras of their own, so the region of one task may show an empty table in another."""
    env = make_env(load([f"recipe={recipe}"]).config.env, 1)
    for seed in range(8):
        pixels = reset(env, [seed])["images"]["base_camera"][0].astype(int)
        assert (pixels[..., 2] > pixels[..., 0] + 25).sum() > 8  # blue, on a brown table
    env.close()


def test_proprio_tells_nothing_of_the_cube(batched):
    assert batched.env_spec.state_dim == 9 + 9 + 7  # joints, their speeds, the hand's pose
    states, images = ([reset(batched, [seed, 0, 0])[part] for seed in (1, 2)] for part in ("state", "images"))
    assert np.abs(images[0]["base_camera"][0].astype(int) - images[1]["base_camera"][0]).max() > 50
    assert np.abs(states[0][0] - states[1][0]).max() < 0.2  # only the arm's own start differs


def test_joints_leave_out_a_goal_from_which_the_cube_is_known():
    told, alone = (
        build(1, task="PullCube-v1", cameras=(), privileged=False, state=state) for state in ("proprio", "joints")
    )
    states = [reset(env, [4])["state"][0] for env in (told, alone)]
    goal, cube = states[0][-3:], told.envs[0].obj.pose.p[0].numpy()
    np.testing.assert_allclose(cube[:2] - goal[:2], [0.2, 0.0], atol=1e-5)
    np.testing.assert_array_equal(states[1], states[0][:-3])  # joints, speeds and the hand's pose
    told.close(), alone.close()


def test_privileged_numbers_are_those_of_the_scene(batched):
    known = reset(batched, [1, 2, 3])["privileged"]
    cube, goal = batched.envs[0].obj.pose, batched.envs[0].goal_region.pose
    assert batched.env_spec.privileged_dim == 3 + 7
    np.testing.assert_allclose(known, np.concatenate([goal.p, cube.raw_pose], axis=1), atol=1e-6)
    assert batched.step_chunk(np.ones((3, 1, 8), np.float32)).obs["privileged"].shape == (3, 10)


def test_fast_images_show_the_same_scene_with_a_fraction_of_the_triangles(batched):
    fine = build(1, backend="cpu", fast_images=False)
    a, b = (
        reset(env, seeds)["images"]["base_camera"][0].astype(int) for env, seeds in ((batched, [3, 4, 5]), (fine, [3]))
    )
    assert triangles(batched) < triangles(fine) / 8
    assert 0 < np.abs(a - b).mean() < 8
    fine.close()


def triangles(env) -> int:
    from sapien.render import RenderBodyComponent

    bodies = [entity.find_component_by_type(RenderBodyComponent) for entity in env.envs[0].scene.sub_scenes[0].entities]
    shapes = [shape for body in bodies if body is not None for shape in body.render_shapes]
    return sum(len(part.triangles) for shape in shapes if hasattr(shape, "parts") for part in shape.parts)


def test_markers_for_human_viewers_are_hidden_from_the_policy():
    """The goal of PickCube-v1 is a green ball in the air."""
    from embodied.envs.maniskill.images import cameras_of, paint, picture

    env = build(1, task="PickCube-v1", backend="cpu_batched", cameras=("render_camera",), image_size=128)
    reset(env, [2])
    raw = env.envs[0]
    raw.scene.sub_scenes[0].update_render()
    shown = picture(cameras_of(raw)["render_camera"].camera._render_cameras[0])
    hidden = paint(raw, 0, ("render_camera",))["render_camera"]
    differs = (shown != hidden).any(axis=-1)
    assert 10 < differs.sum() < 400
    assert shown[differs][:, 1].mean() > hidden[differs][:, 1].mean() + 20  # it is green
    env.close()


@pytest.mark.parametrize("task", ["PushCube-v1", "PokeCube-v1"])
def test_rows_that_are_drawn_together_begin_as_rows_drawn_one_by_one(task, monkeypatch):
    from embodied.envs.maniskill import cpu_batch

    env = make_env(ManiSkillConfig(task=task, backend="cpu_batched"), 3)
    assert task in cpu_batch.DRAWN_TOGETHER
    together = reset(env, [1, 2, 3])["state"]
    monkeypatch.setattr(cpu_batch, "DRAWN_TOGETHER", ())
    np.testing.assert_array_equal(together, reset(env, [1, 2, 3])["state"])
    env.close()
