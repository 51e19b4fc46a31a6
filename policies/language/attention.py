"""Attention of packed rows: masks, the only place that chooses a kernel, and rows that several ranks compute together.

Models with sliding windows, soft caps of scores, or sinks have a kernel of their own (`special_attention`), which takes
a second mask for the layers with a window. On the meta device nothing is computed; it serves to count the memory of a
backward pass.

Divided rows are as in DeepSpeed's Ulysses. Place c of every row belongs to rank c mod N. A rank computes everything but
attention for its own places. Before attention the ranks exchange queries, keys and values: each then has all places,
for its own part of the heads. After attention they exchange back. On GPUs large exchanges are made in two halves of the
heads: one half travels while attention of the other is computed (on cores this costs more than it hides). All ranks
gather the scores of the sampled tokens. One rank, the owner, computes the loss; all ranks use its gradient of the
scores.
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
from embodied.runtime.collective import PendingTensor, RankGroup

DENSE, SPARSE = "sdpa", "flex_attention"  # by transformers' names
COUNTED = "embodied_counted"  # for counting memory: computes nothing
DIVIDED = "embodied_divided"  # for rows that ranks compute together
SPECIAL = "embodied_special"  # for windows, soft caps and sinks
TILE = 128  # block size of flex_attention
HALVED = {"cpu": math.inf, "cuda": 1 << 18}  # numbers of a rank's queries from which exchanges are made in halves


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


def token_bytes(model: Any) -> int:
    """Bytes of one token's keys and values."""
    shape = model.config.get_text_config()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    dims = [getattr(shape, key, None) or dim for key in ("qk_head_dim", "v_head_dim")]  # DeepSeek has other values
    return sum(dims) * shape.num_hidden_layers * heads * next(model.parameters()).element_size()


def window_of(shape: Any) -> int | None:
    """The number of tokens that layers with a sliding window see; None if no layer has one."""
    kinds = getattr(shape, "layer_types", None) or ["sliding_attention"]
    return (getattr(shape, "sliding_window", None) or None) if "sliding_attention" in kinds else None


def is_special(shape: Any) -> bool:
    """True if a model of this shape needs `special_attention`."""
    capped = getattr(shape, "attn_logit_softcapping", None) is not None
    return capped or window_of(shape) is not None or shape.model_type == "gpt_oss"


def implementation(kernel: str, shape: Any) -> str:
    """transformers' name of what computes attention with this kernel for a model of this shape."""
    return SPECIAL if is_special(shape) and kernel != COUNTED else kernel


def attention_masks(packed: Packed, kernel: str, device: torch.device, shape: Any) -> dict[str, Any]:
    """The masks for a model of this shape, as arguments of transformers' model."""
    masks, window = {"attention_mask": attention_mask(packed, kernel, device)}, window_of(shape)
    if window is not None and kernel != COUNTED:
        masks["window_mask"] = attention_mask(packed, kernel, device, window)
    return masks


def attention_mask(packed: Packed, kernel: str, device: torch.device, window: int | None = None) -> Any:
    """The mask for transformers' `attention_mask`. Empty places attend to empty places, so that no row of the mask is
    empty."""
    if kernel == COUNTED:  # without a mask, models with a padding token would search for padding
        rows, width = packed.ids.shape
        return torch.ones(rows, 1, width, width, dtype=torch.bool, device=device)
    parts = (packed.blocks, packed.segments, packed.order)
    blocks, segments, order = (torch.from_numpy(array).to(device) for array in parts)
    sees, (rows, width) = rule(blocks, segments, order, window), blocks.shape
    if kernel == DENSE:
        row, place = torch.arange(rows, device=device), torch.arange(width, device=device)
        return sees(row[:, None, None], None, place[:, None], place)[:, None]
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(sees, rows, None, width, width, device=device, BLOCK_SIZE=TILE)


def rule(blocks: Tensor, segments: Tensor, order: Tensor, window: int | None) -> Any:
    """A function of two places of a row: True if the first sees the second, an earlier or the same token of its block,
    which is shared by the block or of its segment, and one of the last `window` tokens of its conversation."""

    def sees(row: Tensor, head: Tensor | None, one: Tensor, other: Tensor) -> Tensor:
        theirs = segments[row, other]
        mine = (segments[row, one] == theirs) | (theirs == 0)
        seen = (one >= other) & (blocks[row, one] == blocks[row, other]) & mine
        return seen if window is None else seen & (order[row, one] - order[row, other] < window)

    return sees


