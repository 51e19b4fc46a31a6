"""Assigns units to learner ranks: the costliest unit first, each to the rank with the least load.

A unit is not divided among ranks: a group of conversations that share a prompt, or a robot's episode. A forward pass
over L tokens (or decisions) costs a * L, and b * L^2 for attention. All functions are pure: the same costs give the
same assignment in every process. The assignment does not change the gradients.

Example with lengths 8, 1, 1, 6, two ranks and free attention: blocks of neighbours have loads 9 and 7. The
costliest-first assignment gives 8 to rank 0, and 6, 1 and 1 to rank 1: loads 8 and 8.
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
