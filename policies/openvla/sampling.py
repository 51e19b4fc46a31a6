"""Choosing action tokens from logits, one uniform number each, and what the choice is worth."""

from __future__ import annotations

import torch
from torch import Tensor


def pick(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """A token for each of logits [..., bins], by the inverse of the cumulated probabilities; 0: the best."""
    if temperature == 0:
        return logits.argmax(-1)
    steps = (logits.double() / temperature).softmax(-1).cumsum(-1)
    below = uniform[..., None].double() * steps[..., -1:]
    return torch.searchsorted(steps, below).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def action_scores(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of these tokens, and entropies, [...] of logits [..., bins]."""
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, tokens[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
