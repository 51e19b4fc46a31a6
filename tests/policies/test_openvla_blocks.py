"""Our networks against transformers' Llama, SigLIP and DINOv2 with the same small random weights."""

import pytest
import torch

from embodied.policies.openvla.folder import LlamaSettings, TowerSettings
from embodied.policies.openvla.network import Cache, Decoder, LanguageModel, Tower

transformers = pytest.importorskip("transformers")


def fill(module, seed=0):
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.2, generator=draw))
    return module.eval()


@pytest.fixture(scope="module")
def llamas():
    settings = LlamaSettings(vocab=50, dim=32, depth=3, heads=4, kv_heads=2, mlp=48)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        attn_implementation="eager",
    )
    ours, theirs = fill(LanguageModel(settings)), transformers.LlamaForCausalLM(config).eval()
    theirs.load_state_dict(ours.state_dict())  # the same key names
    return ours, theirs


def test_logits_equal_transformers_llama(llamas):
    ours, theirs = llamas
    ids = torch.randint(50, (3, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden = ours.model(ours.model.embed_tokens(ids), torch.ones(3, 11, dtype=torch.bool), padded=False)
        torch.testing.assert_close(ours.lm_head(hidden), theirs(ids).logits, atol=1e-5, rtol=1e-5)


def test_padding_is_invisible_as_in_transformers_llama(llamas):
    ours, theirs = llamas
    ids = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(2))
    there = torch.ones(2, 9, dtype=torch.bool)
    there[1, 1:4] = False  # after the first token, as in our batches
    with torch.no_grad():
        hidden = ours.model(ours.model.embed_tokens(ids), there)
        position = (there.long().cumsum(1) - 1).clamp(min=0)
        wanted = theirs(ids, attention_mask=there.long(), position_ids=position).logits
        torch.testing.assert_close(ours.lm_head(hidden)[there], wanted[there], atol=1e-5, rtol=1e-5)
        alone = theirs(ids[1:, there[1]]).logits
        torch.testing.assert_close(ours.lm_head(hidden)[1, there[1]], alone[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_token_by_token_equals_all_at_once(llamas, padded):
    stack, cache = llamas[0].model, Cache()
    x = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(3))
    there = torch.ones(3, 8, dtype=torch.bool)
    there[0, 1:3] = not padded
    with torch.inference_mode():
        for rows in (3, 2):  # the second batch finds the memory of the first
            whole = stack(x[:rows], there[:rows], padded=padded)
            before = x.clone()
            text = Decoder(stack, cache, there[:rows, :5], padded, more=3)
            found = [text.read(x[:rows, :5]), *(text.go_on(x[:rows, i]) for i in (5, 6, 7))]
            torch.testing.assert_close(torch.stack(found, 1), whole[:, 4:], atol=1e-5, rtol=1e-5)
            assert torch.equal(x, before) and all(len(kept) == 3 for kept in cache.tensors())


def test_siglip_features_equal_transformers():
    tower = fill(Tower(TowerSettings("siglip", 32, 3, 4, 40, 8), 32))
    config = transformers.SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        hidden_act="gelu",
        vision_use_head=False,
    )
    model = transformers.SiglipVisionModel(config).eval()
    own = {"patch_embed.proj": "embeddings.patch_embedding", "pos_embed": "embeddings.position_embedding.weight"}
    theirs = renamed(tower, own, "encoder.layers", ("layer_norm1", "layer_norm2"), "post_layernorm")
    compare(tower, model, {name: value.squeeze(0) if "position" in name else value for name, value in theirs.items()})


def test_dinov2_features_equal_transformers():
    tower = fill(Tower(TowerSettings("dinov2", 32, 3, 4, 128, 8, registers=4), 32))
    config = transformers.Dinov2WithRegistersConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, image_size=32, patch_size=8, num_register_tokens=4
    )
    model = transformers.Dinov2WithRegistersModel(config).eval()
    own = {
        "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "cls_token": "embeddings.cls_token",
        "reg_token": "embeddings.register_tokens",
    }
    theirs = renamed(tower, own, "encoder.layer", ("norm1", "norm2"), "layernorm")
    theirs["embeddings.position_embeddings"] = torch.cat(
        [torch.zeros(1, 1, 32), theirs.pop("pos_embed")], 1
    )  # theirs has a place for the class token
    theirs["embeddings.mask_token"] = torch.zeros(1, 32)
    compare(tower, model, theirs)


def renamed(tower, own, layers, norms, last_norm):
    """Our weights under transformers' names, query, key and value apart."""
    siglip = layers == "encoder.layers"
    inside = {
        "norm1": norms[0],
        "norm2": norms[1],
        "attn.proj": "self_attn.out_proj" if siglip else "attention.o_proj",
        "mlp": "mlp",
        "ls1.scale_factor": "layer_scale1.lambda1",
        "ls2.scale_factor": "layer_scale2.lambda1",
    }
    qkv = "self_attn.{}_proj" if siglip else "attention.{}_proj"
    found = {}
    for name, value in tower.state_dict().items():
        first, _, rest = name.partition(".")
        if first == "blocks":
            number, _, rest = rest.partition(".")
            if rest.startswith("attn.qkv"):
                for kind, part in zip("qkv", value.chunk(3)):
                    found[f"{layers}.{number}.{qkv.format(kind)}.{rest.rpartition('.')[2]}"] = part
                continue
            start = next(key for key in inside if rest.startswith(key))
            found[f"{layers}.{number}.{rest.replace(start, inside[start], 1)}"] = value
        elif first == "norm":
            found[f"{last_norm}.{rest}"] = value
        elif first != "attn_pool":
            start = next((key for key in own if name.startswith(key)), name)
            found[name.replace(start, own.get(start, start), 1)] = value
    return found


def compare(tower, model, weights):
    names = model.state_dict()
    prefix = "vision_model." if any(name.startswith("vision_model.") for name in names) else ""
    model.load_state_dict({prefix + name: value for name, value in weights.items()})
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        wanted = model(pixel_values=pixels, output_hidden_states=True).hidden_states[-2]
        torch.testing.assert_close(tower(pixels), wanted[:, tower.skip :], atol=1e-5, rtol=1e-5)
