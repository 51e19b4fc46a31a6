"""Random streams addressed by name, not by order of use: the same key always gives the same numbers.

Noise for acting is Philox4x32-10 evaluated for many (episode, decision) counters at once, so a sample depends on the
run's seed, the episode and the decision only, never on batching or placement. One-off randomness uses `generator`.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def stream(name: str) -> int:
    """A stable 32-bit number for a named stream."""
    return zlib.crc32(name.encode())


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """A separate generator for one purpose: `generator(seed, "shuffle", iteration, epoch)`."""
    key = [stream(name) if isinstance(name, str) else name for name in names]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *key])))


def permutation(seed: int, iteration: int, epoch: int, num_samples: int) -> np.ndarray:
    """The numbers of all samples, in an order that depends only on the run's seed, the iteration and the epoch."""
    return generator(seed, "shuffle", iteration, epoch).permutation(num_samples)


def minibatches(order: np.ndarray, size: int) -> list[np.ndarray]:
    """Consecutive slices of `size` samples; the last slice may be smaller."""
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


# The seeds of many episodes: `generator(seed, "episode", stream, turn).integers(2**31 - 1)` of every turn, bit for bit,
# without building a generator for each.

SEED_BOUND = 2**31 - 1
FEW = 8  # turns below which generators are faster
_P0, _P1 = 0xD2E7470EE14C6C93, 0xCA5A826395121157  # Philox4x64's factors and the steps of its key
_K0, _K1 = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B


def episode_seeds(seed: int, stream_name: str, turns: np.ndarray) -> np.ndarray:
    """int64 [n]: the seeds of a stream's episodes at these turns."""
    if len(turns) < FEW or turns.max() >= 2**32:
        return np.array([episode_seed(seed, stream_name, turn) for turn in turns.tolist()], np.int64)
    words = [seed >> shift & 0xFFFFFFFF for shift in range(0, max(seed.bit_length(), 1), 32)]
    words += [stream("episode"), stream(stream_name)]
    first = philox64(seed_keys([np.array([word], np.uint32) for word in words] + [turns.astype(np.uint32)]))
    product = (first & _LOW) * np.uint64(SEED_BOUND)
    seeds = (product >> _SHIFT).astype(np.int64)
    for row in np.flatnonzero((product & _LOW) < 2**32 % SEED_BOUND):  # NumPy draws again, for equal odds
        seeds[row] = episode_seed(seed, stream_name, int(turns[row]))
    return seeds


@lru_cache(maxsize=1024)
def episode_seed(seed: int, stream_name: str, turn: int) -> int:
    """The seed of a group's episodes, which have equal initial states. Cached, since they ask for it one after the
    other."""
    return int(generator(seed, "episode", stream_name, turn).integers(SEED_BOUND))


def seed_keys(entropy: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """NumPy's SeedSequence for each row. Input: four or more words, uint32 [n], or [1] for a common word. Output: two
    keys, uint64 [n]."""
    sixteen, factor = np.uint32(16), 0x43B0D7E5

    def scrambled(value: np.ndarray, step: int) -> np.ndarray:
        nonlocal factor
        value = value ^ np.uint32(factor)
        factor = factor * step & 0xFFFFFFFF
        value *= np.uint32(factor)
        return value ^ (value >> sixteen)

    def mixed(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        value = one * np.uint32(0xCA01F9DD) - scrambled(other, 0x931E8875) * np.uint32(0x4973F715)
        return value ^ (value >> sixteen)

    pool = [scrambled(word, 0x931E8875) for word in entropy[:4]]
    for source in range(len(entropy)):
        for place in range(4):
            if source != place:
                pool[place] = mixed(pool[place], pool[source] if source < 4 else entropy[source])
    factor = 0x8B51F9DD
    low0, high0, low1, high1 = (scrambled(word, 0x58F38DED).astype(np.uint64) for word in pool)
    return low0 | high0 << _SHIFT, low1 | high1 << _SHIFT


def philox64(keys: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The first word of NumPy's Philox4x64-10 for each pair of keys: uint64 [n]."""
    key0, key1 = keys
    c0, c1, c2, c3 = np.eye(4, 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for _ in range(9):
            (high0, low0), (high1, low1) = product128(c0, _P0), product128(c2, _P1)
            c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
            key0, key1 = key0 + np.uint64(_K0), key1 + np.uint64(_K1)
    return product128(c2, _P1)[0] ^ c1 ^ key0  # of the tenth round


def product128(value: np.ndarray, factor: int) -> tuple[np.ndarray, np.ndarray]:
    """The upper and the lower 64 bits."""
    low, high = np.uint64(factor & 0xFFFFFFFF), np.uint64(factor >> 32)
    value_low, value_high = value & _LOW, value >> _SHIFT
    middle = value_high * low + (value_low * low >> _SHIFT)
    cross = value_low * high + (middle & _LOW)
    return value_high * high + (middle >> _SHIFT) + (cross >> _SHIFT), value * np.uint64(factor)
