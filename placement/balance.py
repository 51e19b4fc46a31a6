"""Which learner ranks compute which units of a batch, and in which order.

A unit is a group of conversations that share a prompt, or a robot's episode. A forward pass over L tokens (or
decisions) costs a * L, and b * L^2 for attention. `deal` and `deal_groups` give whole units to single ranks: the
costliest unit first, each to the rank with the least load. Example with lengths 8, 1, 1, 6, two ranks and free
attention: blocks of neighbours have loads 9 and 7. The costliest-first assignment gives 8 to rank 0, and 6, 1 and 1
to rank 1: loads 8 and 8.

`divide_sequences` divides long sequences: one of degree N is computed by N neighbouring ranks, which share its work
and memory, and exchange data in attention. Groups of ranks are aligned: two groups are either disjoint or nested.
Every rank runs its passes in the order of one global list. The first unfinished pass of the list can always run, so
there is no deadlock. Example: sequences of 32K, 16K, 16K and eight times 8K tokens on 4 ranks, with costs of
attention alone (16, 4, 4 and 1 each). The rank of the longest sequence has twice the mean load of 8. Divided over
ranks 0 and 1 the longest costs 8 on each, and ranks 2 and 3 get 8 each from the other sequences.

All functions are pure: every process computes the same assignment from the same costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TypeVar

import numpy as np

from embodied.placement.topology import PlacementError

PRODUCTS = {"cpu": (60.0, 2.2e6), "cuda": (900.0, 6e9)}
"""Multiplications that a device computes in the time of sending one number, and of an empty exchange. On cores as
measured (docs/results.md): 3 ns and 0.11 ms, at 20 products a nanosecond. On GPUs from data sheets, of H100s with
NVLink in bfloat16."""
TRIED = 8  # sequences of the busiest rank whose degree may be raised: lighter ones cost more to exchange


@dataclass(frozen=True)
class SequenceLoad:
    """The load of one undivided sequence."""

    tokens: int
    cost: float
    owner: int | None = None  # a rank that must be among the sequence's ranks, since it has the data; None: any


@dataclass(frozen=True)
class ExchangeCosts:
    """The cost of dividing a sequence for each of its ranks, in the unit of `SequenceLoad.cost`, and the limit above
    which it must be divided."""

    each: float = 0.0  # per sequence, independent of its length
    token: float = 0.0  # per token that a rank sends
    most_tokens: float = math.inf  # the most tokens of one sequence on a rank

    def load(self, sequence: SequenceLoad, degree: int) -> float:
        """The load of a sequence on each of so many ranks."""
        if degree == 1:
            return sequence.cost
        sent = sequence.tokens / degree * (1 - 1 / degree)
        return sequence.cost / degree + self.each + self.token * sent

    def lowest_degree(self, tokens: int, degrees: Sequence[int]) -> int:
        """The lowest of these degrees at which a part fits on a rank; the highest if no part fits."""
        return next((degree for degree in degrees if tokens / degree <= self.most_tokens), degrees[-1])


def exchange_costs(numbers: int, exchanges: int, device: str, most_tokens: float) -> ExchangeCosts:
    """The cost of dividing a sequence, in multiplications of a forward pass (as `PassCost`) that exchanges `numbers`
    numbers per token in `exchanges` exchanges. A backward pass computes twice as much and exchanges equally much:
    forward and backward exchange 2 units per 3 units of computation."""
    number, exchange = PRODUCTS[device]
    return ExchangeCosts(exchanges * exchange * 2 / 3, numbers * number * 2 / 3, most_tokens)


@dataclass(frozen=True)
class Division:
    """The ranks of every sequence, and the resulting loads of all ranks."""

    ranks: tuple[range, ...]
    loads: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """Maximum over mean load."""
        return max(self.loads) * len(self.loads) / sum(self.loads) if any(self.loads) else 1.0

    @property
    def by_load(self) -> list[float]:
        """The loads, the highest first."""
        return sorted(self.loads, reverse=True)


def sequence_ranks(rank: int, degree: int) -> range:
    """The aligned group of `degree` ranks that contains this rank."""
    first = rank // degree * degree
    return range(first, first + degree)


def divide_sequences(
    sequences: Sequence[SequenceLoad], num_ranks: int, exchange: ExchangeCosts, degrees: Sequence[int]
) -> Division:
    """Chooses a degree (ascending powers of two that divide the number of ranks) and ranks for every sequence.

    It begins with the lowest degrees that memory allows, and raises the degree of one of the busiest rank's sequences
    while that lowers the rank's load, exchange included. The result is the first step with the lowest maximum load.
    """
    chosen = [exchange.lowest_degree(sequence.tokens, degrees) for sequence in sequences]
    best = at = place(sequences, num_ranks, exchange, chosen)
    while at.imbalance > BALANCED:
        for raised in raised_degrees(sequences, exchange, degrees, chosen, at):
            division = place(sequences, num_ranks, exchange, raised)
            if is_lower(division.by_load, at.by_load):
                chosen, at = raised, division
                break
        else:
            break
        if is_lower(at.by_load[:1], best.by_load[:1]):
            best = at
    return best


def raised_degrees(
    sequences: Sequence[SequenceLoad], exchange: ExchangeCosts, degrees: Sequence[int], chosen: list[int], at: Division
) -> Iterator[list[int]]:
    """All ways to raise the degree of one of the busiest rank's heaviest sequences, the heaviest first."""
    busiest = at.loads.index(max(at.loads))
    numbers = [number for number, ranks in enumerate(at.ranks) if busiest in ranks]
    heaviest = sorted(numbers, key=lambda number: -exchange.load(sequences[number], chosen[number]))
    for number in heaviest[:TRIED]:
        for degree in degrees:
            if degree > chosen[number]:
                yield [*chosen[:number], degree, *chosen[number + 1 :]]


