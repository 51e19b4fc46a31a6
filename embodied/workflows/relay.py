"""Roles between players and learners; docs/workflows.md builds a reward model as an example.

Groups of whole episodes pass through such a role before they are compared and filtered, since its rewards count. A role
that streams (`Role.streams`), on devices of its own, takes every group as soon as its last episode has ended, or with
`Role.keeps_rewards` as soon as the batch certainly contains it, and every part of a rollout as soon as a sim sends it.
Other roles take all groups of a round when the round is over, and all rollouts when the batch is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from embodied.core.types import Answerers, SamplingRule, Trajectory, choose, join
from embodied.envs.store import StoringWorker
from embodied.runtime import Channel, Handle, WorkerGroup
from embodied.workflows.contract import Role

if TYPE_CHECKING:
    from embodied.workflows.workers import Workers

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
