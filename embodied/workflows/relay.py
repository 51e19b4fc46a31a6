"""Roles between players and learners; docs/workflows.md builds a reward model as an example.

Rollouts pass through the workers of such a role when the batch is complete. Groups of whole episodes pass through after
each round and before filtering, since groups are compared by the new rewards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embodied.core.types import Servers, Trajectory, choose, join
from embodied.envs.kept_episodes import EpisodeKeeper
from embodied.runtime import Channel


class RelayWorker(EpisodeKeeper):
    """Receives whole rollouts, or groups of whole episodes, and sends on the result of `relay`."""

    def relay(self, parts: list[Trajectory]) -> tuple[list[Trajectory], dict[str, float]]:
        """Returns a new trajectory for each of these, for the learners, and metrics of the iteration (the first
        worker's are kept). A part is a rollout of some env rows, or the episodes of a group from one round (all of
        them, unless a round refills a batch). The parts are divided among the role's workers; a worker may have
        none."""
        raise NotImplementedError

    def connect(self, servers: Servers) -> None:
        """Set the workers that this worker asks, if its role asks another role."""

    def pass_rollouts(
        self, batch: int, channels: Sequence[Channel], sources: Sequence[Sequence[str]], outlets: Sequence[Channel]
    ) -> dict[str, float]:
        """Get the rollouts of these sources for this batch from each of the channels, and put the results into the
        outlet at the same place. Returns the metrics."""
        came: list[tuple[Trajectory, Channel]] = []
        for channel, wanted, outlet in zip(channels, sources, outlets, strict=True):
            came += [(part, outlet) for part in received(channel, batch, wanted)]
        came.sort(key=lambda item: item[0].ids[0])  # they arrive in any order
        parts, metrics = self.relay([part for part, _ in came])
        for part, (_, outlet) in zip(parts, came, strict=True):
            outlet.put(part, key=batch)
        return metrics

    def pass_groups(
        self, key: int, channel: Channel, sources: Sequence[str], groups: Sequence[tuple[int, ...]]
    ) -> tuple[dict[int, float], dict[str, float]]:
        """Get the episodes of these groups, which the sources have put into the channel under this key, and keep the
        results. Returns each episode's new total reward, and the metrics."""
        parts = received(channel, key, sources)
        whole = join(parts) if parts else None
        relayed, metrics = self.relay([choose(whole, group) for group in groups])
        self.kept_episodes |= {episode: part for part in relayed for episode in part.ids.tolist()}
        rewards = [zip(part.ids.tolist(), total_rewards(part), strict=True) for part in relayed]
        return {episode: reward for each in rewards for episode, reward in each}, metrics


def received(channel: Channel, key: int, sources: Sequence[str]) -> list[Trajectory]:
    """The items that these sources put into a channel; items of other sources come from dead workers."""
    came: dict[str, Trajectory] = {}
    while not came.keys() >= {*sources}:
        part = channel.get(key=key)
        came[part.source] = part
    return [came[source] for source in sources]


def total_rewards(episodes: Trajectory) -> list[float]:
    rewards = (episodes.rewards * episodes.mask).sum(axis=1)
    return np.add.reduceat(rewards, np.cumsum(episodes.lengths) - episodes.lengths).tolist()
