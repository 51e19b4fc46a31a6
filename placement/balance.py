"""Which learner rank has which unit: the costliest first, each to the rank that has least to do.

A unit is what one rank has whole: a group of conversations that share a prompt, or a robot's episode. A forward pass
costs a * L for what it does token by token (decision by decision, camera frames included) and b * L^2 for attention.
Everything here is pure: the same costs give the same deal in every process. Who has a unit changes no result.

Lengths 8, 1, 1, 6 of a model whose attention is free, for two ranks: blocks of neighbours cost 9 and 7, the deal 8 and
8, since 8 goes to rank 0, 6 to rank 1, and both of length 1 to rank 1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TypeVar

import numpy as np

from embodied.placement.placement_errors import PlacementError

Unit = TypeVar("Unit", bound=Hashable)
BALANCED = 1.05  # maximum over mean load at which neighbours stay together


@dataclass(frozen=True)
class PassCost:
    """What passing through the network costs, in any unit."""

    item: float = 1.0  # a token, or a decision
    pair: float = 0.0  # two tokens of which one may attend to the other: counted twice, as L^2 counts them
    place: float = 0.0  # of a picture, in the vision tower

    def of(self, lengths: Sequence[int], shared: int = 0, places: int = 0) -> float:
        """The cost of sequences whose first `shared` tokens are the same and pass once, and of pictures of so many
        places. Lengths 3 and 5, 2 of them shared, at 1 a token and 1 a pair: 2 + 1 + 3 tokens and
        4 + (9 - 4) + (25 - 4) pairs."""
        items = shared + sum(length - shared for length in lengths)
        pairs = shared**2 + sum(length**2 - shared**2 for length in lengths)
        return self.place * places + self.item * items + self.pair * pairs


def blocks(num_units: int, num_ranks: int) -> list[int]:
    """The rank of each unit where ranks have neighbours, as equally many as possible."""
    borders = [num_units * rank // num_ranks for rank in range(num_ranks + 1)]
    return [rank for rank, (begin, end) in enumerate(pairwise(borders)) for _ in range(begin, end)]


def deal(
    costs: Sequence[float],
    num_ranks: int,
    steps: Sequence[Sequence[int]] = (),
    items: Sequence[int] = (),
    most_items: float = inf,
) -> list[int]:
    """The rank of each unit. `steps` are the units of each gradient step, of all epochs (none: one step of all): ranks
    wait for each other at each of them. With `most_items` no rank has more of the units' `items` than that.

    Blocks of neighbours stay if they are balanced already, or no worse.
    """
    neighbours = blocks(len(costs), num_ranks)
    unequal = balance_ratio(costs, neighbours, num_ranks, steps)
    fits = max(held(items, neighbours, num_ranks)) <= most_items
    if fits and unequal <= BALANCED:
        return neighbours
    ranks = costliest_first(costs, num_ranks, steps or [range(len(costs))], items, most_items)
    return neighbours if fits and unequal <= balance_ratio(costs, ranks, num_ranks, steps) else ranks


def costliest_first(
    costs: Sequence[float], num_ranks: int, steps: Sequence[Sequence[int]], items: Sequence[int], most_items: float
) -> list[int]:
    """Give each unit to the rank where the maxima of its steps grow least, of these to the one that has least to do."""
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
    """The rank of each member of groups that cost less together. `steps` are groups by gradient step.

    A group is cut into halves, quarters, ... only where that lowers the maximum load: with fewer groups than ranks, or
    where one of them is as long as all others. Each part pays for the prompt.
    """
    size, best, lowest = len(groups[0]), {}, inf
    for cut in [2**power for power in range(size.bit_length()) if 2**power <= size]:
        borders = [size * part // cut for part in range(cut + 1)]
        parts = [group[begin:end] for group in groups for begin, end in pairwise(borders)]
        at = [[cut * group + part for group in step for part in range(cut)] for step in steps]
        costs = [cost(part) for part in parts]
        ranks = deal(costs, num_ranks, at, [items(part) for part in parts], most_items)
        peak, mean = peak_and_mean(costs, ranks, num_ranks, at)
        if peak < lowest:
            best = {one: rank for part, rank in zip(parts, ranks, strict=True) for one in part}
            lowest = peak
        if peak <= BALANCED * mean:
            break
    return best


def held(items: Sequence[int], ranks: Sequence[int], num_ranks: int) -> list[float]:
    """The items of each rank's units."""
    return np.bincount(ranks, items, minlength=num_ranks).tolist() if items else [0.0]


def balance_ratio(
    costs: Sequence[float], ranks: Sequence[int], num_ranks: int, steps: Sequence[Sequence[int]] = ()
) -> float:
    """Maximum over mean load of the ranks, added up over the gradient steps: how many times longer an update takes than
    with loads that are all equal. 1 where there is nothing to do."""
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
