"""The toy env: exact whatever the batch, saved bitwise, solvable, drawn where it is."""

import numpy as np
import pytest

from embodied.core.types import EpisodeSpec
from embodied.envs.pointmass.config import PointMassConfig
from embodied.envs.pointmass.env import GREEN, RED, VIDEO_SIZE, PointMassEnv


def make(num_envs, **kwargs):
    return PointMassEnv(PointMassConfig(name="pointmass", **kwargs), num_envs)


def begin(env, seeds):
    specs = [EpisodeSpec("reach", -1, int(seed), index) for index, seed in enumerate(seeds)]
    return env.reset(options={"episodes": specs})[0]


def steer(obs):
    """Push towards the target and brake."""
    state = obs["state"]
    return np.clip(10 * state[:, 4:6] - 8 * state[:, 2:4], -1, 1)


def play(env, seeds):
    """Every step's reward of a steered episode, and whether it succeeded."""
    obs, rewards, success = begin(env, seeds), [], np.zeros(len(seeds), bool)
    for _ in range(env.env_spec.max_episode_steps):
        obs, reward, _, _, info = env.step(steer(obs))
        rewards.append(reward)
        success |= info["success"]
    return np.array(rewards).T, success


def test_steering_towards_the_target_always_succeeds():
    rewards, success = play(make(100), range(100))
    assert success.all()
    assert (rewards != 0).sum(axis=1).max() <= 40


def test_rows_of_a_saved_state_can_be_dealt_to_other_workers():
    env = make(4)
    obs = begin(env, range(4))
    env.step(steer(obs))
    state = env.get_state()
    halves = [
        make(2).set_state({name: array[part] for name, array in state.items()}) for part in (slice(2), slice(2, 4))
    ]
    whole = make(4).set_state(state)
    assert np.array_equal(np.concatenate([half["state"] for half in halves]), whole["state"])


def test_the_state_is_in_world_sizes():
    """The same seed in a world of twice the size gives the same picture of it."""
    small, large = make(3, dtype="float64"), make(3, size=2.0, dtype="float64")
    assert begin(large, range(3))["state"] == pytest.approx(begin(small, range(3))["state"])
    a, b = small.step(np.full((3, 2), 0.5)), large.step(np.full((3, 2), 0.5))
    assert b[0]["state"] == pytest.approx(a[0]["state"])
    assert b[1] == pytest.approx(a[1])


def test_a_wall_stops_the_point():
    env = make(1, on_success="continue")
    begin(env, [3])
    for _ in range(50):
        obs, *_ = env.step(np.array([[1.0, 0.0]]))
    assert obs["state"][0, 0] == 1.0
    assert obs["state"][0, 2] == 0.0


def test_the_discrete_actions_move_in_four_directions():
    env = make(5, discrete=True)
    before = begin(env, [4] * 5)["state"]
    moved = env.step(np.arange(5))[0]["state"][:, :2] - before[:, :2]
    assert np.sign(moved).tolist() == [[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]]


@pytest.mark.parametrize("source", ["image", "frame"])
def test_point_and_target_are_drawn_where_they_are(source):
    env = make(2, cameras=("top", "near"), image_size=64)
    env._position[:], env._target[:] = [[-0.5, 0.5], [0.5, 0.0]], [[0.5, -0.5], [0.5, 0.0]]
    picture = env._paint(np.arange(2))["top"] if source == "image" else env.render_rows(np.arange(2))
    side = 64 if source == "image" else VIDEO_SIZE[0]
    assert picture.shape == (2, side, side, 3)
    assert picture[0, side // 4, side // 4].tolist() == list(RED)  # left and up
    assert picture[0, 3 * side // 4, 3 * side // 4].tolist() == list(GREEN)
    assert picture[1, side // 2, 3 * side // 4].tolist() == list(RED)  # the point lies on the target


def test_instruction_and_images_come_on_request_only():
    assert begin(make(2), range(2)).keys() == {"state"}
    obs = begin(make(2, cameras=("top",), instruction=True), range(2))
    assert obs.keys() == {"state", "images", "instruction"}
    assert obs["instruction"][1] == "move the red point to the green target"


def test_success_at_reset_is_reported():
    env = make(1)
    starts = {seed: env.reset(options={"episodes": [EpisodeSpec("reach", -1, seed, 0)]}) for seed in range(400)}
    close = {seed for seed, (obs, _) in starts.items() if np.hypot(*obs["state"][0, 4:6]) < 0.1}
    assert close
    assert {seed for seed, (_, info) in starts.items() if info["success"][0]} == close


def test_privileged_numbers_are_what_proprio_hides():
    full = begin(make(3), range(3))["state"]
    obs = begin(make(3, state="proprio", privileged=True), range(3))
    np.testing.assert_array_equal(np.concatenate([obs["state"], obs["privileged"]], axis=1), full)


def test_an_env_that_goes_on_from_a_state_shows_its_images():
    played, other = (make(2, cameras=("top",), image_size=32) for _ in range(2))
    begin(other, [7, 8])
    obs = played.step(steer(begin(played, [1, 2])))[0]
    assert (other.set_state(played.get_state())["images"]["top"] == obs["images"]["top"]).all()
