"""Collecting a fixed number of decisions of every env row, as PPO learns from: episodes go on from one iteration to the
next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from embodied.core.types import BatchPart, EpisodeList, EpisodeResult, RolloutStats, Route, env_blocks
from embodied.runtime import Handle

if TYPE_CHECKING:
    from embodied.config.recipe import RunConfig
    from embodied.workflows.workers import Workers


@dataclass
class RolloutParts:
    """A rollout as the sims have collected it: which of them gave which env rows, and where the time went."""

    version: int
    stats: dict[int, RolloutStats] = field(default_factory=dict)  # by sim
    sources: dict[str, range] = field(default_factory=dict)  # source -> its env rows
    seconds: float = 0.0

    @property
    def env_ids(self) -> np.ndarray:
        return np.sort(np.concatenate([np.array(rows) for rows in self.sources.values()]))

    def sources_of(self, block: range) -> tuple[str, ...]:
        """The sources that give rows to the learner rank that owns this block."""
        return tuple(s for s, rows in self.sources.items() if rows.start < block.stop and block.start < rows.stop)

    @property
    def finished(self) -> list[EpisodeResult]:
        return [result for _, part in sorted(self.stats.items()) for result in part.finished]


class HorizonCollector:
    """The source of batches that PPO learns from: so many decisions of every env row, episodes going on in the next."""

    exhausted = ""  # there always is something to learn from

    def __init__(self, config: RunConfig, tasks: tuple[str, ...]) -> None:
        self.config = config
        self.stages = config.pipeline.stages
        self.episodes = EpisodeList(config.seed, "train", tasks)
        self.journaled = self.episodes

    def start(self, workers: Workers) -> None:
        """Lay a channel to each learner; sims put into `outlets`, learners read `trajectories`."""
        self.rollouts, self.learners = workers.rollouts, workers.learners
        self.trajectories = self.outlets = workers.trajectory_channels()
        self.blocks = env_blocks(self.config.env.num_envs, len(self.learners))

    def total_iterations(self) -> int:
        """`run.iterations`, or `run.env_steps` in whole iterations (with chunks unmasked steps may be a little
        fewer)."""
        run, config = self.config.run, self.config
        if run.iterations is not None:
            return run.iterations
        steps = config.env.num_envs * config.algo.rollout_decisions * config.policy.chunk
        return max(1, run.env_steps // steps)

    def collect(self, version: int) -> RolloutParts:
        """A rollout of all sims. Of those that die, the part is played again where half or more is missing, or all that
        a learner rank would get; otherwise it is left out."""
        rollouts, streamed = self.rollouts, self.config.pipeline.granularity
        if streamed:
            self.learners.take_in.each(list(zip(self.trajectories, map(np.array, self.blocks), strict=True)))
        batch, missing = RolloutParts(version), list(range(len(rollouts.sims)))
        while missing:
            calls, routes = rollouts.play(missing, self._collect, self.config.pipeline.stages, 1.0, "train")
            for sim, call in calls.items():
                if call.succeeded():
                    batch.stats[sim] = call.wait()[0]
                    batch.sources |= self._parts(sim, routes[sim])
            batch.seconds += max((call.seconds() for call in calls.values() if call.succeeded()), default=0.0)
            missing = [sim for sim in missing if sim not in batch.stats]
            if not self._too_little(batch, missing):
                break
        for channel in self.trajectories if streamed else ():
            channel.put(None)
        rollouts.read_journal()
        rollouts.episode_counter.finish(result for part in batch.stats.values() for result in part.finished)
        return batch

    def update(self, batch: RolloutParts, iteration: int, total: int) -> Handle:
        ids, calls, version = batch.env_ids, [], self.rollouts.weight_sync.version
        for channel, block in zip(self.trajectories, self.blocks, strict=True):
            part = BatchPart(ids, *np.searchsorted(ids, (block.start, block.stop)).tolist(), version)
            calls.append((channel, batch.sources_of(block), part, iteration, total))
        return self.learners.update.each(calls)

    def metrics(self, batch: RolloutParts) -> dict[str, float]:
        def mean(what: Callable[[RolloutStats], float]) -> float:
            return float(np.mean([what(part) for part in batch.stats.values()]))

        missing = self.config.env.num_envs - len(batch.env_ids)
        return {
            "env_steps": sum(part.env_steps for part in batch.stats.values()),
            "time/rollout_s": batch.seconds,
            "time/step_s": mean(lambda part: part.step_s),
            "time/reset_s": mean(lambda part: part.reset_s),
            "time/act_s": mean(lambda part: part.wait_s),
            "faults/lost_decisions": missing * self.config.algo.rollout_decisions,
        }

    def save(self) -> dict[str, np.ndarray]:
        """The state of all env rows, one array row per env id."""
        parts = [part for part in self.rollouts.ask(self.rollouts.sims.get_state) if part]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}

    def restore(self, state: dict[str, np.ndarray]) -> int:
        """Go on from `save`; returns the number of open episodes that had to be abandoned."""
        check_rows(state, self.config.env.num_envs)
        self.rollouts.episode_counter.restore(state)
        return sum(self.rollouts.ask(lambda: self.rollouts.sims.set_state(state, self.episodes)))

    def _collect(self, sim: int, route: Route) -> Handle:
        horizon = self.config.algo.rollout_decisions
        granularity = self.config.pipeline.granularity or 0
        return self.rollouts.sims[sim].collect(self.episodes, route, horizon, tuple(self.outlets), granularity)

    def _parts(self, sim: int, route: Route) -> dict[str, range]:
        """The env rows that each stage of a sim plays."""
        rows, stages = self.rollouts.rows(sim), len(route.sources)
        size = len(rows) // stages
        return {source: rows[i * size : (i + 1) * size] for i, source in enumerate(route.sources)}

    def _too_little(self, batch: RolloutParts, missing: list[int]) -> bool:
        return 2 * len(missing) >= len(self.rollouts.sims) or not all(batch.sources_of(block) for block in self.blocks)


def check_rows(state: dict[str, np.ndarray], num_envs: int) -> None:
    """Refuse what is not the state of so many env rows."""
    if sorted(state["env_ids"].tolist()) != list(range(num_envs)):
        raise ValueError(f"env_ids should be those of {num_envs} env rows")
    if odd := [name for name, array in state.items() if len(array) != num_envs]:
        raise ValueError(f"{odd[0]} has {len(state[odd[0]])} rows of {num_envs}")
    if odd := [name for name in ("rows.started", "rows.length", "rows.episode") if state[name].dtype.kind not in "iu"]:
        raise ValueError(f"{odd[0]} should hold counts")
