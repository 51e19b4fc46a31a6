"""A role between simulators and learners, with a part of the batch source that sends rollouts its way:
docs/workflows.md builds a reward model on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from embodied.core.errors import ConfigError
from embodied.core.types import Trajectory
from embodied.learners.rollout_buffer import RolloutBuffer
from embodied.runtime import Channel, Worker
from embodied.workflows.rl_loop import HorizonCollector, RolloutParts
from embodied.workflows.workers import Workers


class RelayWorker(Worker):
    """Gets whole rollouts before the learners do, and hands on what `relay` makes of them."""

    def relay(self, parts: list[Trajectory]) -> tuple[list[Trajectory], dict[str, float]]:
        """Returns what learners get instead of these, one for each, and metrics of the iteration, of which the first
        worker's are kept. Learner ranks are dealt out among the workers: one may have no parts."""
        raise NotImplementedError

    def pass_on(
        self, batch: int, channels: Sequence[Channel], sources: Sequence[Sequence[str]], learners: Sequence[Channel]
    ) -> dict[str, float]:
        """Get the rollouts of these sources for this batch from each of the channels, and put what becomes of them into
        the learner's channel in the same place. Returns the metrics."""
        came: list[tuple[Trajectory, Channel]] = []
        for channel, wanted, learner in zip(channels, sources, learners, strict=True):
            buffer = RolloutBuffer(1)
            while not buffer.has(wanted):  # others that come are of workers that have died since
                buffer.add(channel.get(key=batch))
            came += [(part, learner) for part in buffer.parts(wanted)]
        came.sort(key=lambda item: item[0].ids[0])  # in whatever order they came
        parts, metrics = self.relay([part for part, _ in came])
        for part, (_, learner) in zip(parts, came, strict=True):
            learner.put(part, key=batch)
        return metrics


class RelayedRollouts(HorizonCollector):
    """Rollouts that pass through a role of the program, whose workers are `RelayWorker`s, on their way to learners."""

    role: ClassVar[str]

    def __init__(self, workers: Workers) -> None:
        super().__init__(workers)
        if pieces := self.config.pipeline.granularity:
            raise ConfigError(f"pipeline.granularity={pieces}: {self.role} workers take whole rollouts; leave it out")
        self.relays = workers.groups[self.role]
        homes = [self.relays[rank % len(self.relays)] for rank in range(len(self.learners))]
        channel = workers.cluster.channel
        self.outlets = [channel(f"{self.role}-{rank}", home=home, capacity=None) for rank, home in enumerate(homes)]

    def collect(self, version: int) -> RolloutParts:
        batch = super().collect(version)
        ways = (self.outlets, [batch.sources_of(block) for block in self.blocks], self.trajectories)
        ranks = range(len(self.relays))
        shares = [(batch.number, *(way[rank :: len(self.relays)] for way in ways)) for rank in ranks]
        self.rollouts.settle(passing := self.relays.pass_on.each(shares))
        batch.relayed = passing.wait()[0]
        return batch
