"""The networks of flow-matching policies: SigLIP sees images, a stack of transformer layers reads images and words,
and a narrower stack (the action expert) turns noise into actions. Weights have transformers' key names.

Images and words are computed once (the prefix). In each denoising step the expert's tokens attend to the prefix's keys
and values, layer by layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.policies.vla.image_processor import constants
from embodied.policies.vla.layers import (
    MLP,
    GatedMLP,
    GroupedAttention,
    NamedParts,
    RotaryTables,
    SideBySide,
    are_faster_apart,
    layer_norm,
    linear,
    patch_tokens,
    product,
    rms_norm,
    rotate,
    smooth_filters,
    turns,
)

EPS, THETA = 1e-6, 10_000.0
KeysValues = tuple[Tensor, Tensor]  # [N, kv_heads, tokens, head_dim] each


# SigLIP. All blocks and the last norm are used, and the GELU is the approximate one, unlike in OpenVLA's tower.


@dataclass(frozen=True)
class VisionSettings:
    dim: int
    depth: int
    mlp: int
    heads: int
    patch: int
    image_size: int

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch) ** 2


class VisionAttention(SideBySide):
    joint = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.q_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        k_proj, v_proj, q_proj, out_proj = self._modules.values()
        inputs = q_proj, k_proj, v_proj
        if are_faster_apart(x, inputs):
            q, k, v = (linear(x, layer).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in inputs)
        else:
            q, k, v = product(x, inputs).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), out_proj)


class SiglipBlock(nn.Module):
    def __init__(self, settings: VisionSettings) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(settings.dim, eps=EPS)
        self.self_attn = VisionAttention(settings.dim, settings.heads)
        self.layer_norm2 = nn.LayerNorm(settings.dim, eps=EPS)
        self.mlp = MLP(settings.dim, settings.mlp, "tanh")

    def forward(self, x: Tensor) -> Tensor:
        norm_1, attention, norm_2, mlp = self._modules.values()
        x = x + attention.forward(layer_norm(x, norm_1))
        return x + mlp.forward(layer_norm(x, norm_2))


class VisionModel(nn.Module):
    def __init__(self, settings: VisionSettings) -> None:
        super().__init__()
        self.embeddings = NamedParts(
            patch_embedding=nn.Conv2d(3, settings.dim, settings.patch, stride=settings.patch),
            position_embedding=nn.Embedding(settings.patches, settings.dim),
        )
        self.encoder = NamedParts(layers=nn.ModuleList(SiglipBlock(settings) for _ in range(settings.depth)))
        self.post_layernorm = nn.LayerNorm(settings.dim, eps=EPS)

    def forward(self, pixels: Tensor) -> Tensor:
        """[N, 3, S, S] -> [N, patches, dim]."""
        filters, places = self.embeddings.patch_embedding, self.embeddings.position_embedding
        x = patch_tokens(pixels.to(filters.weight.dtype), filters) + places.weight
        x = x.to(self.post_layernorm.weight.dtype)
        for block in self.encoder.layers:
            x = block(x)
        return self.post_layernorm(x)


# The stacks of language model and expert


@dataclass(frozen=True)
class StackSettings:
    dim: int
    depth: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int


class Norm(nn.Module):
    """Divides tokens by the root of their mean square and scales them by `offset` + weight. With `condition_dim` a
    condition scales and shifts them instead, and gates the residual."""

    def __init__(self, dim: int, eps: float, offset: int = 0, condition_dim: int = 0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        if condition_dim:
            self.dense = nn.Linear(condition_dim, 3 * dim)
        else:
            self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns the normed tokens and the gate of the residual, if any."""
        exact = torch.promote_types(x.dtype, torch.float32)
        if condition is None:
            weight = self._parameters["weight"]
            weight = self.offset + weight.to(exact) if self.offset else weight
            return rms_norm(x, weight, self.eps), None
        dense = self._modules["dense"]
        scale, shift, gate = dense(condition.to(dense.weight.dtype))[:, None].chunk(3, dim=-1)
        normed = rms_norm(x.to(exact), None, self.eps)
        return torch.addcmul(shift.to(exact), normed, 1 + scale.to(exact)).to(x.dtype), gate.to(x.dtype)


