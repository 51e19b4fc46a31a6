"""Collects batches: plays rounds, and sends a batch's units to the learner ranks under the batch's number. Learners
begin when the batch is complete, or early, before the first unit.

`Collector` asks four questions, which `Horizon` (PPO on robots) and `Groups` (GRPO, and all training with
conversations) answer: what to play next, what is certain, what was lost, what to save. The driver only knows which
parts exist, and learners get trajectories from the sims. `Relays` passes them through a program's own roles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.core.conversations import SamplingRule
from embodied.core.types import BatchEnd, EpisodeResult, Job, Played, Report, Servers, Unit
from embodied.runtime import Channel, Handle, WorkerGroup
from embodied.workflows.contract import BatchSource

if TYPE_CHECKING:
    from embodied.workflows.groups import Groups
    from embodied.workflows.rollout_manager import Round
    from embodied.workflows.workers import Workers


@dataclass
class Batch:
    """The driver's record of one iteration's data; the learners have the trajectories."""

    number: int  # of the batch in its channels
    version: int
    units: list[list[Unit]]  # announced to each learner rank
    rounds: int = 0
    seconds: float = 0.0
    played: list[Played] = field(default_factory=list)  # by sim and round
    finished: list[EpisodeResult] = field(default_factory=list)
    ends: list[tuple[int, float]] = field(default_factory=list)  # of conversations, as in `Played`, over all rounds
    metrics: dict[str, float] = field(default_factory=dict)  # of the collector, roles and engines
    why_empty: str = ""  # why the batch has no gradient, if it has none

    def add_round(self, played: Round) -> None:
        """Add the results of a round."""
        parts = [*played.played.values()]
        self.ends += [(tokens, self.seconds + seconds) for part in parts for tokens, seconds in part.ends]
        self.played += parts
        self.seconds += played.seconds
        self.rounds += 1

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Conversations for samples.jsonl."""
        return sorted((sample for part in self.played for sample in part.samples), key=lambda sample: sample["index"])

    @property
    def problems(self) -> list[str]:
        """Reasons for discarded episodes."""
        return [problem for part in self.played for problem in part.problems]


class Collector(BatchSource):
    """Collects batches with sims and policies, and sends their units to the learner ranks."""

    sampling = SamplingRule()
    rows_of_ranks: Sequence[np.ndarray | None] = ()  # by learner rank, its env rows, if env rows are the units
    batch: Batch  # the last one, perhaps in collection

    def __init__(self, workers: Workers) -> None:
        """Make a channel to each learner."""
        self.config, self.rollouts, self.learners = workers.config, workers.rollouts, workers.learners
        self.channels, self.relays = workers.trajectory_channels(), Relays(workers)
        self.early = self.config.pipeline.begins_early
        self.listens = self.early and not self.relays.groups  # units become certain during rounds, by reports
        self.rollouts.training = self
        self.batches = 0  # number of collected batches
        self.learning: Handle | None = None  # call of learners that began before the batch was complete
        self.began = 0.0

    def total_iterations(self) -> int:
        return self.config.run.iterations

    def collect(self, version: int) -> Batch:
        """Play rounds until the batch needs no more. Parts of dead sims are left out, or collected again if too much is
        missing."""
        self.batches += 1
        batch = self.batch = Batch(self.batches, version, [[] for _ in self.channels])
        self.begin()
        if self.early or self.config.pipeline.granularity:
            self.began, self.learning = perf_counter(), self.begin_learning(batch.number)
        while jobs := self.next_jobs():
            listener = self if self.listens else None
            played = self.rollouts.play(jobs, self.sampling, self.rollouts.take_beside(), listener)
            batch.add_round(played)
            self.add_round(played)
            self._announce(self.certain_units(wait=True))
        self._announce(self.remaining_units())
        return batch

    # Questions

    def begin(self) -> None:
        """A batch begins."""
        raise NotImplementedError

    def next_jobs(self) -> dict[int, Job]:
        """The jobs of the next round, by sim; none if the batch needs no more."""
        raise NotImplementedError

    def begin_round(self, jobs: dict[int, Job]) -> None:
        """The sims have been asked to play these jobs; a sim that dies from now on loses its job."""

    def add_report(self, report: Report) -> None:
        """A sim reports during a round."""
        raise NotImplementedError

    def add_round(self, played: Round) -> None:
        """A round has ended with these results."""
        raise NotImplementedError

    def certain_units(self, wait: bool) -> Iterator[tuple[int, Unit]]:
        """Learner ranks, with units that have become certain before the batch is complete and whose data have come to
        the rank. `wait` at the end of a round for data that are on their way."""
        return iter(())

    def remaining_units(self) -> Iterator[tuple[int, Unit]]:
        """The batch has all its rounds: the remaining units, and then the batch's episodes and metrics."""
        raise NotImplementedError

    def lose(self, sim: int) -> int:
        """A sim has died and was replaced; returns the number of abandoned open episodes."""
        raise NotImplementedError

    # To the learners

    def due(self) -> bool:
        """During a round: true if reports wait."""
        return self.rollouts.inbox.qsize() > 0

    def go_on(self) -> None:
        self.rollouts.read_reports()
        self._announce(self.certain_units(wait=False))

    def _announce(self, units: Iterable[tuple[int, Unit]]) -> None:
        """Announce units to their ranks, whose channels get the trajectories from the sims."""
        for rank, unit in units:
            self.batch.units[rank].append(unit)
            self.channels[rank].put(unit, key=self.batch.number)

    def begin_learning(self, batch: int) -> Handle:
        """Let each learner rank receive its units of a batch, and update when it has all of them."""
        how = batch, self.rollouts.weight_sync.learned
        ranks = zip(self.channels, self.rows_of_ranks or [None] * len(self.channels), strict=True)
        return self.learners.learn.each([(channel, *how, rows, self.early) for channel, rows in ranks])

    def update(self, batch: Batch, iteration: int, total: int) -> Handle | None:
        """Tell the learners that no more units follow; returns the call in which they learn."""
        self.samples, self.ends = batch.samples, batch.ends
        if not (self.learning or any(batch.units)):
            return None
        learning, self.learning = self.learning, None
        end = BatchEnd(iteration, total, perf_counter() - self.began if learning else 0.0)
        for channel in self.channels:
            channel.put(end, key=batch.number)
        return learning or self.begin_learning(batch.number)

    def metrics(self, batch: Batch) -> dict[str, float]:
        parts, sims = batch.played, len(self.rollouts.sims)
        return {
            "env_steps": sum(part.env_steps for part in parts),
            "time/rollout_s": batch.seconds,
            "time/step_s": sum(part.step_s for part in parts) / sims,
            "time/reset_s": sum(part.reset_s for part in parts) / sims,
            "time/act_s": sum(part.wait_s for part in parts) / sims,
            **batch.metrics,
        }

    def abandon(self) -> dict[str, np.ndarray]:
        """End the wait of learners for units."""
        for channel in self.channels:
            channel.close("the run ends")
        return {}


