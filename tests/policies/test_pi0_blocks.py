"""Our Pi0 against transformers' with the same small random weights: prefix, velocity and whole denoising."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from embodied.policies.pi0.policy import Pi0Network, Pi0Settings
from embodied.policies.vla.flow import plain_step, time_of
from embodied.policies.vla.flow_network import StackSettings, VisionSettings

transformers = pytest.importorskip("transformers")

LANGUAGE = StackSettings(32, 3, 48, 4, 1, 16)
EXPERT = StackSettings(24, 3, 40, 4, 1, 16)
VISION = VisionSettings(32, 2, 40, 4, 8, 16)
STEPS = 4


def settings(kind="pi0"):
    return Pi0Settings(
        kind=kind,
        language=LANGUAGE,
        expert=EXPERT,
        vision=VISION,
        vocab=60,
        horizon=5,
        action_dim=6,
        state_dim=6,
        max_tokens=48,
        normalization="mean_std",
    )


def build(kind="pi0"):
    draw = torch.Generator().manual_seed(0)
    network = Pi0Network(settings(kind)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.2, generator=draw))
    return network


def gemma(sizes, **more):
    return {
        "model_type": "gemma",
        "hidden_size": sizes.dim,
        "num_hidden_layers": sizes.depth,
        "intermediate_size": sizes.mlp,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        **more,
    }


@pytest.fixture(scope="module")
def theirs():
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": VISION.dim,
        "num_hidden_layers": VISION.depth,
        "intermediate_size": VISION.mlp,
        "num_attention_heads": VISION.heads,
        "patch_size": VISION.patch,
        "image_size": VISION.image_size,
        "vision_use_head": False,
    }
    vlm = {
        "model_type": "paligemma",
        "text_config": gemma(LANGUAGE, vocab_size=60),
        "vision_config": vision,
        "projection_dim": LANGUAGE.dim,
        "image_token_id": 59,
    }
    config = transformers.PI0Config(
        vlm_config=vlm, dit_config=gemma(EXPERT, vocab_size=60), chunk_size=5, max_state_dim=6, max_action_dim=6
    )
    model = transformers.PI0ForConditionalGeneration(config).eval()
    model.embed_action_time.sinusoid_embeds = ExactTime()
    return model


class ExactTime(nn.Module):
    """As openpi computes them: transformers rounds angles of up to 1571 to float32, which moves sines by 1e-4."""

    def forward(self, time):
        angle = time.double()[:, None] * 2 * torch.pi / (0.004 * 1000 ** torch.linspace(0, 1, 12, dtype=torch.float64))
        return torch.cat([angle.sin(), angle.cos()], 1).float()


def rename(name):
    """Our name in transformers' model."""
    for part in ("state_proj", "action_in_proj", "action_time_mlp_in", "action_time_mlp_out"):
        if name.startswith(part):
            return f"embed_action_time.{name}"
    name = name.replace("paligemma_with_expert.paligemma.model.", "model.vlm.")
    return name.replace("paligemma_with_expert.gemma_expert.model.", "model.dit.").replace(".vision_model.", ".")


def observe():
    draw = torch.Generator().manual_seed(1)
    pixels = torch.randn(2, 2, 3, 16, 16, generator=draw)
    ids = torch.randint(1, 50, (2, 5), generator=draw)
    there = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    state, noise = torch.randn(2, 6, generator=draw), torch.randn(2, 5, 6, generator=draw)
    return pixels, ids, there, state, noise


def denoise(network, prefix, state, x):
    prefix = replace(prefix, state=state)
    for step in range(STEPS):
        time = time_of(torch.full((len(x),), step), STEPS)
        x = plain_step(x, network.velocity(network.suffix(prefix, x, time)), STEPS)
    return x