class StackLayer(nn.Module):
    """With `across` its tokens attend to the prefix alone, through projections of the prefix's keys and values."""

    def __init__(self, sizes: StackSettings, norm: Callable[[], Norm], activation: Callable, across: bool) -> None:
        super().__init__()
        self.across = across
        self.self_attn = GroupedAttention(sizes.dim, sizes.heads, sizes.kv_heads, sizes.head_dim)
        if across:
            wide = sizes.kv_heads * sizes.head_dim
            self.self_attn.k_proj, self.self_attn.v_proj = (nn.Linear(wide, wide, bias=False) for _ in range(2))
        self.mlp = GatedMLP(sizes.dim, sizes.mlp, activation)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()

    def forward(
        self, x: Tensor, turn: RotaryTables, mask: Tensor | None, past: KeysValues | None, condition: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        attention, mlp, norm_1, norm_2 = self._modules.values()
        ready, gate = norm_1.forward(x, condition)
        if self.across:
            q_proj, *others, _ = attention._modules.values()
            q = rotate(attention.split(linear(ready, q_proj)), *turn).transpose(1, 2)
            k, v = (
                attention.split(linear(seen.transpose(1, 2).flatten(2), layer)).transpose(1, 2)
                for seen, layer in zip(past, others, strict=True)
            )
        else:
            q, k, v = attention.project(ready, turn)
            if past is not None:
                k, v = (torch.cat([before, new], dim=2) for before, new in zip(past, (k, v), strict=True))
        x = with_residual(x, gate, lambda add_to: attention.attend(q, k, v, mask, add_to=add_to))
        ready, gate = norm_2.forward(x, condition)
        return with_residual(x, gate, lambda add_to: mlp.forward(ready, add_to)), (k, v)


def with_residual(x: Tensor, gate: Tensor | None, change: Callable[[Tensor | None], Tensor]) -> Tensor:
    return change(x) if gate is None else torch.addcmul(x, change(None), gate)


class Stack(nn.Module):
    """Transformer layers with embeddings of `vocab` words, if any. If `self_every` is set, only every `self_every`-th
    layer attends to its own tokens, too (with 0 none does); the other layers attend to the prefix alone."""

    def __init__(
        self,
        sizes: StackSettings,
        norm: Callable[[], Norm],
        activation: Callable,
        vocab: int = 0,
        self_every: int | None = None,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        if vocab:
            self.embed_tokens = nn.Embedding(vocab, sizes.dim)
        across = (self_every is not None and (self_every < 1 or n % self_every > 0) for n in range(sizes.depth))
        self.layers = nn.ModuleList(StackLayer(sizes, norm, activation, spans) for spans in across)
        self.norm = norm()

    def forward(
        self,
        x: Tensor,
        positions: list[Tensor],
        masks: list[Tensor | None],
        past: list[KeysValues] | None = None,
        condition: Tensor | None = None,
    ) -> tuple[Tensor, list[KeysValues]]:
        """Returns hidden states before the last norm, and each layer's keys and values, for embeddings [N, L, D].
        `positions` [N, L] and attention masks [N, 1, L, all tokens, `past` first] (None: all attend to all) are those
        of layers that attend to their own tokens, then, if there are some, those of layers that attend to the prefix
        alone. Without padding one row stands for all."""
        tables = [turns(position, self.sizes.head_dim, THETA, x.dtype) for position in positions]
        seen = []
        for number, layer in enumerate(self.layers):
            x, new = layer(x, tables[layer.across], masks[layer.across], past and past[number], condition)
            seen.append(new)
        return x, seen


@dataclass(frozen=True)
class Prefix:
    seen: list[KeysValues]  # of each layer
    present: Tensor  # bool [N, L], without padding [1, L]
    hidden: Tensor | None = None  # hidden states [N, L, dim] or of the last token [N, dim]
    state: Tensor | None = None  # the robot's state [N, state_dim], where the expert reads it
    padded: bool = True  # True: there may be padding

    def stacked(self) -> Tensor:
        """Keys and values of all layers [N, depth, 2, kv_heads, L, head_dim]."""
        return torch.stack([torch.stack(pair, dim=1) for pair in self.seen], dim=1)

    @classmethod
    def unstacked(cls, seen: Tensor, present: Tensor, hidden: Tensor | None = None) -> Prefix:
        return cls([(layer[:, 0], layer[:, 1]) for layer in seen.unbind(1)], present, hidden)


class FlowNetwork(nn.Module):
    """Families create the weights, and implement `prefix`, and `suffix`: the hidden states of the expert's tokens for
    noisy actions x [N, H, D] at `time` [N]. In `part` are the language model and the expert together."""

    part: str
    settings: Any
    vlm: nn.Module  # sees and reads
    tower: nn.Module
    to_words: nn.Module  # maps patches to the language model's width
    language: Stack
    expert: Stack

    def read_patches(self, pixels: Tensor) -> Tensor:
        """Image tokens [N, cameras * tokens, dim] of pixels [N, cameras, 3, S, S]."""
        patches = self.to_words(self.merge_patches(self.tower(pixels.flatten(0, 1))))
        return patches.view(pixels.shape[0], -1, patches.shape[-1])

    def merge_patches(self, patches: Tensor) -> Tensor:
        return patches

    def mixed_with_time(self, actions: Tensor, waves: Tensor) -> Tensor:
        """The expert's tokens [N, H, D] from embedded actions and the waves of their time [N, D]."""
        both = torch.cat([actions, waves[:, None].expand_as(actions).to(actions.dtype)], dim=2)
        return self.action_time_mlp_out(F.silu(self.action_time_mlp_in(both)))

    def waves(self, time: Tensor) -> Tensor:
        """Sines and cosines [N, D] of times [N] from 0 to 1, computed in float64."""
        wide = self.action_in_proj.weight
        circle, periods = constants(circle_and_periods, wide.shape[0] // 2, *self.settings.periods, device=time.device)
        angle = circle * time.double()[:, None] / periods
        return torch.cat([angle.sin(), angle.cos()], dim=1).to(wide.dtype)

    def velocity(self, hidden: Tensor) -> Tensor:
        """The velocity of the noisy actions [N, H, D], from the suffix's hidden states."""
        return self.action_out_proj(hidden[:, -self.settings.horizon :])

    def blocks(self) -> list[nn.Module]:
        return [*self.tower.encoder.layers, *self.language.layers, *self.expert.layers]


def circle_and_periods(count: int, shortest: float, longest: float) -> tuple[np.ndarray, np.ndarray]:
    """2 pi and periods [D], as arrays: in an ONNX program numbers are rounded to float32."""
    return np.array(2 * math.pi), shortest * (longest / shortest) ** np.linspace(0, 1, count)


def places_in(present: Tensor) -> Tensor:
    """The positions [N, L] of tokens among the present ones."""
    return (present.long().cumsum(1) - 1).clamp(min=0)


def with_itself(mask: Tensor) -> Tensor:
    """A mask [N, 1, L, L] in which padding attends to itself, which keeps its rows finite."""
    return (mask | torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device))[:, None]


def value_head(width: int, sizes: tuple[int, ...]) -> nn.Sequential:
    """A network from features of this width to a value."""
    layers: list[nn.Module] = []
    for size in sizes:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, 1))


