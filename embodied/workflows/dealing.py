"""Distributes the episodes of a batch over learner ranks by cost, with the rules of `placement/balance.py`. The driver
only knows lengths; the data stay in their stores (`envs/store.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

from embodied.algorithms.group_pool import Group
from embodied.core.arrays import gather
from embodied.core.errors import ConfigError
from embodied.core.rng import minibatches, permutation
from embodied.core.types import Unit
from embodied.envs.store import EpisodeRef
from embodied.placement.balance import (
    Division,
    ExchangeCosts,
    PassCost,
    SequenceLoad,
    balance_ratio,
    deal_groups,
    divide_sequences,
)
from embodied.placement.topology import PlacementError
from embodied.runtime import WorkerGroup

if TYPE_CHECKING:
    from embodied.config.recipe import RunConfig


class Dealer:
    """Deals stored episodes by their lengths."""

    def __init__(self, config: RunConfig, learners: WorkerGroup, text: bool, refs: Mapping[int, EpisodeRef]) -> None:
        self.config, self.learners, self.text, self.refs = config, learners, text, refs

    def cost(self, episodes: Sequence[int]) -> float:
        """The cost of these episodes of a group on one learner rank."""
        lengths, prompts, places = zip(*(self.refs[episode].length for episode in episodes), strict=True)
        if not self.config.learner.share_prompts:
            return self.pass_cost.of(lengths, places=sum(places))
        return self.pass_cost.of(lengths, min(prompts), max(places))

    @cached_property
    def divides(self) -> tuple[Sequence[int], ExchangeCosts] | None:
        """The numbers of ranks that may compute a sequence together, and the cost of their exchange."""
        if self.config.learner.sequence_degree == 1:
            return None
        answer = self.learners[0].divides().wait()[0]
        return None if answer is None else (answer[0], ExchangeCosts(*answer[1]))

    @cached_property
    def pass_cost(self) -> PassCost:
        """The cost of a pass of the learners' policy."""
        return PassCost(*self.learners[0].pass_cost().wait()[0])

    def deal(self, groups: Sequence[Group], iteration: int) -> dict[int, int]:
        """The learner rank of each episode of a batch of these groups."""
        num_ranks, most = len(self.learners), self.config.learner.most_items or inf
        if num_ranks == 1:
            return {episode: 0 for group in groups for episode in group.episodes}
        together = [group.episodes for group in groups]
        if not self.text:  # episodes share no prompt
            together = [(episode,) for episodes in together for episode in episodes]
        steps = self.steps(len(together), iteration)
        try:
            ranks = deal_groups(together, self.cost, num_ranks, steps, self.items, most)
        except PlacementError as err:
            raise ConfigError(str(err)) from None
        return ranks if steps or most < inf else self._deal_divided(together, ranks)

    def _deal_divided(self, groups: Sequence[Sequence[int]], dealt: dict[int, int]) -> dict[int, int]:
        """If ranks may compute a group together: the first rank of each group, if this lowers the largest load more
        than dividing `dealt`."""
        if self.divides is None:
            return dealt
        parts = [share for group in groups for share in gather((dealt[episode], episode) for episode in group).items()]
        kept = self._divided([(episodes, rank) for rank, episodes in parts])
        free = self._divided([(group, None) for group in groups])
        if max(kept.loads) <= max(free.loads):
            return dealt
        return {item: ranks.start for group, ranks in zip(groups, free.ranks, strict=True) for item in group}

    def _divided(self, parts: Sequence[tuple[Sequence[int], int | None]]) -> Division:
        """For a group's episodes and their owner rank: the ranks that compute them, and their loads."""
        degrees, exchange = self.divides
        loads = [SequenceLoad(self.items(episodes), self.cost(episodes), rank) for episodes, rank in parts]
        return divide_sequences(loads, len(self.learners), exchange, degrees)

    def items(self, episodes: Sequence[int]) -> int:
        """Tokens or decisions."""
        return sum(self.refs[episode].length[0] for episode in episodes)

    def steps(self, count: int, iteration: int) -> list[list[int]]:
        """This many groups by gradient steps, if these take whole groups (`RankBatch.order`)."""
        algo = self.config.algo
        if not self.text or algo.minibatch_size is None:
            return []
        orders = (permutation(self.config.seed, iteration, epoch, count) for epoch in range(algo.epochs))
        return [
            step.tolist() for order in orders for step in minibatches(order, algo.minibatch_size // algo.group_size)
        ]

    def balance_ratio(self, of_ranks: Sequence[Sequence[Unit]], iteration: int) -> float:
        """Maximum over mean of the learner ranks' costs for these units."""
        units = [
            (unit.ids.tolist(), rank)
            for rank, of_rank in enumerate(of_ranks)
            for unit in of_rank
            if not unit.is_padding
        ]
        if len(of_ranks) == 1 or not units:
            return 1.0
        groups = [ids[0] // self.config.algo.group_size for ids, _ in units]
        parts = gather((group, place) for place, group in enumerate(groups))
        numbered = [parts[group] for group in sorted(parts)]
        steps = [[item for group in step for item in numbered[group]] for step in self.steps(len(parts), iteration)]
        if self.divides is not None:
            loads = [self._divided([units[item] for item in step]).loads for step in steps or [range(len(units))]]
            return sum(map(max, loads)) * len(of_ranks) / sum(map(sum, loads))
        return balance_ratio([self.cost(ids) for ids, _ in units], [rank for _, rank in units], len(of_ranks), steps)
