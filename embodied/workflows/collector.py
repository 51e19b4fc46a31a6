"""Collects batches: plays rounds, and sends a batch's units to the learner ranks under the batch's number. Learners
begin when the batch is complete, or early, before the first unit.

`Collector` asks four questions, which `Horizon` (PPO on robots) and `group_collector.Groups` (GRPO, and all training
with conversations) answer: what to play next, what is certain, what was lost, what to save. `DatasetBatches`
(imitation) plays nothing. The driver only knows which parts exist, and learners get trajectories from the sims.
`Relays` passes them through a program's own roles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.core.errors import ConfigError
from embodied.core.types import (
    BatchEnd,
    EpisodeList,
    EpisodeResult,
    Job,
    Played,
    Report,
    SamplingRule,
    Unit,
    env_blocks,
)
from embodied.runtime import Handle
from embodied.workflows.relay import Relays

if TYPE_CHECKING:
    from embodied.workflows.launched_workers import Workers
    from embodied.workflows.rollout_manager import Round


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
        self.ends += [(tokens, self.seconds + seconds) for of_sim in parts for tokens, seconds in of_sim.ends]
        self.played += parts
        self.seconds += played.seconds
        self.rounds += 1

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Conversations for samples.jsonl."""
        return sorted(
            (sample for of_sim in self.played for sample in of_sim.samples), key=lambda sample: sample["index"]
        )

    @property
    def problems(self) -> list[str]:
        """Reasons for discarded episodes."""
        return [problem for of_sim in self.played for problem in of_sim.problems]


