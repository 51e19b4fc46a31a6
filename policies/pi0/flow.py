"""From noise (time 1) to actions (time 0) in steps of d = 1 / steps: straight ahead, or with noise that RL explores by.

With the velocity v = noise - actions, a point x at time t came from x1 = x + v (1 - t) and goes to x0 = x - v t.

- plain:      mean x - d v, no noise.
- flow_sde:   the same marginals with noise: sigma = level sqrt(t / (1 - t)), mean x - d v - sigma^2 d / (2 t) x1,
              deviation sqrt(d) sigma. The first step, t = 1, takes the second's time in the denominator.
- flow_noise: the plain mean, and a deviation that a small network has learned.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def time_of(step: Tensor, steps: int) -> Tensor:
    """The time [N] before a step [N]."""
    return 1 - step / steps


def plain(x: Tensor, v: Tensor, steps: int) -> Tensor:
    return x - v / steps


def sde(x: Tensor, v: Tensor, step: Tensor, steps: int, level: float) -> tuple[Tensor, Tensor]:
    """Mean and deviation [N, H, D] of flow_sde's step `step` [N]."""
    t = column(time_of(step, steps), x)
    below = column(1 - time_of(step.clamp(min=1), steps), x)  # 1 - t, of the second step for the first
    sigma, d = level * (t / below).sqrt(), 1 / steps
    mean = x - d * v - sigma**2 * d / (2 * t) * (x + v * (1 - t))
    return mean, (math.sqrt(d) * sigma).expand_as(x)


class NoiseHead(nn.Module):
    """flow_noise's deviation between `low` and `high`, on a logarithmic scale."""

    def __init__(self, dim: int, actions: int, low: float, high: float) -> None:
        super().__init__()
        self.range = (math.log(low), math.log(high))
        self.mlp = nn.Sequential(nn.Linear(dim, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, actions))

    def forward(self, hidden: Tensor) -> Tensor:
        low, high = self.range
        return (low + (high - low) * (self.mlp(hidden).tanh() + 1) / 2).exp()


def log_density(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    z = (x - mean) / deviation
    return -0.5 * z * z - deviation.log() - HALF_LOG_2PI


def unit_density(x: Tensor) -> Tensor:
    """Log-density of the noise that an action begins with."""
    return -0.5 * x * x - HALF_LOG_2PI


def entropy(deviation: Tensor) -> Tensor:
    return deviation.log() + (0.5 + HALF_LOG_2PI)


def uniform_of(normal: Tensor) -> Tensor:
    """A uniform number for each standard normal one."""
    return torch.special.ndtr(normal.double())


def training_time(uniform: Tensor) -> Tensor:
    """Beta(1.5, 1), of uniform numbers by the inverse of t^1.5, kept above 0.001: early times are trained more."""
    return uniform ** (1 / 1.5) * 0.999 + 0.001


def column(numbers: Tensor, like: Tensor) -> Tensor:
    return numbers.to(like.dtype)[:, None, None]
