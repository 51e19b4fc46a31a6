"""Actions as tokens, 256 bins of [-1, 1] on the last ids of the vocabulary, or as numbers with Laplace noise.

256 ids share 255 bin centres (the two lowest ids mean the same), and ids fall as actions grow.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BOS, STOP = 1, 2
SPACE = 29871  # Llama's "▁", which precedes the first action token in training


class ActionTokens:
    """Tokens count from 0: `OpenVLASettings.first_action_id` is added for the vocabulary."""

    def __init__(self, bins: int) -> None:
        self.edges = np.linspace(-1, 1, bins)
        self.centers = (self.edges[:-1] + self.edges[1:]) / 2
        self.bins = bins

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Numbers in [-1, 1]."""
        return self.centers[np.minimum(self.bins - 1 - tokens, self.bins - 2)]

    def encode(self, actions: np.ndarray) -> np.ndarray:
        return self.bins - np.digitize(np.clip(actions, -1, 1), self.edges)


def pick(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Draws a token from logits [..., bins], by the inverse of the cumulative probabilities; temperature 0: the best
    token."""
    if temperature == 0:
        return logits.argmax(-1)
    steps = (logits.double() / temperature).softmax(-1).cumsum(-1)
    below = uniform[..., None].double() * steps[..., -1:]
    return torch.searchsorted(steps, below).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def action_scores(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of these tokens, and entropies, [...] of logits [..., bins]."""
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, tokens[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def laplace(center: Tensor, log_scale: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Log-density of numbers around a center, and its entropy. Its maximum is the L1 regression."""
    log_width = log_scale + torch.log(torch.tensor(2.0, dtype=center.dtype))
    return -(numbers - center).abs() * (-log_scale).exp() - log_width, (1 + log_width).expand_as(center)


def laplace_noise(uniform: Tensor) -> Tensor:
    """Converts uniform to standard Laplace numbers, by the inverse distribution function."""
    side = (uniform.double() - 0.5).clamp(-0.5 + 1e-12, 0.5 - 1e-12)
    return -side.sign() * torch.log1p(-2 * side.abs())
