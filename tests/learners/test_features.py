"""What frozen towers see is computed once for all epochs of an update, and makes no difference."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from embodied.core.arrays import text_arrays
from embodied.core.types import ActionSpec, EnvSpec
from embodied.learners import model
from embodied.learners.config import LearnerConfig
from embodied.learners.model import Model
from embodied.learners.train_batch import RankBatch, frozen_features
from embodied.policies import make_policy
from embodied.policies.openvla.config import OpenVLAConfig, OpenVLAOFTConfig
from embodied.policies.pi0.config import Pi0Config

CAMERAS = {"top": (64, 64, 3), "wrist": (64, 64, 3)}
FAMILIES = {
    "openvla": OpenVLAConfig(name="openvla", camera="top", train="language"),
    "openvla_oft": OpenVLAOFTConfig(name="openvla_oft", chunk=2, train="language"),
    "pi05": Pi0Config(name="pi05", chunk=2, steps=2, train="expert"),
    "pi0": Pi0Config(name="pi0", chunk=2, steps=2, train="expert"),
}


def batch_of(policy, rows=5):
    draw = np.random.default_rng(0)
    images = {name: draw.integers(0, 256, (rows, *size), np.uint8) for name, size in policy.spec.images.items()}
    obs = {"images": images, "state": draw.normal(size=(rows, 3)), "instruction": ["go", "pick it up"] * 2 + ["go"]}
    spec = policy.noise_spec()
    noise = draw.random((rows, spec.width)) if spec.kind == "uniform" else draw.normal(size=(rows, spec.width))
    output = policy.act(obs, noise)
    played = {
        "mask": np.ones(output.actions.shape[:2], bool),
        "current": np.ones(rows, bool),
        "sequences": np.arange(rows),
    }
    arrays = {"actions": output.actions, "logprobs": output.logprobs} | played
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    obs = obs | {"images": {n: torch.from_numpy(i) for n, i in images.items()}, "state": torch.from_numpy(obs["state"])}
    replay = {name: torch.from_numpy(array) for name, array in output.replay.items()}
    return RankBatch(obs=text_arrays(obs), replay=replay, numbers=np.arange(rows), **tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_from_cached_features_read_no_image(family, monkeypatch):
    config = FAMILIES[family]
    spec = EnvSpec(ActionSpec(2), state_dim=3, images=CAMERAS, instruction=True)
    policy = make_policy(config, spec, 0).eval()
    batch = batch_of(policy)
    kept = frozen_features(Model(policy, LearnerConfig()), batch, 2)
    known, items = replace(batch, replay=batch.replay | kept), torch.tensor([3, 0, 4])
    wanted = policy(batch.inputs(items))
    for image in batch.obs["images"].values():
        image.zero_()
    found = policy(known.inputs(items))
    torch.testing.assert_close(found.logprobs, wanted.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.values, wanted.values, atol=1e-5, rtol=1e-5)
    if family != "pi0":  # whose value is read at the state
        assert not torch.allclose(policy(batch.inputs(items)).values, wanted.values, atol=1e-4)
    trained = make_policy(config.model_copy(update={"train": "all"}), spec).eval()
    assert not frozen_features(Model(trained, LearnerConfig()), batch, 2)
    monkeypatch.setattr(model, "KEPT_BYTES", sum(map(size_of_one, kept.values())) * len(batch) // 2)
    assert not frozen_features(Model(policy, LearnerConfig()), batch, 2), "more than may be kept"


def size_of_one(tensor):
    return tensor[0].nbytes


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-4), ("bfloat16", 0.3)])
def test_cached_features_give_the_log_probs_of_acting(dtype, atol):
    """Up to rounding: prompts that are cached are padded, and rows that are padded otherwise round otherwise; other
    images would change the log-probs by 3."""
    spec = EnvSpec(ActionSpec(2), state_dim=3, images=CAMERAS, instruction=True)
    policy = make_policy(FAMILIES["pi0"].model_copy(update={"dtype": dtype}), spec, 0).eval()
    batch = batch_of(policy)
    kept = frozen_features(Model(policy, LearnerConfig()), batch, 2)
    for known in (batch, replace(batch, replay=batch.replay | kept)):
        found = policy(known.inputs(torch.arange(len(batch)))).logprobs
        torch.testing.assert_close(found, batch.logprobs, atol=atol, rtol=0)


@pytest.mark.parametrize("family", ["openvla", "openvla_oft"])
def test_in_half_precision_acting_and_learning_differ_by_no_more_than_either_from_the_exact_numbers(family):
    """A policy acts a token at a time, or on other rows than are learned from at once. Kernels sum up matrices of other
    shapes in another order, and bfloat16 rounds what comes out: to one part in 256."""
    spec = EnvSpec(ActionSpec(7), state_dim=3, images=CAMERAS, instruction=True)
    policy = make_policy(FAMILIES[family], spec, 0).eval()
    with torch.autocast("cpu", torch.bfloat16):
        batch = batch_of(policy)
    parts = torch.arange(len(batch)).split(2)

    def scored(enabled):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return torch.cat([policy(batch.inputs(items)).logprobs for items in parts])

    learned, exact = scored(True), scored(False)
    gap, of_precision = (learned - batch.logprobs).abs(), (learned - exact).abs()
    assert gap.mean() < 1.5 * of_precision.mean() and gap.max() < 2**-5
    exact_gap = exact - batch_of(policy).logprobs  # of the same tokens where all are drawn alike
    assert exact_gap.abs().median() < 1e-5
