"""OpenVLA-OFT: chunks in one pass, both heads, the robot's state, several images, FiLM, and its folders."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import load_policy, make_policy
from embodied.policies.config import OpenVLAOFTConfig
from embodied.policies.openvla.components import main as convert
from embodied.policies.openvla.folder import TINY
from embodied.policies.openvla.tokens import laplace, laplace_noise

SPEC = EnvSpec(ActionSpec(3), state_dim=4, images={"top": (16, 16, 3), "wrist": (16, 16, 3)}, instruction=True)
TEXTS = ["pick up the red cup", "go"]  # of two lengths, so there is padding
CHUNK = 2


def build(seed=0, spec=SPEC, chunk=CHUNK, **options):
    return make_policy(OpenVLAOFTConfig(name="openvla_oft", chunk=chunk, **options), spec, seed)


def observe(rows=2):
    draw = np.random.default_rng(0)
    frames = {camera: draw.integers(0, 256, (rows, 16, 16, 3), np.uint8) for camera in SPEC.images}
    state = draw.normal(size=(rows, 4)).astype(np.float32)
    return {"images": frames, "state": state, "instruction": [TEXTS[row % 2] for row in range(rows)]}


def uniform(rows=2, seed=1):
    return np.random.default_rng(seed).random((rows, CHUNK * 3))


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


def test_every_input_matters(policy):
    obs = observe()
    played = torch.zeros(2, CHUNK, 3)
    before = policy({"obs": obs, "actions": played}).logprobs
    changed = [
        obs | {"state": obs["state"] + 1},
        obs | {"images": obs["images"] | {"wrist": 255 - obs["images"]["wrist"]}},
        obs | {"instruction": ["pick up the blue cup", "come"]},
    ]
    scores = [policy({"obs": other, "actions": played}).logprobs for other in changed]
    assert all((score - before).abs().max() > 1e-4 for score in scores)


@pytest.mark.parametrize("stop", [True, False])
def test_it_reads_what_transformers_llama_gives_for_the_published_sequence(stop):
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
        (ids,) = policy._words({"instruction": [TEXTS[row]]}, 1)[0]
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


def test_film_of_a_block_by_hand():
    policy = build(film=True)
    film = policy.vision_backbone.featurizer.blocks[0]
    draw = torch.Generator().manual_seed(0)
    x, words = torch.randn(2, 5, 96, generator=draw), torch.randn(2, 192, generator=draw)
    with torch.no_grad():
        middle = x + film.block.ls1(film.block.attn(film.block.norm1(x)))
        gamma, beta = words @ film.scale.weight.T + film.scale.bias, words @ film.shift.weight.T + film.shift.bias
        middle = middle * (1 + gamma)[:, None, :] + beta[:, None, :]
        wanted = middle + film.block.ls2(film.block.mlp(film.block.norm2(middle)))
        torch.testing.assert_close(film(x, words), wanted)


def test_the_best_chunk_of_the_l1_head_is_what_it_regresses():
    policy = build(head="l1")
    one, two = (policy.act(observe(), uniform(seed=seed), temperature=0.0) for seed in (1, 2))
    assert np.array_equal(one.actions, two.actions)
    with torch.no_grad():
        hidden = policy._hidden(observe())
        np.testing.assert_allclose(one.actions, policy.action_head.model(hidden.flatten(2)), atol=1e-6)


def test_laplace_numbers_by_hand():
    # density exp(-|x| / 2) / 4 with scale 2: at x = 1, -0.5 - ln 4; entropy 1 + ln 4
    logprob, entropy = laplace(torch.zeros(1), torch.tensor([2.0]).log(), torch.ones(1))
    assert logprob.item() == pytest.approx(-0.5 - np.log(4), abs=1e-6)
    assert entropy.item() == pytest.approx(1 + np.log(4), abs=1e-6)
    # three quarters lie below ln 2, since 1 - exp(-ln 2) / 2 = 0.75
    assert laplace_noise(torch.tensor([0.5, 0.75, 0.25])).tolist() == pytest.approx([0, np.log(2), -np.log(2)])
    assert torch.isfinite(laplace_noise(torch.tensor([0.0, 1.0]))).all()


def test_a_demonstration_is_scored_through_the_units_of_the_statistics():
    policy = build()
    actions = torch.tensor([[[0.5, -0.9, 0.9], [0.0, 0.21, -0.3]]])
    tokens = torch.from_numpy(policy.codes.encode(actions.numpy()))
    obs = observe(1)
    one, two = (policy({"obs": obs} | more).logprobs for more in ({"actions": actions}, {"tokens": tokens}))
    assert torch.equal(one, two)


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    """A folder as others publish it: shards, statistics apart, brain floats, parts in .pt files."""
    folder = tmp_path_factory.mktemp("official")
    made = build(head="l1", proprio=True, film=True, dtype="bfloat16")
    made.save_published(folder, shard_bytes=4_000_000)
    for kind in ("action_head", "proprio_projector", "vision_backbone"):
        path = folder / f"{kind}--0_checkpoint.safetensors"
        prefix = "module." if kind == "action_head" else ""  # trained on several devices
        torch.save({prefix + n: t for n, t in load_file(path).items()}, folder / f"{kind}--150_checkpoint.pt")
        path.unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["openvla_oft"], config["norm_stats"]
    (folder / "config.json").write_text(json.dumps(config))
    action = {"q01": [-0.1] * 3, "q99": [0.3] * 3, "mask": [True, True, False]}
    proprio = {"q01": [-2.0] * 4, "q99": [2.0] * 4}
    (folder / "dataset_statistics.json").write_text(
        json.dumps({"shelf_no_noops": {"action": action, "proprio": proprio}})
    )
    return folder


def everything(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= {
            f"{path.name.partition('--')[0] if '--' in path.name else ''}/{n}": t for n, t in load_file(path).items()
        }
    return found


def test_an_official_folder_says_what_it_is_and_is_saved_as_it_was_read(official, tmp_path):
    made = build(seed=5, pretrained=str(official), dtype="bfloat16", statistics="shelf")
    assert (made.head, made.proprio, made.film) == ("l1", True, True)
    assert made.statistics.low[0] == -0.1 and made.felt.high[0] == 2.0
    made.save_published(tmp_path, shard_bytes=4_000_000)
    assert (tmp_path / "action_head--150_checkpoint.safetensors").is_file()
    assert convert([str(official)]) == 0
    before, after = everything(official), everything(tmp_path)
    assert before.keys() == after.keys() and len(list(tmp_path.glob("model-*"))) > 1
    assert all(before[n].dtype == after[n].dtype and torch.equal(before[n], after[n]) for n in before)
    again = build(seed=6, pretrained=str(tmp_path), dtype="bfloat16")
    assert np.array_equal(*(p.act(observe(), uniform(), 0.0).actions for p in (made, again)))


@pytest.fixture
def adapted_towers(official, tmp_path):
    """The same folder as upstream's LoRA leaves it: adapters inside the file of the towers, in convolutions too."""
    shutil.copytree(official, tmp_path / "folder")
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
    path.with_suffix(".safetensors").unlink(missing_ok=True)  # if it was converted meanwhile
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


