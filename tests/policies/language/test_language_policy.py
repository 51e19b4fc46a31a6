"""Language models as policies: their folders, what is trained of them, and heads that are embeddings."""

import json
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from tiny_language import SPEC, TALKS, answers, build, inputs_of, publish, theirs

from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.plugins import OURS
from embodied.policies import load_policy, policy_class
from embodied.policies.config import PolicyConfig
from embodied.policies.language.config import LanguageConfig
from embodied.policies.policy_folder import published_family, read_description, read_weights
from embodied.runtime.published_weights import tensor_of

INPUTS = inputs_of(*answers([8, 9, 10], [11, 1]))
KINDS = [("gpt2", True), ("gpt2", False), ("llama", True), ("llama", False), ("qwen3", True), ("qwen3", False)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    return {each: publish(root / f"{each[0]}-{each[1]}", *each) for each in KINDS}


def logits(model, ids=(5, 6, 7, 8)):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits


def logprobs(policy):
    return policy(INPUTS).logprobs.detach()


# Folders


@pytest.mark.parametrize("preset", ["tiny", "tiny_gpt2"])
def test_a_preset_is_drawn_by_the_seed_alone_and_saved_whole(preset, tmp_path):
    before = torch.random.get_rng_state()
    policy = build(preset=preset)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(logprobs(build(preset=preset)), logprobs(policy))
    assert not torch.equal(logprobs(build(preset=preset, seed=1)), logprobs(policy))
    assert 0.6e6 < sum(p.numel() for p in policy.parameters()) < 0.7e6
    policy.save_pretrained(tmp_path)
    assert torch.equal(logits(theirs(tmp_path)), logits(policy.model))
    assert torch.equal(logprobs(load_policy(tmp_path)), logprobs(policy))
    config, spec = read_description(tmp_path)
    assert (config, spec) == (policy.config, SPEC)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path)("a b")["input_ids"] == policy.tokenizer.encode("a b", first=True)


def test_names_may_lack_what_all_names_of_a_model_begin_with(folders, tmp_path):
    known = build(pretrained=str(folders["gpt2", True]))
    bare = publish(tmp_path, "gpt2", True)
    stored = {name.removeprefix("transformer."): part for name, part in load_file(bare / "model.safetensors").items()}
    save_file(stored | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, bare / "model.safetensors")
    assert torch.equal(logprobs(build(pretrained=str(bare))), logprobs(known))


def rewritten(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def described(folder, **about):
    path = folder / "config.json"
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | about))


