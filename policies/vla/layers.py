"""Layers shared by the transformers of several families; weights keep the names that each family publishes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ADAPTER = "default"  # peft's name of a layer's adapter
RotaryTables = tuple[Tensor, Tensor]  # cosines and sines of the rotary embedding [N, 1, L, head_dim]


class NamedParts(nn.Module):
    """A module with children of these names, to reproduce upstream's nested parameter names."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class MLP(nn.Module):
    """`approximate` is the kind of GELU."""

    def __init__(self, dim: int, hidden: int, approximate: str = "none") -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))


class GroupedAttention(nn.Module):
    """The projections of an attention in which `heads` queries share `kv_heads` keys and values."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.groups = heads // kv_heads
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """[N, L, heads * head_dim] -> [N, heads, L, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=self.groups > 1)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self, dim: int, hidden: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def normed(x: Tensor, eps: float) -> Tensor:
    """`x` divided by the root of its mean square, in float32 at least."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)


def turns(position: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> RotaryTables:
    speed = theta ** (-torch.arange(0, head_dim, 2, device=position.device).float() / head_dim)
    angle = (position[:, None, :, None].float() * speed).repeat(1, 1, 1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def patch_tokens(pixels: Tensor, convolution: nn.Module) -> Tensor:
    """[N, 3, H, W] -> [N, patches, dim]: the convolution as one matrix product, since patches do not overlap."""
    if is_scaled(convolution):
        return convolution(pixels).flatten(2).transpose(1, 2)
    (rows, colours, height, width), size = pixels.shape, convolution.weight.shape[-1]
    patches = pixels.view(rows, colours, height // size, size, width // size, size).permute(0, 2, 4, 1, 3, 5)
    patches = patches.reshape(rows, -1, colours * size**2)
    tokens = F.linear(patches, convolution.weight.flatten(1), convolution.bias)
    return with_adapter(tokens, convolution, patches)


def with_adapter(y: Tensor, layer: nn.Module, x: Tensor, rows: slice = slice(None)) -> Tensor:
    """Adds a layer's plain LoRA adapter, if any, to its output `y` for `x`; `rows` are the outputs that `y`
    contains."""
    if not hasattr(layer, "lora_A"):
        return y
    down, up = (getattr(layer, part)[ADAPTER].weight.flatten(1) for part in ("lora_A", "lora_B"))
    return y + F.linear(F.linear(x.to(down.dtype), down), up[rows]) * layer.scaling[ADAPTER]


def is_scaled(layer: nn.Module) -> bool:
    """True if an adapter does more than add to the layer's output (DoRA), so the whole layer must be called."""
    return bool(getattr(layer, "lora_variant", None))


def smooth_filters(shape: torch.Size, draw: torch.Generator) -> Tensor:
    """Initial filters [dim, colours, P, P] that vary slowly over a patch and ignore uniform brightness.

    With white-noise filters a small object in a patch adds little to the background, and something different at every
    place; a small model then learns to ignore images long before it learns the object's position.
    """
    coarse = torch.empty(*shape[:2], 2, 2).normal_(generator=draw)
    filters = F.interpolate(coarse, size=shape[2:], mode="bilinear")
    filters = filters - filters.mean((2, 3), keepdim=True)
    return filters / filters.std() * shape[1:].numel() ** -0.5
