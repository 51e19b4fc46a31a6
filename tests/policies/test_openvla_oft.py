"""OpenVLA-OFT: chunks in one pass, both heads, the robot's state, several images, FiLM, and its folders."""

from dataclasses import replace

import numpy as np
import pytest
import tiny_vla as tiny
import torch
from safetensors.torch import load_file
from tiny_vla import ROBOT

from embodied.core.errors import CheckpointError
from embodied.policies.openvla.components import main as convert
from embodied.policies.openvla.folder import TINY
from embodied.policies.openvla.network import laplace, laplace_noise

SPEC = replace(ROBOT, images={"top": (16, 16, 3), "wrist": (16, 16, 3)})
CHUNK = 2


def build(**options):
    return tiny.build("openvla_oft", spec=SPEC, **{"chunk": CHUNK} | options)


def observe(rows=2):
    return tiny.observe(rows, SPEC)


def uniform(rows=2):
    return np.random.default_rng(1).random((rows, CHUNK * 3))


def lively(policy, scale=5):
    """Probabilities, and effects of all parts, that differ."""
    with torch.no_grad():
        policy.language_model.lm_head.weight.mul_(scale)
        for name, parameter in policy.named_parameters():
            if name.endswith(("scale.weight", "shift.weight", "proprio_projector.fc1.weight", "fc2.weight")):
                parameter.mul_(3)
    return policy


@pytest.fixture(scope="module", params=["discrete", "l1"])
def policy(request):
    options = {"temperature": 1.6} if request.param == "discrete" else {}
    return lively(build(head=request.param, proprio=True, film=True, **options))


@pytest.mark.parametrize("stop", [True, False])
def test_log_probs_of_the_published_sequence_equal_those_of_transformers_llama(stop):
    """One row at a time, without padding: begin, images, state, prompt, empty tokens, stop; read one place before."""
    transformers = pytest.importorskip("transformers")
    policy = lively(build(proprio=True, stop_token=stop))
    text = TINY["text_config"]
    config = transformers.LlamaConfig(**text, attn_implementation="eager", pad_token_id=None)
    llama = transformers.LlamaForCausalLM(config).eval()
    llama.load_state_dict(policy.language_model.state_dict())
    obs = observe()
    tokens = torch.from_numpy(policy.act(obs, uniform()).replay["tokens"])
    ours = policy({"obs": obs, "tokens": tokens}).logprobs.detach()
    stack, numbers = policy.language_model.model, CHUNK * 3
    for row in range(2):
        (ids,) = policy.prompt_tokens([tiny.TEXTS[row]])[0]
        frames = [policy.images(torch.from_numpy(obs["images"][c][row : row + 1])) for c in ("top", "wrist")]
        with torch.no_grad():
            words = stack.embed_tokens(torch.tensor([[*ids, 2]]))
            patches = [policy.projector(policy.vision_backbone(pixels)) for pixels in frames]
            felt = torch.from_numpy(np.clip(obs["state"][row] / np.pi, -1, 1)).float()
            told = policy.proprio_projector(felt)[None, None]
            blank = torch.zeros(1, numbers, 192)
            parts = [words[:, :1], *patches, told, words[:, 1:-1], blank, words[:, -1:]]
            x = torch.cat(parts if stop else parts[:-1], dim=1)
            logits = llama(inputs_embeds=x, attention_mask=torch.zeros(1, 1, x.shape[1], x.shape[1])).logits[0]
        begin = 2 * 16 + 1 + len(ids) - 1  # patches of two images, the state, the prompt without its beginning
        scores = logits[begin : begin + numbers, 1024 - 256 : 1024].log_softmax(-1)
        wanted = scores.gather(-1, tokens[row].view(-1, 1)).view(CHUNK, 3)
        torch.testing.assert_close(ours[row], wanted, atol=1e-5, rtol=1e-5)


def test_film_scales_and_shifts_the_attention_of_a_block():
    policy = build(film=True)
    film = policy.vision_backbone.featurizer.blocks[0]
    draw = torch.Generator().manual_seed(0)
    x, words = torch.randn(2, 5, 96, generator=draw), torch.randn(2, 192, generator=draw)
    with torch.no_grad():
        middle = x + film.block.ls1.scale_factor * film.block.attn(film.block.norm1(x))
        gamma, beta = words @ film.scale.weight.T + film.scale.bias, words @ film.shift.weight.T + film.shift.bias
        middle = middle * (1 + gamma)[:, None, :] + beta[:, None, :]
        wanted = middle + film.block.ls2.scale_factor * film.block.mlp(film.block.norm2(middle))
        torch.testing.assert_close(film(x, words), wanted)


def test_log_probs_entropy_and_noise_of_the_laplace_distribution_equal_hand_computed_numbers():
    # density exp(-|x| / 2) / 4 with scale 2: at x = 1, -0.5 - ln 4; entropy 1 + ln 4
    logprob, entropy = laplace(torch.zeros(1), torch.tensor([2.0]).log(), torch.ones(1))
    assert logprob.item() == pytest.approx(-0.5 - np.log(4), abs=1e-6)
    assert entropy.item() == pytest.approx(1 + np.log(4), abs=1e-6)
    # three quarters lie below ln 2, since 1 - exp(-ln 2) / 2 = 0.75
    assert laplace_noise(torch.tensor([0.5, 0.75, 0.25])).tolist() == pytest.approx([0, np.log(2), -np.log(2)])
    assert torch.isfinite(laplace_noise(torch.tensor([0.0, 1.0]))).all()


