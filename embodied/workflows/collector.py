"""Collects batches. `Collector` is the common base for PPO and GRPO: it sends units of a batch to the learner ranks
under the batch's number. Learners begin when the batch is complete, or early, before the first unit.

`HorizonCollector` collects PPO's rollouts: a fixed number of decisions of every env row. Episodes continue in the next
rollout. Sims put slices of env rows into the channels of the learner ranks that own the rows. `group_collector.py`
collects whole episodes. `Relays` passes both through a program's own roles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from embodied.algorithms.config import PPOConfig
from embodied.core.conversations import SamplingRule
from embodied.core.errors import ConfigError
from embodied.core.types import BatchEnd, EpisodeList, EpisodeResult, Job, Played, Report, Servers, Unit, env_blocks
from embodied.placement.balance import balance_ratio
from embodied.runtime import Channel, Handle, WorkerGroup
from embodied.workflows.contract import BatchSource

if TYPE_CHECKING:
    from embodied.workflows.group_collector import Experience
    from embodied.workflows.workers import Workers


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
        self, groups: Iterable[tuple[int, ...]], experience: Experience
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
                dealt[rank] = [episodes for episodes in dealt[rank] if not experience.gone(episodes)]
                reached = [source for source, call in calls.items() if call.succeeded() and call.wait()[0]]
                shares.append((self.passed, channels[rank], reached, dealt[rank]))
            with self._answered(group):
                self.rollouts.settle(passing := group.pass_groups.each(shares))
            rewards, metrics = {}, metrics | passing.wait()[0][1]
            for totals, _ in passing.wait():
                rewards |= totals
            kept = [[episode for episodes in for_rank for episode in episodes] for for_rank in dealt]
            experience.keep_at(dict(zip(group.workers, kept, strict=True)))
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


class Collector(BatchSource):
    """Collects batches with sims and policies, and sends them to learners."""

    def __init__(self, workers: Workers) -> None:
        """Make a channel to each learner."""
        self.config = workers.config
        self.rollouts, self.learners = workers.rollouts, workers.learners
        self.trajectories, self.relays = workers.trajectory_channels(), Relays(workers)
        self.batches = 0  # number of collected batches
        self.learning: Handle | None = None  # call of learners that began before the batch was complete
        self.began = 0.0

    def rows_of_ranks(self) -> list[np.ndarray | None]:
        """The env rows of each learner rank, if env rows are the units."""
        return [None] * len(self.trajectories)

    def begin_learning(self, batch: int, one_by_one: bool = False) -> Handle:
        """Let each learner rank receive its units of a batch, and update when it has all of them."""
        version, ranks = self.rollouts.weight_sync.learned, zip(self.trajectories, self.rows_of_ranks(), strict=True)
        return self.learners.learn.each([(channel, batch, version, rows, one_by_one) for channel, rows in ranks])

    def begin_early(self, batch: int, one_by_one: bool = False) -> None:
        """Let learners begin before the batch is complete."""
        self.began, self.learning = perf_counter(), self.begin_learning(batch, one_by_one)

    def end_batch(self, batch: int, iteration: int, total: int) -> Handle:
        """Tell the learners that no more units follow; returns the call in which they learn."""
        learning, self.learning = self.learning, None
        end = BatchEnd(iteration, total, perf_counter() - self.began if learning else 0.0)
        for channel in self.trajectories:
            channel.put(end, key=batch)
        return learning or self.begin_learning(batch)

    def close_channels(self) -> None:
        """End the wait of learners for units."""
        for channel in self.trajectories:
            channel.close("the run ends")


class EpisodeCounter:
    """Counts the begun training episodes of each env row, and the episodes with a known outcome.

    Sim workers record every episode before it begins, so a replacement begins the next one: no episode is played twice,
    and lost episodes are counted.
    """

    def __init__(self, num_envs: int) -> None:
        self.begun = np.zeros(num_envs, np.int64)  # episodes that each env row has begun
        self.settled = np.zeros(num_envs, np.int64)  # begun episodes that ended or were abandoned

    def begin(self, indices: Iterable[int]) -> None:
        """Env row e plays episodes e, e + E, e + 2E, ..."""
        for index in indices:
            count, env = divmod(index, len(self.begun))
            self.begun[env] = max(self.begun[env], count + 1)

    def finish(self, results: Iterable[EpisodeResult]) -> None:
        """Count these episodes as settled."""
        for result in results:
            self.settled[result.index % len(self.begun)] += 1

    def abandon(self, rows: Sequence[int] | np.ndarray) -> int:
        """Give up the open episodes of these rows; returns their number."""
        lost = int((self.begun[rows] - self.settled[rows]).sum())
        self.settled[rows] = self.begun[rows]
        return lost

    def abandoned(self) -> dict[str, np.ndarray]:
        """The state of all env rows without their open episodes; no simulator is needed."""
        from embodied.envs.player import EpisodeTracker  # imports a simulator's packages

        rows = len(self.begun)
        state = {f"rows.{name}": np.zeros(rows, np.int64) for name in (*EpisodeTracker.ARRAYS, "initial")}
        state |= {"rows.started": self.settled + (self.begun > self.settled), "rows.length": np.ones(rows, np.int64)}
        return {"env_ids": np.arange(rows), **state}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Continue from the state of all env rows: each has one open episode, a new one if the old one was
        abandoned."""
        envs, started = state["env_ids"], state["rows.started"]
        goes_on = any(name.startswith("env.") for name in state)
        self.begun[envs] = started if goes_on else started + (state["rows.length"] > 0)
        self.settled[envs] = self.begun[envs] - 1


