"""The driver's record of whole episodes: the worker that keeps each, and the groups sent to learners.

Learners use a group when all of it was sent: to one learner rank, or a part of it to each. If a sim dies before that,
its parts are ignored. With schedule=periodic a group is sent as soon as the batch is certain to contain it, to the rank
with the lowest cost so far, and learners process it during the rollout. Otherwise groups are sent when the batch is
complete, distributed by cost (`placement/balance.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from embodied.algorithms.groups import Group
from embodied.core.arrays import gather
from embodied.core.types import Unit
from embodied.runtime import Channel, Handle, WorkerGroup

if TYPE_CHECKING:
    from embodied.workflows.rollout_manager import RolloutManager


@dataclass
class GroupTransfer:
    """A group on its way from sims to learner ranks."""

    group: Group
    shares: dict[int, list[int]]  # by rank, the places of its episodes in the group; empty: padding
    calls: dict[int, dict[str, Handle]]  # by rank and source

    @property
    def handles(self) -> list[Handle]:
        return [call for calls in self.calls.values() for call in calls.values()]

    def done(self) -> bool:
        return all(call.done() for call in self.handles)

    def arrived(self) -> bool:
        """True if the whole group was sent; False if a sim died first."""
        return all(call.succeeded() and call.wait()[0] for call in self.handles)


class Experience:
    """Whole episodes kept by workers, and groups on their way to learners."""

    def __init__(self, rollouts: RolloutManager, in_step: bool, relays: Sequence[WorkerGroup] = ()) -> None:
        """With `in_step` every rank takes some episodes of every group, and all run their passes together. Sims keep
        their episodes, unless these pass through the `relays`."""
        self.rollouts, self.in_step = rollouts, in_step
        self.keepers = [rollouts.sims, *relays]
        self.worker = {name: group[rank] for group in self.keepers for rank, name in enumerate(group.workers)}
        self.channels: list[Channel] = []
        self.kept_by: dict[int, tuple[str, int]] = {}  # episode -> its worker, and the worker's life
        self.sent = 0  # parts of groups, in all
        self.under_way: list[GroupTransfer] = []
        self.loads = np.zeros(0)  # by rank, the cost of this batch's groups sent during the rollout

    def begin(self, channels: list[Channel]) -> None:
        """Begin a batch; its groups go to the learner ranks through these channels."""
        self.channels, self.loads = channels, np.zeros(len(channels))

    def keep_at(self, episodes: Mapping[str, Collection[int]]) -> None:
        """Record the workers that play or keep these episodes."""
        lives = self.rollouts.lives
        self.kept_by |= {number: (worker, lives[worker]) for worker, numbers in episodes.items() for number in numbers}

    def forget_all_but(self, episodes: tuple[int, ...]) -> None:
        """Let all workers forget all other episodes."""
        self.kept_by = {episode: self.kept_by[episode] for episode in episodes if episode in self.kept_by}
        self.rollouts.settle(*(group.forget_all_but(episodes) for group in self.keepers))

    def gone(self, episodes: Collection[int]) -> list[int]:
        """The episodes whose worker has died since."""
        return [episode for episode in episodes if not self._there(episode)]

    def _there(self, episode: int) -> bool:
        worker, life = self.kept_by[episode]
        return self.rollouts.lives[worker] == life

    def hand_in(self, episodes: Sequence[int], channel: Channel, batch: int, keep: bool = False) -> dict[str, Handle]:
        """Let the workers that keep these episodes put them into a channel; returns the calls by source."""
        self.sent += 1
        calls = {}
        for worker, numbers in gather((self.kept_by[episode][0], episode) for episode in episodes).items():
            source = f"{worker}#{self.sent}"
            calls[source] = self.worker[worker].hand_in(numbers, source, channel, batch, keep=keep)
        return calls

    def get_kept(self) -> dict[str, np.ndarray]:
        """All kept episodes, as arrays for a checkpoint."""
        parts = [part for part in self.rollouts.ask(self.keepers[-1].get_kept) if part]
        return {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}

    def set_kept(self, arrays: dict[str, np.ndarray]) -> None:
        """Restore the arrays of `get_kept`."""
        keepers = self.keepers[-1]
        self.keep_at(dict(zip(keepers.workers, self.rollouts.ask(lambda: keepers.set_kept(arrays)), strict=True)))

    def send(self, group: Group, batch: int, cost: Callable[[Sequence[int]], float]) -> None:
        """Begin to send a certain group; `cost` gives the cost of episodes on one rank."""
        places = range(len(group.episodes))
        parts = [[place] for place in places] if self.in_step else [[*places]]
        costs = [cost([group.episodes[place] for place in part]) for part in parts]
        shares: dict[int, list[int]] = {rank: [] for rank in range(len(self.channels))} if self.in_step else {}
        for number in sorted(range(len(parts)), key=lambda number: -costs[number]):
            rank = int(np.argmin(self.loads))
            self.loads[rank] += costs[number]
            shares[rank] = sorted(shares.get(rank, []) + parts[number])
        self._send(group, shares, batch, keep=False)

    def send_all(self, groups: Sequence[Group], batch: int, rank_of: Mapping[int, int]) -> None:
        """Begin to send all groups of a batch, each episode to its rank. A rank without episodes gets a copy of an
        episode as padding."""
        shares: dict[int, list[int]] = {rank: [] for rank in {*range(len(self.channels))} - {*rank_of.values()}}
        for group in groups:
            shares |= gather((rank_of[episode], place) for place, episode in enumerate(group.episodes))
            self._send(group, shares, batch, keep=True)
            shares = {}

    def pad(self, group: Group, ranks: Collection[int], batch: int) -> None:
        """Begin to send an episode as padding to these ranks."""
        self._send(group, {rank: [] for rank in ranks}, batch, keep=True)

    def arrived(self) -> list[GroupTransfer]:
        """Groups whose transfer has ended, successfully or not; they are no longer under way."""
        over = [batch for batch in self.under_way if batch.done()]
        self.under_way = [batch for batch in self.under_way if batch not in over]
        return over

    def wait(self) -> list[GroupTransfer]:
        """Wait for all transfers, and return them."""
        self.rollouts.settle(*(call for transfer in self.under_way for call in transfer.handles))
        return self.arrived()

    def _send(self, group: Group, shares: dict[int, list[int]], batch: int, keep: bool) -> None:
        calls = {}
        for rank, share in sorted(shares.items(), key=lambda item: len(item[1])):  # copies for padding come first
            episodes = [group.episodes[place] for place in share or [0]]
            calls[rank] = self.hand_in(episodes, self.channels[rank], batch, keep=keep or not share)
        self.under_way.append(GroupTransfer(group, shares, calls))


def units_of(sent: GroupTransfer, advantages: np.ndarray | None = None) -> dict[int, Unit]:
    """The unit of each rank from a group that has arrived; `advantages` [S] of its episodes need no
    other group."""
    episodes, scores = np.array(sent.group.episodes), np.array(sent.group.scores)
    units = {}
    for rank, share in sent.shares.items():
        at = share or [0]
        compared = None if advantages is None else advantages[at]
        units[rank] = Unit(tuple(sent.calls[rank]), episodes[at], compared, scores[at], is_padding=not share)
    return units
