"""Random streams addressed by name, not by order of use: the same key always gives the same numbers.

Noise for acting is Philox4x32-10 evaluated for many (episode, decision) counters at once, so a sample depends on the
run's seed, the episode and the decision only, never on batching or placement. One-off randomness uses `generator`.
"""

from __future__ import annotations

import zlib

import numpy as np

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def stream(name: str) -> int:
    """A stable 32-bit number for a named stream."""
    return zlib.crc32(name.encode())


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """A generator of its own for one purpose: `generator(seed, "shuffle", iteration, epoch)`."""
    key = [stream(name) if isinstance(name, str) else name for name in names]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *key])))


def permutation(seed: int, iteration: int, epoch: int, num_units: int) -> np.ndarray:
    """The numbers of all units, shuffled by the run's seed, the iteration and the epoch alone."""
    return generator(seed, "shuffle", iteration, epoch).permutation(num_units)


def minibatches(order: np.ndarray, size: int) -> list[np.ndarray]:
    """Consecutive slices of `size` units; the last one is smaller where they do not divide."""
    return [order[start : start + size] for start in range(0, len(order), size)]


def philox(counters: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10: uint32 [n, 4] counters and two 32-bit keys to uint32 [n, 4] random words."""
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniform(seed: int, name: str, episodes: np.ndarray, decisions: np.ndarray, width: int) -> np.ndarray:
    """float64 [N, width] in (0, 1), keyed by each row's episode and decision."""
    blocks = -(-width // 2)  # one Philox block makes two 53-bit numbers
    rows = len(episodes)
    counters = np.empty((rows, blocks, 4), np.uint32)
    counters[:, :, 0] = np.arange(blocks, dtype=np.uint32)
    counters[:, :, 1] = np.asarray(decisions, np.uint32)[:, None]
    episodes = np.asarray(episodes, np.uint64)
    counters[:, :, 2] = (episodes & _LOW)[:, None]
    counters[:, :, 3] = (episodes >> _SHIFT)[:, None]
    words = philox(counters.reshape(-1, 4), ((seed ^ (seed >> 32)) & 0xFFFFFFFF, stream(name))).astype(np.uint64)
    high, low = words[:, 0::2] >> np.uint64(5), words[:, 1::2] >> np.uint64(6)
    numbers = (high * np.float64(2**26) + low + 0.5) / 2.0**53
    return numbers.reshape(rows, blocks * 2)[:, :width]


def normal(seed: int, name: str, episodes: np.ndarray, decisions: np.ndarray, width: int) -> np.ndarray:
    """float64 [N, width] standard normal numbers (Box-Muller), keyed like `uniform`."""
    pairs = uniform(seed, name, episodes, decisions, 2 * -(-width // 2))
    radius = np.sqrt(-2.0 * np.log(pairs[:, 0::2]))
    angle = 2.0 * np.pi * pairs[:, 1::2]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=2).reshape(len(pairs), -1)[:, :width]
