"""Roles between players and learners; docs/workflows.md builds a reward model as an example.

Groups of whole episodes pass through such a role before they are compared and filtered, since its rewards count. A role
that streams (`Role.streams`), on devices of its own, takes every group as soon as its last episode has ended, or with
`Role.keeps_rewards` as soon as the batch certainly contains it, and every part of a rollout as soon as a sim sends it.
Other roles take all groups of a round when the round is over, and all rollouts when the batch is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from embodied.core.types import Answerers, SamplingRule, Trajectory, choose, join
from embodied.envs.store import Stores, StoringWorker, Transfer
from embodied.runtime import Channel, Handle, WorkerGroup
from embodied.workflows import Role

if TYPE_CHECKING:
    from embodied.workflows.launched_workers import Workers

T = TypeVar("T")
NO_DEADLINE = float("inf")  # rollouts may be long; if the run fails, the channel closes


class RelayWorker(StoringWorker):
    """Receives rollouts, or groups of whole episodes, and sends on new trajectories for the learners.

    A subclass has either `relay`, or, if every part can be changed by itself, `add` and perhaps `finish`.
    """

    merges = False
    """True: a role that streams adds all waiting groups at once, which may be faster. Their number depends on the time,
    so the result should not depend on it."""

    def relay(self, parts: list[Trajectory]) -> tuple[list[Trajectory], dict[str, float]]:
        """Returns a new trajectory for each of these, for the learners, and metrics of the iteration (the first
        worker's are kept). A part is a rollout of some env rows, or the episodes of a group from one round (all of
        them, unless a round refills a batch). The parts are divided among the role's workers; a worker may have
        none."""
        return self.add(parts), self.finish()

    def add(self, parts: list[Trajectory]) -> list[Trajectory]:
        """Returns a new trajectory for each of these, for the learners. A worker of a role that streams gets one part
        after the other, or with `merges` all groups that wait, in any order, while the other workers are busy with
        other parts."""
        raise NotImplementedError

    def finish(self) -> dict[str, float]:
        """The batch has no more parts; all workers of the role are called together. Returns the metrics."""
        return {}

    def connect(self, answerers: Answerers) -> None:
        """Set the workers that this worker asks, if its role asks another role."""

    def pass_rollouts(
        self, batch: int, channels: Sequence[Channel], sources: Sequence[Sequence[str]], outlets: Sequence[Channel]
    ) -> dict[str, float]:
        """Get the rollouts of these sources for this batch from each of the channels, and put the results into the
        outlet at the same place. Returns the metrics."""
        came: list[tuple[Trajectory, Channel]] = []
        for channel, wanted, outlet in zip(channels, sources, outlets, strict=True):
            came += [(trajectory, outlet) for trajectory in received(channel, batch, wanted)]
        came.sort(key=lambda item: item[0].ids[0])  # they arrive in any order
        parts, metrics = self.relay([trajectory for trajectory, _ in came])
        for trajectory, (taken, outlet) in zip(parts, came, strict=True):
            outlet.put(replace(trajectory, source=taken.source), key=batch)
        return metrics

    def stream_rollouts(self, batch: int, inlet: Channel, outlets: Sequence[tuple[range, Channel]]) -> dict[str, float]:
        """Pass on every part of a batch's rollouts as it comes, into the outlet of its env rows, until the driver has
        put the sources that count for each outlet, and all their parts have passed. Returns the metrics."""
        ended: set[tuple[int, str]] = set()  # outlets and sources whose rollouts have passed
        counted: set[tuple[int, str]] | None = None
        while counted is None or not ended >= counted:
            with self.timers.measure("wait"):
                item = inlet.get(key=batch, timeout_s=NO_DEADLINE if counted is None else None)
            if not isinstance(item, Trajectory):
                counted = {(number, source) for number, sources in enumerate(item) for source in sources}
                continue
            number = next(number for number, (rows, _) in enumerate(outlets) if int(item.ids[0]) in rows)
            (trajectory,) = self.add([item])
            outlets[number][1].put(replace(trajectory, source=item.source, first=item.first, last=item.last), key=batch)
            ended |= {(number, item.source)} if item.last else set()
        return self.finish()

    def pass_groups(
        self, key: int, channel: Channel, sources: Sequence[str], groups: Sequence[tuple[int, ...]]
    ) -> tuple[dict[int, float], dict[str, float]]:
        """Get the episodes of these groups, which the sources have put into the channel under this key, and store the
        results. Returns each episode's new total reward, and the metrics."""
        relayed, metrics = self.relay(groups_from(received(channel, key, sources), groups))
        return self._store(relayed), metrics

    def add_groups(
        self, channel: Channel, came: Sequence[tuple[int, Sequence[str], Sequence[tuple[int, ...]]]]
    ) -> dict[int, float]:
        """Get groups that have come, and store the results. Groups that came together have a key in the channel, their
        sources, and their episodes. Returns each episode's new total reward."""
        parts = [unit for key, sources, groups in came for unit in groups_from(received(channel, key, sources), groups)]
        if self.merges:
            return self._store(self.add(parts) if parts else [])
        return self._store([result for unit in parts for result in self.add([unit])])

    def _store(self, parts: list[Trajectory]) -> dict[int, float]:
        """Store these episodes; returns their total rewards."""
        self.store |= {episode: trajectory for trajectory in parts for episode in trajectory.ids.tolist()}
        rewards = [zip(trajectory.ids.tolist(), total_rewards(trajectory), strict=True) for trajectory in parts]
        return {episode: reward for each in rewards for episode, reward in each}


