"""How many learner ranks compute a sequence together, which ranks, and the order in which all ranks run their passes.

A sequence of degree N is divided over N neighbouring ranks, which share its computation and memory, and exchange data
in attention. Groups of ranks are aligned: two groups are either disjoint or nested. Every rank runs its passes in the
order of one global list. The first unfinished pass of the list can always run, so there is no deadlock. All functions
are pure: every rank computes the same result from the same lengths.

Example: sequences of 32K, 16K, 16K and eight times 8K tokens on 4 ranks, with costs of attention alone (16, 4, 4 and 1
each). The rank of the longest sequence has twice the mean load of 8. Divided over ranks 0 and 1 the longest costs 8 on
each, and ranks 2 and 3 get 8 each from the other sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PRODUCTS = {"cpu": (60.0, 2.2e6), "cuda": (900.0, 6e9)}
"""Multiplications that a device computes in the time of sending one number, and of an empty exchange. On cores as
measured (docs/results.md): 3 ns and 0.11 ms, at 20 products a nanosecond. On GPUs from data sheets, of H100s with
NVLink in bfloat16."""
TRIED = 8  # sequences of the busiest rank whose degree may be raised: lighter ones cost more to exchange
BALANCED = 1.05  # maximum over mean load at which the search stops


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


def group_of(rank: int, degree: int) -> range:
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
    sequences: Sequence[SequenceLoad],
    exchange: ExchangeCosts,
    degrees: Sequence[int],
    chosen: list[int],
    at: Division,
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
    return sorted(range(len(ranks)), key=lambda one: (one not in early, -len(ranks[one]), -tokens[one], one))
