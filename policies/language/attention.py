"""Who sees whom in packed rows, as attention wants to know it: the one place that knows which kernel computes it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from embodied.policies.language.packing import Packed

DENSE, SPARSE = "sdpa", "flex_attention"  # by transformers' names
COUNTED = "embodied_counted"  # where nothing is computed, only what is kept is counted
TILE = 128  # of flex_attention's blocks, into which rows are divided


def kernel(device: torch.device, dtype: torch.dtype) -> str:
    """What computes attention: on GPUs one that leaves out what nobody sees, elsewhere one with a dense mask."""
    if device.type == "meta":
        return COUNTED
    return SPARSE if device.type == "cuda" and dtype != torch.float64 else DENSE


def wide(kernel: str, dim: int) -> float:
    """Places of a row at which attention costs a model of this width as much as all else: a dense mask is computed
    through, whatever it hides (12 dim^2 products a token beside 2 dim a place, which are three times as slow)."""
    return 2.0 * dim if kernel == DENSE else math.inf


def visible(packed: Packed, kernel: str, device: torch.device) -> Any:
    """Which places see which, for transformers' `attention_mask`. Places without a token see such places, so that no
    row of numbers is empty."""
    if kernel == COUNTED:
        return None
    blocks, segments = (torch.from_numpy(part).to(device) for part in (packed.blocks, packed.segments))
    if kernel == DENSE:
        return dense(blocks, segments)
    from torch.nn.attention.flex_attention import create_block_mask

    rows, width = blocks.shape
    return create_block_mask(rule(blocks, segments), rows, None, width, width, device=device, BLOCK_SIZE=TILE)


def dense(blocks: Tensor, segments: Tensor) -> Tensor:
    """bool [B, 1, W, W]: what is before a place, in its block, and shared by that block or of its own segment."""
    same = blocks[:, :, None] == blocks[:, None, :]
    mine = segments[:, :, None] == segments[:, None, :]
    return (same & (mine | (segments == 0)[:, None, :])).tril()[:, None]


def rule(blocks: Tensor, segments: Tensor) -> Any:
    """The same, place by place."""

    def sees(row: Tensor, head: Tensor, one: Tensor, other: Tensor) -> Tensor:
        theirs = segments[row, other]
        mine = (segments[row, one] == theirs) | (theirs == 0)
        return (one >= other) & (blocks[row, one] == blocks[row, other]) & mine

    return sees


class Kept(torch.autograd.Function):
    """What both kernels keep for the backward pass: what goes in and what comes out, no table of who sees whom."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out)
        return out


def counted(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Attention on the meta device, as transformers calls it: [B, heads, W, D] -> [B, W, heads, D]."""
    return Kept.apply(query, key, value).transpose(1, 2).contiguous(), None


AttentionInterface.register(COUNTED, counted)