class Collector:
    """Collects batches with sims and policies, and sends their units to the learner ranks. It is constructed after all
    workers."""

    exhausted = ""
    """Why the run should end here; empty while there is something to learn from."""
    solved = False
    """True if there is nothing more to learn, since every episode succeeds."""
    samples: Sequence[dict[str, Any]] = ()
    """Conversations of the last updated batch, for samples.jsonl."""
    ends: Sequence[tuple[int, float]] = ()
    """The tokens of that batch's conversations, and how long after the rollout's begin each ended."""
    sampling = SamplingRule()
    rows_of_ranks: Sequence[np.ndarray | None] = ()  # by learner rank, its env rows, if env rows are the units
    batch: Batch  # the last one, perhaps in collection

    def __init__(self, workers: Workers) -> None:
        """Make a channel to each learner. Raises ConfigError if the env is unsuitable."""
        self.config, self.rollouts, self.learners = workers.config, workers.rollouts, workers.learners
        self.channels, self.relays = workers.trajectory_channels(), Relays(workers)
        self.begins_early = self.config.pipeline.begins_early
        self.sends_early = self.begins_early or self.config.pipeline.granularity is not None  # units, during rollouts
        self.listens = False  # True: units are passed to roles or become certain during rounds, by reports
        self.rollouts.training = self
        self.batches = 0  # number of collected batches
        self.learning: Handle | None = None  # call of learners that began before the batch was complete
        self.began = 0.0

    def total_iterations(self) -> int:
        """The number of iterations of the recipe."""
        return self.config.total_iterations

    def collect(self, version: int) -> Batch:
        """Play rounds with this version of the weights until the batch needs no more. Parts of dead sims are left out,
        or collected again if too much is missing."""
        self.batches += 1
        batch = self.batch = Batch(self.batches, version, [[] for _ in self.channels])
        self.begin()
        if self.sends_early:
            self.began, self.learning = perf_counter(), self.begin_learning(batch.number)
        while jobs := self.next_jobs():
            listener = self if self.listens else None
            played = self.rollouts.play(jobs, self.sampling, self.rollouts.take_beside(), listener)
            batch.add_round(played)
            self.add_round(played)
            self._announce(self.certain_units(wait=True))
        self._announce(self.remaining_units())
        self.finish_batch()
        return batch

    @property
    def collected(self) -> float:
        return 0.0

    # Questions, with the answers of a collector that plays nothing

    def begin(self) -> None:
        """A batch begins."""

    def next_jobs(self) -> dict[int, Job]:
        """The jobs of the next round, by sim; none if the batch needs no more."""
        return {}

    def begin_round(self, jobs: dict[int, Job]) -> None:
        """The sims have been asked to play these jobs; a sim that dies from now on loses its job."""

    def add_report(self, report: Report) -> None:
        """A sim reports during a round."""

    def add_round(self, played: Round) -> None:
        """A round has ended with these results."""

    def certain_units(self, wait: bool) -> Iterator[tuple[int, Unit]]:
        """Learner ranks, with units that have become certain before the batch is complete and whose data have come to
        the rank. `wait` at the end of a round for data that are on their way."""
        return iter(())

    def remaining_units(self) -> Iterator[tuple[int, Unit]]:
        """The batch has all its rounds: the remaining units."""
        return iter(())

    def finish_batch(self) -> None:
        """All units are announced: the batch's episodes, in the order of their end, and more of its metrics."""
        self.batch.finished = [result for of_sim in self.batch.played for result in of_sim.finished]

    def sim_replaced(self, sim: int) -> int:
        """A sim has died and was replaced; returns the number of abandoned episodes: open episodes, and episodes that
        ended in the lost part of its rollout."""
        return 0

    def save(self) -> dict[str, np.ndarray]:
        """Returns collected data that no update has used, as arrays for a checkpoint."""
        return {}

    def restore(self, state: dict[str, np.ndarray]) -> int:
        """Continue from `save`; returns the number of open episodes that had to be abandoned."""
        return 0

    def abandon(self) -> dict[str, np.ndarray]:
        """Returns the arrays of `save` after a final failure of sims or policies: open episodes are abandoned, and
        roles and learners that wait for units are released."""
        for channel in (*self.channels, *(channel for channels in self.relays.channels for channel in channels)):
            channel.close("the run ends")
        return {}

    # To the learners

    def is_due(self) -> bool:
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
        return self.learners.learn.each(
            [(channel, *how, rows, self.begins_early, self.sends_early) for channel, rows in ranks]
        )

    def update(self, batch: Batch, iteration: int, total: int) -> Handle | None:
        """Tell the learners that no more units follow; returns the call in which they learn, None if the batch has no
        gradient."""
        self.samples, self.ends = batch.samples, batch.ends
        if not (self.learning or any(batch.units)):
            return None
        learning, self.learning = self.learning, None
        end = BatchEnd(iteration, total, perf_counter() - self.began if learning else 0.0)
        for channel in self.channels:
            channel.put(end, key=batch.number)
        return learning or self.begin_learning(batch.number)

    def metrics(self, batch: Batch) -> dict[str, float]:
        """The batch's metrics, among them the number of env steps."""
        parts, sims = batch.played, len(self.rollouts.sims)
        return {
            "env_steps": sum(of_sim.env_steps for of_sim in parts),
            "time/rollout_s": batch.seconds,
            "time/step_s": sum(of_sim.step_s for of_sim in parts) / sims,
            "time/reset_s": sum(of_sim.reset_s for of_sim in parts) / sims,
            "time/act_s": sum(of_sim.wait_s for of_sim in parts) / sims,
            **batch.metrics,
        }