class Relays:
    """The relaying roles, in the order of the program's declaration."""

    def __init__(self, workers: Workers) -> None:
        self.rollouts, self.ranks = workers.rollouts, len(workers.learners)
        relaying = [role for role in workers.roles if role.relays]
        self.groups = [workers.groups[role.name] for role in relaying]
        channel = workers.cluster.channel
        self.channels = [
            [
                channel(f"{group.role}-{place}", home=group[place % len(group)], capacity=None)
                for place in range(max(self.ranks, len(group)))
            ]
            for group in self.groups
        ]
        self.asked = {
            role.name: AskedRole(workers, workers.groups[role.name], workers.groups[role.asks])
            for role in relaying
            if role.asks
        }
        self.passed = 0  # rounds of relayed groups

    def _answered(self, group: WorkerGroup) -> AbstractContextManager[None]:
        """Inside, the requests of a role are answered."""
        return self.asked[group.role].answering() if group.role in self.asked else nullcontext()

    def inlets(self, learners: list[Channel]) -> list[Channel]:
        """The channels into which sims put rollouts for each learner rank."""
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
            with self._answered(group):
                self.rollouts.settle(passing := group.pass_rollouts.each(shares))
            metrics |= passing.wait()[0]
        return metrics

    def pass_groups(
        self, groups: Iterable[tuple[int, ...]], experience: Groups
    ) -> tuple[dict[int, float], dict[str, float]]:
        """Let these groups of episodes pass through; the workers of the last role keep them afterwards. Returns each
        episode's total reward, without episodes of sims that died meanwhile, and the metrics."""
        rewards: dict[int, float] = {}
        metrics: dict[str, float] = {}
        left = sorted(groups)
        for group, channels in zip(self.groups, self.channels, strict=True):
            self.passed += 1
            dealt = [left[rank :: len(group)] for rank in range(len(group))]
            sending = [
                experience.hand_in([episode for episodes in for_rank for episode in episodes], channel, self.passed)
                for for_rank, channel in zip(dealt, channels, strict=False)
            ]
            self.rollouts.settle(*(call for calls in sending for call in calls.values()))
            shares = []
            for rank, calls in enumerate(sending):
                dealt[rank] = [episodes for episodes in dealt[rank] if not experience.lost_among(episodes)]
                reached = [source for source, call in calls.items() if call.succeeded() and call.wait()[0]]
                shares.append((self.passed, channels[rank], reached, dealt[rank]))
            with self._answered(group):
                self.rollouts.settle(passing := group.pass_groups.each(shares))
            rewards, metrics = {}, metrics | passing.wait()[0][1]
            for totals, _ in passing.wait():
                rewards |= totals
            kept = [[episode for episodes in for_rank for episode in episodes] for for_rank in dealt]
            experience.set_keepers(dict(zip(group.workers, kept, strict=True)))
            left = sorted(episodes for for_rank in dealt for episodes in for_rank)
        return rewards, metrics


class AskedRole:
    """A role of language workers that answers the requests of a relaying role."""

    def __init__(self, workers: Workers, asking: WorkerGroup, asked: WorkerGroup) -> None:
        self.asked, self.rollouts, channel = asked, workers.rollouts, workers.cluster.channel
        self.requests = [
            channel(f"{name}-requests", home=asked[rank], capacity=None) for rank, name in enumerate(asked.workers)
        ]
        self.replies = {
            name: channel(f"{name}-answers", home=asking[rank], capacity=None)
            for rank, name in enumerate(asking.workers)
        }
        channels = dict(zip(asked.workers, self.requests, strict=True))
        asking.connect.each(
            [(Servers(name, channels, replies=replies),) for name, replies in self.replies.items()]
        ).wait()

    @contextmanager
    def answering(self) -> Iterator[None]:
        rule = SamplingRule(0.0, stream="judge")
        serving = self.asked.serve.each([(requests, dict(self.replies), 0, rule) for requests in self.requests])
        try:
            yield
        finally:
            for requests in self.requests:
                requests.put(None)
        self.rollouts.settle(serving)
        serving.wait()