def received(channel: Channel, key: int, sources: Sequence[str]) -> list[Trajectory]:
    """The items that these sources put into a channel; items of other sources come from dead workers."""
    came: dict[str, Trajectory] = {}
    while not came.keys() >= {*sources}:
        item = channel.get(key=key)
        came[item.source] = item
    return [came[source] for source in sources]


def groups_from(parts: list[Trajectory], groups: Sequence[tuple[int, ...]]) -> list[Trajectory]:
    """These groups of the episodes in `parts`."""
    if not groups:
        return []
    whole = join(parts)
    return [choose(whole, group) for group in groups]


def total_rewards(episodes: Trajectory) -> list[float]:
    rewards = (episodes.rewards * episodes.mask).sum(axis=1)
    return np.add.reduceat(rewards, np.cumsum(episodes.lengths) - episodes.lengths).tolist()


# On the driver


def why_together(roles: Sequence[Role], workers: Workers) -> str:
    """Why the units of a batch pass through these roles together; "" if each passes by itself."""
    if whole := [role.name for role in roles if not role.streams]:
        return f"{whole[0]} workers take whole batches"
    names = {name for role in roles for name in (role.name, role.asks) if name}
    devices = [({*host.roles}, {*host.devices} or {host.name}) for host in workers.cluster.hosts]
    role_devices = {device for of_host, held in devices if of_host & names for device in held}
    others = sorted({role for of_host, held in devices if held & role_devices for role in of_host - names})
    return f"{' and '.join(sorted(names))} workers share devices with {' and '.join(others)} workers" if others else ""


