"""PutOnPlate-25 with its real things, where they are here."""

import numpy as np
import pytest
from bridge_files import needs
from needed import requires, without_files

from embodied.core.errors import MissingAsset
from embodied.core.types import EpisodeSpec
from embodied.envs import env_class
from embodied.envs.maniskill.bridge import CAMERA, PLATES
from embodied.envs.maniskill.bridge.bridge_expert import FASTEST, FASTEST_TURN
from embodied.envs.maniskill.config import ManiSkillConfig

pytestmark = pytest.mark.filterwarnings("ignore")  # ManiSkill's and SAPIEN's own
requires("mani_skill")

SINGLE = f"{PLATES}Single-v1"
KIND = env_class(ManiSkillConfig())


def build(name, num_envs=1, **options):
    from embodied.envs.maniskill.env import ManiSkillEnv

    options = {"cameras": (CAMERA,), "image_size": 64, "state": "full", "reward_mode": "dense", **options}
    return ManiSkillEnv(KIND.resolve(ManiSkillConfig(task=PLATES + name, **options)), num_envs)


def reset(env, *numbers):
    episodes = [EpisodeSpec("task", number, 0, i) for i, number in enumerate(numbers)]
    return env.reset(options={"episodes": episodes})[0]


def test_missing_things_are_named_with_where_they_come_from(monkeypatch, tmp_path):
    import embodied.envs.maniskill.bridge.put_on_plate  # noqa: F401  it keeps the folder it finds when it is imported

    without_files(monkeypatch, tmp_path)
    with pytest.raises(MissingAsset, match=r"(?s)widowx250s.*more_carrot, more_plate and more_table"):
        KIND.check(KIND.resolve(ManiSkillConfig(task=SINGLE)))


@pytest.mark.parametrize("inside", [True, False])
def test_a_texture_covers_what_it_is_for(inside, tmp_path):
    import cv2

    from embodied.envs.maniskill.bridge.put_on_plate import paint_over

    path = tmp_path / "red.png"
    cv2.imwrite(str(path), np.full((8, 8, 3), (0, 0, 255), np.uint8))
    picture, front = np.zeros((16, 16, 3), np.uint8), np.zeros((16, 16), bool)
    front[4:8, 4:6] = True
    painted = paint_over(picture, front, str(path), 0.5, everywhere=not inside)
    assert (painted[front] == [128, 0, 0]).all()
    assert (painted[~front] == ([0, 0, 0] if inside else [128, 0, 0])).all()


@needs(SINGLE)
@pytest.mark.slow
def test_every_variant_plays():
    from embodied.envs.maniskill.bridge.put_on_plate import variants

    for name in variants("all"):
        env = build(name, max_episode_steps=8)
        seen = env.reset(options={"episodes": [EpisodeSpec("task", -1, 1, 0)]})[0]
        assert seen["images"][CAMERA][0].std() > 15 and seen["instruction"][0]
        result = env.step_chunk(np.zeros((1, 8, 7), np.float32))
        assert result.rewards.sum() == 0 and not result.terminated.any()
        source, plate = result.obs["state"][0, -14:-7], result.obs["state"][0, -7:]
        assert 0.85 < source[2] < 0.97 and 0.85 < plate[2] < 0.92, name  # both lie on the table
        env.close()


@needs(SINGLE)
def test_an_object_on_its_plate_is_a_success_and_earns_only_if_it_was_grasped():
    import sapien

    env = build("Single-v1", max_episode_steps=80, on_success="continue", backend="cpu")
    reset(env, 1234)
    scene = env.envs[0]
    plate = scene.actors["plate", 0].pose.p[0].numpy()
    scene.actors["object", 0].set_pose(sapien.Pose([*plate[:2], 0.92]))
    result = env.step_chunk(np.zeros((1, 6, 7), np.float32))
    assert result.success[0, -1] and result.rewards.sum() == 0
    scene._grasped[:] = True
    assert env.step_chunk(np.zeros((1, 1, 7), np.float32)).rewards[0, 0] == pytest.approx(1.1)
    env.close()


@needs(SINGLE)
def test_a_batch_of_carrots_is_moved_as_each_alone():
    """Grasped, put down and seen: the batch is what `env.backend=auto` takes for this task. A plate may come to rest
    with another rounding, which a carrot that falls on it makes larger."""
    units = {"action_units": (FASTEST, FASTEST_TURN), "on_success": "continue"}
    many, single = build("Single-v1", 3, **units), build("Single-v1", 3, backend="cpu", **units)
    assert many.env_spec.backend == "cpu_batched"
    numbers, draw = (100, 101, 103), np.random.default_rng(0)
    a, b = reset(many, *numbers), reset(single, *numbers)
    experts, solved = [env.expert() for env in (many, single)], np.zeros(3, bool)
    for _ in range(16):
        np.testing.assert_allclose(a["state"], b["state"], atol=1e-3 if solved.any() else 1e-6)
        assert np.abs(a["images"][CAMERA].astype(int) - b["images"][CAMERA]).mean() < 1e-3
        first, second = (expert.act() for expert in experts)
        np.testing.assert_allclose(first, second, atol=0.05 if solved.any() else 1e-5)
        moves = np.clip(first + draw.normal(0, 0.1, first.shape), -1, 1).astype(np.float32)
        moves = np.repeat(moves[:, None], 2, axis=1)
        one, two = (env.step_chunk(moves) for env in (many, single))
        assert np.array_equal(one.rewards, two.rewards) and np.array_equal(one.success, two.success)
        a, b, solved = one.obs, two.obs, solved | two.success.any(1)
    assert solved.any()
    many.close()
    single.close()


@needs(SINGLE)
@pytest.mark.slow
def test_scenes_at_once_play_as_single_ones_do():
    """What a GPU does, on the CPU's batch: rows play with other things and restart one by one."""
    many, single = build("MainCarrot-v3", 2, backend="cpu_batched"), build("MainCarrot-v3", 2, backend="cpu")
    numbers = 12_345, 40_001
    a, b = reset(many, *numbers), reset(single, *numbers)
    np.testing.assert_allclose(a["state"], b["state"], atol=1e-5)
    assert a["instruction"] == b["instruction"] and len(set(a["instruction"])) == 2
    assert np.abs(a["images"][CAMERA].astype(int) - b["images"][CAMERA]).mean() < 0.5
    episode = [EpisodeSpec("task", 777, 0, 0), None]
    mask = np.array([True, False])
    again = many.reset(options={"episodes": episode, "reset_mask": mask})[0]
    np.testing.assert_allclose(again["state"][1], a["state"][1], atol=1e-6)
    assert np.abs(again["state"][0] - a["state"][0]).max() > 0.01
    many.close()
    single.close()