class Whole(nn.Module):
    """The networks that upstream gives to peft."""

    def __init__(self, policy):
        super().__init__()
        self.vision_backbone, self.projector = policy.vision_backbone, policy.projector
        self.language_model = policy.language_model


@pytest.mark.parametrize(("rank", "dtype"), [(8, "float32"), (32, "bfloat16")])
def test_a_folder_of_the_official_recipe_acts_as_peft_merges_it(tmp_path, rank, dtype):
    """finetune.py with FiLM: adapters on all that is called as a linear layer is, but FiLM's own; the language model is
    saved merged, the towers as they are."""
    peft = pytest.importorskip("peft")
    merged = build(head="l1", proprio=True, film=True, dtype=dtype)
    whole = Whole(merged)
    layers = {name for name, layer in whole.named_modules() if isinstance(layer, nn.Linear)}
    ends = {name.rpartition(".")[2] for name in layers} - {"scale", "shift"}
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


def test_a_saved_policy_is_loaded_as_it_was(official, tmp_path):
    made = build(pretrained=str(official), lora_rank=None)
    made.save_pretrained(tmp_path / "saved")
    again = load_policy((tmp_path / "saved").rename(tmp_path / "moved"))
    assert (again.head, again.proprio, again.film) == ("l1", True, True)
    assert np.array_equal(*(p.act(observe(), uniform()).actions for p in (made, again)))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("dataset_statistics.json", None, "no action statistics"),
        ("dataset_statistics.json", {"shelf": {"action": {"q01": [0] * 3, "q99": [1] * 3}}}, "has no 'proprio'"),
        ("action_head--150_checkpoint.pt", b"nonsense", "cannot be read as tensors"),
        ("action_head--7_checkpoint.pt", b"", "holds both action_head--"),
        ("noisy_action_projector--150_checkpoint.pt", b"", "diffusion head"),
    ],
)
def test_an_incomplete_folder_is_refused_and_says_what_is_missing(official, tmp_path, name, content, reason):
    for file in official.iterdir():
        if file.name != name and not (file.suffix == ".safetensors" and "--" in file.name):
            (tmp_path / file.name).symlink_to(file)
    if content is not None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=reason):
        build(pretrained=str(tmp_path))


def test_code_in_a_component_is_not_run(official, tmp_path):
    class Trap:
        def __reduce__(self):
            return print, ("run",)

    for file in official.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "action_head--150_checkpoint.pt").unlink()
    (tmp_path / "action_head--150_checkpoint.safetensors").unlink(missing_ok=True)
    torch.save({"a": Trap()}, tmp_path / "action_head--150_checkpoint.pt")
    with pytest.raises(CheckpointError, match="cannot be read as tensors: it holds other things too"):
        build(pretrained=str(tmp_path))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cameras": ("front",)}, r"policy\.cameras='front' is none of this env's cameras: top, wrist"),
        ({"head": "l1", "temperature": 1.6}, "writes none"),
        ({"proprio": True, "spec": EnvSpec(ActionSpec(3), images=SPEC.images, instruction=True)}, "env.state=proprio"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(options, reason):
    with pytest.raises(ConfigError, match=reason):
        build(**options)
