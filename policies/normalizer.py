"""Running mean and variance of the state, as buffers of the policy, so that they are part of every weight version.

The policy only applies them. The learner merges the moments of a whole iteration, in env order and over all ranks,
after its update; within an iteration they never change.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

CLIP = 10.0


class ObservationNormalizer(nn.Module):
    """(x - mean) / sqrt(variance + floor^2), clipped to +-10; the identity until something was counted."""

    count: Tensor
    mean: Tensor
    m2: Tensor

    def __init__(self, dim: int, floor: float = 1e-3) -> None:
        super().__init__()
        self.floor = floor
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(dim, dtype=torch.float64))

    def forward(self, state: Tensor, first: int = 0) -> Tensor:
        """Of numbers that are those from `first` on."""
        if self.count < 2:
            return state
        part = slice(first, first + state.shape[-1])
        std, mean = self._deviation(self.floor)[part], self.mean[part]
        return ((state - mean.to(state.dtype)) / std.to(state.dtype)).clamp(-CLIP, CLIP)

    def spread(self, first: int, least: float) -> Tensor:
        """The deviation of what `forward` gives, of the numbers from `first` on; of those that vary by less than
        `least`, in units of the state, what that makes."""
        if self.count < 2:
            return torch.ones_like(self.mean[first:])
        return (self._deviation(least) / self._deviation(self.floor))[first:]

    def _deviation(self, floor: float) -> Tensor:
        return (self.m2 / self.count + floor**2).sqrt()

    def merge(self, moments: np.ndarray) -> None:
        """Merge rows of (count, mean[D], M2[D]), one per env, in the order given (Chan's parallel formula)."""
        count, mean, m2 = float(self.count), self.mean.cpu().numpy().copy(), self.m2.cpu().numpy().copy()
        dim = len(mean)
        for row in moments:
            n, row_mean, row_m2 = row[0], row[1 : 1 + dim], row[1 + dim :]
            if n == 0:
                continue
            delta, total = row_mean - mean, count + n
            mean = mean + delta * (n / total)
            m2 = m2 + row_m2 + delta * delta * (count * n / total)
            count = total
        self.count.fill_(count)
        self.mean.copy_(torch.from_numpy(mean))
        self.m2.copy_(torch.from_numpy(m2))


def state_moments(state: np.ndarray) -> np.ndarray:
    """(count, mean, M2) per env of states [T, N, D], as float64 [N, 1 + 2D]."""
    x = state.astype(np.float64)
    mean = x.mean(axis=0)
    m2 = ((x - mean) ** 2).sum(axis=0)
    return np.concatenate([np.full((x.shape[1], 1), float(len(x))), mean, m2], axis=1)