@pytest.fixture
def adapted_towers(tmp_path):
    """The same folder as upstream's LoRA leaves it: adapters inside the file of the towers, in convolutions too."""
    tiny.publish(tmp_path / "folder", "oft", SPEC)
    path = tmp_path / "folder" / "vision_backbone--150_checkpoint.pt"
    draw, found = torch.Generator().manual_seed(1), {}
    for name, tensor in torch.load(path, weights_only=True).items():
        if not name.endswith(("attn.qkv.weight", "mlp.fc1.weight", "patch_embed.proj.weight")):
            found[name] = tensor
            continue
        layer, (rows, *inputs) = name.removesuffix(".weight"), tensor.shape
        found[f"{layer}.base_layer.weight"] = tensor
        for part, shape in (("A", (32, *inputs)), ("B", (rows, 32, *[1] * (len(inputs) - 1)))):
            drawn = torch.empty(shape).normal_(0.0, 0.1, generator=draw)
            found[f"{layer}.lora_{part}.default.weight"] = drawn.bfloat16()
    torch.save(found, path)
    return tmp_path / "folder"


def test_towers_with_adapters_are_saved_as_they_were_read(adapted_towers, tmp_path):
    file = "vision_backbone--150_checkpoint"
    before = torch.load(adapted_towers / f"{file}.pt", weights_only=True)
    made = build(pretrained=str(adapted_towers), dtype="bfloat16")
    made.save_published(tmp_path / "same")
    same = load_file(tmp_path / "same" / f"{file}.safetensors")
    assert before.keys() == same.keys() and all(torch.equal(before[n], same[n]) for n in before)
    trained = build(pretrained=str(adapted_towers))
    layer = trained.vision_backbone.fused_featurizer.blocks[1].block.attn.qkv
    with torch.no_grad():
        layer.weight.add_(0.5)
    trained.save_published(tmp_path / "more")
    after = load_file(tmp_path / "more" / f"{file}.safetensors")
    name = "vision_backbone.fused_featurizer.blocks.1.block.attn.qkv.base_layer.weight"
    assert [n for n in before if not torch.equal(before[n].float(), after[n].float())] == [name]
    again = build(pretrained=str(tmp_path / "more"))
    weight = again.vision_backbone.fused_featurizer.blocks[1].block.attn.qkv.weight
    torch.testing.assert_close(weight, layer.weight, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("rank", "dtype"), [(8, "float32"), (32, "bfloat16")])
def test_a_folder_of_the_official_recipe_acts_as_peft_merges_it(tmp_path, rank, dtype):
    """finetune.py with FiLM: adapters on all that is called as a linear layer is, but FiLM's own; the language model is
    saved merged, the towers as they are."""
    peft = pytest.importorskip("peft")
    merged = build(head="l1", proprio=True, film=True, dtype=dtype)
    whole = tiny.Whole(merged)
    ends = whole.linear_layers() - {"scale", "shift"}
    config = peft.LoraConfig(r=rank, lora_alpha=min(rank, 16), target_modules=sorted(ends), init_lora_weights=False)
    model = peft.get_peft_model(whole, config)
    towers = {f"vision_backbone.{n}": t.clone() for n, t in merged.vision_backbone.state_dict().items()}
    model.merge_and_unload()
    merged.save_published(tmp_path)
    (file,) = tmp_path.glob("vision_backbone--*")
    assert {n.replace(".base_layer.", ".") for n in towers if "lora_" not in n} == load_file(file).keys()
    file.unlink()
    torch.save({f"module.{n}": t for n, t in towers.items()}, tmp_path / "vision_backbone--5_checkpoint.pt")
    made = build(pretrained=str(tmp_path), dtype=dtype)
    ours, theirs = (p.act(observe(), uniform(), 0.0).actions for p in (made, merged))
    atol = {"float32": 1e-5, "bfloat16": 0.02}[dtype]  # peft multiplies the adapters in another order
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)
    made.save_published(tmp_path / "back")
    back = load_file(tmp_path / "back" / "vision_backbone--5_checkpoint.safetensors")
    assert back.keys() == towers.keys() and all(torch.equal(back[n], towers[n]) for n in towers)


def test_an_adapter_that_does_not_fit_its_layer_is_refused(adapted_towers):
    path = adapted_towers / "vision_backbone--150_checkpoint.pt"
    tensors = torch.load(path, weights_only=True)
    name = next(name for name in tensors if name.endswith("patch_embed.proj.lora_A.default.weight"))
    torch.save(tensors | {name: tensors[name][:, :2]}, path)
    with pytest.raises(CheckpointError, match=r"does not fit its layer .*patch_embed.proj"):
        build(pretrained=str(adapted_towers))
    torch.save(tensors | {name: tensors[name][:7]}, path)
    with pytest.raises(CheckpointError, match="of rank 32 and 7"):
        build(pretrained=str(adapted_towers))


def test_components_become_safetensors_with_the_same_names_and_bytes(tmp_path):
    folder = tiny.publish(tmp_path / "folder", "oft", SPEC)
    before = tiny.weights_of(folder)
    assert convert([str(folder)]) == 0
    for path in folder.glob("*.pt"):
        path.unlink()
    after = tiny.weights_of(folder)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
