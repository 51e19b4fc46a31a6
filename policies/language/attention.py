"""Attention of packed rows: masks, the only place that chooses a kernel, and rows that several ranks compute together.

On the meta device nothing is computed; it serves to count the memory of a backward pass.

Divided rows are as in DeepSpeed's Ulysses. Place c of every row belongs to rank c mod N. A rank computes everything but
attention for its own places. Before attention the ranks exchange queries, keys and values: each then has all places,
for its own part of the heads. After attention they exchange back. All ranks gather the scores of the sampled tokens.
One rank, the owner, computes the loss; all ranks use its gradient of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface

from embodied.policies.language.packing import Packed
from embodied.runtime.collective import RankGroup

DENSE, SPARSE = "sdpa", "flex_attention"  # by transformers' names
COUNTED = "embodied_counted"  # for counting memory: computes nothing
DIVIDED = "embodied_divided"  # for rows that ranks compute together
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
    sees, (rows, width) = rule(blocks, segments), blocks.shape
    if kernel == DENSE:
        row, place = torch.arange(rows, device=device), torch.arange(width, device=device)
        return sees(row[:, None, None], None, place[:, None], place)[:, None]
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(sees, rows, None, width, width, device=device, BLOCK_SIZE=TILE)


def rule(blocks: Tensor, segments: Tensor) -> Any:
    """A function of two places of a row: True if the first sees the second, an earlier or the same token of its block,
    which is shared by the block or of its segment."""

    def sees(row: Tensor, head: Tensor | None, one: Tensor, other: Tensor) -> Tensor:
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


def parts_of_ranks(packed: Packed, count: int) -> list[Packed]:
    """Returns the parts of `count` ranks. Ids, positions and scored tokens are a rank's own. Blocks and segments, which
    define the attention mask, are of whole rows, padded to a multiple of `count` places.

    Rows of 5 places on 2 ranks: places 0, 2, 4 and 1, 3, 5; place 5 is padding.
    """
    width = packed.ids.shape[1]
    more = [(0, 0), (0, -width % count)]
    ids, segments = (np.pad(each, more) for each in (packed.ids, packed.segments))
    positions = np.pad(packed.positions, more + [(0, 0)] * (packed.positions.ndim - 2))
    whole = replace(packed, blocks=np.pad(packed.blocks, more, constant_values=-1), segments=segments)
    row, column = np.divmod(packed.sources, width)
    parts = []
    for rank in range(count):
        on_rank = column % count == rank
        judged = on_rank[packed.takes]
        parts.append(
            replace(
                whole,
                ids=np.ascontiguousarray(ids[:, rank::count]),
                positions=np.ascontiguousarray(positions[:, rank::count]),
                sources=(row * (ids.shape[1] // count) + column // count)[on_rank],
                takes=(np.cumsum(on_rank) - 1)[packed.takes[judged]],
                scored=packed.scored[judged],
            )
        )
    return parts


@dataclass(frozen=True)
class DividedPass:
    """The ranks that run a pass together, and the rank that owns the loss."""

    group: RankGroup
    owner: int
    kernel: str  # transformers' name of the attention kernel

    def to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """[B, heads, W/N, D] of this rank's places -> [B, heads/N, W, D] of its heads, in one exchange."""
        count, dtype = self.group.size, tensors[-1].dtype  # autocast leaves queries wider than values
        parts = [each.to(dtype).unflatten(1, (count, -1)).movedim(1, 0) for each in tensors]  # [N, B, heads/N, W/N, D]
        came = Exchange.apply(self.group, torch.cat([part.flatten(1) for part in parts], 1))
        sizes = [part[0].numel() for part in parts]
        return [
            each.view(part.shape).movedim(0, 3).flatten(2, 3)
            for each, part in zip(came.split(sizes, 1), parts, strict=True)
        ]

    def to_places(self, out: Tensor) -> Tensor:
        """[B, W, heads/N, D] of this rank's heads -> [B, W/N, heads, D] of its places."""
        parts = out.unflatten(1, (-1, self.group.size)).movedim(2, 0)  # [N, B, W/N, heads/N, D]
        came = Exchange.apply(self.group, parts.flatten(1)).view(parts.shape)
        return came.movedim(0, 2).flatten(2, 3)

    def score(self, scores_of: Callable[..., list[Tensor]], packed: Packed) -> tuple[Sequence[Tensor], np.ndarray]:
        """Returns the scores [M] of all sampled tokens, a tensor for each kind of score, and the tokens' numbers [M].
        `scores_of` computes the scores [m] of this rank's part of the rows."""
        parts = parts_of_ranks(packed, self.group.size)
        of_rank = torch.stack(scores_of(parts[self.group.place], ranks=self), 1)
        scored = [part.scored for part in parts]
        scores = AllScores.apply(self, [len(each) for each in scored], of_rank)
        return scores.unbind(1), np.concatenate(scored)


class Exchange(torch.autograd.Function):
    """Sends part i [N, k] to member i (all-to-all); gradients go the opposite way."""

    @staticmethod
    def forward(ctx: Any, group: RankGroup, parts: Tensor) -> Tensor:
        ctx.group = group
        return group.exchange(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, ctx.group.exchange(grad)


class AllScores(torch.autograd.Function):
    """Gathers the rows of all ranks, whose numbers of rows are given. Gradients are the owner's."""

    @staticmethod
    def forward(ctx: Any, ranks: DividedPass, counts: list[int], scores: Tensor) -> Tensor:
        ctx.ranks, ctx.counts = ranks, counts
        room = scores.new_zeros(max(1, *counts), scores.shape[1])
        room[: len(scores)] = scores
        came = ranks.group.gather(room)
        return torch.cat([rows[:count] for rows, count in zip(came, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        group = ctx.ranks.group
        if len(grad):
            grad = group.send_from(ctx.ranks.owner, grad.clone(memory_format=torch.contiguous_format)).wait()
        return None, None, grad.split(ctx.counts)[group.place]


def divided_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, ranks: DividedPass, **options: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [B, heads, W/N, D] -> [B, W/N, heads, D]."""
    query, key, value = ranks.to_heads(query, key, value)
    out, _ = AttentionInterface()[ranks.kernel](module, query, key, value, mask, **options)
    return ranks.to_places(out), None


AttentionInterface.register(COUNTED, counted_attention)
AttentionInterface.register(DIVIDED, divided_attention)
ExpertsInterface.register(COUNTED, counted_experts)