def place(
    sequences: Sequence[SequenceLoad], num_ranks: int, exchange: ExchangeCosts, chosen: Sequence[int]
) -> Division:
    """Assigns sequences to groups of ranks: the highest degree first, within a degree the heaviest first, each to the
    group whose busiest rank has the lowest load."""
    loads, ranks = [0.0] * num_ranks, [range(0)] * len(sequences)
    each = [exchange.load(sequence, degree) for sequence, degree in zip(sequences, chosen, strict=True)]
    for number in sorted(range(len(sequences)), key=lambda number: (-chosen[number], -each[number], number)):
        degree, owner = chosen[number], sequences[number].owner
        groups = [
            sequence_ranks(first, degree) for first in (range(0, num_ranks, degree) if owner is None else [owner])
        ]
        ranks[number] = min(groups, key=lambda group: max(loads[rank] for rank in group))
        for rank in ranks[number]:
            loads[rank] += each[number]
    return Division(tuple(ranks), tuple(loads))


def is_lower(loads: Sequence[float], than: Sequence[float]) -> bool:
    """True if the first load that differs is lower, by more than rounding."""
    for one, other in zip(loads, than, strict=True):
        if not math.isclose(one, other, rel_tol=1e-9):
            return one < other
    return False


def order_of_passes(ranks: Sequence[range], tokens: Sequence[int], num_ranks: int) -> list[int]:
    """The global order of the sequences, in which every rank runs its own.

    The highest degree first, within a degree the longest first. If every rank has an undivided sequence, its shortest
    one comes first, while the tokens of divided sequences are sent. All ranks of a sequence run equally many passes
    before it, so sharded weights can be gathered in every pass.
    """
    shortest: dict[int, int] = {}
    for number in sorted(range(len(ranks)), key=lambda number: (tokens[number], number)):
        if len(ranks[number]) == 1:
            shortest.setdefault(ranks[number].start, number)
    early = set(shortest.values()) if len(shortest) == num_ranks and len(shortest) < len(ranks) else set()
    return sorted(range(len(ranks)), key=lambda at: (at not in early, -len(ranks[at]), -tokens[at], at))


Unit = TypeVar("Unit", bound=Hashable)
BALANCED = 1.05  # maximum over mean load at which neighbours stay together


@dataclass(frozen=True)
class PassCost:
    """The cost of a forward pass, in any unit."""

    item: float = 1.0  # a token, or a decision
    pair: float = 0.0  # a pair of tokens in attention; L tokens have L^2 pairs
    place: float = 0.0  # a picture token, in the vision tower

    def of(self, lengths: Sequence[int], shared: int = 0, places: int = 0) -> float:
        """The cost of sequences whose first `shared` tokens are equal and computed once, plus `places` image places.
        Lengths 3 and 5 with 2 shared tokens, at 1 per token and 1 per pair: 2 + 1 + 3 tokens and 4 + (9 - 4) + (25 - 4)
        pairs."""
        items = shared + sum(length - shared for length in lengths)
        pairs = shared**2 + sum(length**2 - shared**2 for length in lengths)
        return self.place * places + self.item * items + self.pair * pairs


