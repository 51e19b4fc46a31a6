"""How many learner ranks compute a sequence together, which ranks, and the order in which all ranks run their passes.

A sequence of degree N is divided over N neighbouring ranks: its computation and its memory are shared, and its
attention exchanges numbers between them. Groups of ranks are aligned, so that two groups are either apart or one lies
inside the other. Every rank runs its passes in the order of one global list. The first pass in the list that is not
done can always run, so ranks never wait for each other in a circle. Everything here is pure: all ranks compute the
same from the same lengths.

Sequences of 32K, 16K, 16K and eight times 8K tokens on 4 ranks, where attention is all that costs (16, 4, 4 and 1
each): the rank of the longest has twice the mean load of 8. Divided over ranks 0 and 1 the longest costs 8 on each, and
ranks 2 and 3 have 8 each of all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PRODUCTS = {"cpu": (60.0, 2.2e6), "cuda": (900.0, 6e9)}
"""Products that a device computes while it sends a number to others, and while it waits for an exchange of none. On
cores as measured (docs/results.md): 3 ns and 0.11 ms, at 20 products a nanosecond. On GPUs from data
sheets, of H100s with NVLink in bfloat16."""
TRIED = 8  # sequences of the busiest rank whose degrees may be raised: light ones save less than their exchange
BALANCED = 1.05  # maximum over mean load at which no degree is raised any more


@dataclass(frozen=True)
class SequenceLoad:
    """What one sequence asks of a rank that has it alone."""

    tokens: int
    cost: float
    owner: int | None = None  # the rank that has its data and must be among its ranks; None: any ranks


@dataclass(frozen=True)
class ExchangeCosts:
    """What dividing a sequence costs each of its ranks, in the unit of `SequenceLoad.cost`, and when it must be."""

    each: float = 0.0  # whatever its length
    token: float = 0.0  # for every token that a rank sends to others
    most_tokens: float = math.inf  # of one sequence on a rank

    def load(self, sequence: SequenceLoad, degree: int) -> float:
        """The load of a sequence on each of so many ranks."""
        if degree == 1:
            return sequence.cost
        sent = sequence.tokens / degree * (1 - 1 / degree)
        return sequence.cost / degree + self.each + self.token * sent

    def lowest_degree(self, tokens: int, degrees: Sequence[int]) -> int:
        """The lowest of these degrees at which a rank has room for its part; the highest where none has."""
        return next((degree for degree in degrees if tokens / degree <= self.most_tokens), degrees[-1])


def exchange_costs(numbers: int, exchanges: int, device: str, most_tokens: float) -> ExchangeCosts:
    """What it costs to divide a sequence, in products of a forward pass (as `PassCost`), in which so many numbers of a
    token travel in so many exchanges. A backward pass computes twice as much and exchanges as much: together they cost
    2 beside 3."""
    number, exchange = PRODUCTS[device]
    return ExchangeCosts(exchanges * exchange * 2 / 3, numbers * number * 2 / 3, most_tokens)


@dataclass(frozen=True)
class Division:
    """The ranks of every sequence, and the loads of all ranks that follow."""

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


def group_of(rank: int, degree: int) -> range:
    """The aligned group of so many ranks in which this rank is."""
    first = rank // degree * degree
    return range(first, first + degree)


def divide_sequences(
    sequences: Sequence[SequenceLoad], num_ranks: int, exchange: ExchangeCosts, degrees: Sequence[int]
) -> Division:
    """Choose one of these degrees (ascending powers of two that divide the number of ranks) for every sequence, and its
    ranks.

    Begins with the lowest degrees that memory allows, and raises a degree of the busiest rank's sequences as long as
    that lowers its load, exchange included. Of all steps on the way, the earliest with the lowest maximum counts.
    """
    chosen = [exchange.lowest_degree(sequence.tokens, degrees) for sequence in sequences]
    best = at = place(sequences, num_ranks, exchange, chosen)
    while at.imbalance > BALANCED:
        for raised in raised_degrees(sequences, exchange, degrees, chosen, at):
            found = place(sequences, num_ranks, exchange, raised)
            if is_lower(found.by_load, at.by_load):
                chosen, at = raised, found
                break
        else:
            break
        if is_lower(at.by_load[:1], best.by_load[:1]):
            best = at
    return best


def raised_degrees(
    sequences: Sequence[SequenceLoad],
    exchange: ExchangeCosts,
    degrees: Sequence[int],
    chosen: list[int],
    at: Division,
) -> Iterator[list[int]]:
    """All ways to raise the degree of one of the heaviest sequences of the busiest rank, that of its heaviest first."""
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
    """Give the sequences of these degrees to groups of ranks: the highest degree first, of one degree the heaviest
    first, each to the group whose busiest rank has least to do."""
    loads, ranks = [0.0] * num_ranks, [range(0)] * len(sequences)
    each = [exchange.load(sequence, degree) for sequence, degree in zip(sequences, chosen, strict=True)]
    for number in sorted(range(len(sequences)), key=lambda number: (-chosen[number], -each[number], number)):
        degree, owner = chosen[number], sequences[number].owner
        groups = [group_of(first, degree) for first in (range(0, num_ranks, degree) if owner is None else [owner])]
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
    """The sequences, by number, in the one order in which every rank runs those that are its own.

    The highest degree first, of one degree the longest first. Where every rank has a sequence for itself, its shortest
    one comes before everything else: the tokens of divided sequences travel meanwhile. All ranks of a sequence run
    equally many passes before it, so that sharded weights may be gathered in every pass.
    """
    shortest: dict[int, int] = {}
    for number in sorted(range(len(ranks)), key=lambda number: (tokens[number], number)):
        if len(ranks[number]) == 1:
            shortest.setdefault(ranks[number].start, number)
    early = set(shortest.values()) if len(shortest) == num_ranks and len(shortest) < len(ranks) else set()
    return sorted(range(len(ranks)), key=lambda one: (one not in early, -len(ranks[one]), -tokens[one], one))
