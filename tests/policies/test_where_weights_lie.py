"""Families compute where their weights lie. The meta device stands for a GPU: it mixes with no other."""

import numpy as np
import pytest
import torch

from embodied.data import ActionSpec, EnvSpec
from embodied.policies import make_policy
from embodied.policies.config import OpenVLAConfig, OpenVLAOFTConfig, Pi0Config

ROWS = 2
SPEC = EnvSpec(ActionSpec(3), state_dim=4, images={"top": (16, 16, 3)}, instruction=True)
FAMILIES = {
    "openvla": OpenVLAConfig(name="openvla", temperature=1.6),
    "discrete": OpenVLAOFTConfig(name="openvla_oft", chunk=2, proprio=True, film=True),
    "l1": OpenVLAOFTConfig(name="openvla_oft", chunk=2, head="l1", train="language"),
    "words": OpenVLAConfig(name="openvla", sft_loss="vocabulary", lora_rank=2, lora_targets="reference"),
    "chunks of words": OpenVLAOFTConfig(name="openvla_oft", chunk=2, sft_loss="vocabulary"),
    "augmented": Pi0Config(name="pi0", augment=True),
    "flow_sde": Pi0Config(name="pi0", train="all"),
    "flow_noise": Pi0Config(name="pi0", exploration="flow_noise"),
    "pi05": Pi0Config(name="pi05"),
}


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_scores_and_losses_are_computed_on_the_policys_device(config, monkeypatch):
    if getattr(config, "lora_rank", None):
        pytest.importorskip("peft")
    draw, policy = np.random.default_rng(0), make_policy(config, SPEC, 0).eval()
    frames = draw.integers(0, 256, (ROWS, 16, 16, 3), np.uint8)
    obs = {"images": {"top": frames}, "state": draw.normal(size=(ROWS, 4)), "instruction": ["push the cube", "go"]}
    output = policy.act(obs, numbers(policy.noise_spec(), draw))
    replay = {name: torch.from_numpy(array) for name, array in output.replay.items()}
    asked = {"obs": obs, "actions": torch.from_numpy(output.actions)}
    policy.to("meta")
    fetched = lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype)  # noqa: E731 (for the state in a prompt)
    monkeypatch.setattr(torch.Tensor, "cpu", fetched)
    scores = policy(asked | replay)
    shown = torch.zeros(ROWS, policy.horizon, 3)
    wanted = policy.imitation_noise()
    losses = policy.imitate(
        asked | {"actions": shown, "mask": torch.ones(shown.shape[:2]) > 0}, wanted and numbers(wanted, draw)
    )
    (scores.logprobs.sum() + scores.entropy.sum() + scores.values.sum() + losses.sum()).backward()
    found = (scores.logprobs, scores.entropy, scores.values, losses, *policy.frozen_features(obs).values())
    assert {tensor.device.type for tensor in found} == {"meta"}
    assert any(parameter.grad is not None for parameter in policy.parameters())


def numbers(wanted, draw):
    size = (ROWS, wanted.width)
    return draw.random(size) if wanted.kind == "uniform" else draw.normal(size=size)
