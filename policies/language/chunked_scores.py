"""Scores of hidden states a part at a time, so that the logits of a whole batch never exist."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

LOGITS_BYTES = 2**27  # most bytes of log-probs of the whole vocabulary at a time
PARTS = 5  # buffers of that size that exist at a time in the backward pass


class InParts(torch.autograd.Function):
    """Scores a part of the places at a time, and again in the backward pass, so the logits of all places never exist at
    once. Gradients of weights are summed in float32 at least."""

    @staticmethod
    def forward(ctx: Any, score: Any, most: int, parts: list, hidden: Tensor, *weights: Tensor) -> Any:
        ctx.score, ctx.most, ctx.parts = score, most, parts
        ctx.kind = "cpu" if hidden.is_meta else hidden.device.type  # of autocast, which does not know meta
        ctx.autocast = torch.is_autocast_enabled(ctx.kind), torch.get_autocast_dtype(ctx.kind)
        room = [hidden.new_empty(PARTS * LOGITS_BYTES, dtype=torch.uint8)] if hidden.is_meta else []  # to be counted
        ctx.save_for_backward(hidden, *weights, *room)
        ctx.set_materialize_grads(False)
        scores = [score(hidden[first : first + most], *which) for first, *which in parts]
        return tuple(torch.cat(each) for each in zip(*scores, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        hidden, *weights = ctx.saved_tensors
        ends = np.cumsum([len(takes) for _, takes, _ in ctx.parts])
        wanted = [number for number, grad in enumerate(grads) if grad is not None]
        sums = [torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for w in weights]
        backwards = torch.empty_like(hidden)
        enabled, dtype = ctx.autocast
        for (first, *which), end in zip(ctx.parts, ends, strict=True):
            part = hidden[first : first + ctx.most].detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(ctx.kind, dtype, enabled=enabled):
                scores = ctx.score(part, *which)
            of = [grads[number][end - len(which[0]) : end] for number in wanted]
            own, *more = torch.autograd.grad([scores[number] for number in wanted], [part, *weights], of)
            backwards[first : first + ctx.most] = own
            for total, grad in zip(sums, more, strict=True):
                total += grad
        return None, None, None, backwards, *(s.to(w.dtype) for s, w in zip(sums, weights, strict=True))
