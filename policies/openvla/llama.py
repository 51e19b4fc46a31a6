"""A Llama decoder with transformers' key names, and its KV cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.policies.openvla.settings import LlamaSettings
from embodied.policies.vla.layers import GatedMLP, GroupedAttention, RotaryTables, normed, rotate, turns

ALL = slice(None)


class Cache:
    """The KV cache of every layer: `length` tokens of up to `width` are filled. The memory is reused for later batches
    and grows to the largest."""

    def __init__(self) -> None:
        self.rows = self.width = self.length = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, rows: int, width: int) -> None:
        self.rows, self.width, self.length = rows, width, 0

    def add(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append new tokens; returns all keys and values so far."""
        end = self.length + k.shape[2]
        keys, values = self.room(layer, k)
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def room(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Allocate the memory for this batch."""
        keys, values = self._memory(layer, like)
        return keys[: self.rows, :, : self.width], values[: self.rows, :, : self.width]

    def __deepcopy__(self, _: dict) -> Cache:
        return Cache()

    def tensors(self) -> list[Tensor]:
        return [memory for pair in self.layers.values() for memory in pair]

    def _memory(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.layers.get(layer)
        if memory is None or memory[0].dtype != like.dtype or memory[0].device != like.device:
            rows, width = self.rows, self.width
        elif memory[0].shape[0] >= self.rows and memory[0].shape[2] >= self.width:
            return memory
        else:
            rows, width = max(self.rows, memory[0].shape[0]), max(self.width, memory[0].shape[2])
        shape = (rows, like.shape[1], width, like.shape[3])
        self.layers[layer] = like.new_empty(shape), like.new_empty(shape)
        return self.layers[layer]


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * normed(x, self.eps).to(x.dtype)


class LlamaAttention(GroupedAttention):
    def __init__(self, settings: LlamaSettings, layer: int) -> None:
        super().__init__(settings.dim, settings.heads, settings.kv_heads, settings.dim // settings.heads)
        self.layer = layer

    def forward(
        self, x: Tensor, turn: RotaryTables, mask: Tensor | None, causal: bool, cache: Cache | None, read: slice
    ):
        cos, sin = turn
        q, k, v = self.split(self.q_proj(x[:, read])), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        q, k = rotate(q, cos[:, :, read], sin[:, :, read]), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.add(self.layer, k, v)
        return self.attend(q, k, v, mask, causal)


class LlamaLayer(nn.Module):
    def __init__(self, settings: LlamaSettings, layer: int) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(settings, layer)
        self.mlp = GatedMLP(settings.dim, settings.mlp, F.silu)
        self.input_layernorm = RMSNorm(settings.dim, settings.eps)
        self.post_attention_layernorm = RMSNorm(settings.dim, settings.eps)

    def forward(
        self,
        x: Tensor,
        turn: RotaryTables,
        mask: Tensor | None,
        causal: bool,
        cache: Cache | None = None,
        read: slice = ALL,
    ) -> Tensor:
        x = x[:, read] + self.self_attn(self.input_layernorm(x), turn, mask, causal, cache, read)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaStack(nn.Module):
    """The model up to the last norm."""

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.settings = settings
        self.embed_tokens = nn.Embedding(settings.vocab, settings.dim)
        self.layers = nn.ModuleList(LlamaLayer(settings, layer) for layer in range(settings.depth))
        self.norm = RMSNorm(settings.dim, settings.eps)

    def forward(
        self,
        x: Tensor,
        present: Tensor,
        cache: Cache | None = None,
        bidirectional: bool = False,
        padded: bool = True,
        read: slice = ALL,
    ) -> Tensor:
        """Hidden states [N, L, D] of embeddings [N, L, D]; with `read`, the last layer computes only these places.

        `present` [N, all tokens so far] is False for padding; cached tokens come first. `padded`: there may be padding.
        `bidirectional`: every token attends to every other one.
        """
        new, total = x.shape[1], present.shape[1]
        position = (present.long().cumsum(1) - 1).clamp(min=0)[:, -new:]
        head_dim = self.settings.dim // self.settings.heads
        turn = turns(position, head_dim, self.settings.rope_theta, x.dtype)
        plain = not padded and (bidirectional or new in (1, total))
        mask = None if plain else visible(present, new, bidirectional)
        causal = plain and not bidirectional and new > 1
        *first, last = self.layers
        for layer in first:
            x = layer(x, turn, mask, causal, cache)
        if causal and read != ALL:
            causal, mask = False, visible(present, new, False)
        x = last(x, turn, mask if mask is None else mask[:, :, read], causal, cache, read)
        if cache is not None:
            cache.length += new
        return self.norm(x)


class LanguageModel(nn.Module):
    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.model = LlamaStack(settings)
        self.lm_head = nn.Linear(settings.dim, settings.vocab, bias=False)


def visible(present: Tensor, new: int, bidirectional: bool) -> Tensor:
    """Attention mask [N, 1, new, all]; padding attends to itself, so that its rows stay finite."""
    total = present.shape[1]
    here = torch.arange(total, device=present.device)
    seen = torch.ones(new, total, dtype=torch.bool, device=present.device)
    if not bidirectional:
        seen = here <= here[-new:, None]
    return ((seen & present[:, None]) | (here == here[-new:, None]))[:, None]