def initial_weight(name: str, shape: torch.Size, draw: torch.Generator) -> Tensor:
    """The initial numbers of a transformer's weight, which keep the scale of activations."""
    if name.endswith("patch_embedding.weight"):
        return smooth_filters(shape, draw)
    if name.endswith("position_embedding.weight"):
        return torch.empty(shape).normal_(generator=draw)
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    return torch.empty(shape).normal_(0.0, shape[1:].numel() ** -0.5, generator=draw)


class NoiseHead(nn.Module):
    """flow_noise's learned deviation between `low` and `high`, on a logarithmic scale."""

    def __init__(self, dim: int, actions: int, low: float, high: float) -> None:
        super().__init__()
        self.range = (math.log(low), math.log(high))
        self.mlp = nn.Sequential(nn.Linear(dim, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, actions))

    def forward(self, hidden: Tensor) -> Tensor:
        low, high = self.range
        return (low + (high - low) * (self.mlp(hidden).tanh() + 1) / 2).exp()


MOST_GUIDANCE = 5.0  # as in "Real-Time Execution of Action Chunking Flow Policies" (2025)


def continuing(
    denoise: Callable, actions: Tensor, weights: Tensor, seen: Prefix, x: Tensor, time: Tensor
) -> tuple[Tensor, Tensor]:
    """`denoise` towards chunks that begin with these actions [N, H, D], as far as the weights [N, H, 1] ask for it: the
    velocity is corrected by the gradient of the actions that it leads to (real-time chunking)."""
    t = time.to(x.dtype)[:, None, None]
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        hidden, velocity = denoise(seen, x, time)
        there = x - t * velocity
        (pull,) = torch.autograd.grad(there, x, weights * (actions - there.detach()))
    strength = ((t * t + (1 - t) ** 2) / (t * (1 - t))).clamp(max=MOST_GUIDANCE)  # infinite at first
    return hidden.detach(), velocity.detach() - strength * pull
