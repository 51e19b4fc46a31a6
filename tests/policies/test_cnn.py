"""The policy that sees: it scores as it acted, and says what it cannot look at."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from embodied.core import rng
from embodied.core.errors import ConfigError
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import make_policy
from embodied.policies.config import CNNConfig
from embodied.policies.networks import COLORS, FAR, Keypoints

SPEC = EnvSpec(ActionSpec(3), state_dim=5, images={"top": (16, 20, 3), "wrist": (12, 12, 3)})
SMALL = {"name": "cnn", "channels": (4, 4), "kernels": (4, 3), "strides": (2, 1), "features": 6, "hidden": (16,)}


def build(spec=SPEC, **options):
    return make_policy(CNNConfig(**{**SMALL, "dtype": "float64", **options}), spec, 0)


def observation(rows=5):
    r = np.random.default_rng(0)
    images = {name: r.integers(0, 256, (rows, *size), np.uint8) for name, size in SPEC.images.items()}
    return {"state": r.normal(size=(rows, 5)), "images": images}


def act(policy, obs):
    rows = len(obs["state"])
    noise = rng.normal(1, "act", np.arange(rows), np.zeros(rows, int), policy.noise_spec().width)
    return policy.act(obs, noise)


def test_tensors_are_answered_with_tensors():
    policy, obs = build(), observation()
    given = {
        "state": torch.from_numpy(obs["state"]),
        "images": {n: torch.from_numpy(i) for n, i in obs["images"].items()},
    }
    output, usual = act(policy, given), act(policy, obs)
    assert all(isinstance(part, torch.Tensor) for part in (output.actions, output.logprobs, output.values))
    assert all(isinstance(part, np.ndarray) for part in (usual.actions, usual.logprobs, usual.values))
    np.testing.assert_array_equal(output.actions.numpy(), usual.actions)


def knowing(rows=5):
    """Observations with two privileged numbers."""
    return {**observation(rows), "privileged": np.random.default_rng(1).normal(size=(rows, 2))}


def test_privileged_numbers_reach_the_critic_and_no_action():
    policy, obs = build(replace(SPEC, privileged_dim=2), estimate=True, normalize_observations=True), knowing()
    policy.merge_observation_moments(policy.observation_moments({n: obs[n][None] for n in ("state", "privileged")}))
    other = {**obs, "privileged": obs["privileged"] + 1}
    before, after = act(policy, obs), act(policy, other)
    np.testing.assert_array_equal(before.actions, after.actions)
    np.testing.assert_array_equal(before.logprobs, after.logprobs)
    assert (before.values != after.values).all()
    np.testing.assert_array_equal(act(policy, observation()).actions, before.actions)  # a robot that knows nothing
    unseen = {n: frames * 0 for n, frames in obs["images"].items()}
    np.testing.assert_array_equal(policy.value({**obs, "images": unseen}), before.values)


def test_estimates_are_trained_in_deviations_of_each_number():
    policy, obs = build(replace(SPEC, privileged_dim=2), estimate=True, normalize_observations=True), knowing(50)
    obs["privileged"] = obs["privileged"] * [10, 0.1] + 5
    policy.merge_observation_moments(policy.observation_moments({n: obs[n][None] for n in ("state", "privileged")}))
    torch.nn.init.zeros_(policy.estimator[0].weight)  # every estimate is the mean: the error is one deviation
    output = act(policy, obs)
    scores = policy({"obs": obs, "actions": torch.from_numpy(output.actions), **output.replay})
    z = (obs["privileged"] - obs["privileged"].mean(0)) / obs["privileged"].std(0)
    wanted = np.where(np.abs(z) < 1, z**2 / 2, np.abs(z) - 0.5).mean(-1)
    np.testing.assert_allclose(scores.own_loss.detach().numpy(), wanted, atol=0.02)  # 0.01 is added to deviation 0.1
    scores.own_loss.sum().backward()
    assert policy.estimator[0].weight.grad.abs().max() > 0


def test_training_the_estimator_does_not_change_log_probs():
    policy, obs = build(replace(SPEC, privileged_dim=2), estimate=True), knowing()
    output = act(policy, obs)
    torch.nn.init.ones_(policy.estimator[0].weight)
    scores = policy({"obs": obs, "actions": torch.from_numpy(output.actions), **output.replay})
    np.testing.assert_allclose(scores.logprobs.detach().numpy(), output.logprobs, atol=1e-12)
    scores.logprobs.sum().backward()
    assert policy.estimator[0].weight.grad is None


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"images": {}}, {}, r"set env\.cameras .*, or try policy\.name=mlp"),
        ({}, {"estimate": True}, r"set env\.privileged=true"),
        ({}, {"kernels": (4, 7)}, r"need images of 16x16 pixels or more, and those of camera 'wrist' are 12x12"),
    ],
)
def test_images_that_the_cnn_cannot_read_are_refused(change, options, words):
    with pytest.raises(ConfigError, match=words):
        build(replace(SPEC, **change), **options)


@pytest.mark.parametrize("keypoints", [False, True])
def test_the_smallest_images_that_it_names_are_large_enough(keypoints):
    options = CNNConfig(name="cnn", keypoints=keypoints)
    least = options.least_image_side
    policy = make_policy(options, EnvSpec(ActionSpec(3), images={"top": (least, least, 3)}), 0)
    frames = np.zeros((1, least, least, 3), np.uint8)
    assert policy.trunks["top"](policy._pixels(frames)).isfinite().all()
    with pytest.raises(ConfigError, match=f"need images of {least}x{least} pixels or more"):
        make_policy(options, EnvSpec(ActionSpec(3), images={"top": (least, least - 1, 3)}), 0)


def test_a_keypoint_is_the_place_of_a_spot_wherever_it_is():
    maps = torch.zeros(3, 2, 7, 13)
    maps[:, 0, [0, 3, 6], [0, 6, 9]] = torch.eye(3) * 50  # a spot in another corner, the middle, further right
    places = Keypoints()(maps).view(3, 2, 2).swapaxes(1, 2)  # [rows, channels, (down, across)]
    torch.testing.assert_close(places[:, 0], torch.tensor([[-1.0, -1.0], [0.0, 0.0], [1.0, 0.5]]) * FAR)
    torch.testing.assert_close(places[:, 1], torch.zeros(3, 2))  # of a flat map the middle


def test_colors_tell_where_a_spot_is_before_anything_has_learned():
    spec = EnvSpec(ActionSpec(3), images={"top": (64, 64, 3)})
    policy = make_policy(CNNConfig(name="cnn", encoder="colors", dtype="float64"), spec, 0)
    frames = np.full((3, 64, 64, 3), (200, 120, 60), np.uint8)
    centres = [(12, 32), (32, 32), (52, 10)]
    for frame, (down, across) in zip(frames, centres, strict=True):
        frame[down - 2 : down + 2, across - 2 : across + 2] = (40, 60, 160)
    positions = policy.encode({"images": {"top": frames}}).view(3, 2, COLORS).swapaxes(1, 2)
    wanted = (torch.tensor(centres)[:, None] - 32) / 31 * FAR / 2
    nearest = (positions - wanted).abs().amax((0, 2)).min()
    assert nearest < FAR / 64  # a pixel
