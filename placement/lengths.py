"""The cost of unequal lengths of conversations: an engine ends with its longest answer, learner ranks wait for the
busiest rank, and a group is complete with its last answer.

A profile has the lengths of answers as evenly spaced quantiles. Batches drawn from them (equal in every process) are
simulated on engines with a limited number of concurrent answers, and assigned to ranks by `balance.py`. The resulting
ratios multiply the profile's measured seconds; with one worker they are 1.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from embodied.placement.balance import PassCost, deal_groups
from embodied.placement.sequence_degrees import ExchangeCosts, SequenceLoad, divide_sequences

BATCHES = 4  # number of drawn batches
PARTS = 64  # parts of a rollout, for the times at which groups are complete


@dataclass(frozen=True)
class Lengths:
    """Lengths of answers. Example: an engine that writes two answers at a time writes three of 100, 200 and 900 tokens.
    If the longest begins last, when the first ends, all are written after 1,000 tokens, else after 900."""

    answers: tuple[int, ...]  # tokens of an answer, as even quantiles, the shortest first
    group: int = 1  # answers to one prompt
    prompt: int = 0  # tokens of the shared prompt
    running: int = 1  # answers that an engine writes at a time
    item: float = 1.0  # cost of a token in a learner's pass (`PassCost`)
    pair: float = 0.0  # cost of a pair of tokens in attention
    degrees: tuple[int, ...] = (1,)  # numbers of learners that may compute a group together

    def __post_init__(self) -> None:
        if not self.answers or min(self.answers) < 1 or sorted(self.answers) != [*self.answers]:
            raise ValueError(f"answers={self.answers}: should be numbers of tokens, the fewest first")
        if self.running < 1 or self.prompt < 0 or min(self.item, self.pair) < 0 or not self.degrees:
            raise ValueError(f"running={self.running}, prompt={self.prompt}, item={self.item}, pair={self.pair}")

    def batches(self, groups: int, size: int) -> np.ndarray:
        """[BATCHES, groups, size] Drawn tokens of answers."""
        places = np.linspace(0.0, 1.0, len(self.answers))
        drawn = np.random.default_rng(0).random((BATCHES, groups, size))
        return np.maximum(np.interp(drawn, places, self.answers), 1).astype(int)


def lengths_from_json(content: Mapping[str, Any]) -> Lengths:
    """Lists in JSON are tuples here."""
    return Lengths(**{name: tuple(value) if isinstance(value, list) else value for name, value in content.items()})


def completion_times(lengths: np.ndarray, slots: int) -> np.ndarray:
    """The time at which each answer is complete, in tokens. The next answer begins when a slot is free.

    Lengths 3, 1, 4 in two slots: 3, 1, 5.
    """
    free = [0.0] * min(slots, len(lengths))
    times = np.empty(len(lengths))
    for place, length in enumerate(lengths):
        times[place] = heapq.heappop(free) + length
        heapq.heappush(free, times[place])
    return times


@cache
def engine_ratios(lengths: Lengths, answers: int, most: int) -> np.ndarray:
    """[most + 1] By the number of engines: the duration of all answers, relative to the mean duration of an equal part
    on one engine."""
    return interpolated(lambda engines: engine_ratio(lengths, answers, min(engines, answers)), most)


def engine_ratio(lengths: Lengths, answers: int, engines: int) -> float:
    ratios = []
    for batch in lengths.batches(1, answers)[:, 0]:
        alone = [completion_times(share, lengths.running).max() for share in np.array_split(batch, engines)]
        ratios.append((completion_times(batch, engines * lengths.running).max(), np.mean(alone)))
    together_s, alone_s = np.mean(ratios, axis=0)
    return max(1.0, float(together_s / alone_s))


@cache
def learner_ratios(lengths: Lengths, groups: int, size: int, most: int) -> np.ndarray:
    """[most + 1] By the number of learners: maximum over mean load, for groups of drawn lengths."""
    return interpolated(lambda ranks: learner_ratio(lengths, groups, size, ranks), most)


def interpolated(ratio: Callable[[int], float], most: int) -> np.ndarray:
    """The ratios of 0, 1, ... workers, computed at powers of two and interpolated between them."""
    counts = [2**power for power in range(most.bit_length() + 1)]
    ratios = [ratio(count) for count in counts]
    return np.interp(np.log2(np.maximum(np.arange(most + 1), 1)), np.log2(counts), ratios)


def learner_ratio(lengths: Lengths, groups: int, size: int, ranks: int) -> float:
    if ranks == 1:
        return 1.0
    return float(
        np.mean([dealt_ratio(lengths, batch + lengths.prompt, ranks) for batch in lengths.batches(groups, size)])
    )


def dealt_ratio(lengths: Lengths, batch: np.ndarray, ranks: int) -> float:
    """Maximum over mean load of learners for a batch [groups, size] of conversations' tokens: the lower of two
    assignments, with whole groups on single ranks, or with groups that several ranks compute together."""
    groups, size = batch.shape
    members = [[(group, place) for place in range(size)] for group in range(groups)]

    def cost(part: Sequence[tuple[int, int]]) -> float:
        return PassCost(lengths.item, lengths.pair).of([int(batch[one]) for one in part], lengths.prompt)

    whole = [cost(group) for group in members]
    rank_of = deal_groups(members, cost, ranks)
    loads = np.zeros(ranks)
    for group in members:
        for rank in {rank_of[one] for one in group}:
            loads[rank] += cost([one for one in group if rank_of[one] == rank])
    degrees = [degree for degree in lengths.degrees if ranks % degree == 0]
    together = [SequenceLoad(int(group.sum()), each) for group, each in zip(batch, whole)]
    divided = divide_sequences(together, ranks, ExchangeCosts(), degrees).loads if len(degrees) > 1 else [np.inf]
    return float(min(loads.max(), max(divided)) * ranks / sum(whole))


@cache
def group_times(lengths: Lengths, groups: int, size: int, engines: int) -> tuple[float, ...]:
    """The share of a rollout after which each group is complete, in ascending order."""
    times = []
    for batch in lengths.batches(groups, size):
        ends = completion_times(batch.reshape(-1), engines * lengths.running).reshape(groups, size).max(axis=1)
        times.append(np.sort(ends) / ends.max())
    return tuple(np.mean(times, axis=0).tolist())


@cache
def shares_by_time(lengths: Lengths, groups: int, size: int, most: int) -> np.ndarray:
    """[most + 1, PARTS] By the number of engines: the share of complete groups at the end of each part of a rollout."""
    shares = np.zeros((most + 1, PARTS))
    for engines in range(1, most + 1):
        at = np.ceil(np.array(group_times(lengths, groups, size, engines)) * PARTS).astype(int) - 1
        shares[engines] = np.bincount(np.clip(at, 0, PARTS - 1), minlength=PARTS) / groups
    return shares