class Horizon(Collector):
    """Collects PPO's rollouts: a fixed number of decisions of every env row, whose episodes go on in the next batch.
    Sims put slices of env rows into the channels of the learner ranks that own the rows, a block of rows each."""

    def __init__(self, workers: Workers) -> None:
        super().__init__(workers)
        config = self.config
        self.horizon, self.num_envs = config.algo.rollout_decisions, config.env.num_envs
        self.episodes = EpisodeList(config.seed, "train", workers.tasks)
        self.counter = EpisodeCounter(self.num_envs)
        if (pieces := config.pipeline.granularity) and (reason := self.relays.why_together):
            raise ConfigError(f"pipeline.granularity={pieces} sends parts of rollouts, but {reason}; leave it out")
        self.blocks = env_blocks(self.num_envs, len(self.channels))
        self.rows_of_ranks = [np.array(block) for block in self.blocks]

    def begin(self) -> None:
        self.sources: dict[str, np.ndarray] = {}  # source of a slice -> its env rows
        self.missing = [*range(len(self.rollouts.sims))]
        self.relays.begin_rollouts(self.batch.number, self.blocks, self.channels)

    def next_jobs(self) -> dict[int, Job]:
        """All sims at first. Then dead sims, if at least half of the rollout or all data of a learner rank is missing;
        else their rows are left out."""
        sims = len(self.rollouts.sims)
        if self.batch.rounds and 2 * len(self.missing) < sims and all(map(self._sources_of, self.blocks)):
            return {}
        inlets, pieces = self.relays.inlets(self.channels), self.config.pipeline.granularity or 0
        job = Job(self.episodes, self.horizon, tuple(inlets), self.batch.number, pieces, self._labels())
        return dict.fromkeys(self.missing, job)

    def _labels(self) -> str:
        """What the env's expert does: with algo.name=dagger it labels every decision, and plays the first iteration."""
        if self.config.algo.name != "dagger":
            return ""
        return "labelled" if self.batch.version or self.config.run.start_from else "played"

    def add_report(self, report: Report) -> None:
        self.counter.begin(report.begun)

    def add_round(self, played: Round) -> None:
        for sim, of_sim in played.played.items():
            stages = played.sources[sim]
            self.sources |= zip(stages, np.split(self.rollouts.rows(sim), len(stages)), strict=True)
            self.rollouts.abandoned_episodes -= self.counter.finish(of_sim.finished)
        self.missing = [sim for sim in self.missing if sim not in played.played]

    def remaining_units(self) -> Iterator[tuple[int, Unit]]:
        """The slices that count."""
        batch, ids = self.batch, np.sort(np.concatenate([*self.sources.values()]))
        rows = [ids[within(ids, block)] for block in self.blocks]
        sources = [self._sources_of(block) for block in self.blocks]
        batch.metrics |= {
            "faults/lost_decisions": (self.num_envs - len(ids)) * self.horizon,
            "train/balance_ratio": max(map(len, rows)) / float(np.mean([*map(len, rows)])),
            **self.relays.pass_rollouts(batch.number, sources, self.channels),
        }
        for rank, (of_rank, slices) in enumerate(zip(rows, sources, strict=True)):
            yield rank, Unit(slices, of_rank)

    def sim_replaced(self, sim: int) -> int:
        """Begin the next episode in every row of a replaced sim."""
        rows = self.rollouts.rows(sim)
        abandoned = self.counter.abandon(rows)
        self.rollouts.sims[sim].take_over(self.episodes, self.counter.begun[rows])
        return abandoned

    def save(self) -> dict[str, np.ndarray]:
        """The state of all env rows, one array row per env id."""
        parts = [rows for rows in self.rollouts.ask(self.rollouts.sims.get_state) if rows]
        return {name: np.concatenate([rows[name] for rows in parts]) for name in parts[0]} if parts else {}

    def abandon(self) -> dict[str, np.ndarray]:
        """The number of episodes begun by each row; a resumed run begins the next episodes."""
        self.rollouts.read_reports()
        super().abandon()
        return self.counter.state_of_ended()

    def restore(self, state: dict[str, np.ndarray]) -> int:
        self.counter.restore(state)
        return sum(self.rollouts.ask(lambda: self.rollouts.sims.set_state(state, self.episodes)))

    def _sources_of(self, block: range) -> tuple[str, ...]:
        """The sources that send rows to the learner rank of this block."""
        return tuple(source for source, rows in self.sources.items() if within(rows, block).any())


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

    def finish(self, results: Iterable[EpisodeResult]) -> int:
        """Count these episodes as settled. Returns how many of them were given up before, when their sim died after it
        had played its part of the round."""
        given_up = 0
        for result in results:
            count, env = divmod(result.index, len(self.begun))
            given_up += int(count < self.settled[env])
            self.settled[env] = max(self.settled[env], count + 1)
        return given_up

    def abandon(self, rows: Sequence[int] | np.ndarray) -> int:
        """Give up the open episodes of these rows; returns their number."""
        lost = int((self.begun[rows] - self.settled[rows]).sum())
        self.settled[rows] = self.begun[rows]
        return lost

    def state_of_ended(self) -> dict[str, np.ndarray]:
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


def within(ids: np.ndarray, block: range) -> np.ndarray:
    """Bool: True for ids in the block."""
    return (ids >= block.start) & (ids < block.stop)
