"""Collecting whole episodes in groups, as GRPO learns from: sims keep what they have played until it is clear which
groups are wanted, and then send only those.

An episode that was lost with its sim worker takes its group along; the arithmetic of what is played, kept and carried
over is in `algorithms/groups.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from embodied.algorithms.groups import Group, GroupPool, group_advantages
from embodied.core.errors import ConfigError
from embodied.core.types import BatchPart, EpisodeList, EpisodeResult, EpisodeSpec, RolloutStats, Route, env_blocks
from embodied.runtime import Handle

if TYPE_CHECKING:
    from embodied.config.recipe import RunConfig
    from embodied.workflows.workers import Workers


@dataclass
class GroupedEpisodes:
    """What an iteration learns from, and what it took to get it."""

    version: int
    stats: list[RolloutStats] = field(default_factory=list)  # per sim and round
    rounds: int = 0
    seconds: float = 0.0
    lost: int = 0  # episodes
    groups: list[Group] = field(default_factory=list)
    sources: list[tuple[str, ...]] = field(default_factory=list)  # per learner rank

    @property
    def finished(self) -> list[EpisodeResult]:
        return sorted((result for part in self.stats for result in part.finished), key=lambda result: result.index)

    @property
    def episodes(self) -> np.ndarray:
        return np.array([episode for group in self.groups for episode in group.episodes], np.int64)


class GroupCollector:
    journaled = None  # episodes of a sim that died are lost with their groups

    def __init__(self, config: RunConfig, tasks: tuple[str, ...]) -> None:
        self.config, self.algo = config, config.algo
        self.stages = config.pipeline.stages
        self.episodes = EpisodeList(config.seed, "train", tasks, group_size=config.algo.group_size)
        self.pool = GroupPool(config.algo)
        self.empty, self.why = 0, ""  # iterations in a row that learned nothing
        self.handed = 0  # times that episodes were handed over

    def start(self, workers: Workers) -> None:
        """Lay a channel to each learner; sims put into `outlets`, learners read `trajectories`."""
        self.rollouts, self.learners = workers.rollouts, workers.learners
        self.trajectories = self.outlets = workers.trajectory_channels()
        if self.algo.filter_metric == "success" and not workers.spec.has_success:
            raise ConfigError(
                "algo.filter_metric=success bounds the rate of success, but this env has none; try "
                "algo.filter_metric=return"
            )

    def total_iterations(self) -> int:
        """`run.iterations`: how long whole episodes are is not known before."""
        return self.config.run.iterations

    @property
    def exhausted(self) -> str:
        """Why the run should end here; empty while there is something to learn from."""
        if self.empty < self.algo.max_empty:
            return ""
        return (
            f"nothing to learn from in the last {self.empty} iterations (algo.max_empty): {self.why}. Where all "
            "episodes succeed, the run is done; where none does, start from a policy that sometimes succeeds, or try "
            "another env.reward, a larger algo.group_size or algo.filter=resample"
        )

    def collect(self, version: int) -> GroupedEpisodes:
        batch = GroupedEpisodes(version)
        self.pool.counts.clear()
        while count := self.pool.wanted(batch.rounds, self.config.env.num_envs):
            self._play([self.episodes[index] for index in self.pool.deal(count)], batch)
        batch.groups = self.pool.take()
        self._hand_over(batch)
        self.rollouts.settle(self.rollouts.sims.keep(self.pool.held))
        self._count_empty(batch)
        return batch

    def update(self, batch: GroupedEpisodes, iteration: int, total: int) -> Handle | None:
        if not batch.groups:
            return None
        scores = np.array([group.scores for group in batch.groups])
        options = (self.algo.baseline, self.algo.scale, self.algo.deviation)
        advantages = group_advantages(scores, *options).ravel()
        blocks = env_blocks(len(advantages), len(self.learners))
        about = (batch.version, scores.ravel(), advantages)
        parts = [BatchPart(batch.episodes, block.start, block.stop, *about) for block in blocks]
        shares = zip(self.trajectories, batch.sources, parts, strict=True)
        return self.learners.update.each([(*share, iteration, total) for share in shares])

    def numbers(self, batch: GroupedEpisodes) -> dict[str, float]:
        counts, sims = self.pool.counts, len(self.rollouts.sims)
        return {
            "env_steps": sum(part.env_steps for part in batch.stats),
            "time/rollout_s": batch.seconds,
            "time/step_s": sum(part.step_s for part in batch.stats) / sims,
            "time/reset_s": sum(part.reset_s for part in batch.stats) / sims,
            "time/act_s": sum(part.wait_s for part in batch.stats) / sims,
            "faults/lost_episodes": batch.lost,
            "groups/used": len(batch.groups),
            "groups/kept": counts["kept"],
            "groups/dropped_equal": counts["equal"],
            "groups/dropped_out_of_bounds": counts["out_of_bounds"],
            "groups/dropped_incomplete": counts["incomplete"],
            "groups/carried_episodes": len(self.pool.held),
            "groups/rounds": batch.rounds,
        }

    def save(self) -> dict[str, np.ndarray]:
        """The pool, and the episodes that the sims keep for it."""
        parts = [part for part in self.rollouts.ask(self.rollouts.sims.get_kept) if part]
        names = parts[0] if parts else ()
        kept = {f"kept.{name}": np.concatenate([part[name] for part in parts]) for name in names}
        pool = {f"groups.{name}": array for name, array in self.pool.state().items()}
        return {**pool, **kept, "groups.empty": np.array(self.empty)}

    def restore(self, state: dict[str, np.ndarray]) -> int:
        """Go on from `save`. Nothing is abandoned, since no episode was open."""
        groups = {name[7:]: array for name, array in state.items() if name.startswith("groups.")}
        self.pool.restore(groups)
        self.empty = int(groups["empty"]) % self.algo.max_empty
        if kept := {name[5:]: array for name, array in state.items() if name.startswith("kept.")}:
            self.rollouts.ask(lambda: self.rollouts.sims.set_kept(kept))
        return 0

    # Inside

    def _play(self, specs: list[EpisodeSpec], batch: GroupedEpisodes) -> None:
        """A round of episodes. Neighbours go to the same sim, so one that dies takes few groups along."""
        rollouts = self.rollouts
        blocks = enumerate(env_blocks(len(specs), len(rollouts.sims)))
        shares = {sim: specs[block.start : block.stop] for sim, block in blocks if block}

        def begin(sim: int, route: Route) -> Handle:
            return rollouts.sims[sim].collect(shares[sim], route)

        calls, _ = rollouts.play(shares, begin, self.config.pipeline.stages, 1.0, "train")
        played = [call for call in calls.values() if call.succeeded()]
        stats = [call.wait()[0] for call in played]
        batch.stats += stats
        batch.seconds += max((call.seconds() for call in played), default=0.0)
        batch.rounds += 1
        results = {result.index: result for part in stats for result in part.finished}
        scores = {index: result.total_reward for index, result in results.items()}
        self.pool.add(scores, {index: bool(result.success_once) for index, result in results.items()})
        finished = set(results)
        self._lose([spec.index for spec in specs if spec.index not in finished], batch)
        self._lose_what_is_gone(batch)

    def _hand_over(self, batch: GroupedEpisodes) -> None:
        """Every learner rank gets its part of the episodes; groups that went down with a sim are left out."""
        while True:
            there = self._lose_what_is_gone(batch)
            lost = [group for group in batch.groups if not there.issuperset(group.episodes)]
            batch.groups = [group for group in batch.groups if group not in lost]
            self.pool.counts.update(kept=-len(lost), incomplete=len(lost))
            batch.lost += sum(len(group.episodes) for group in lost)
            if not batch.groups:
                return
            self.handed += 1
            episodes = batch.episodes
            blocks = env_blocks(len(episodes), len(self.learners))
            wanted = [episodes[block.start : block.stop] if len(block) else episodes[:1] for block in blocks]
            calls = [
                self.rollouts.sims[sim].hand_over(wanted, self._source(sim), tuple(self.outlets))
                for sim in range(len(self.rollouts.sims))
            ]
            self.rollouts.settle(*calls)
            if all(call.succeeded() for call in calls):
                sent = [call.wait()[0] for call in calls]
                batch.sources = [
                    tuple(self._source(sim) for sim, ranks in enumerate(sent) if rank in ranks)
                    for rank in range(len(blocks))
                ]
                return

    def _source(self, sim: int) -> str:
        return f"sim-{sim}#{self.handed}"

    def _lose_what_is_gone(self, batch: GroupedEpisodes) -> set[int]:
        """Sims that were replaced have forgotten what they kept; returns what is still there."""
        there = {episode for kept in self.rollouts.ask(self.rollouts.sims.kept) for episode in kept}
        self._lose([episode for episode in self.pool.held if episode not in there], batch)
        return there

    def _lose(self, episodes: list[int], batch: GroupedEpisodes) -> None:
        self.pool.lose(episodes)
        batch.lost += len(episodes)

    def _count_empty(self, batch: GroupedEpisodes) -> None:
        self.empty = 0 if batch.groups else self.empty + 1
        if not batch.groups:
            returns = [result.total_reward for result in batch.finished]
            counts = ", ".join(f"{count} {name}" for name, count in sorted(self.pool.counts.items()) if count)
            mean = f", mean return {np.mean(returns):.3g}" if returns else ""
            self.why = f"its groups were {counts or 'none'}{mean}"
