"""Gemma with transformers' key names, for two stacks of unlike width that share keys and values layer by layer.

The prefix (images and words) is computed once; what comes behind it looks at its keys and values, which nobody adds to.
Pi0.5's expert has adaptive norms: a condition (the time) scales and shifts what is normed and gates what is added.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.policies.pi0.settings import GemmaSettings
from embodied.policies.vla.layers import GatedMLP, Turn, normed, rotate, turns

EPS, THETA = 1e-6, 10_000.0
KeysValues = tuple[Tensor, Tensor]  # [N, kv_heads, tokens, head_dim] each


class Norm(nn.Module):
    def __init__(self, dim: int, condition_dim: int | None) -> None:
        super().__init__()
        if condition_dim:
            self.dense = nn.Linear(condition_dim, 3 * dim)
        else:
            self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """The normed tokens, and the gate of what is made of them."""
        exact = normed(x, EPS)
        if condition is None:
            return (exact * (1 + self.weight.to(exact.dtype))).to(x.dtype), 1.0
        scale, shift, gate = self.dense(condition.to(self.dense.weight.dtype))[:, None].chunk(3, dim=-1)
        return (exact * (1 + scale.to(exact.dtype)) + shift.to(exact.dtype)).to(x.dtype), gate.to(x.dtype)


class GemmaAttention(nn.Module):
    def __init__(self, settings: GemmaSettings) -> None:
        super().__init__()
        self.head_dim = settings.head_dim
        self.groups = settings.heads // settings.kv_heads
        self.q_proj = nn.Linear(settings.dim, settings.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(settings.dim, settings.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(settings.dim, settings.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(settings.heads * self.head_dim, settings.dim, bias=False)

    def forward(self, x: Tensor, turn: Turn, mask: Tensor, past: KeysValues | None) -> tuple[Tensor, KeysValues]:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, *turn), rotate(k, *turn)
        if past is not None:
            k, v = (torch.cat([before, new], dim=2) for before, new in zip(past, (k, v)))
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=self.groups > 1)
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v)


class GemmaLayer(nn.Module):
    def __init__(self, settings: GemmaSettings, condition_dim: int | None) -> None:
        super().__init__()
        self.self_attn = GemmaAttention(settings)
        self.mlp = GatedMLP(settings.dim, settings.mlp, nn.GELU("tanh"))
        self.input_layernorm = Norm(settings.dim, condition_dim)
        self.post_attention_layernorm = Norm(settings.dim, condition_dim)

    def forward(
        self, x: Tensor, turn: Turn, mask: Tensor, past: KeysValues | None, condition: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        ready, gate = self.input_layernorm(x, condition)
        out, seen = self.self_attn(ready, turn, mask, past)
        x = x + out * gate
        ready, gate = self.post_attention_layernorm(x, condition)
        return x + self.mlp(ready) * gate, seen


class GemmaStack(nn.Module):
    """`vocab` None: no words go in, only embeddings."""

    def __init__(self, settings: GemmaSettings, vocab: int | None = None, condition_dim: int | None = None) -> None:
        super().__init__()
        self.settings = settings
        if vocab:
            self.embed_tokens = nn.Embedding(vocab, settings.dim)
        self.layers = nn.ModuleList(GemmaLayer(settings, condition_dim) for _ in range(settings.depth))
        self.norm = Norm(settings.dim, condition_dim)

    def forward(
        self,
        x: Tensor,
        position: Tensor,
        mask: Tensor,
        past: list[KeysValues] | None = None,
        condition: Tensor | None = None,
    ) -> tuple[Tensor, list[KeysValues]]:
        """Hidden states [N, L, D] and each layer's keys and values, of embeddings [N, L, D] at `position` [N, L];
        `mask` [N, 1, L, everything], everything of `past` first, says which token attends to which."""
        x = x.to(self.layers[0].mlp.up_proj.weight.dtype)
        turn = turns(position, self.settings.head_dim, THETA, x.dtype)
        seen = []
        for number, layer in enumerate(self.layers):
            x, added = layer(x, turn, mask, past and past[number], condition)
            seen.append(added)
        return self.norm(x, condition)[0], seen