def blocks(num_units: int, num_ranks: int) -> list[int]:
    """Returns the rank of each unit when ranks get contiguous blocks of nearly equal numbers of units."""
    borders = [num_units * rank // num_ranks for rank in range(num_ranks + 1)]
    return [rank for rank, (begin, end) in enumerate(pairwise(borders)) for _ in range(begin, end)]


def deal(
    costs: Sequence[float],
    num_ranks: int,
    steps: Sequence[Sequence[int]] = (),
    items: Sequence[int] = (),
    most_items: float = inf,
) -> list[int]:
    """Returns the rank of each unit. `steps` lists the units of every gradient step, over all epochs (None: one step
    with all units); ranks wait for each other at every step. `most_items` limits the `items` of a rank.

    Contiguous blocks are kept if they are balanced, or no worse than the costliest-first assignment.
    """
    neighbours = blocks(len(costs), num_ranks)
    unequal = balance_ratio(costs, neighbours, num_ranks, steps)
    fits = max(items_by_rank(items, neighbours, num_ranks)) <= most_items
    if fits and unequal <= BALANCED:
        return neighbours
    ranks = costliest_first(costs, num_ranks, steps or [range(len(costs))], items, most_items)
    return neighbours if fits and unequal <= balance_ratio(costs, ranks, num_ranks, steps) else ranks


def costliest_first(
    costs: Sequence[float], num_ranks: int, steps: Sequence[Sequence[int]], items: Sequence[int], most_items: float
) -> list[int]:
    """Give each unit to the rank for which the maximum loads of its steps grow least; ties go to the least loaded
    rank."""
    rank_of = [0] * len(costs)
    of: list[list[int]] = [[] for _ in costs]  # by unit, its steps
    for number, step in enumerate(steps):
        for unit in step:
            of[unit].append(number)
    loads, room = np.zeros((len(steps), num_ranks)), np.full(num_ranks, most_items)
    for unit in sorted(range(len(costs)), key=lambda unit: (-costs[unit], unit)):
        size = items[unit] if items else 0
        step_loads = loads[of[unit]]
        peaks = np.maximum(step_loads + costs[unit], step_loads.max(axis=1, keepdims=True)).sum(axis=0)
        ranks = np.lexsort((loads.sum(axis=0), step_loads.sum(axis=0), peaks))
        fitting = [rank for rank in ranks.tolist() if size <= room[rank]]
        if not fitting:
            raise PlacementError(
                f"{sum(items):,} tokens or decisions of a batch do not fit into {num_ranks} learners that may have "
                f"{most_items:,} each (learner.most_items); try {-(-sum(items) // num_ranks) + max(items):,}"
            )
        rank = rank_of[unit] = fitting[0]
        loads[of[unit], rank] += costs[unit]
        room[rank] -= size
    return rank_of


def deal_groups(
    groups: Sequence[Sequence[Unit]],
    cost: Callable[[Sequence[Unit]], float],
    num_ranks: int,
    steps: Sequence[Sequence[int]] = (),
    items: Callable[[Sequence[Unit]], int] = len,
    most_items: float = inf,
) -> dict[Unit, int]:
    """Returns the rank of each member of groups whose members share the prompt's cost. `steps` lists groups by gradient
    step.

    A group is cut into halves, quarters, ... only if that lowers the maximum load: with fewer groups than ranks, or
    with one very long group. Each part pays for the prompt again.
    """
    size, best, lowest = len(groups[0]), {}, inf
    for cut in [2**power for power in range(size.bit_length()) if 2**power <= size]:
        borders = [size * border // cut for border in range(cut + 1)]
        parts = [group[begin:end] for group in groups for begin, end in pairwise(borders)]
        at = [[cut * group + border for group in step for border in range(cut)] for step in steps]
        costs = [cost(border) for border in parts]
        ranks = deal(costs, num_ranks, at, [items(border) for border in parts], most_items)
        peak, mean = peak_and_mean(costs, ranks, num_ranks, at)
        if peak < lowest:
            best = {unit: rank for border, rank in zip(parts, ranks, strict=True) for unit in border}
            lowest = peak
        if peak <= BALANCED * mean:
            break
    return best


def items_by_rank(items: Sequence[int], ranks: Sequence[int], num_ranks: int) -> list[float]:
    """The items of each rank's units."""
    return np.bincount(ranks, items, minlength=num_ranks).tolist() if items else [0.0]


def balance_ratio(
    costs: Sequence[float], ranks: Sequence[int], num_ranks: int, steps: Sequence[Sequence[int]] = ()
) -> float:
    """Maximum over mean load of the ranks, summed over gradient steps: the factor by which an update is longer than
    with equal loads. 1 without any load."""
    most, mean = peak_and_mean(costs, ranks, num_ranks, steps)
    return most / mean if mean else 1.0


def peak_and_mean(
    costs: Sequence[float], ranks: Sequence[int], num_ranks: int, steps: Sequence[Sequence[int]] = ()
) -> tuple[float, float]:
    """The maximum and the mean load of the ranks, each added up over the gradient steps."""
    costs, ranks = np.array(costs, np.float64), np.array(ranks, np.int64)
    at = [np.array(step, np.int64) for step in steps or [range(len(costs))]]
    loads = np.array([np.bincount(ranks[step], costs[step], minlength=num_ranks) for step in at])
    return float(loads.max(axis=1).sum()), float(loads.mean(axis=1).sum())
