"""The first random numbers of many generators at once, each seeded for one env row.

ManiSkill draws initial states with `torch.rand` and with `numpy.random.RandomState.normal`. Both are Mersenne Twisters
with the same words for a seed. Building two generators per row takes 150 us; computing the words of all rows together
takes about a microsecond per row. The numbers equal the generators' bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy.special import xlogy

FEW_ROWS = 96  # with fewer rows, reseeding a generator for each row is faster
STATE, SHIFT = 624, 397  # words of a Mersenne Twister's state, and the offset at which it mixes them
WORDS = STATE - SHIFT  # number of first words that depend only on the initial state
SPARE_PAIRS = 7  # extra attempts at pairs of normal numbers; about one row in 1,000 needs more
TORCH_RAND = torch.rand


class EpisodeDraws:
    """Random numbers of rows with these seeds: row i's numbers equal a generator's with seed `seeds[i]`."""

    def __init__(self, seeds: np.ndarray) -> None:
        self.seeds = np.asarray(seeds, np.uint32)
        self._words = np.empty((0, len(self.seeds)), np.uint32)

    def uniforms(self, count: int) -> torch.Tensor:
        """The first `torch.rand(count)` of each row: float32 [rows, count]."""
        if len(self.seeds) < FEW_ROWS or count > WORDS:
            generator = torch.Generator()
            drawn = [TORCH_RAND(count, generator=generator.manual_seed(seed)) for seed in self.seeds.tolist()]
            return torch.stack(drawn)
        words = self.words(count).T & np.uint32(2**24 - 1)
        return torch.from_numpy(words.astype(np.float32) * np.float32(2.0**-24))

    def normals(self, count: int) -> np.ndarray:
        """The first `RandomState(seed).normal(size=count)` of each row: float64 [rows, count]."""
        pairs = -(-count // 2)
        attempts = pairs + SPARE_PAIRS
        if len(self.seeds) < FEW_ROWS or 4 * attempts > WORDS:
            return normals_one_by_one(self.seeds, count)
        high, low = halves(self.words(4 * attempts))
        points = (high * 67108864.0 + low) * (2.0 / 9007199254740992.0) - 1.0  # [2 * attempts, rows] in [-1, 1)
        first, second = points[0::2], points[1::2]
        radius = first * first + second * second
        accepted = (radius < 1.0) & (radius != 0.0)
        order = np.cumsum(accepted, axis=0, dtype=np.int8)
        complete = order[-1] >= pairs
        wanted = np.ascontiguousarray((accepted & (order <= pairs) & complete).T)
        row, attempt = np.divmod(np.flatnonzero(wanted), attempts)
        at = attempt * len(self.seeds) + row
        chosen = radius.take(at)
        logs = xlogy(1.0, chosen)  # the C library's log, as in the generators; NumPy's differs in the last bit
        factor = np.sqrt(-2.0 * logs / chosen)
        numbers = np.stack([factor * each.ravel().take(at) for each in (second, first)], axis=1)
        numbers = numbers.reshape(-1, 2 * pairs)[:, :count]
        if complete.all():
            return numbers
        found = np.empty((len(complete), count))
        found[complete], found[~complete] = numbers, normals_one_by_one(self.seeds[~complete], count)
        return found

    def words(self, count: int) -> np.ndarray:
        """The first words of each row's Mersenne Twister: uint32 [count, rows]."""
        if len(self._words) < count:
            self._words = twister_words(self.seeds, count)
        return self._words[:count]


def normals_one_by_one(seeds: np.ndarray, count: int) -> np.ndarray:
    generator = np.random.RandomState(0)
    found = np.empty((len(seeds), count))
    for row, seed in enumerate(seeds.tolist()):
        generator.seed(seed)
        found[row] = generator.normal(size=count)
    return found


def halves(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """27 and 26 bits of each pair of words, which form a number of 53 bits."""
    return words[0::2] >> np.uint32(5), words[1::2] >> np.uint32(6)


def twister_words(seeds: np.ndarray, count: int) -> np.ndarray:
    """uint32 [count, rows], of Mersenne Twisters seeded with `seeds`; `count` is at most WORDS."""
    block = np.empty((2 * count + 4, len(seeds)), np.uint32)  # one array: separate arrays were twice as slow
    first, passed, later, mixed = block[: count + 1], block[count + 1 : count + 3], block[count + 3 : -1], block[-1]
    state = [*first, *(passed[place % 2] for place in range(SHIFT - count - 1)), *later]
    first[0] = seeds
    factor, thirty = np.uint32(1812433253), np.uint32(30)
    for last, following, number in zip(state, state[1:], np.arange(1, len(state), dtype=np.uint32), strict=False):
        np.right_shift(last, thirty, mixed)
        np.bitwise_xor(mixed, last, mixed)
        np.multiply(mixed, factor, mixed)
        np.add(mixed, number, following)
    for place in range(count):  # row by row, in the cache
        joined = (first[place] & np.uint32(0x80000000)) | (first[place + 1] & np.uint32(0x7FFFFFFF))
        word = later[place]
        word ^= joined >> np.uint32(1)
        word ^= (joined & np.uint32(1)) * np.uint32(0x9908B0DF)
        word ^= word >> np.uint32(11)
        word ^= (word << np.uint32(7)) & np.uint32(0x9D2C5680)
        word ^= (word << np.uint32(15)) & np.uint32(0xEFC60000)
        word ^= word >> np.uint32(18)
    return later


class RowsOfUniforms:
    """Replaces `torch.rand`: row i of each tensor comes from row i's own stream, on any device."""

    def __init__(self, draws: EpisodeDraws, device: torch.device) -> None:
        self.draws, self.device = draws, device
        self.num_drawn = 0  # numbers drawn by each row

    def __call__(self, *size: Any, **options: Any) -> torch.Tensor:
        size = options.get("size", size)
        shape = torch.Size(size if len(size) != 1 or isinstance(size[0], int) else size[0])
        check_rows(shape, self.draws)
        first, self.num_drawn = self.num_drawn, self.num_drawn + shape[1:].numel()
        return self.draws.uniforms(self.num_drawn)[:, first:].reshape(shape).to(self.device)


class RowsOfNormals:
    """Replaces a numpy generator: row i of each array comes from row i's own stream."""

    def __init__(self, draws: EpisodeDraws) -> None:
        self.draws = draws
        self.num_drawn = 0  # numbers drawn by each row

    def normal(self, mean: float, deviation: float, size: tuple[int, ...]) -> np.ndarray:
        check_rows(size, self.draws)
        first, self.num_drawn = self.num_drawn, self.num_drawn + math.prod(size[1:])
        return mean + deviation * self.draws.normals(self.num_drawn)[:, first:].reshape(size)


def check_rows(shape: tuple[int, ...], draws: EpisodeDraws) -> None:
    assert shape[0] == len(draws.seeds), f"a draw of shape {list(shape)} for {len(draws.seeds)} rows"
