"""OpenVLA as a policy: one image and an instruction in, one action out, written token by token.

Only the 256 action tokens can be generated, so only their logits are computed. The value is read at the place that
predicts the first action token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.core.arrays import tensor_of
from embodied.core.errors import ConfigError
from embodied.core.types import NoiseSpec, Observation, PolicyOutput
from embodied.policies.base import Scores
from embodied.policies.openvla.llama import Cache, LlamaAttention, LlamaLayer, LlamaStack, RMSNorm, visible
from embodied.policies.openvla.prismatic import PATCHES, PrismaticPolicy
from embodied.policies.openvla.tokens import action_scores, pick
from embodied.policies.vla.layers import GatedMLP, turns
from embodied.policies.vla.policy import compiled

Memory = list[tuple[Tensor, Tensor]]  # keys and values of every layer [N, kv_heads, width, head_dim]
LAST = slice(-1, None)
PLAIN = {LlamaStack, LlamaLayer, LlamaAttention, GatedMLP, RMSNorm, nn.ModuleList, nn.Linear, nn.Embedding}


class OpenVLAPolicy(PrismaticPolicy):
    def choose_cameras(self) -> tuple[str, ...]:
        names, asked = sorted(self.spec.images), self.config.camera
        self.check_cameras((asked,) if asked else (), "policy.camera")
        if asked is None and len(names) > 1:
            raise ConfigError(f"policy.name={self.config.name} sees one image; choose policy.camera={'|'.join(names)}")
        return (asked or names[0],)

    def build(self) -> None:
        super().build()
        self.adapt()
        self.cache = Cache()

    def cache_tensors(self) -> list[Tensor]:
        return self.cache.tensors()

    def row_bytes(self, words: int) -> int:
        llama, tokens = self.settings.llama, self.settings.patches * len(self.cameras) + words
        of_number = next(self.parameters()).element_size()
        return 2 * llama.depth * llama.dim * llama.kv_heads // llama.heads * tokens * of_number

    def noise_spec(self) -> NoiseSpec:
        return NoiseSpec("uniform", self.spec.action.dim)

    @torch.inference_mode()
    def act(self, obs: Observation, noise: np.ndarray, temperature: float = 1.0) -> PolicyOutput:
        uniform = torch.as_tensor(noise).to(self.device)
        tokens, logprobs, values = self.write(*self._prefix(obs), uniform, temperature)
        chosen = tokens.cpu().numpy()
        return PolicyOutput(
            self.actions_of(self.codes.decode(chosen))[:, None],
            logprobs[:, None].cpu().numpy(),
            values.cpu().numpy(),
            {"tokens": chosen[:, None]},
        )

    @torch.inference_mode()
    def write(
        self, x: Tensor, present: Tensor, padded: bool, uniform: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Action tokens and their log-probs [N, A], and values [N], from embeddings of image and prompt."""
        stack, numbers = self.language_model.model, uniform.shape[1]
        way = CompiledDecoder if self.config.compile else FastDecoder if is_plain(stack) else Decoder
        text = way(stack, self.cache, present, padded, numbers - 1)
        hidden = text.read(x)
        values = self._value(hidden)
        tokens, logits = [], [self._logits(hidden)]
        for column in uniform.T:
            tokens.append(pick(logits[-1], column, temperature))
            if len(tokens) < numbers:
                logits.append(self._logits(text.go_on(self._embed(tokens[-1]))))
        chosen = torch.stack(tokens, 1)
        return chosen, action_scores(torch.stack(logits, 1), chosen)[0], values

    @torch.inference_mode()
    def value(self, obs: Observation) -> np.ndarray:
        x, present, padded = self._prefix(obs)
        return self._value(self.language_model.model(x, present, padded=padded, read=LAST)[:, -1]).cpu().numpy()

    def forward(self, inputs: dict[str, Any]) -> Scores:
        tokens = self.tokens_of(inputs)[:, 0]
        x, present, padded = self._prefix(inputs["obs"], inputs.get(PATCHES))
        x = torch.cat([x, self._embed(tokens[:, :-1])], dim=1)
        present = nn.functional.pad(present, (0, tokens.shape[1] - 1), value=True)
        written = slice(-tokens.shape[1], None)
        hidden = self.language_model.model(x, present, padded=padded, read=written)
        logprobs, entropy = action_scores(self._logits(hidden), tokens)
        return Scores(logprobs[:, None], entropy[:, None], self._value(hidden[:, 0]))

    def imitate_actions(self, inputs: dict[str, Any], noise: np.ndarray | None) -> Tensor:
        if self.config.sft_loss == "actions":
            return super().imitate_actions(inputs, noise)
        tokens = self.tokens_of(inputs)[:, 0]
        x, present, padded = self._prefix(inputs["obs"], inputs.get(PATCHES))
        x = torch.cat([x, self._embed(tokens)], dim=1)
        present = nn.functional.pad(present, (0, tokens.shape[1]), value=True)
        written = slice(-tokens.shape[1] - 1, None)
        hidden = self.language_model.model(x, present, padded=padded, read=written)
        return self._word_losses(hidden, tokens)[:, None]

    def _prefix(self, obs: Observation, patches: Tensor | None = None) -> tuple[Tensor, Tensor, bool]:
        """Returns embeddings [N, L, D] of begin, image and text, their mask [N, L], and True if there is padding.
        `patches` [N, 1, P, D] are features of frozen towers."""
        seen = self._see(*self._pixels(obs)) if patches is None else tensor_of(patches, self.device)[:, 0]
        ids, mask = self._words(obs, len(seen))
        patches = self.projector(seen)
        words = self.language_model.model.embed_tokens(tensor_of(ids, self.device))
        x = torch.cat([words[:, :1], patches.to(words.dtype), words[:, 1:]], dim=1)
        shown = np.ones((len(ids), patches.shape[1]), bool)
        present = np.concatenate([mask[:, :1], shown, mask[:, 1:]], axis=1)
        return x, tensor_of(present, self.device), not present.all()

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.language_model.model.embed_tokens(tokens + self.settings.first_action_id)


