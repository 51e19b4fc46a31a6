"""Which layers get adapters, as the published recipes choose them, and adapters that peft made."""

import json
import shutil
import warnings
from dataclasses import replace
from importlib.util import find_spec

import pytest
import tiny_vla
import torch
from safetensors.torch import load_file, save_file
from tiny_vla import ONE, Whole, change_json, observe

from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.types import ActionSpec
from embodied.evaluate import main as evaluate
from embodied.policies import load_policy, make_policy, policy_class
from embodied.policies.openvla.config import OpenVLAConfig

peft = pytest.importorskip("peft")
OBS = observe(2, ONE, ("go", "a b"))


def build(**options):
    return tiny_vla.build(spec=ONE, **options)


def logprobs(policy):
    return policy({"obs": OBS, "tokens": torch.full((2, 1, 2), 100)}).logprobs.detach()


def counts(policy):
    """Adapted layers, and the adapters' weights."""
    found = [(name, p) for name, p in policy.named_parameters() if "lora_" in name]
    assert all(p.requires_grad for _, p in found)
    return len(found) // 2, sum(p.numel() for _, p in found)


def test_the_reference_adapts_71_layers_of_a_tiny_model_and_linear_55():
    assert counts(build(lora_rank=4, lora_targets="reference"))[0] == 71
    assert counts(build(lora_rank=4))[0] == 55


@pytest.mark.parametrize(("targets", "expected"), [("reference", 110_828_288), ("linear", 107_862_016)])
def test_a_model_of_7b_gets_as_many_weights_as_the_reference(targets, expected):
    config = OpenVLAConfig(name="openvla", preset="full", dtype="bfloat16", lora_rank=32, lora_targets=targets)
    spec = replace(ONE, action=ActionSpec(7))
    shapes = policy_class("openvla").for_memory_estimate(config, spec)  # no weight is touched
    assert counts(shapes)[1] == expected


@pytest.mark.parametrize("way", ["kaiming", "gaussian"])
def test_adapters_begin_as_peft_begins_them(way):
    made = build(lora_rank=8, lora_targets="reference", lora_init=way)
    chosen = {"language_model.lm_head", "vision_backbone.featurizer.patch_embed.proj"}
    own, model = dict(made.named_parameters()), build()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = peft.LoraConfig(r=8, target_modules=list(chosen), init_lora_weights=way == "kaiming" or way)
        wrapped = dict(peft.get_peft_model(model, config).named_parameters())
    for layer in chosen:
        name = f"{layer}.lora_A.default.weight"
        ours, theirs = own[name].detach(), wrapped[f"base_model.model.{name}"].detach()
        assert ours.shape == theirs.shape
        assert float(ours.std()) == pytest.approx(float(theirs.std()), rel=0.1)
        assert float(ours.abs().max()) == pytest.approx(float(theirs.abs().max()), rel=0.02 if way == "kaiming" else 1)
        assert not own[f"{layer}.lora_B.default.weight"].any()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    build().save_published(folder)
    return folder


ALL = sorted(Whole(build()).linear_layers())


@pytest.fixture(scope="module")
def official(base, tmp_path_factory):
    """What OpenVLA's finetune.py leaves: adapters of rank r with alpha min(r, 16) on all that is called as a linear
    layer is (peft 0.11.1's all-linear), after some training."""
    folder = tmp_path_factory.mktemp("adapters")
    whole = Whole(build(pretrained=str(base)))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = peft.get_peft_model(
            whole, peft.LoraConfig(r=32, lora_alpha=16, target_modules=ALL, init_lora_weights=False)
        )
    with warnings.catch_warnings():  # peft saves lm_head's own weights beside its adapter, and says so
        warnings.simplefilter("ignore", UserWarning)
        model.save_pretrained(folder)
    return folder