@dataclass
class RolloutParts:
    """A collected rollout: the env rows of each sim, and the times."""

    number: int  # number of the batch in its channels
    version: int
    stats: dict[int, Played] = field(default_factory=dict)  # by sim
    sources: dict[str, np.ndarray] = field(default_factory=dict)  # source -> its env rows
    seconds: float = 0.0
    relayed: dict[str, float] = field(default_factory=dict)  # metrics of relaying roles

    @property
    def env_ids(self) -> np.ndarray:
        return np.sort(np.concatenate([*self.sources.values()]))

    def sources_of(self, block: range) -> tuple[str, ...]:
        """The sources that send rows to the learner rank of this block."""
        return tuple(source for source, rows in self.sources.items() if within(rows, block).any())

    @property
    def finished(self) -> list[EpisodeResult]:
        return [result for _, part in sorted(self.stats.items()) for result in part.finished]


class HorizonCollector(Collector):
    """The source of PPO's batches: a fixed number of decisions of every env row. Episodes continue in the next
    batch."""

    def __init__(self, workers: Workers) -> None:
        """Sims put rollouts into `inlets`."""
        super().__init__(workers)
        config = workers.config
        assert isinstance(config.algo, PPOConfig)
        self.horizon = config.algo.rollout_decisions
        self.episodes = EpisodeList(config.seed, "train", workers.tasks)
        self.counter = EpisodeCounter(config.env.num_envs)
        self.rollouts.training = self
        self.inlets = self.relays.inlets(self.trajectories)
        if (pieces := config.pipeline.granularity) and self.relays.groups:
            role = self.relays.groups[0].role
            raise ConfigError(f"pipeline.granularity={pieces}: {role} workers take whole rollouts; leave it out")
        self.blocks = env_blocks(self.config.env.num_envs, len(self.learners))

    def total_iterations(self) -> int:
        """`run.iterations`, or `run.env_steps` in whole iterations (with action chunks slightly fewer steps may be
        executed)."""
        run, config = self.config.run, self.config
        if run.iterations is not None:
            return run.iterations
        assert run.env_steps is not None
        return max(1, run.env_steps // (config.env.num_envs * self.horizon * config.policy.chunk))

    def collect(self, version: int) -> RolloutParts:
        """Collect a rollout of all sims. Sims put slices of their rows into the learner ranks' channels (`inlets`); the
        driver only hears which rows arrived. A dead sim's part is collected again if at least half of the rollout, or
        all data of a learner rank, is missing; otherwise it is left out."""
        rollouts = self.rollouts
        self.batches += 1
        batch, missing = RolloutParts(self.batches, version), list(range(len(rollouts.sims)))
        if self.config.pipeline.granularity:
            self.begin_early(batch.number)
        pieces, evaluation = self.config.pipeline.granularity or 0, rollouts.take_beside()
        job = Job(self.episodes, horizon=self.horizon, outlets=tuple(self.inlets), batch=batch.number, pieces=pieces)
        while missing:
            played = rollouts.play(dict.fromkeys(missing, job), SamplingRule(), evaluation)
            batch.stats |= played.played
            for sim in played.played:
                batch.sources |= self._parts(sim, played.sources[sim])
            batch.seconds += played.seconds
            missing, evaluation = [sim for sim in missing if sim not in batch.stats], None
            if not self._too_little(batch, missing):
                break
        self.counter.finish(result for stats in batch.stats.values() for result in stats.finished)
        sources = [batch.sources_of(block) for block in self.blocks]
        batch.relayed = self.relays.pass_rollouts(batch.number, sources, self.trajectories)
        return batch

    def update(self, batch: RolloutParts, iteration: int, total: int) -> Handle:
        """Each rank's channel already holds the sims' slices. A `Unit` names the slices that count, a `BatchEnd` says
        that no unit follows; then `learn` takes all of them."""
        ids = batch.env_ids
        for channel, block in zip(self.trajectories, self.blocks, strict=True):
            channel.put(Unit(batch.sources_of(block), ids[within(ids, block)]), key=batch.number)
        return self.end_batch(batch.number, iteration, total)

    def rows_of_ranks(self) -> list[np.ndarray | None]:
        return [np.array(block) for block in self.blocks]

    def metrics(self, batch: RolloutParts) -> dict[str, float]:
        def mean(what: Callable[[Played], float]) -> float:
            return float(np.mean([what(part) for part in batch.stats.values()]))

        ids = batch.env_ids
        loads = [int(within(ids, block).sum()) for block in self.blocks]
        return {
            "env_steps": sum(part.env_steps for part in batch.stats.values()),
            "time/rollout_s": batch.seconds,
            "time/step_s": mean(lambda part: part.step_s),
            "time/reset_s": mean(lambda part: part.reset_s),
            "time/act_s": mean(lambda part: part.wait_s),
            "faults/lost_decisions": (self.config.env.num_envs - len(ids)) * self.horizon,
            "train/balance_ratio": balance_ratio(loads, range(len(loads)), len(loads)),
            **batch.relayed,
        }

    def save(self) -> dict[str, np.ndarray]:
        """The state of all env rows, one array row per env id."""
        parts = [part for part in self.rollouts.ask(self.rollouts.sims.get_state) if part]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}

    def abandon(self) -> dict[str, np.ndarray]:
        """The number of episodes begun by each row; a resumed run begins the next episodes."""
        self.rollouts.read_reports()
        self.close_channels()
        return self.counter.abandoned()

    def restore(self, state: dict[str, np.ndarray]) -> int:
        """Restore the arrays of `save`; returns the number of abandoned open episodes."""
        check_rows(state, self.config.env.num_envs)
        self.counter.restore(state)
        return sum(self.rollouts.ask(lambda: self.rollouts.sims.set_state(state, self.episodes)))

    def hear(self, report: Report) -> None:
        self.counter.begin(report.begun)

    def lose(self, sim: int) -> int:
        """Begin the next episode in every row of a replaced sim; returns the number of lost episodes."""
        rows = self.rollouts.rows(sim)
        abandoned = self.counter.abandon(rows)
        self.rollouts.sims[sim].begin(self.episodes, self.counter.begun[rows])
        return abandoned

    def _parts(self, sim: int, sources: Sequence[str]) -> dict[str, np.ndarray]:
        """The env rows of each stage of a sim."""
        return dict(zip(sources, np.split(self.rollouts.rows(sim), len(sources)), strict=True))

    def _too_little(self, batch: RolloutParts, missing: list[int]) -> bool:
        return 2 * len(missing) >= len(self.rollouts.sims) or not all(batch.sources_of(block) for block in self.blocks)


def within(ids: np.ndarray, block: range) -> np.ndarray:
    """Bool: True for ids in the block."""
    return (ids >= block.start) & (ids < block.stop)


def check_rows(state: dict[str, np.ndarray], num_envs: int) -> None:
    """Refuse a state with another number of env rows than `num_envs`."""
    if sorted(state["env_ids"].tolist()) != list(range(num_envs)):
        raise ValueError(f"env_ids should belong to {num_envs} env rows")
    if odd := [name for name, array in state.items() if len(array) != num_envs]:
        raise ValueError(f"{odd[0]} has {len(state[odd[0]])} rows of {num_envs}")
    if odd := [name for name in ("rows.started", "rows.length", "rows.episode") if state[name].dtype.kind not in "iu"]:
        raise ValueError(f"{odd[0]} should hold counts")
    if (state["rows.episode"] < 0).any():
        raise ValueError("rows.episode holds a negative number, and episodes are counted from 0")