# Decoding of action tokens after a prompt. Acting needs no gradients, and small batches are limited by the number of
# operations, so `FastDecoder` computes the same as `LlamaStack` in far fewer operations, in place and on flat rows. It
# supports plain layers only. With adapters, autocast or half precision, whose rounding must equal the learner's,
# `Decoder` runs the stack itself.


class Decoder:
    """A batch of prompts; `present` [N, L] is False for padding, `more` tokens will follow."""

    def __init__(self, stack: LlamaStack, cache: Cache, present: Tensor, padded: bool, more: int) -> None:
        self.stack, self.cache, self.padded = stack, cache, padded
        self.present = F.pad(present, (0, more), value=True)
        cache.begin(*self.present.shape)

    def read(self, x: Tensor) -> Tensor:
        """The last hidden states [N, D] of prompts with embeddings [N, L, D]."""
        return self._run(x)

    def go_on(self, x: Tensor) -> Tensor:
        """Hidden states [N, D] of one more token with embeddings [N, D]."""
        return self._run(x[:, None])

    def _run(self, x: Tensor) -> Tensor:
        so_far = self.present[:, : self.cache.length + x.shape[1]]
        return self.stack(x, so_far, self.cache, padded=self.padded, read=LAST)[:, -1]


class FastDecoder(Decoder):
    def __init__(self, stack: LlamaStack, cache: Cache, present: Tensor, padded: bool, more: int) -> None:
        super().__init__(stack, cache, present, padded, more)
        settings = stack.settings
        self.rows = len(self.present)
        self.heads, self.kv_heads = settings.heads, settings.kv_heads
        self.head_dim = settings.dim // settings.heads
        weight = stack.norm.weight
        self.eps = weight.new_tensor(settings.eps)
        rows = self.present if padded else self.present[:1]  # without padding all rows have the same positions
        position = (rows.long().cumsum(1) - 1).clamp(min=0)
        cos, sin = turns(position, self.head_dim, settings.rope_theta, weight.dtype)
        left, right = sin.chunk(2, dim=-1)
        self.cos, self.sin = cos.transpose(1, 2), torch.cat([-left, right], dim=-1).transpose(1, 2)  # [N, W, 1, d]
        self.seen = as_bias(self.present[:, None, None], weight.dtype) if padded else None  # [N, 1, 1, W]

    def _run(self, x: Tensor) -> Tensor:
        begin, new = self.cache.length, x.shape[1]
        end = begin + new
        mask = None
        if self.padded:
            first = as_bias(visible(self.present[:, :end], new, False), x.dtype) if new > 1 else None
            mask = self.seen[..., :end] if first is None else first
        turn = self.cos[:, begin:end], self.sin[:, begin:end]
        x = x.reshape(self.rows * new, -1).clone()
        *layers, last = self.stack.layers
        for layer in layers:
            x = self._layer(layer, x, turn, mask, begin, new)
        x = self._layer(last, x, turn, mask, begin, new, read_last=new > 1)
        self.cache.length = end
        return self._norm(self.stack.norm, x)

    def _layer(
        self,
        layer: LlamaLayer,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        mask: Tensor | None,
        begin: int,
        new: int,
        read_last: bool = False,
    ) -> Tensor:
        """Runs a layer on embeddings [N * new, D], overwriting them; returns its outputs, on request only of the last
        tokens."""
        attention, mlp, (cos, sin) = layer.self_attn, layer.mlp, turn
        normed = self._norm(layer.input_layernorm, x)
        k = self._turned(normed @ attention.k_proj.weight.t(), cos, sin)
        v = normed @ attention.v_proj.weight.t()
        causal = mask is None and new > 1
        if read_last:
            x, normed = x.view(self.rows, new, -1)[:, -1].contiguous(), normed.view(self.rows, new, -1)[:, -1]
            cos, sin, causal = cos[:, -1:], sin[:, -1:], False
            mask = None if mask is None else mask[:, :, -1:]
        q = self._turned(normed @ attention.q_proj.weight.t(), cos, sin).transpose(1, 2)
        k, v = self.cache.add(attention.layer, k.transpose(1, 2), v.view(k.shape).transpose(1, 2))
        grouped = self.heads != self.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)
        x.addmm_(out.transpose(1, 2).reshape(len(x), -1), attention.o_proj.weight.t())
        normed = self._norm(layer.post_attention_layernorm, x)
        gate = F.silu(normed @ mlp.gate_proj.weight.t(), inplace=True)
        return x.addmm_(gate.mul_(normed @ mlp.up_proj.weight.t()), mlp.down_proj.weight.t())

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[N * L, heads * d] -> [N, L, heads, d], by the places of its tokens."""
        x = x.view(self.rows, -1, x.shape[-1] // self.head_dim, self.head_dim)
        return (x * cos).addcmul_(x.roll(self.head_dim // 2, -1), sin)

    def _norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(self.eps, size, size, value=1 / x.shape[-1]).rsqrt_()).mul_(norm.weight)


def as_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias for attention scores: 0 for visible tokens."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def is_plain(stack: LlamaStack) -> bool:
    weight = stack.norm.weight
    exact = weight.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(weight.device.type)
    return exact and all(type(module) in PLAIN for module in stack.modules())


# With torch.compile: one program for prompts and one for a single token, from the stack's own layers. A program needs
# memory of a fixed size, so each token attends to all of it, with a mask for empty places.


class CompiledDecoder(Decoder):
    def __init__(self, stack: LlamaStack, cache: Cache, present: Tensor, padded: bool, more: int) -> None:
        super().__init__(stack, cache, present, padded, more)
        self.shown = self.present if padded else self.present[:1]  # without padding all rows are equal
        weight = stack.norm.weight
        half = torch.is_autocast_enabled(weight.device.type)
        dtype = torch.get_autocast_dtype(weight.device.type) if half else weight.dtype
        self.memory = [cache.room(layer, self._one_token(dtype)) for layer in range(stack.settings.depth)]
        for memory in (memory for pair in self.memory for memory in pair):
            torch._dynamo.mark_static_address(memory)  # a CUDA graph may write to it
            memory[:, :, present.shape[1] :] = 0  # masked values must be finite

    def _one_token(self, dtype: torch.dtype) -> Tensor:
        settings = self.stack.settings
        shape = len(self.present), settings.kv_heads, 1, settings.dim // settings.heads
        return self.stack.norm.weight.new_empty(shape, dtype=dtype)

    def _run(self, x: Tensor) -> Tensor:
        begin = self.cache.length
        self.cache.length += x.shape[1]
        place = torch.arange(begin, self.cache.length, device=x.device)
        return compiled(step, x.device.type)(self.stack, x, place, self.shown, self.memory)


class Slots:
    """A cache for layers; new tokens are written to these places."""

    def __init__(self, memory: Memory, place: Tensor) -> None:
        self.memory, self.place = memory, place

    def add(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.memory[layer]
        keys.index_copy_(2, self.place, k)
        values.index_copy_(2, self.place, v)
        return keys, values


def step(stack: LlamaStack, x: Tensor, place: Tensor, present: Tensor, memory: Memory) -> Tensor:
    """The last hidden states [N, D] of tokens x [N, L, D] at places [L]."""
    head_dim = stack.settings.dim // stack.settings.heads
    position = (present.long().cumsum(1) - 1).clamp(min=0)[:, place]
    turn = turns(position, head_dim, stack.settings.rope_theta, x.dtype)
    here = torch.arange(present.shape[1], device=x.device)
    mask = (((here <= place[:, None]) & present[:, None]) | (here == place[:, None]))[:, None]
    slots, (*first, last) = Slots(memory, place), stack.layers
    for layer in first:
        x = layer(x, turn, mask, False, slots)
    return stack.norm(last(x, turn, mask[:, :, LAST], False, slots, LAST))[:, -1]
