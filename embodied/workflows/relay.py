"""Roles between players and learners: docs/workflows.md builds a reward model on one.

Rollouts pass through the workers of such a role when the batch is complete. Groups of whole episodes do so after each
round in which they were played, before any of them is filtered: the new rewards are what groups are compared by.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from embodied.core.types import Trajectory, choose, join
from embodied.envs.whole_episodes import EpisodeKeeper
from embodied.runtime import Channel

if TYPE_CHECKING:
    from embodied.workflows.experience import Experience
    from embodied.workflows.workers import Workers


class RelayWorker(EpisodeKeeper):
    """Gets whole rollouts, or groups of whole episodes, and hands on what `relay` makes of them."""

    def relay(self, parts: list[Trajectory]) -> tuple[list[Trajectory], dict[str, float]]:
        """Returns what learners get instead of these, one for each, and metrics of the iteration, of which the first
        worker's are kept. A part is a rollout of some env rows, or the episodes of a group that one round played
        (all of them, unless a round refills a batch). The workers of a role share the parts: one may have none."""
        raise NotImplementedError

    def pass_rollouts(
        self, batch: int, channels: Sequence[Channel], sources: Sequence[Sequence[str]], outlets: Sequence[Channel]
    ) -> dict[str, float]:
        """Get the rollouts of these sources for this batch from each of the channels, and put what becomes of them into
        the outlet in the same place. Returns the metrics."""
        came: list[tuple[Trajectory, Channel]] = []
        for channel, wanted, outlet in zip(channels, sources, outlets, strict=True):
            came += [(part, outlet) for part in received(channel, batch, wanted)]
        came.sort(key=lambda item: item[0].ids[0])  # in whatever order they came
        parts, metrics = self.relay([part for part, _ in came])
        for part, (_, outlet) in zip(parts, came, strict=True):
            outlet.put(part, key=batch)
        return metrics

    def pass_groups(
        self, key: int, channel: Channel, sources: Sequence[str], groups: Sequence[tuple[int, ...]]
    ) -> tuple[dict[int, float], dict[str, float]]:
        """Get the episodes of these groups, which the sources have put into the channel under this key, and keep what
        becomes of them. Returns each episode's new total reward, and the metrics."""
        parts = received(channel, key, sources)
        whole = join(parts) if parts else None
        relayed, metrics = self.relay([choose(whole, group) for group in groups])
        self.kept |= {episode: part for part in relayed for episode in part.ids.tolist()}
        rewards = [zip(part.ids.tolist(), total_rewards(part), strict=True) for part in relayed]
        return {episode: reward for each in rewards for episode, reward in each}, metrics


def received(channel: Channel, key: int, sources: Sequence[str]) -> list[Trajectory]:
    """What these sources put into a channel; other sources are workers that have died since."""
    came: dict[str, Trajectory] = {}
    while not came.keys() >= {*sources}:
        part = channel.get(key=key)
        came[part.source] = part
    return [came[source] for source in sources]


def total_rewards(episodes: Trajectory) -> list[float]:
    rewards = (episodes.rewards * episodes.mask).sum(axis=1)
    return np.add.reduceat(rewards, np.cumsum(episodes.lengths) - episodes.lengths).tolist()


class Relays:
    """The roles that relay, in the order in which a program declares them."""

    def __init__(self, workers: Workers) -> None:
        self.rollouts, self.ranks = workers.rollouts, len(workers.learners)
        self.groups = [workers.groups[role.name] for role in workers.roles if role.relays]
        channel = workers.cluster.channel
        self.channels = [
            [
                channel(f"{group.role}-{place}", home=group[place % len(group)], capacity=None)
                for place in range(max(self.ranks, len(group)))
            ]
            for group in self.groups
        ]
        self.passed = 0  # rounds of groups

    def inlets(self, learners: list[Channel]) -> list[Channel]:
        """Where sims put rollouts for each learner rank."""
        return self.channels[0][: self.ranks] if self.groups else learners

    def pass_rollouts(self, batch: int, sources: Sequence[Sequence[str]], learners: list[Channel]) -> dict[str, float]:
        """Let the rollouts of a batch pass through; `sources` by learner rank. Returns the metrics."""
        metrics: dict[str, float] = {}
        ways = [*(channels[: self.ranks] for channels in self.channels), learners]
        for group, channels, outlets in zip(self.groups, ways, ways[1:], strict=False):
            shares = [
                (batch, *(way[rank :: len(group)] for way in (channels, sources, outlets)))
                for rank in range(len(group))
            ]
            self.rollouts.settle(passing := group.pass_rollouts.each(shares))
            metrics |= passing.wait()[0]
        return metrics

    def pass_groups(
        self, groups: Iterable[tuple[int, ...]], experience: Experience
    ) -> tuple[dict[int, float], dict[str, float]]:
        """Let these groups of episodes pass through, whose keepers the workers of the last role are then. Returns each
        episode's total reward, without those whose sim has died meanwhile, and the metrics."""
        rewards: dict[int, float] = {}
        metrics: dict[str, float] = {}
        left = sorted(groups)
        for group, channels in zip(self.groups, self.channels, strict=True):
            self.passed += 1
            dealt = [left[rank :: len(group)] for rank in range(len(group))]
            sending = [
                experience.hand_in([one for episodes in mine for one in episodes], channel, self.passed)
                for mine, channel in zip(dealt, channels, strict=False)
            ]
            self.rollouts.settle(*(call for calls in sending for call in calls.values()))
            shares = []
            for rank, calls in enumerate(sending):
                dealt[rank] = [episodes for episodes in dealt[rank] if not experience.gone(episodes)]
                there = [source for source, call in calls.items() if call.succeeded() and call.wait()[0]]
                shares.append((self.passed, channels[rank], there, dealt[rank]))
            self.rollouts.settle(passing := group.pass_groups.each(shares))
            rewards, metrics = {}, metrics | passing.wait()[0][1]
            for found, _ in passing.wait():
                rewards |= found
            experience.keep_at(dict(zip(group.workers, map(flat, dealt), strict=True)))
            left = sorted(episodes for mine in dealt for episodes in mine)
        return rewards, metrics


def flat(groups: Iterable[Collection[int]]) -> list[int]:
    return [episode for group in groups for episode in group]
