"""The random numbers of many episodes at once, each episode's from its own seed.

ManiSkill draws initial states with `torch.rand`, `torch.randint` and `numpy.random.RandomState.normal`. All are
Mersenne Twisters with the same words for a seed. Building two generators per row takes 150 us; computing the words of
all rows together takes about a microsecond per row. The numbers equal the generators' bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from mani_skill.envs.utils.randomization.samplers import UniformPlacementSampler
from scipy.special import xlogy

FEW_ROWS = 200  # with fewer rows, reseeding a generator for each row is faster
STATE, SHIFT = 624, 397  # words of a Mersenne Twister's state, and the offset at which it mixes them
WORDS = STATE - SHIFT  # number of first words that depend only on the initial state
SPARE_PAIRS = 7  # extra attempts at pairs of normal numbers; about one row in 1,000 needs more
LARGE = 1 << 28  # from here on torch draws whole numbers from two words each
# Arrays without axes, which NumPy takes faster than its scalars
THIRTY, FACTOR, *NUMBERS = (np.array(number, np.uint32) for number in (30, 1812433253, *range(STATE)))


class EpisodeDraws:
    """Random numbers of rows with these seeds: row i's numbers equal a generator's with seed `seeds[i]`."""

    def __init__(self, seeds: np.ndarray) -> None:
        self.seeds = np.asarray(seeds, np.uint32)
        self._state = (np.empty((0, len(self.seeds)), np.uint32),) * 2

    def words(self, count: int) -> np.ndarray:
        """The first numbers of 32 bits of each row: uint32 [rows, count]."""
        if len(self.seeds) >= FEW_ROWS and count <= WORDS:
            return twister_words(*self.state(0, count)).T
        generator = np.random.RandomState(0)
        words = np.empty((len(self.seeds), count), np.uint32)
        for row, seed in enumerate(self.seeds.tolist()):
            generator.seed(seed)
            words[row] = generator.randint(0, 2**32, count, np.uint32)
        return words

    def normals(self, count: int) -> np.ndarray:
        """The first `RandomState(seed).normal(size=count)` of each row: float64 [rows, count]."""
        pairs = -(-count // 2)
        attempts = pairs + SPARE_PAIRS
        if len(self.seeds) < FEW_ROWS or 4 * attempts > WORDS:
            return normals_one_by_one(self.seeds, count)
        rows = np.arange(len(self.seeds))
        points = np.empty(len(rows) * pairs, np.complex128)
        places = rows * pairs  # of the next point of each row, which replaces a rejected one
        self.state(0, 4 * attempts)  # of all attempts at once
        for attempt in range(attempts):
            state = self.state(4 * attempt, 4 * attempt + 4)
            if attempt >= pairs:
                unfinished = places < (rows + 1) * pairs
                rows, places = rows[unfinished], places[unfinished]
                state = [part.take(rows, axis=1) for part in state]
            points[places], accepted = points_in_square(twister_words(*state))
            places += accepted
        numbers = normals_of(points).reshape(-1, 2 * pairs)[:, :count]
        lacking = rows[places < (rows + 1) * pairs]
        numbers[lacking] = normals_one_by_one(self.seeds[lacking], count)
        return numbers

    def state(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The arguments of `twister_words` for words `start` to `stop` of each row."""
        if len(self._state[1]) < stop:
            self._state = twister_state(self.seeds, stop)
        first, later = self._state
        return first[start : stop + 1], later[start:stop]


def normals_one_by_one(seeds: np.ndarray, count: int) -> np.ndarray:
    generator = np.random.RandomState(0)
    numbers = np.empty((len(seeds), count))
    for row, seed in enumerate(seeds.tolist()):
        generator.seed(seed)
        numbers[row] = generator.normal(size=count)
    return numbers