def special_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    window_mask: Any = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention with windows, soft caps and sinks, as transformers calls it: [B, heads, W, D] -> [B, W, heads, D]."""
    mask = mask if sliding_window is None else window_mask
    if not isinstance(mask, Tensor):  # a GPU's block mask
        out, _ = AttentionInterface()[SPARSE](
            module, query, key, value, mask, scaling=scaling, softcap=softcap, s_aux=s_aux
        )
        return out, None
    if softcap is None and s_aux is None:
        out, _ = AttentionInterface()[DENSE](module, query, key, value, mask, scaling=scaling)
        return out, None
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if s_aux is not None:  # a head's own score of no token
        scores = torch.cat((scores, s_aux.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
    exact = torch.promote_types(scores.dtype, torch.float32)
    likely = scores.softmax(-1, dtype=exact).to(value.dtype)[..., : key.shape[2]]
    return (likely @ value).transpose(1, 2).contiguous(), None


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
    ids, segments = (np.pad(array, more) for array in (packed.ids, packed.segments))
    positions = np.pad(packed.positions, more + [(0, 0)] * (packed.positions.ndim - 2))
    whole = replace(packed, blocks=np.pad(packed.blocks, more, constant_values=-1), segments=segments)
    whole = replace(whole, order=np.pad(packed.order, more))
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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, of_heads: Callable[..., Tensor]) -> Tensor:
        """Attention of this rank's places: [B, heads, W/N, D] -> [B, W/N, heads, D]. `of_heads` computes it for all
        places and some heads, [B, heads, W, D] -> [B, W, heads, D], with their number among the halves."""
        count, dtype = self.group.size, value.dtype  # autocast leaves queries wider than values
        parts = [tensor.to(dtype).unflatten(1, (count, -1)).movedim(1, 0) for tensor in (query, key, value)]
        sizes = [part.shape[2] for part in parts]  # heads of a rank; parts are [N, B, heads/N, W/N, D]
        halves = 2 if query.numel() >= HALVED[query.device.type] and not any(size % 2 for size in sizes) else 1
        coming = [self._to_heads(half) for half in zip(*(part.chunk(halves, 2) for part in parts), strict=True)]
        leaving = [self._to_places(of_heads(*wait(), at)) for at, wait in enumerate(coming)]
        return torch.cat([wait() for wait in leaving], 3).flatten(2, 3)

    def _to_heads(self, parts: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to exchange [N, B, heads/N, W/N, D]; the result waits for [B, heads/N, W, D]."""
        wait = travel(self.group, torch.cat([tensor.flatten(1) for tensor in parts], 1))
        sizes, shapes = [tensor[0].numel() for tensor in parts], [tensor.shape for tensor in parts]
        return lambda: [
            tensor.view(shape).movedim(0, 3).flatten(2, 3)
            for tensor, shape in zip(wait().split(sizes, 1), shapes, strict=True)
        ]

    def _to_places(self, out: Tensor) -> Callable[[], Tensor]:
        """Begin to exchange [B, W, heads/N, D]; the result waits for [B, W/N, N, heads/N, D]."""
        parts = out.unflatten(1, (-1, self.group.size)).movedim(2, 0)  # [N, B, W/N, heads/N, D]
        wait = travel(self.group, parts.flatten(1))
        return lambda: wait().view(parts.shape).movedim(0, 2)

    def score(self, scores_of: Callable[..., list[Tensor]], packed: Packed) -> tuple[Sequence[Tensor], np.ndarray]:
        """Returns the scores [M] of all sampled tokens, a tensor for each kind of score, and the tokens' numbers [M].
        `scores_of` computes the scores [m] of this rank's part of the rows."""
        parts = parts_of_ranks(packed, self.group.size)
        of_rank = torch.stack(scores_of(parts[self.group.place], ranks=self), 1)
        scored = [mine.scored for mine in parts]
        scores = AllScores.apply(self, [len(numbers) for numbers in scored], of_rank)
        return scores.unbind(1), np.concatenate(scored)


def travel(group: RankGroup, parts: Tensor) -> Callable[[], Tensor]:
    """Begin to send part i [N, k] to member i (all-to-all); the result waits for the parts that come. Gradients go the
    opposite way, and travel meanwhile, too."""
    flight = Flight(group)
    coming = Depart.apply(flight, parts)
    return lambda: Arrive.apply(flight, coming)


@dataclass
class Flight:
    """An exchange under way."""

    group: RankGroup
    pending: PendingTensor | None = None


class Depart(torch.autograd.Function):
    """Begins an exchange, and waits for that of the gradients."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, parts: Tensor) -> Tensor:
        ctx.flight, flight.pending = flight, flight.group.begin_exchange(parts)
        return flight.pending.tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, ctx.flight.pending.wait()


class Arrive(torch.autograd.Function):
    """Waits for an exchange, and begins that of the gradients."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, coming: Tensor) -> Tensor:
        ctx.flight = flight
        return flight.pending.wait().view_as(coming)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.flight.pending = ctx.flight.group.begin_exchange(grad)
        return None, ctx.flight.pending.tensor


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
    sinks = options.get("s_aux")

    def of_heads(query: Tensor, key: Tensor, value: Tensor, half: int) -> Tensor:
        if sinks is not None:  # of these heads
            ours = sinks.chunk(ranks.group.size)[ranks.group.place]
            options["s_aux"] = ours.chunk(len(ours) // query.shape[1])[half]
        out, _ = AttentionInterface()[ranks.kernel](module, query, key, value, mask, **options)
        return out

    return ranks.attend(query, key, value, of_heads), None


AttentionInterface.register(COUNTED, counted_attention)
AttentionInterface.register(DIVIDED, divided_attention)
AttentionInterface.register(SPECIAL, special_attention)
ExpertsInterface.register(COUNTED, counted_experts)
