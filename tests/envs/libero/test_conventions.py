"""Conventions of LIBERO that policies were trained with, and that evaluations of others have had wrong.

Of the 26 rows of vla-eval's list of common pitfalls these can happen with LIBERO; what no other test guards is here:
- rotation: axis-angle or Euler, w first or last, the half turn: the first two tests;
- gripper: threshold, polarity: the second and the fourth; test_env's step that is LIBERO's own bit for bit;
- state: not sent, from the controller instead of the observation: the second and the last;
- actions: relative or absolute: test_env's step; number of dimensions: tests/policies/test_published_folders;
  statistics, length of a chunk: the last two;
- episodes: step limit, what ends one, control rate: the third and the last; initial states: test_env's stored states;
- images: crop in the center, upside down: the last; test_images;
- other software: test_env's protocol of another MuJoCo. Seed: stored states leave furniture alone to it (test_env).
The other ten belong to CALVIN, SimplerEnv, RoboTwin and MolmoBot (rot6d, an offset of angles, Bridge's rotation, a
sticky gripper, a hand's place in the base frame, a finger's range, kinds of actions of one model, a gripper of 0 to
255, a policy's period, forks of a simulator).
"""

import importlib.util

import numpy as np
import pytest
import torch

from embodied.config.recipe import load
from embodied.core.types import EpisodeSpec
from embodied.envs import make_env
from embodied.envs.libero.config import SUITES, LiberoConfig
from embodied.envs.libero.env import CONTROL_HZ, rotation_vector
from embodied.policies.vla.statistics import GRIPPERS, STORED_GRIPPERS, statistics_of

pytestmark = pytest.mark.usefixtures("plain_scenes")
needs_libero = pytest.mark.skipif(importlib.util.find_spec("libero") is None, reason="needs LIBERO")
TASK = "libero_object/0"


@pytest.mark.parametrize("angle", [0.0, 0.5, 3.0, 3.3, 6.0])
def test_a_rotation_of_more_than_half_a_turn_stays_one(angle):
    """A hand that points down turns by about half a turn, so many states would change their sign. w comes first."""
    axis = np.array([2.0, -1.0, 2.0]) / 3
    quaternion = np.array([np.cos(angle / 2), *(np.sin(angle / 2) * axis)])  # w < 0 beyond half a turn
    np.testing.assert_allclose(rotation_vector(quaternion), angle * axis, atol=1e-9)


@needs_libero
@pytest.mark.filterwarnings("ignore")  # robosuite's, numba's and bddl's own
def test_orientations_are_robosuites_observation_and_1_closes_the_gripper():
    env = make_env(LiberoConfig(name="libero", task=TASK, state="proprio"), 2)
    obs, _ = env.reset(options={"episodes": [EpisodeSpec(TASK, number, 0, number) for number in range(2)]})
    scene, row = env.row(0).scene, env.row(0)
    gap = np.ptp(obs["state"][:, 6:], axis=1)
    actions = np.zeros((2, 4, 7), np.float32)
    actions[:, :, 5], actions[:, :, 6] = 0.5, [[1.0], [-1.0]]
    after = env.step_chunk(actions).obs["state"]
    assert np.ptp(after[0, 6:]) < gap[0] - 0.01 and np.ptp(after[1, 6:]) > gap[1] - 0.01
    from robosuite.utils.transform_utils import mat2quat, quat2axisangle

    scene.attach(row)
    hand = row.shown["xquat"][scene.sim.model.body_name2id("robot0_right_hand")]
    np.testing.assert_allclose(after[0, 3:6], quat2axisangle(np.roll(hand, -1)), atol=1e-6)
    turned = np.abs(mat2quat(row.data.get_site_xmat("gripper0_grip_site")) @ np.roll(hand, -1))
    assert turned < 0.8  # the controller's orientation is another one, by a quarter of a turn
    env.close()


def test_limits_and_control_rate_are_the_published_ones():
    limits = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
    assert {name: SUITES[name].max_steps for name in limits} == limits and CONTROL_HZ == 20


def test_a_stored_gripper_of_0_closes_and_half_is_the_border():
    stored = torch.tensor([0.0, 0.49, 0.51, 1.0])
    assert GRIPPERS["libero"](stored).tolist() == [1, 1, -1, -1]
    assert GRIPPERS["bridge"](stored).tolist() == [-1, -1, 1, 1]
    for kind, back in STORED_GRIPPERS.items():
        assert back(GRIPPERS[kind](torch.tensor([0.0, 1.0]))).tolist() == [0, 1]


@pytest.mark.parametrize(("bounds", "action"), [("quantiles", 3.0), ("extremes", 10.0)])
def test_the_statistics_that_a_model_was_trained_with_scale_its_actions(bounds, action):
    figures = {"action": {"q01": [-3.0], "q99": [3.0], "min": [-10.0], "max": [10.0]}}
    assert statistics_of({"own": figures}, None, "here", bounds=bounds).from_unit(torch.ones(1)) == action


@pytest.mark.parametrize(
    ("recipe", "chunk", "cameras", "crop"),
    [
        ("openvla", 1, ("agentview",), 0.9),
        ("openvla_oft", 8, ("agentview", "wrist"), 0.9),
        ("pi0", 5, ("agentview", "wrist"), None),
        ("pi05", 5, ("agentview", "wrist"), None),
        ("smolvla", 1, ("agentview", "wrist"), None),
    ],
)
def test_published_models_are_asked_as_their_authors_ask_them(recipe, chunk, cameras, crop):
    config = load([f"recipe=libero_published_{recipe}"], entry="evaluate").config
    env, policy = config.env, config.policy
    assert (env.cameras, env.image_size, env.mirrored, env.state) == (cameras, 256, True, "proprio")
    assert (env.settling_steps, env.settling_gripper, env.on_success) == (10, "open", "terminate")
    assert policy.chunk == chunk and getattr(policy, "crop_area", None) == crop
