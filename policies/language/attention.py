"""Attention masks of packed rows, and the only place that chooses attention's kernel. On the meta device nothing is
computed; it serves to count the memory of a backward pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface

from embodied.policies.language.packing import Packed

DENSE, SPARSE = "sdpa", "flex_attention"  # by transformers' names
COUNTED = "embodied_counted"  # for counting memory: computes nothing
TILE = 128  # block size of flex_attention


def attention_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """The kernel of attention: on GPUs a kernel that skips masked blocks, elsewhere a kernel with a dense mask."""
    if device.type == "meta":
        return COUNTED
    return SPARSE if device.type == "cuda" and dtype != torch.float64 else DENSE


def use_kernel(model: Any, kernel: str) -> None:
    """Make transformers' model use this attention kernel."""
    if model.config._attn_implementation != kernel:
        model.set_attn_implementation(kernel)
        if kernel == COUNTED:
            model.set_experts_implementation(kernel)


def wide_row(kernel: str, dim: int) -> float:
    """The row length at which attention costs as much as the rest of a model of this width: a dense kernel also
    computes masked places (12 dim^2 products per token, and 2 dim per place, which are three times as slow)."""
    return 2.0 * dim if kernel == DENSE else math.inf


def attention_mask(packed: Packed, kernel: str, device: torch.device) -> Any:
    """The mask for transformers' `attention_mask`. Empty places attend to empty places, so that no row of the mask is
    empty."""
    if kernel == COUNTED:  # without a mask, models with a padding token would search for padding
        rows, width = packed.ids.shape
        return torch.ones(rows, 1, width, width, dtype=torch.bool, device=device)
    blocks, segments = (torch.from_numpy(part).to(device) for part in (packed.blocks, packed.segments))
    if kernel == DENSE:
        return dense(blocks, segments)
    from torch.nn.attention.flex_attention import create_block_mask

    rows, width = blocks.shape
    return create_block_mask(rule(blocks, segments), rows, None, width, width, device=device, BLOCK_SIZE=TILE)


def dense(blocks: Tensor, segments: Tensor) -> Tensor:
    """bool [B, 1, W, W]: earlier tokens of the same block, shared by the block or of the same segment."""
    same = blocks[:, :, None] == blocks[:, None, :]
    same_segment = segments[:, :, None] == segments[:, None, :]
    return (same & (same_segment | (segments == 0)[:, None, :])).tril()[:, None]


def rule(blocks: Tensor, segments: Tensor) -> Any:
    """The same, place by place."""

    def sees(row: Tensor, head: Tensor, one: Tensor, other: Tensor) -> Tensor:
        theirs = segments[row, other]
        mine = (segments[row, one] == theirs) | (theirs == 0)
        return (one >= other) & (blocks[row, one] == blocks[row, other]) & mine

    return sees


class CountedAttention(torch.autograd.Function):
    """Keeps the memory of both kernels for the backward pass: inputs and outputs, no attention mask."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out)
        return out


def counted_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Attention on the meta device, as transformers calls it: [B, heads, W, D] -> [B, W, heads, D]."""
    return CountedAttention.apply(query, key, value).transpose(1, 2).contiguous(), None


def counted_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """A layer of experts on the meta device, as transformers calls it: every token passes its chosen number of
    experts."""
    one, turned = hidden.repeat_interleave(chosen.shape[-1], dim=0), getattr(module, "is_transposed", False)

    def linear(inputs: Tensor, matrices: Tensor) -> Tensor:
        return inputs @ (matrices[0] if turned else matrices[0].T)

    inner = linear(one, module.gate_up_proj if module.has_gate else module.up_proj)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = linear(inner, module.down_proj) * weights.reshape(-1, 1)
    return out.view(*chosen.shape, -1).sum(1).to(hidden.dtype)


AttentionInterface.register(COUNTED, counted_attention)
ExpertsInterface.register(COUNTED, counted_experts)
