"""Collects PPO's rollouts: the same number of decisions of every env row, whose episodes go on in the next batch. Sims
put slices of env rows into the channels of the learner ranks that own the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from embodied.core.errors import ConfigError
from embodied.core.types import EpisodeList, EpisodeResult, Job, Report, Unit, env_blocks
from embodied.workflows.collector import Collector, metrics_of

if TYPE_CHECKING:
    from embodied.workflows.rollout_manager import Round
    from embodied.workflows.workers import Workers


class Horizon(Collector):
    """A fixed number of decisions of every env row. Each learner rank owns a block of env rows."""

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

    def total_iterations(self) -> int:
        """`run.iterations`, or `run.env_steps` in whole iterations (with action chunks slightly fewer steps may be
        executed)."""
        run = self.config.run
        if run.iterations is not None:
            return run.iterations
        return max(1, run.env_steps // (self.num_envs * self.horizon * self.config.policy.chunk))

    def begin(self) -> None:
        self.sources: dict[str, np.ndarray] = {}  # source of a slice -> its env rows
        self.missing = [*range(len(self.rollouts.sims))]
        if self.relays.streams:
            self.passing = self.relays.begin_rollouts(self.batch.number, self.blocks, self.channels)

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
            **self._pass_roles(sources),
        }
        batch.finished = [result for of_sim in batch.played for result in of_sim.finished]
        for rank, (of_rank, slices) in enumerate(zip(rows, sources, strict=True)):
            yield rank, Unit(slices, of_rank)

    def _pass_roles(self, sources: Sequence[Sequence[str]]) -> dict[str, float]:
        """Let the slices of these sources, by learner rank, pass through the roles; returns the metrics."""
        if not self.relays.streams:
            return self.relays.pass_rollouts(self.batch.number, sources, self.channels)
        self.relays.end_rollouts(self.batch.number, sources)
        self.rollouts.finish_calls(*self.passing)
        return metrics_of(self.passing)

    def lose(self, sim: int) -> int:
        """Begin the next episode in every row of a replaced sim."""
        rows = self.rollouts.rows(sim)
        abandoned = self.counter.abandon(rows)
        self.rollouts.sims[sim].begin(self.episodes, self.counter.begun[rows])
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
