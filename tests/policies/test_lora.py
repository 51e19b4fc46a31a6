"""Adapters beside frozen weights: what is trained, saved, merged and compared with."""

import json

import numpy as np
import pytest
import tiny_vla
import torch
from safetensors.torch import load_file, save_file
from tiny_vla import ONE, noise, observe, scored

from embodied.core.errors import CheckpointError
from embodied.policies import load_policy

pytest.importorskip("peft")
OBS = observe(2, ONE, ("go", "a b"))


def build(**options):
    return tiny_vla.build(spec=ONE, **options)


def logprobs(policy):
    return policy({"obs": OBS, "tokens": torch.full((2, 1, 2), 100)}).logprobs.detach()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    build().save_published(folder)
    return folder


@pytest.fixture
def adapted(base):
    """As after some training."""
    return move(build(pretrained=str(base), lora_rank=4, lora_scale=0.5))


@torch.no_grad()
def move(policy):
    draw = torch.Generator().manual_seed(1)
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            p.normal_(0, 0.05, generator=draw)
    return policy


@pytest.mark.parametrize("extra", [{}, {"use_dora": True, "rank_pattern": {"q_proj": 2}}], ids=["lora", "dora"])
def test_adapters_begin_without_effect_and_are_all_that_trains(base, extra):
    plain, made = build(pretrained=str(base)), build(pretrained=str(base), lora_rank=4, lora_config=extra)
    torch.testing.assert_close(logprobs(plain), logprobs(made), atol=1e-6, rtol=0)
    trained = {name for name, p in made.named_parameters() if p.requires_grad}
    assert all("lora_" in name or name.startswith("value_head.") for name in trained)
    scores = scored(made, OBS, made.act(OBS, noise(made, 2)))
    (scores.logprobs.sum() + scores.values.sum()).backward()
    assert all(p.grad is not None for p in made.parameters() if p.requires_grad)


def test_a_checkpoint_holds_adapters_and_finds_the_rest_where_it_was(adapted, base, tmp_path):
    adapted.save_pretrained(tmp_path / "saved")
    names = set(load_file(tmp_path / "saved" / "model.safetensors"))
    assert names and all("lora_" in name or name.startswith("value_head.") for name in names)
    assert torch.equal(logprobs(load_policy(tmp_path / "saved")), logprobs(adapted))
    again = build(pretrained=str(tmp_path / "saved"), lora_rank=4, lora_scale=0.5)
    assert torch.equal(logprobs(again), logprobs(adapted))
    (tmp_path / "saved" / "checksums.json").unlink()
    text = (tmp_path / "saved" / "config.json").read_text()
    (tmp_path / "saved" / "config.json").write_text(text.replace(str(base), str(tmp_path / "gone")))
    with pytest.raises(CheckpointError, match=f"adapters for the model in {tmp_path / 'gone'}"):
        load_policy(tmp_path / "saved")


def test_a_checkpoint_of_before_whose_layers_have_pefts_names_loads_as_it_was(adapted, base, tmp_path):
    for number, made in enumerate((adapted, build(lora_rank=4))):
        folder = tmp_path / str(number)
        made.save_pretrained(folder)
        (folder / "checksums.json").unlink()
        layers = {name.partition(".lora_A.")[0] for name in made.state_dict() if ".lora_A." in name}
        renamed = lambda name: name.removesuffix(".weight") + ".base_layer.weight"  # noqa: E731
        old = {f"{layer}.weight": renamed(f"{layer}.weight") for layer in layers}
        tensors = load_file(folder / "model.safetensors")
        save_file({old.get(name, name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        if "base_names" in config:
            config["base_names"] = {old.get(name, name): there for name, there in config["base_names"].items()}
        (folder / "config.json").write_text(json.dumps(config))
        assert torch.equal(logprobs(load_policy(folder)), logprobs(made))


def test_merged_weights_act_as_the_adapted_ones(adapted, tmp_path):
    adapted.save_published(tmp_path)
    made = build(pretrained=str(tmp_path))
    torch.testing.assert_close(logprobs(made), logprobs(adapted), atol=1e-5, rtol=0)
    assert not torch.allclose(logprobs(made), logprobs(build()), atol=1e-3)


def test_a_reference_copies_only_what_trains(adapted):
    before = logprobs(adapted)
    reference = adapted.reference()
    own, other = dict(adapted.named_parameters()), dict(reference.named_parameters())
    shared = {name for name in own if own[name].data_ptr() == other[name].data_ptr()}
    assert shared == {name for name, p in own.items() if not p.requires_grad}
    with torch.no_grad():
        for p in adapted.parameters():
            if p.requires_grad:
                p.add_(0.1)
    torch.testing.assert_close(logprobs(reference), before, atol=1e-6, rtol=0)  # its copies may be aligned otherwise
    assert (logprobs(adapted) - before).abs().max() > 1e-3


def test_frozen_towers_have_no_adapters():
    made = build(lora_rank=4, train="language")
    trained = {name for name, p in made.named_parameters() if p.requires_grad and "lora_" in name}
    assert trained and not any(name.startswith("vision_backbone.") for name in trained)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_adapters_of_a_flow_are_saved_alone_and_merged_for_others(family, tmp_path):
    folder = tiny_vla.publish(tmp_path / "there", family)
    given = {"pretrained": str(folder), "lora_rank": 2, "lora_scale": 0.5}
    made, obs = tiny_vla.build(family, **given), observe(2)
    assert made.reference().source is made.source, "its files are not copied into memory"
    frozen = {n for n, p in made.named_parameters() if not p.requires_grad}
    assert all(".paligemma_with_expert." in n and "lora" not in n for n in frozen)
    move(made)
    played = made.act(obs, noise(made, 2)).actions
    made.save_pretrained(tmp_path / "ours")
    begun = tiny_vla.build(family, 9, **given | {"pretrained": str(tmp_path / "ours")})
    begun.save_pretrained(tmp_path / "next")
    for policy in (load_policy(tmp_path / "ours"), begun, load_policy(tmp_path / "next")):
        assert np.array_equal(policy.act(obs, noise(policy, 2)).actions, played)
    made.save_published(tmp_path / "back")
    assert tiny_vla.weights_of(tmp_path / "back").keys() == tiny_vla.weights_of(folder).keys()