def test_a_checkpoint_of_such_a_policy_is_loaded_as_it_was(official, base, tmp_path):
    made = build(pretrained=str(base), lora_path=str(official))
    made.save_pretrained(tmp_path / "saved")
    assert torch.equal(logprobs(load_policy(tmp_path / "saved")), logprobs(made))
    acting = make_policy(made.config.model_copy(update={"lora_path": str(official)}), ONE)
    assert acting.stored_weights().keys() == made.state_dict().keys()


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        ({"use_qalora": True}, {}, "use_qalora=True, which is not supported"),
        ({"r": 10**12}, {}, "its rank r is 1000000000000"),
        ({"lora_alpha": float("nan")}, {}, "lora_scale|lora_alpha"),
        ({"rank_pattern": {"([a-z.]+)+x": 4}}, {}, "could take forever to match"),
        ({"target_modules": ["q_proj"]}, {}, "the policy has no such adapter"),
        ({}, {"lora_rank": 4}, "policy.lora_rank=4, but the adapters in .* have 32"),
        (None, {}, "adapter_config.json is missing"),
    ],
)
def test_adapters_that_cannot_be_taken_are_refused(official, base, tmp_path, change, options, reason):
    if change is not None:
        config = json.loads((official / "adapter_config.json").read_text()) | change
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        (tmp_path / "adapter_model.safetensors").symlink_to(official / "adapter_model.safetensors")
    with pytest.raises((CheckpointError, ConfigError), match=reason):
        build(pretrained=str(base), lora_path=str(tmp_path), **options)


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        ({"target_modules": ALL, "r": 32, "lora_alpha": 16}, 71),
        ({"target_modules": r".*language_model.*\.(q|v)_proj"}, 8),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1, 2]}, 4),
        ({"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj"]}, 4),
        ({"target_modules": ["q_proj"], "use_rslora": True}, 4),
        ({"target_modules": ["q_proj", "patch_embed.proj", "lm_head"], "use_dora": True}, 7),
        ({"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"1.+q_proj": 3}}, 8),
        ({"target_modules": ["q_proj"], "modules_to_save": ["projector.fc1", "v_proj"]}, 4),
    ],
)
def test_whatever_peft_adapts_acts_merges_and_goes_back_as_there(base, tmp_path, asked, count):
    policy = build(pretrained=str(base))
    model = peft.get_peft_model(
        Whole(policy), peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "init_lora_weights": False} | asked)
    )
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "magnitude" in name or "modules_to_save" in name:
                p.mul_(torch.empty_like(p).uniform_(0.5, 1.5, generator=draw))
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    model.merge_and_unload()
    made = build(pretrained=str(base), lora_path=str(tmp_path))
    assert len([name for name, _ in made.named_parameters() if "lora_A" in name]) == count
    torch.testing.assert_close(logprobs(made), logprobs(policy), atol=1e-4, rtol=0)
    theirs = policy.state_dict()
    for name, tensor in made.published_weights().items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-5, rtol=1e-5)
    made.save_adapters(tmp_path / "back")
    before, after = (load_file(path / "adapter_model.safetensors") for path in (tmp_path, tmp_path / "back"))
    assert all(torch.equal(before[name], after.pop(name)) for name in before if name in after) and not after
    again = build(pretrained=str(base), lora_path=str(tmp_path / "back"))
    assert torch.equal(logprobs(again), logprobs(made))


def test_adapters_are_counted_and_evaluated_with_their_model(official, base, tmp_path, capsys):
    config = OpenVLAConfig(name="openvla", pretrained=str(base), lora_path=str(official))
    assert counts(policy_class("openvla").for_memory_estimate(config, ONE))[0] == 71
    if find_spec("libero"):
        place = shutil.copytree(base, tmp_path / "base")
        figures = {"q01": [-1.0] * 7, "q99": [1.0] * 7}
        change_json(place / "config.json", norm_stats={"libero_goal": {"action": figures}})
        told = [f"checkpoint={place}", f"policy.lora_path={official}", "env.name=libero", "env.task=libero_goal"]
        assert evaluate([*told, "--dry-run"]) == 0
        assert f"policy.lora_path={official}" in capsys.readouterr().out


def test_adapters_beside_changed_weights_are_refused(official, base, tmp_path):
    tensors = load_file(official / "adapter_model.safetensors")
    name = "base_model.model.language_model.lm_head.base_layer.weight"
    save_file(tensors | {name: tensors[name] + 1}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text((official / "adapter_config.json").read_text())
    with pytest.raises(CheckpointError, match=r"changes language_model\.lm_head\.weight"):
        build(pretrained=str(base), lora_path=str(tmp_path))


def test_targets_can_be_named_and_must_exist():
    assert counts(build(lora_rank=4, lora_targets=("q_proj", "v_proj")))[0] == 8
    with pytest.raises(ConfigError, match="names no trained layer"):
        build(lora_rank=4, lora_targets=("qq_proj",))
    with pytest.raises(ConfigError, match=r"policy\.pretrained=FOLDER too"):
        build(lora_path="somewhere")
