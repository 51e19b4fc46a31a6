"""SmolVLA computes the numbers of transformers' SmolVLM with an expert that is written here."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_vla import ROBOT, build, noise, observe, scored
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel, SmolVLMConfig
from transformers.models.smolvlm.modeling_smolvlm import (
    SmolVLMConnector,
    SmolVLMVisionEmbeddings,
    SmolVLMVisionTransformer,
)

from embodied.policies.smolvla.policy import TINY, settings_of

SPEC = replace(ROBOT, images={"top": (48, 64, 3), "near": (32, 32, 3)})
HEADS, KV_HEADS, HEAD, DIM = 4, 2, 32, 128

# The reference: one row at a time, without padding and without a cache of its own.


def turned(x, places):
    """Rotary positions as complex numbers: x [L, heads, d]."""
    half = x.shape[-1] // 2
    angle = places[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def root_norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


class Reference:
    def __init__(self, weights):
        self.w = weights
        sizes = {"vocab_size": 1024, "hidden_size": DIM, "intermediate_size": 384, "num_hidden_layers": 4}
        heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "rms_norm_eps": 1e-5}
        rope = {"rope_type": "default", "rope_theta": 10_000.0}
        text = LlamaConfig(**sizes, **heads, rope_parameters=rope, attn_implementation="eager")
        vision = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        vision |= {"patch_size": 8, "image_size": 64}
        whole = SmolVLMConfig(text_config=text.to_dict(), vision_config=vision, scale_factor=2)
        self.text, self.connector = LlamaModel(text).eval(), SmolVLMConnector(whole).eval()
        self.vision = SmolVLMVisionTransformer(whole.vision_config).eval()
        for name, part in (("text_model", self.text), ("connector", self.connector), ("vision_model", self.vision)):
            start = f"vlm_with_expert.vlm.model.{name}."
            part.load_state_dict({n.removeprefix(start): t for n, t in weights.items() if n.startswith(start)})

    def linear(self, name, x):
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def prefix(self, frames, ids, state, empty=0):
        """Keys and values of each layer [L, kv_heads, d], which of these are seen, and the state's last hidden state.
        `empty` black pictures follow the others and are masked, as lerobot's empty_cameras are."""
        images = []
        for frame in frames:
            pixels = torch.from_numpy(frame).permute(2, 0, 1)[None] / 255
            ratio = max(pixels.shape[2:]) / 64
            high, wide = (int(side / ratio) for side in pixels.shape[2:])
            pixels = F.interpolate(pixels, (high, wide), mode="bilinear", align_corners=False)
            pixels = F.pad(pixels, (64 - wide, 0, 64 - high, 0)) * 2 - 1
            images.append(self.connector(self.vision(pixels).last_hidden_state)[0] * math.sqrt(DIM))
        words = self.text.embed_tokens(torch.tensor(ids)) * math.sqrt(DIM)
        black = self.connector(self.vision(torch.full((1, 3, 64, 64), -1.0)).last_hidden_state)[0] * math.sqrt(DIM)
        x = torch.cat([*images, *[black] * empty, words, self.linear("state_proj", state)[None]])
        known, mask = torch.ones(len(x)).bool(), torch.zeros(len(x), len(x))
        known[len(frames) * len(black) : (len(frames) + empty) * len(black)] = False
        mask[:-1, -1] = mask[:, ~known] = torch.finfo(torch.float32).min
        places = {"position_ids": known.cumsum(0)[None] - 1, "attention_mask": mask[None, None]}
        found = self.text(inputs_embeds=x[None], **places, use_cache=True)
        layers = [
            (each.keys[0].transpose(0, 1), each.values[0].transpose(0, 1)) for each in found.past_key_values.layers
        ]
        return layers, known, found.last_hidden_state[0, -1]

    def velocity(self, layers, known, x, time, shortest, longest):
        dim = self.w["action_in_proj.bias"].shape[0]
        period = shortest * (longest / shortest) ** torch.linspace(0, 1, dim // 2, dtype=torch.float64)
        angle = 2 * math.pi * time / period
        waves = torch.cat([angle.sin(), angle.cos()]).float().expand(len(x), -1)
        x = F.silu(self.linear("action_time_mlp_in", torch.cat([self.linear("action_in_proj", x), waves], dim=1)))
        x = self.linear("action_time_mlp_out", x)
        here, causal = torch.arange(len(x)), torch.ones(len(x), len(x)).tril().bool()
        for number, (keys, values) in enumerate(layers):
            at = f"vlm_with_expert.lm_expert.layers.{number}"
            ready = root_norm(x, self.w[f"{at}.input_layernorm.weight"])
            q = self.linear(f"{at}.self_attn.q_proj", ready).view(len(x), HEADS, HEAD)
            if number % 2:
                places, seen = here, known.expand(len(x), -1)
                k = self.linear(f"{at}.self_attn.k_proj", keys.flatten(1)).view(-1, KV_HEADS, HEAD)
                v = self.linear(f"{at}.self_attn.v_proj", values.flatten(1)).view(-1, KV_HEADS, HEAD)
            else:
                places, seen = known.sum() + here, torch.cat([known.expand(len(x), -1), causal], dim=1)
                k = self.linear(f"{at}.self_attn.k_proj", ready).view(-1, KV_HEADS, HEAD)
                v = self.linear(f"{at}.self_attn.v_proj", ready).view(-1, KV_HEADS, HEAD)
                k, v = torch.cat([keys, turned(k, places)]), torch.cat([values, v])
            q, out = turned(q, places), []
            for head in range(HEADS):
                mine = head // (HEADS // KV_HEADS)
                scores = (q[:, head] @ k[:, mine].T / math.sqrt(HEAD)).masked_fill(~seen, -torch.inf)
                out.append(scores.softmax(-1) @ v[:, mine])
            x = x + self.linear(f"{at}.self_attn.o_proj", torch.cat(out, dim=1))
            ready = root_norm(x, self.w[f"{at}.post_attention_layernorm.weight"])
            gate = F.silu(self.linear(f"{at}.mlp.gate_proj", ready)) * self.linear(f"{at}.mlp.up_proj", ready)
            x = x + self.linear(f"{at}.mlp.down_proj", gate)
        return self.linear("action_out_proj", root_norm(x, self.w["vlm_with_expert.lm_expert.norm.weight"]))


@torch.no_grad()
@pytest.mark.parametrize(("periods", "empty"), [((), 0), ((0.05, 9.0), 1), ((), 2)])
def test_actions_and_what_the_value_reads_are_those_of_an_independent_reference(periods, empty):
    policy, draw = build("smolvla", spec=SPEC), torch.Generator().manual_seed(2)
    policy.model.settings = settings_of(TINY | dict(zip(("min_period", "max_period"), periods)))
    for parameter in policy.model.parameters():
        parameter.add_(0.05 * torch.empty_like(parameter).normal_(generator=draw))
    obs, draws = observe(2, SPEC, ("pick up the red cup", "go\n")), noise(policy, 2)
    reference = Reference(policy.model.state_dict())
    seen, actions = policy.read(obs), policy.act(obs, draws, temperature=0.0).actions
    for row in range(2):
        frames = [obs["images"][name][row] for name in SPEC.images]
        text = obs["instruction"][row]
        ids = policy.encode(text)
        state = F.pad(torch.from_numpy(obs["state"][row]), (0, 28))
        layers, known, felt = reference.prefix(frames, ids, state, empty)
        torch.testing.assert_close(seen.hidden[row], felt, atol=1e-4, rtol=1e-4)
        x = torch.from_numpy(draws[row, : 8 * 8]).float().view(8, 8)
        for step in range(10):
            x = x - reference.velocity(layers, known, x, 1 - step / 10, *(periods or (4e-3, 4.0))) / 10
        np.testing.assert_allclose(actions[row], x[:5, :3].numpy(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patches_of_the_full_size_stand_in_the_places_that_transformers_gives_them(dtype):
    config = SmolVLMConfig(
        vision_config={"hidden_size": 2, "num_attention_heads": 1, "patch_size": 16, "image_size": 512}
    )
    theirs = SmolVLMVisionEmbeddings(config.vision_config).to(dtype)
    theirs.position_embedding.weight.data = torch.arange(1024.0).to(dtype)[:, None].expand(-1, 2)
    theirs.patch_embedding.weight.data.zero_()
    theirs.patch_embedding.bias.data.zero_()
    found = theirs(torch.zeros(1, 3, 512, 512, dtype=dtype), torch.ones(1, 32, 32, dtype=torch.bool))
    torch.testing.assert_close(found[0], theirs.position_embedding.weight)  # ours are added in this order


def test_in_bfloat16_learners_give_the_log_probs_of_acting():
    policy = build("smolvla", spec=SPEC, dtype="bfloat16", exploration="flow_noise", steps=2)
    obs = observe(2, SPEC)
    acted = policy.act(obs, noise(policy, 2))
    np.testing.assert_allclose(scored(policy, obs, acted).logprobs.detach(), acted.logprobs, atol=1e-4)