def test_actions_equal_transformers_pi0_under_the_same_noise(theirs):
    ours = build()
    weights = {rename(name): value for name, value in ours.state_dict().items()}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"model.dit.embed_tokens.weight"}
    pixels, ids, there, state, noise = observe()
    images = torch.full((2, 2 * 4), 59)
    with torch.no_grad():
        wanted = theirs.sample_actions(
            state=state,
            input_ids=torch.cat([images, ids], 1),
            pixel_values=pixels,
            pixel_attention_mask=torch.ones(2, 2, dtype=torch.bool),
            attention_mask=torch.cat([torch.ones(2, 8, dtype=torch.long), there.long()], 1),
            noise=noise,
            num_steps=STEPS,
        )
        prefix = ours.prefix(pixels, ids, there)
        torch.testing.assert_close(denoise(ours, prefix, state, noise), wanted, atol=1e-5, rtol=1e-5)


def plain_pi05(network, pixels, ids, x, time):
    """Pi0.5's velocity the long way: one sequence, one mask, adaptive norms by their definition; no padding."""
    with torch.no_grad():
        vlm, expert = network.vlm, network.expert
        patches = network.to_words(vlm.vision_tower.vision_model(pixels.flatten(0, 1))).view(
            len(pixels), -1, LANGUAGE.dim
        )
        words = vlm.language_model.embed_tokens.weight[ids] * LANGUAGE.dim**0.5
        streams = [torch.cat([patches, words], 1), network.action_in_proj(x)]
        split = streams[0].shape[1]
        waves = ExactTime()(time)
        silu = nn.functional.silu
        condition = silu(network.time_mlp_out(silu(network.time_mlp_in(waves))))
        total = split + x.shape[1]
        mask = torch.ones(total, total, dtype=torch.bool)
        mask[:split, split:] = False
        place = torch.arange(total)[:, None] * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
        turn = torch.polar(torch.ones_like(place), place)

        def normed(stream, norm, adaptive):
            unit = stream / (stream.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            if not adaptive:
                return unit * (1 + norm.weight), 1.0
            scale, shift, gate = norm.dense(condition).chunk(3, -1)
            return unit * (1 + scale[:, None]) + shift[:, None], gate[:, None]

        def spun(heads):
            pairs = torch.complex(heads[..., :8].contiguous(), heads[..., 8:].contiguous()) * turn
            return torch.cat([pairs.real, pairs.imag], -1)

        for layers in zip(vlm.language_model.layers, expert.layers):
            inputs = [normed(s, layer.input_layernorm, i == 1) for i, (s, layer) in enumerate(zip(streams, layers))]
            q, k, v = (
                torch.cat(
                    [
                        getattr(layer.self_attn, f"{name}_proj")(n).unflatten(-1, (-1, 16)).transpose(1, 2)
                        for layer, (n, _) in zip(layers, inputs)
                    ],
                    2,
                )
                for name in "qkv"
            )
            weights = (spun(q) @ spun(k).transpose(2, 3) / 4).masked_fill(~mask, -1e30).softmax(-1)
            seen = (weights @ v).transpose(1, 2).flatten(2)
            parts = [seen[:, :split], seen[:, split:]]
            for i, layer in enumerate(layers):
                streams[i] = streams[i] + layer.self_attn.o_proj(parts[i]) * inputs[i][1]
                inner, gate = normed(streams[i], layer.post_attention_layernorm, i == 1)
                streams[i] = streams[i] + layer.mlp(inner) * gate
        return network.action_out_proj(normed(streams[1], expert.norm, True)[0])


def test_pi05_equals_one_long_sequence_with_adaptive_norms():
    network = build("pi05")
    pixels, ids, there, _, noise = observe()
    time = torch.tensor([1.0, 0.25])
    with torch.no_grad():
        prefix = network.prefix(pixels, ids, torch.ones_like(there))
        found = network.velocity(network.suffix(prefix, noise, time))
    torch.testing.assert_close(found, plain_pi05(network, pixels, ids, noise, time), atol=1e-5, rtol=1e-5)
