"""The base of a role that stands between simulators and learners: docs/workflows.md builds a reward model on it.

`RelayedRollouts` of `embodied/workflows/rl_loop.py` sends the rollouts of all sims its way.
"""

from __future__ import annotations

from collections.abc import Sequence

from embodied.core.types import Trajectory
from embodied.learners.rollout_buffer import RolloutBuffer
from embodied.runtime import Channel, Worker


class RelayWorker(Worker):
    """Gets whole rollouts before the learners do, and hands on what `relay` makes of them."""

    def relay(self, parts: list[Trajectory]) -> tuple[list[Trajectory], dict[str, float]]:
        """Returns what learners get instead of these, one for each, and metrics of the iteration, of which the first
        worker's are kept. Learner ranks are dealt out among the workers: one may have no parts."""
        raise NotImplementedError

    def pass_on(
        self, channels: Sequence[Channel], sources: Sequence[Sequence[str]], learners: Sequence[Channel]
    ) -> dict[str, float]:
        """Get the rollouts of these sources from each of the channels, and put what becomes of them into the learner's
        channel in the same place. Returns the metrics."""
        came: list[tuple[Trajectory, Channel]] = []
        for channel, wanted, learner in zip(channels, sources, learners, strict=True):
            buffer = RolloutBuffer(1)
            while not buffer.has(wanted):  # others that come are of workers that have died since
                buffer.add(channel.get())
            came += [(part, learner) for part in buffer.parts(wanted)]
        came.sort(key=lambda item: item[0].ids[0])  # in whatever order they came
        parts, metrics = self.relay([part for part, _ in came])
        for part, (_, learner) in zip(parts, came, strict=True):
            learner.put(part)
        return metrics