class AskedRole:
    """A role of language workers that answers the requests of a relaying role."""

    def __init__(self, workers: Workers, asking: WorkerGroup, asked: WorkerGroup) -> None:
        self.asked, self.rollouts, channel = asked, workers.rollouts, workers.cluster.channel
        self.serving: Handle
        self.asking = 0  # calls of the asking role that are not over
        self.requests = [
            channel(f"{name}-requests", home=asked[rank], capacity=None) for rank, name in enumerate(asked.workers)
        ]
        self.replies = {
            name: channel(f"{name}-answers", home=asking[rank], capacity=None)
            for rank, name in enumerate(asking.workers)
        }
        channels = dict(zip(asked.workers, self.requests, strict=True))
        asking.connect.each(
            [(Answerers(name, channels, replies=replies),) for name, replies in self.replies.items()]
        ).wait()

    @contextmanager
    def answering(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()
        self.rollouts.wait_and_replace(self.serving)
        self.serving.wait()

    def begin(self) -> None:
        """Let the role answer from now on."""
        if not self.asking:
            rule = SamplingRule(0.0, stream="judge")
            calls = [(requests, dict(self.replies), 0, rule) for requests in self.requests]
            self.serving = self.asked.serve.each(calls)
        self.asking += 1

    def end(self) -> None:
        """A call has all its answers; after the last such call the role answers no more."""
        self.asking -= 1
        if not self.asking:
            for requests in self.requests:
                requests.put(None)


class Relays:
    """The relaying roles, in the order of the program's declaration.

    With `streams` every unit passes as soon as it is there, while sims play and learners learn: no other role uses the
    devices of these roles, and all of them take units by themselves. Otherwise the units of a round pass together.
    """

    def __init__(self, workers: Workers) -> None:
        self.rollouts, self.ranks = workers.rollouts, len(workers.learners)
        self.streaming: list[Handle] = []  # calls of roles that pass on a batch's rollouts
        relaying = [role for role in workers.roles if role.relays]
        self.worker_groups = [workers.groups[role.name] for role in relaying]
        # The reason if the units of a batch pass together
        self.why_together = why_together(relaying, workers) if relaying else ""
        asking = [role for role in relaying if role.asks]
        self.asked = {r.name: AskedRole(workers, workers.groups[r.name], workers.groups[r.asks]) for r in asking}
        self.streams = bool(relaying) and not self.why_together
        # The first roles, to the last one that may change rewards, decide which groups count.
        decides = [not (self.streams and role.keeps_rewards) for role in relaying]
        self.deciding = max((number for number, one in enumerate(decides, 1) if one), default=0)
        channel = workers.cluster.channel
        self.channels = [
            [
                channel(f"{group.role}-{place}", home=group[place % len(group)], capacity=None)
                for place in range(max(self.ranks, len(group)))
            ]
            for group in self.worker_groups
        ]
        self.queues = {
            (role, worker): RoleQueue(group[worker], self.channels[role][worker])
            for role, group in enumerate(self.worker_groups)
            for worker in range(len(group))
        }

    def _answering(self, group: WorkerGroup) -> AbstractContextManager[None]:
        """Inside, the requests of a role are answered."""
        return self.asked[group.role].answering() if group.role in self.asked else nullcontext()

    def inlets(self, learners: list[Channel]) -> list[Channel]:
        """The channels into which sims put rollouts for each learner rank."""
        return self._ways(learners)[0]

    def _ways(self, learners: list[Channel]) -> list[list[Channel]]:
        """The channels to the first role, ..., to the learners, by learner rank. A worker of a role that streams has
        one channel for all its ranks."""
        ranks = range(self.ranks)
        at = [[rank % len(group) if self.streams else rank for rank in ranks] for group in self.worker_groups]
        return [*([channels[p] for p in places] for channels, places in zip(self.channels, at, strict=True)), learners]

    def begin_rollouts(self, batch: int, blocks: Sequence[range], learners: list[Channel]) -> None:
        """Let roles that stream pass on each part of the rollouts as it comes; `blocks` are the learner ranks' env
        rows."""
        ways, self.streaming = self._ways(learners), list[Handle]()
        for group, channels, outlets in zip(self.worker_groups, self.channels, ways[1:], strict=True):
            ends = [*zip(blocks, outlets, strict=True)]
            shares = [(batch, channels[worker], ends[worker :: len(group)]) for worker in range(len(group))]
            self.streaming += [group.stream_rollouts.each(shares)] if self.streams else []

    def pass_rollouts(self, batch: int, sources: Sequence[Sequence[str]], learners: list[Channel]) -> dict[str, float]:
        """Let the rollouts of these sources, by learner rank, pass through the roles; parts of other sources come from
        dead sims. Returns the metrics."""
        if self.streams:
            for group, channels in zip(self.worker_groups, self.channels, strict=True):
                for worker in range(len(group)):
                    channels[worker].put(sources[worker :: len(group)], key=batch)
            self.rollouts.wait_and_replace(*self.streaming)
            return metrics_of(self.streaming)
        metrics: dict[str, float] = {}
        ways = self._ways(learners)
        for group, channels, outlets in zip(self.worker_groups, ways, ways[1:], strict=False):
            shares = [
                (batch, *(way[rank :: len(group)] for way in (channels, sources, outlets)))
                for rank in range(len(group))
            ]
            with self._answering(group):
                self.rollouts.wait_and_replace(passing := group.pass_rollouts.each(shares))
            metrics |= passing.wait()[0]
        return metrics

    def pass_groups(
        self, groups: Iterable[tuple[int, ...]], stores: Stores
    ) -> tuple[dict[int, float], dict[str, float]]:
        """Let these groups of episodes pass through; the workers of the last role store them afterwards. Returns each
        episode's total reward, without episodes of sims that died meanwhile, and the metrics."""
        rewards: dict[int, float] = {}
        metrics: dict[str, float] = {}
        left = sorted(groups)
        for group, channels in zip(self.worker_groups, self.channels, strict=True):
            dealt = [left[rank :: len(group)] for rank in range(len(group))]
            transfers = [
                stores.send(flat(for_rank), channel) for for_rank, channel in zip(dealt, channels, strict=False)
            ]
            self.rollouts.wait_and_replace(*(call for transfer in transfers for call in transfer.calls.values()))
            dealt = [sent_groups(*both) for both in zip(transfers, dealt, strict=True)]
            shares = [
                (one.number, channel, one.succeeded(), groups_of_rank)
                for one, channel, groups_of_rank in zip(transfers, channels, dealt, strict=False)
            ]
            with self._answering(group):
                self.rollouts.wait_and_replace(passing := group.pass_groups.each(shares))
            rewards, metrics = {}, metrics | passing.wait()[0][1]
            for (totals, _), worker, of_rank in zip(passing.wait(), group.workers, dealt, strict=True):
                rewards |= totals
                stores.put(worker, flat(of_rank))
            left = sorted(flat(dealt))
        return rewards, metrics

    # Groups as they come

    @property
    def adds_columns(self) -> bool:
        """True if roles follow the deciding ones; they get the groups that the batch certainly contains."""
        return self.deciding < len(self.worker_groups)

    def decide(self, episodes: tuple[int, ...], place: int) -> None:
        """Pass a group through the deciding roles, from the next `go_on` on; `place` decides its workers."""
        self._put(0, Passage(episodes, place, self.deciding))

    def add_columns(self, episodes: tuple[int, ...], place: int) -> None:
        """The same with the other roles."""
        self._put(self.deciding, Passage(episodes, place, len(self.worker_groups)))

    def passing(self, end: int | None = None) -> bool:
        """True if groups are on their way, to this last role if given."""
        return any(end in (None, passage.end) for queue in self.queues.values() for passage in queue.passages())

    def calls(self) -> list[Handle]:
        """The calls for all groups on their way."""
        return [call for queue in self.queues.values() for call in queue.calls()]

    def is_due(self) -> bool:
        """True if groups have come to a role, or a role has passed groups on."""
        return any(queue.is_due() for queue in self.queues.values())

    def go_on(self, stores: Stores) -> Iterator[tuple[Passage, dict[int, float]]]:
        """Groups that have passed their roles, with the total reward of each episode, or that were lost (without
        rewards)."""
        for (role, _), queue in self.queues.items():
            if queue.call and queue.call.done():
                rewards, passed = queue.call.wait()[0], queue.adding
                queue.call, queue.adding = None, []
                if asked := self.asked.get(queue.group.role):
                    asked.end()
                for passage in passed:
                    of_group = {episode: rewards[episode] for episode in passage.episodes if episode in rewards}
                    if of_group and role + 1 < passage.end:
                        self._put(role + 1, passage)
                    else:
                        yield passage, of_group
        for queue in self.queues.values():
            if not queue.call and any(transfer.done() for transfer, _ in queue.sent):
                self._add(queue, stores)
            if queue.to_send:
                self._send(queue, stores)

    def _put(self, role: int, passage: Passage) -> None:
        self.queues[role, passage.place % len(self.worker_groups[role])].to_send.append(passage)

    def _send(self, queue: RoleQueue, stores: Stores) -> None:
        """Let groups be sent from their stores to a role's worker."""
        passages, queue.to_send = queue.to_send, []
        episodes = flat(passage.episodes for passage in passages)
        queue.sent.append((stores.send(episodes, queue.channel), passages))

    def _add(self, queue: RoleQueue, stores: Stores) -> None:
        """Let an idle worker take all groups that have come, and store them afterwards. Of a lost group it takes what
        is in its channel."""
        came = [sent for sent in queue.sent if sent[0].done()]
        queue.sent = [sent for sent in queue.sent if sent not in came]
        queue.adding = flat(passages for _, passages in came)
        whole = [sent_groups(transfer, [passage.episodes for passage in passages]) for transfer, passages in came]
        if asked := self.asked.get(queue.group.role):
            asked.begin()
        parts = [(one.number, one.succeeded(), groups) for (one, _), groups in zip(came, whole, strict=True)]
        queue.call = queue.group.add_groups(queue.channel, parts)
        stores.put(queue.group.workers[0], flat(flat(whole)))

    def finish(self) -> list[Handle]:
        """The batch has no more units: let each role end its work on it. The results are metrics by worker."""
        return [group.finish() for group in self.worker_groups]


@dataclass(frozen=True)
class Passage:
    """A group on its way through the roles."""

    episodes: tuple[int, ...]
    place: int
    end: int  # number of the role after its last one


@dataclass
class RoleQueue:
    """The groups that a worker of a role gets."""

    group: WorkerGroup  # of this worker alone
    channel: Channel
    to_send: list[Passage] = field(default_factory=list)
    sent: list[tuple[Transfer, list[Passage]]] = field(default_factory=list)
    adding: list[Passage] = field(default_factory=list)  # groups of the worker's call
    call: Handle | None = None

    def passages(self) -> list[Passage]:
        return [*self.to_send, *self.adding, *flat(passages for _, passages in self.sent)]

    def calls(self) -> list[Handle]:
        return [
            *(call for transfer, _ in self.sent for call in transfer.calls.values()),
            *([self.call] if self.call else []),
        ]

    def is_due(self) -> bool:
        if self.call:
            return self.call.done()
        return bool(self.to_send) or any(transfer.done() for transfer, _ in self.sent)


def sent_groups(transfer: Transfer, groups: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The groups of which all episodes were sent; a sim that died has not sent its own."""
    sent = {*transfer.sent_episodes()}
    return [group for group in groups if sent.issuperset(group)]


def flat(lists: Iterable[Iterable[T]]) -> list[T]:
    return [*chain.from_iterable(lists)]


def metrics_of(calls: Sequence[Handle]) -> dict[str, float]:
    """The metrics of roles' calls, of each role's first worker."""
    return {name: number for call in calls for name, number in call.wait()[0].items()}