def points_in_square(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A point of each row, whose coordinates are in [-1, 1), from four words: complex [rows]; and if it is accepted."""
    high, low = (words[0::2] >> np.uint32(5)).view(np.int32), (words[1::2] >> np.uint32(6)).view(np.int32)
    points = np.empty(words.shape[1], np.complex128)
    # The generators return the second coordinate's number first.
    points.imag, points.real = (high * 67108864.0 + low) * (2.0 / 9007199254740992.0) - 1.0
    radius = squared_radius(points)
    return points, (radius < 1.0) & (radius != 0.0)


def squared_radius(points: np.ndarray) -> np.ndarray:
    return points.real * points.real + points.imag * points.imag


def normals_of(points: np.ndarray) -> np.ndarray:
    """Two normal numbers from each point in the unit circle, by the polar method: float64 [points, 2]."""
    with np.errstate(all="ignore"):  # rows without enough points have memory's old content
        radius = squared_radius(points)
        logs = xlogy(1.0, radius)  # the C library's log, as in the generators; NumPy's differs in the last bit
        return points.view(np.float64).reshape(-1, 2) * np.sqrt(-2.0 * logs / radius)[:, None]


def twister_state(seeds: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The part of the initial states that the first `count` words, at most WORDS, depend on: words 0 to `count`, and
    `count` words from SHIFT on, both uint32 [words, rows]."""
    block = np.empty((2 * count + 3, len(seeds)), np.uint32)  # one array: separate arrays were twice as slow
    first, later, (passed, mixed) = block[: count + 1], block[count + 1 : -2], block[-2:]
    state = [*first, *[passed] * (SHIFT - count - 1), *later]
    first[0] = seeds
    for last, following, number in zip(state, state[1:], NUMBERS[1:], strict=False):
        np.right_shift(last, THIRTY, mixed)
        np.bitwise_xor(mixed, last, mixed)
        np.multiply(mixed, FACTOR, mixed)
        np.add(mixed, number, following)
    return first, later


def twister_words(first: np.ndarray, later: np.ndarray) -> np.ndarray:
    """The words that Mersenne Twisters give first, from parts of their initial states: uint32 [words, rows]."""
    joined = (first[:-1] & np.uint32(0x80000000)) | (first[1:] & np.uint32(0x7FFFFFFF))
    words = later ^ (joined >> np.uint32(1)) ^ (joined & np.uint32(1)) * np.uint32(0x9908B0DF)
    words ^= words >> np.uint32(11)
    words ^= (words << np.uint32(7)) & np.uint32(0x9D2C5680)
    words ^= (words << np.uint32(15)) & np.uint32(0xEFC60000)
    return words ^ words >> np.uint32(18)


class RowsOfUniforms:
    """Replaces `torch.rand` and `torch.randint`: row i of each tensor comes from row i's own stream, on any device."""

    def __init__(self, draws: EpisodeDraws, device: torch.device) -> None:
        self.draws, self.device = draws, device
        self.num_drawn = np.zeros(len(draws.seeds), np.int64)  # words drawn by each row
        self.words = np.empty((len(draws.seeds), 0), np.uint32)  # of each row's stream, as far as known

    def rand(self, *size: Any, **options: Any) -> torch.Tensor:
        size = options.get("size", size)
        shape = torch.Size(size if len(size) != 1 or isinstance(size[0], int) else size[0])
        check_rows(shape, self.draws)
        assert not options.keys() - {"size", "device"}, f"torch.rand with {options}"
        drawn = self.uniforms(np.arange(shape[0]), shape[1:].numel())
        return drawn.reshape(shape).to(options.get("device") or self.device)

    def randint(self, *limits_and_size: Any, **options: Any) -> torch.Tensor:
        *limits, size = [*limits_and_size, *([options["size"]] if "size" in options else [])]
        low, high = limits if len(limits) == 2 else (0, *limits)
        check_rows(size, self.draws)
        assert high - low < LARGE and not options.keys() - {"size", "device"}, f"torch.randint with {options}"
        words = self.next_words(np.arange(size[0]), math.prod(size[1:]))
        drawn = torch.from_numpy(low + (words % np.uint32(high - low)).astype(np.int64))
        return drawn.reshape(size).to(options.get("device") or self.device)

    def uniforms(self, rows: np.ndarray, count: int) -> torch.Tensor:
        """The next numbers of these rows: float32 [len(rows), count], on the CPU."""
        words = self.next_words(rows, count) & np.uint32(2**24 - 1)
        return torch.from_numpy(words.astype(np.float32) * np.float32(2.0**-24))

    def next_words(self, rows: np.ndarray, count: int) -> np.ndarray:
        first = self.num_drawn[rows]
        if (needed := int(first.max(initial=0)) + count) > self.words.shape[1]:
            self.words = self.draws.words(max(needed, 2 * self.words.shape[1]))
        self.num_drawn[rows] += count
        if (first == first[:1]).all() and len(rows) == len(self.words):
            return self.words[:, first[0] : needed]
        return self.words[rows[:, None], first[:, None] + np.arange(count)]


class RowsOfPlaces(UniformPlacementSampler):
    """Replaces ManiSkill's sampler of places: each row draws until its own place is free, as when it is alone.
    ManiSkill's draws for all rows until all are free, and takes the last free place."""

    rand: RowsOfUniforms  # set by a subclass

    def __init__(self, bounds: Any, batch_size: int, device: Any = None) -> None:
        super().__init__(bounds, batch_size, "cpu")
        self.fixtures = torch.empty((0, batch_size, self._bounds.shape[1]), device="cpu")
        self.radii: list[float] = []

    def sample(self, radius: Any, max_trials: int, append: bool = True, verbose: bool = False) -> torch.Tensor:
        left, places = np.arange(self.batch_size), torch.zeros(self.fixtures.shape[1:], device="cpu")
        radius = torch.as_tensor(radius, dtype=torch.float32).cpu()
        for _ in range(max_trials if len(self.radii) else 1):
            drawn = self.rand.uniforms(left, places.shape[1]) * self._ranges + self._bounds[0]
            distance = torch.linalg.norm(drawn - self.fixtures[:, left], axis=-1)
            free = (distance > (torch.tensor(self.radii, device="cpu") + radius)[:, None]).all(dim=0)
            places[left[free.numpy()]] = drawn[free]
            left = left[~free.numpy()]
            if not len(left):
                break
        if append:
            self.fixtures = torch.cat([self.fixtures, places[None]])
            self.radii.append(float(radius))
        return places.to(self.rand.device)


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


class Rows(torch.Tensor):
    """The rows to reset, as an index, in place of ManiSkill's mask: an index that is a mask makes the host wait for the
    GPU, which counts its rows."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    rows: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray, device: torch.device) -> Rows:
        index = torch.as_tensor(rows, device=device).as_subclass(cls)
        index.rows = rows
        return index

    def __getitem__(self, scenes: Any) -> torch.Tensor:
        """The places of the rows in a list of scenes, such as an object's."""
        if not hasattr(scenes, "on_host"):
            scenes.on_host = scenes.cpu().numpy()
        places = np.flatnonzero(np.isin(scenes.on_host, self.rows))
        if np.array_equal(places, self.rows):
            return self.as_subclass(torch.Tensor)
        return torch.as_tensor(places, device=self.device)

    def __setitem__(self, *_: Any) -> None:
        raise NotImplementedError("rows that are drawn together cannot be chosen again")
