"""The value of the text before each token: a head of ours on a language model, which no engine and no other program
gets."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_language import answers, apart, build, inputs_of, publish, theirs

from embodied.core.errors import CheckpointError
from embodied.policies import load_policy
from embodied.policies.policy_folder import read_weights

HEAD = {"value_head.weight", "value_head.bias"}
TURNS = [(0, [(False, [5, 6, 7]), (True, [8, 9]), (False, [10]), (True, [11])])]  # mask F F F T T F T
MIXED = [
    *answers([8, 9, 10], [11], [12, 8, 9, 40, 41], prompt=range(20, 29), group=4),
    *answers([50, 51], [50, 52, 53, 54], prompt=(30, 31, 32), group=2),
    *TURNS,
    (7, [(False, [5, 6, 7]), (True, [8])]),
]


def judging(seed=1, **options):
    """A policy with a head that has learned something."""
    policy = build(value_head=True, **{"preset": "tiny_gpt2", "dtype": "float64"} | options)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.value_head.parameters():
            p.normal_(0, 0.3, generator=draw)
    return policy


def values_by_hand(policy, inputs):
    """Conversation by conversation, with transformers' own forward."""
    tokens, mask, found = *(torch.from_numpy(inputs[name].reshape(-1)) for name in ("actions", "mask")), []
    for ids, sampled in zip(*(each.split(inputs["lengths"].tolist()) for each in (tokens, mask)), strict=True):
        states = policy.model.base_model(ids[None].long()).last_hidden_state[0]
        worth = states @ policy.value_head.weight[0] + policy.value_head.bias
        found.append(torch.where(sampled, torch.cat([worth[:1], worth[:-1]]), 0.0))
    return torch.cat(found)


@pytest.mark.parametrize("share", [True, False])
def test_values_are_those_of_separate_conversations_however_they_are_packed(share):
    policy, inputs = judging(), inputs_of(*MIXED) if share else apart(inputs_of(*MIXED))
    found, known = policy(inputs).values, values_by_hand(policy, inputs)
    assert (found - known).abs().max() < 1e-12 and found.std() > 0.1
    weights = torch.linspace(-1, 2, len(found), dtype=torch.float64)
    grads = []
    for values in (found, known):
        policy.zero_grad()
        (weights * values).sum().backward()
        grads.append([p.grad.clone() for p in policy.parameters() if p.grad is not None])
    for one, other in zip(*grads, strict=True):
        assert (one - other).abs().max() < 1e-12 * max(1.0, float(other.abs().max()))


def test_a_fresh_head_predicts_nothing_and_leaves_the_model_as_it_would_be():
    plain, policy = build(), build(value_head=True)
    assert plain.value_head is None and set(policy.state_dict()) - set(plain.state_dict()) == HEAD
    assert all(torch.equal(policy.state_dict()[name], weight) for name, weight in plain.state_dict().items())
    scores = policy(inputs_of(*TURNS))
    assert not scores.values.any() and torch.equal(scores.logprobs, plain(inputs_of(*TURNS)).logprobs)
    ((scores.values - 1) ** 2).sum().backward()
    assert policy.value_head.weight.grad.abs().max() > 0
    groups = policy.parameter_groups()
    assert [len(group) for group in groups.values()] == [len(plain.state_dict()), 2]


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2}, {"train_layers": 1}], ids=str)
def test_the_value_head_is_float32_and_trained_in_every_model(options):
    policy = build(value_head=True, dtype="bfloat16", **options)
    head = dict(policy.value_head.named_parameters())
    assert all(p.dtype == torch.float32 and p.requires_grad for p in head.values())
    with torch.no_grad():
        head["bias"].fill_(1 + 2**-12)  # no number of bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        values = policy(inputs_of(*TURNS)).values
    assert values.dtype == torch.float32 and set(values.tolist()) == {0.0, 1 + 2**-12}


@pytest.mark.parametrize("options", [{"preset": "tiny"}, {"preset": "tiny_gpt2"}], ids=str)
def test_the_value_head_is_saved_in_its_own_subfolder(options, tmp_path):
    policy = judging(dtype="float32", **options)
    policy.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(policy.state_dict()) - HEAD
    assert set(load_file(tmp_path / "values" / "model.safetensors")) == HEAD
    inputs = inputs_of(*MIXED)
    with torch.no_grad():
        logits = theirs(tmp_path)(torch.tensor([[5, 6, 7]])).logits
        assert torch.equal(logits, policy.model(torch.tensor([[5, 6, 7]])).logits)
    assert torch.equal(load_policy(tmp_path)(inputs).values, policy(inputs).values)
    again = build(pretrained=str(tmp_path), value_head=True)
    assert torch.equal(again(inputs).values, policy(inputs).values)
    assert torch.equal(build(pretrained=str(tmp_path))(inputs).logprobs, policy(inputs).logprobs)
    policy.save_published(tmp_path / "theirs")
    assert not (tmp_path / "theirs" / "values").exists()
    assert set(load_file(tmp_path / "theirs" / "model.safetensors")) == set(policy.state_dict()) - HEAD


def test_adapters_are_saved_with_the_head_beside_them(tmp_path):
    folder = publish(tmp_path / "model", "qwen3", True)
    policy = judging(pretrained=str(folder), lora_rank=2, dtype="float32")
    policy.save_pretrained(tmp_path / "ours")
    assert set(read_weights(tmp_path / "ours")) == set(policy.state_dict())
    assert all("lora_" in name for name in load_file(tmp_path / "ours" / "model.safetensors"))
    inputs = inputs_of(*TURNS)
    assert torch.equal(load_policy(tmp_path / "ours")(inputs).values, policy(inputs).values)
    assert "values" not in json.dumps(json.loads((tmp_path / "ours" / "config.json").read_text())["base_names"])


def test_engines_get_the_model_alone():
    policy = judging()
    assert set(policy.model_weights()) == set(policy.state_dict()) - HEAD


def test_a_run_begins_from_a_policy_with_or_without_a_head(tmp_path):
    plain, policy = build(preset="tiny_gpt2", dtype="float64", seed=5), judging()
    for name, each in (("plain", plain), ("judging", policy)):
        each.save_pretrained(tmp_path / name)
    head = {name: policy.state_dict()[name].clone() for name in HEAD}
    policy.begin_with(read_weights(tmp_path / "plain"))
    known = plain.state_dict() | head
    assert all(torch.equal(weight, known[name]) for name, weight in policy.state_dict().items())
    plain.begin_with(read_weights(tmp_path / "judging"))
    first = read_weights(tmp_path / "judging")
    assert all(np.array_equal(weight.numpy(), first[name]) for name, weight in plain.state_dict().items())
    with pytest.raises(CheckpointError, match="do not belong to this policy"):
        plain.begin_with({name: weight for name, weight in first.items() if "wpe" not in name})