CODE = {"model_type": "new", "auto_map": {"AutoConfig": "new.Config"}}
LOST = "model.norm.weight"
REFUSED = {  # how the folder of a Llama is changed, options, words
    "no config": (lambda folder: (folder / "config.json").unlink(), {}, r"config\.json is missing"),
    "pictures": (lambda folder: described(folder, model_type="vit"), {}, "a vit, which is not a causal language model"),
    "code": (lambda folder: described(folder, **CODE), {}, "needs code of its own .*, and no code of a folder is run"),
    "names": (
        lambda folder: rewritten(folder, lambda stored: stored.update({"model.other.weight": stored.pop(LOST)})),
        {},
        r"model\.norm\.weight, model\.other\.weight",
    ),
    "scaled": (lambda folder: described(folder, final_logit_softcapping=30.0), {}, "softcapping is not supported"),
    "long": (None, {"max_length": 300}, r"max_length=300 is more than this model's 256 positions; try .*=256"),
    "layers": (None, {"train_layers": 3}, "train_layers=3, but this model has 2 layers"),
    "tied": (None, {"lora_rank": 2, "lora_targets": "reference"}, "tied to its embeddings"),
    "not linear": (None, {"pretrained": None, "preset": "tiny_gpt2", "lora_rank": 2}, "a gpt2 are not linear layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_or_an_option_that_does_not_fit_is_named(name, tmp_path):
    change, options, words = REFUSED[name]
    folder = publish(tmp_path, "llama", True)
    (folder / "new.py").write_text("raise SystemExit('code of a stranger')")
    if change:
        change(folder)
    with pytest.raises((CheckpointError, ConfigError), match=words):
        build(**{"pretrained": str(folder)} | options)


def test_a_published_model_is_known_as_one_and_says_how_to_use_it(folders, tmp_path):
    folder = folders["qwen3", False]
    assert published_family(folder) == "language"
    with pytest.raises(CheckpointError, match=rf"policy\.name=language policy\.pretrained={folder}"):
        read_description(folder)
    described(tmp_path, model_type="qwen2_vl", architectures=["Qwen2VLForConditionalGeneration"])
    with pytest.raises(CheckpointError, match="holds a qwen2_vl, and models of this kind are not supported") as caught:
        read_description(tmp_path)
    assert "policy.name" not in str(caught.value)


def test_a_conversation_is_as_long_as_the_model_has_positions_or_less(folders):
    folder = str(folders["llama", False])
    assert build(pretrained=folder).max_length == 256
    assert build(pretrained=folder, max_length=100).max_length == 100


@pytest.mark.parametrize("name", OURS["embodied.families"])
def test_options_say_of_every_family_whether_it_speaks(name):
    options = TypeAdapter(PolicyConfig).validate_python({"name": name})
    assert options.speaks == policy_class(name).speaks


# Tied heads


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_a_tied_head_is_one_weight_however_weights_arrive(folders, kind, tmp_path):
    policy = build(pretrained=str(folders[kind, True]))
    words = "transformer.wte.weight" if kind == "gpt2" else "model.embed_tokens.weight"
    names = [name for name, _ in policy.named_parameters()]
    assert sorted(names) == sorted(policy.state_dict()) and "lm_head.weight" not in names

    def check_tied(policy, number):
        head, table = policy.model.get_output_embeddings(), policy.model.get_input_embeddings()
        assert head.weight is table.weight and (head.weight == number).all()

    whole = {name: torch.full_like(part, 0.5) for name, part in policy.state_dict().items()}
    policy.use_weights(whole)
    check_tied(policy, 0.5)
    assert policy.state_dict()[words].data_ptr() == whole[words].data_ptr()
    policy.load_weights({name: np.full(tuple(part.shape), 0.25, np.float32) for name, part in whole.items()})
    check_tied(policy, 0.25)
    check_tied(deepcopy(policy), 0.25)
    check_tied(policy.reference(), 0.25)
    policy.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(names)
    check_tied(load_policy(tmp_path), 0.25)
    with pytest.raises(CheckpointError, match="lm_head"):
        policy.load_weights(whole | {"lm_head.weight": whole[words]})
    counted = policy.to("meta")
    assert counted.model.get_output_embeddings().weight.is_meta


def test_a_folder_that_names_a_tied_head_too_is_read(tmp_path):
    folder = publish(tmp_path, "llama", True)
    stored = load_file(folder / "model.safetensors")
    known = logprobs(build(pretrained=str(folder)))
    save_file(stored | {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    assert torch.equal(logprobs(build(pretrained=str(folder))), known)


def test_gradients_of_head_and_embeddings_add_up_in_a_tied_weight(folders):
    policy = build(pretrained=str(folders["gpt2", True]), dtype="float64")
    mask, known = torch.from_numpy(INPUTS["mask"])[:, :, None], theirs(folders["gpt2", True], torch.float64)
    policy(INPUTS).logprobs.sum().backward()
    ids = torch.from_numpy(INPUTS["actions"].reshape(-1).astype(np.int64)).split(INPUTS["lengths"].tolist())
    sampled = mask.reshape(-1).split(INPUTS["lengths"].tolist())
    for one, where in zip(ids, sampled, strict=True):
        likely = known(one[None]).logits[0].log_softmax(-1)
        likely[:-1].gather(1, one[1:, None])[where[1:]].sum().backward()
    for (name, mine), other in zip(policy.named_parameters(), known.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-12, rtol=1e-9, msg=name)


# What is trained


def trained(policy):
    return {name for name, p in policy.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_only_the_last_layers_and_the_final_norm_are_trained(folders, kind):
    policy = build(pretrained=str(folders[kind, True]), train_layers=1)
    last = ("transformer.h.1.", "transformer.ln_f.") if kind == "gpt2" else ("model.layers.1.", "model.norm.")
    assert trained(policy) == {name for name in policy.state_dict() if name.startswith(last)}
    policy(INPUTS).logprobs.sum().backward()
    assert {name for name, p in policy.named_parameters() if p.grad is not None} == trained(policy)


@pytest.fixture
def adapted(folders):
    """As after some training."""
    policy = build(pretrained=str(folders["qwen3", True]), lora_rank=2, lora_scale=0.5)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=draw)
    return policy


def test_adapters_begin_without_effect_and_are_all_that_is_trained(folders):
    plain, policy = (build(pretrained=str(folders["qwen3", True]), lora_rank=rank) for rank in (None, 2))
    assert torch.equal(logprobs(plain), logprobs(policy))
    assert trained(policy) and all("lora_" in name for name in trained(policy))
    assert not any("lm_head" in name for name in policy.state_dict())
    policy(INPUTS).logprobs.sum().backward()
    assert all(p.grad is not None for p in policy.parameters() if p.requires_grad)


def test_adapters_are_saved_beside_the_name_of_their_model_and_merged_for_others(adapted, folders, tmp_path):
    adapted.save_pretrained(tmp_path / "ours")
    assert all("lora_" in name for name in load_file(tmp_path / "ours/model.safetensors"))
    assert torch.equal(logprobs(load_policy(tmp_path / "ours")), logprobs(adapted))
    assert set(read_weights(tmp_path / "ours")) == set(adapted.state_dict())
    adapted.save_published(tmp_path / "theirs")
    assert (logits(theirs(tmp_path / "theirs")) - logits(adapted.model)).abs().max() < 1e-5
    assert (logits(adapted.model) - logits(theirs(folders["qwen3", True]))).abs().max() > 1e-2
    assert "policy" not in json.loads((tmp_path / "theirs/config.json").read_text())


def test_a_reference_keeps_its_adapters_and_shares_the_rest(adapted):
    known, reference = logprobs(adapted), adapted.reference()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.mul_(2)
    assert torch.equal(logprobs(reference), known) and not torch.equal(logprobs(adapted), known)
    mine, others = adapted.state_dict(), reference.state_dict()
    assert all((mine[n].data_ptr() == others[n].data_ptr()) != ("lora_" in n) for n in mine)


def test_adapters_with_the_last_layers_are_in_these_alone(folders):
    policy = build(pretrained=str(folders["qwen3", False]), lora_rank=2, train_layers=1)
    assert {name.split(".")[2] for name in trained(policy)} == {"1"}


def test_a_head_of_its_own_takes_an_adapter():
    assert any("lm_head.lora_" in n for n in trained(build(lora_rank=2, lora_targets="reference")))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_weights_have_the_asked_precision_but_positions_do_not_lose_theirs(folders, dtype):
    policy = build(pretrained=str(folders["llama", False]), dtype=dtype, lora_rank=2)
    assert {p.dtype for p in policy.parameters()} == {getattr(torch, dtype)}
    assert policy.model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.isfinite(logprobs(policy)).all()


def test_a_policy_worker_that_only_acts_gets_the_folders_weights(folders):
    policy = build(pretrained=str(folders["gpt2", True]))
    found = policy.stored_weights()
    assert found.keys() == policy.state_dict().keys()
    assert all(torch.equal(tensor_of(blob), policy.state_dict()[name]) for name, blob in found.items())


# Memory


def test_memory_is_counted_without_weights_or_words(folders):
    from embodied.learners.config import LearnerConfig
    from embodied.learners.memory_estimate import conversations, count

    config = LanguageConfig(name="language", pretrained=str(folders["qwen3", True]))
    kind = policy_class("language")
    found = count(kind.for_memory_estimate(config, SPEC), LearnerConfig(), conversations(64))
    more = count(kind.for_memory_estimate(config, SPEC), LearnerConfig(), conversations(128))
    assert (
        found.num_weights
        == found.num_trained
        == sum(p.numel() for p in build(pretrained=str(config.pretrained)).parameters())
    )
    assert more.activations > 1.9 * found.activations > 0
    assert found.acting == 2 * 2 * 2 * 8 * 256 * 4  # keys and values, layers, heads, numbers, tokens, bytes
    assert kind.for_memory_estimate(LanguageConfig(name="language"), SPEC) is None


def test_models_for_one_answer_need_no_template_that_goes_on(tmp_path):
    folder = publish(tmp_path, "llama", False, template="{% for m in messages[-1:] %}{{ m['content'] }}{% endfor %}")
    assert build(pretrained=str(folder)).tokenizer.chat
    with pytest.raises(ConfigError, match="chat template leaves out the model's answers"):
        build(TALKS, pretrained=str(folder))
    assert not build(TALKS, pretrained=str(folder), chat=False).tokenizer.chat


def test_policies_that_are_built_in_threads_do_not_disturb_each_other(folders):
    """As those of an inline run are, or a policy and a learner of one process."""
    begin = torch.get_default_dtype(), torch.nn.init.normal_
    options = [
        {"dtype": dtype, "pretrained": str(folders["qwen3", False])} for dtype in ("float64", "bfloat16", "float32")
    ]
    with ThreadPoolExecutor(6) as threads:
        built = list(threads.map(lambda chosen: build(**chosen), options * 6))
    assert (torch.get_default_dtype(), torch.nn.init.normal_) == begin
    for policy, chosen in zip(built, options * 6, strict=True):
        assert {str(p.dtype) for p in policy.parameters()} == {f"torch.{chosen['dtype']}"}
        angles = dict(policy.named_buffers())["model.rotary_emb.inv_freq"]
        assert angles.dtype == torch.float32 and angles[0] == 1 and 0 < angles[-1] < 1
