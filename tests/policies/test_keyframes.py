"""What imitation teaches the vision encoder besides actions: where the robot will be at the next keyframe and at the
end."""

import numpy as np
import pytest
import tiny_vla
import torch
from tiny_vla import observe

from embodied.policies import load_policy
from embodied.policies.policy_folder import read_weights

FAMILIES = {"pi0": {"chunk": 4}, "openvla_oft": {"chunk": 4, "head": "l1", "proprio": True}, "openvla": {}}
FAMILIES["smolvla"] = {"chunk": 4}
EYES = {"pi0": "vision_tower", "openvla_oft": "featurizer", "openvla": "featurizer", "smolvla": "vision_model"}


def build(family, **options):
    return tiny_vla.build(family, **FAMILIES[family] | options)


def demonstrated(policy, rows=3):
    draw = np.random.default_rng(0)
    actions = torch.from_numpy(draw.uniform(-1, 1, (rows, policy.horizon, 3)).astype(np.float32))
    states = torch.from_numpy(draw.uniform(-1, 1, (rows, 2, 4)).astype(np.float32))
    noise = policy.imitation_noise()
    inputs = {"obs": observe(rows, texts=["go"]), "actions": actions, "keyframes": states}
    inputs["mask"] = torch.ones(rows, policy.horizon, dtype=bool)
    return inputs, None if noise is None else draw.normal(size=(rows, noise.width))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_that_of_the_asked_numbers_at_both_places(family):
    policy = build(family, keyframes=[2, 0])
    inputs, noise = demonstrated(policy)
    with torch.no_grad():
        policy.keyframe_head.weight.zero_()
        policy.keyframe_head.bias.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    losses, beside = policy.imitate(inputs, noise)
    wanted = policy.unit_state(inputs["keyframes"])[:, :, [2, 0]].flatten(1) - torch.tensor([0.1, 0.2, 0.3, 0.4])
    torch.testing.assert_close(beside, wanted.square().mean(1).float())
    plain = build(family)
    plain.begin_with({name: tensor.numpy() for name, tensor in policy.state_dict().items()})
    assert torch.equal(losses, plain.imitate(inputs, noise))


@pytest.mark.parametrize("family", FAMILIES)
def test_keyframe_imitation_trains_only_the_vision_encoder_and_its_head(family):
    policy = build(family, keyframes=[1])
    policy.imitate(*demonstrated(policy))[1].sum().backward()
    taught = {name for name, p in policy.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert any(EYES[family] in name for name in taught) and "keyframe_head.weight" in taught
    assert not any("language_model" in name or "gemma_expert" in name for name in taught)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_keyframe_loss_of_a_row_depends_on_its_own_images_only(family):
    policy = build(family, keyframes=[1, 3])
    inputs, noise = demonstrated(policy)
    _, together = policy.imitate(inputs, noise)
    for row in range(3):
        pick = slice(row, row + 1)
        obs = {"images": {name: part[pick] for name, part in inputs["obs"]["images"].items()}}
        obs |= {"state": inputs["obs"]["state"][pick], "instruction": ["go"]}
        one = {"obs": obs, **{name: inputs[name][pick] for name in ("actions", "mask", "keyframes")}}
        torch.testing.assert_close(policy.imitate(one, None if noise is None else noise[pick])[1], together[pick])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_keeps_the_keyframe_head_and_rl_drops_it(family, tmp_path):
    policy = build(family, keyframes=[1])
    policy.save_pretrained(tmp_path)
    assert torch.equal(load_policy(tmp_path).keyframe_head.weight, policy.keyframe_head.weight)
    weights = read_weights(tmp_path)
    without = build(family)
    without.begin_with(weights)
    assert not [name for name in without.state_dict() if "keyframe" in name]
    again = build(family, keyframes=[2])
    drawn = again.keyframe_head.weight.clone()
    again.begin_with({name: tensor for name, tensor in weights.items() if "keyframe" not in name})
    assert torch.equal(again.keyframe_head.weight, drawn)
