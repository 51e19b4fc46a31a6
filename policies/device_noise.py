"""Noise for acting, made on the device that uses it: the numbers of `core/rng.py` from the same counters.

Uniform numbers equal the host's bit for bit. Normal numbers may differ in the last digits, since devices compute
logarithms, sines and square roots differently.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from embodied.core.arrays import is_tensor
from embodied.core.rng import stream
from embodied.core.types import Array

LOW = 0xFFFFFFFF
FACTORS, STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def philox(counters: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 of int64 tensors that hold 32-bit words; products keep all of their 64 bits."""
    c0, c1, c2, c3 = counters
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * FACTORS[0], c2 * FACTORS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & LOW) ^ c1 ^ k0, p1 & LOW, ((p0 >> 32) & LOW) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + STEPS[0]) & LOW, (k1 + STEPS[1]) & LOW
    return c0, c1, c2, c3


def uniform(seed: int, name: str, episodes: Tensor, decisions: Tensor, width: int) -> Tensor:
    """float64 [N, width] in (0, 1), of int64 [N] episodes and decisions, on their device."""
    blocks = torch.arange(-(-width // 2), device=episodes.device)
    rows = torch.broadcast_tensors(
        blocks, (decisions & LOW)[:, None], (episodes & LOW)[:, None], ((episodes >> 32) & LOW)[:, None]
    )
    words = philox((rows[0], rows[1], rows[2], rows[3]), ((seed ^ (seed >> 32)) & LOW, stream(name)))
    pairs = [((high >> 5).double() * 2.0**26 + (low >> 6) + 0.5) / 2.0**53 for high, low in (words[:2], words[2:])]
    return torch.stack(pairs, dim=2).flatten(1)[:, :width]


def normal(seed: int, name: str, episodes: Tensor, decisions: Tensor, width: int) -> Tensor:
    """float64 [N, width] standard normal numbers (Box-Muller), keyed like `uniform`."""
    pairs = uniform(seed, name, episodes, decisions, 2 * -(-width // 2))
    radius, angle = (-2.0 * pairs[:, 0::2].log()).sqrt(), 2.0 * math.pi * pairs[:, 1::2]
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=2).flatten(1)[:, :width]


def draw(kind: str, seed: int, name: str, episodes: Array, decisions: Array, width: int, device: str) -> Tensor:
    """Noise of this kind; only its counters are sent to the device, unless they are already there."""
    if not is_tensor(episodes):
        episodes, decisions = torch.from_numpy(np.stack([episodes, decisions]).astype(np.int64)).to(device)
    there = (counters.to(device) for counters in (episodes, decisions))
    return (normal if kind == "normal" else uniform)(seed, name, *there, width)
