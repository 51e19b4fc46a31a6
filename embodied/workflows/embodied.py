"""The cyclic loop of embodied RL: simulate, act, learn, publish.

This is the macro program. It launches the three groups and says who does what in an iteration; where each worker runs
is the plan's business, and what happens when one dies is told in `crew.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embodied.data import EnvSpec, EpisodeResult, EpisodeSpec, RolloutStats, Route
from embodied.envs import env_class
from embodied.envs.protocols import choose_protocol
from embodied.episodes import EpisodeList, env_blocks
from embodied.runtime import Budget, Cluster, Handle, Timers, WorkerGroup
from embodied.runtime.weights import new_name
from embodied.workflows.crew import Crew
from embodied.workflows.delivery import Delivery, Weights
from embodied.workflows.evaluation import play_fixed

if TYPE_CHECKING:
    from embodied.config import RunConfig

# By name: the driver never imports torch or a simulator.
SIM = "embodied.envs.worker:SimWorker"
POLICY = "embodied.policies.worker:PolicyWorker"
LEARNER = "embodied.learners.worker:LearnerWorker"


@dataclass
class Batch:
    """What the sims have collected in an iteration: who gave which env rows, and where the time went."""

    stats: dict[int, RolloutStats] = field(default_factory=dict)  # by sim
    sources: dict[str, range] = field(default_factory=dict)  # source -> its env rows
    seconds: float = 0.0

    @property
    def env_ids(self) -> np.ndarray:
        return np.sort(np.concatenate([np.array(rows) for rows in self.sources.values()]))

    def sources_of(self, block: range) -> tuple[str, ...]:
        """Those that give rows to the learner rank that owns this block."""
        return tuple(s for s, rows in self.sources.items() if rows.start < block.stop and block.start < rows.stop)

    def mean(self, what: Callable[[RolloutStats], float]) -> float:
        return float(np.mean([what(part) for part in self.stats.values()]))


class EmbodiedLoop:
    def __init__(
        self,
        config: RunConfig,
        cluster: Cluster,
        learn: bool = True,
        meeting=None,
        tell: Callable[[str], None] = lambda line: None,
        eval_tasks: tuple[str, ...] = (),
    ) -> None:
        """`tell` hears of every restart of a worker. `eval_tasks` are all tasks of an evaluation of which this env
        plays some."""
        self.config = config
        self.cluster = cluster
        self.timers = Timers()
        kind = env_class(config.env)
        tasks = kind.tasks(config.env)
        self.protocol = choose_protocol(kind, config.env, config.eval.protocol)
        self.eval_env = self.protocol.apply(config.env)
        self.train_episodes = EpisodeList(config.seed, "train", tasks)
        fixed = EpisodeList(config.eval.seed, "eval", eval_tasks or tasks, self.protocol.stored_states)
        self.eval_episodes = [spec for spec in fixed.first(config.eval.episodes) if spec.task in tasks]
        stages = config.pipeline.stages if learn else 0
        journal = cluster.channel("journal", capacity=None)
        self.notes = cluster.channel("evaluation notes", capacity=None)
        num_sims = sum(host.roles.count("sim") for host in cluster.hosts)
        rows = eval_rows(len(self.eval_episodes), config.eval.num_envs or config.env.num_envs, num_sims)
        self.sims = cluster.launch(SIM, "sim", config.env, stages, journal, self.eval_env, rows)
        self.policies = cluster.launch(POLICY, "policy", config.policy, config.seed, config.learner.precision)
        self.crew = Crew(cluster, self.sims, self.policies, max(stages, 1), journal, config.env.num_envs, tell)
        self.learners = None
        if learn:
            options = (config.policy, config.algo, config.learner)
            self.learners = cluster.launch(LEARNER, "learner", *options, config.seed, meeting)

    @property
    def groups(self) -> list[WorkerGroup]:
        return [group for group in (self.sims, self.policies, self.learners) if group]

    def start(self) -> EnvSpec:
        """Wait for the simulators, build policy and learner for what they offer, lay the channels."""
        spec = self.sims.spec().wait()[0]
        builds = [self.policies.build(spec)]
        if self.learners:
            learning = self.learners.process().wait()
            if len({machine for machine, _ in learning}) > 1:
                (address,) = self.learners[0].listen(self.config.faults.timeout_s).wait()
                self.learners.meet_at(address).wait()
            others = {*self.policies.process().wait()} - {*learning}
            builds.append(self.learners.build(spec, new_name(), snapshot=bool(others)))
        for build in builds:
            build.wait()
        channel, faults = self.cluster.channel, self.config.faults
        self.delivery = Delivery(self.cluster, self.policies)
        ranks = range(len(self.learners)) if self.learners else range(0)
        self.trajectories = [channel(f"trajectories-{r}", home=self.learners[r]) for r in ranks]
        budget = Budget(faults.max_restarts, faults.window_s, faults.hang_s)
        self.crew.start(spec, self.train_episodes if self.learners else None, self.delivery, budget)
        return spec

    def iterate(self, iteration: int, total: int) -> tuple[list[EpisodeResult], dict[str, float]]:
        """Collect a batch, update, publish. Returns the finished episodes and the numbers of the iteration."""
        restarts = self.crew.restarts
        with self.timers.measure("rollout"):
            batch = self.collect()
        blocks = env_blocks(self.config.env.num_envs, len(self.learners))
        shares = [(channel, batch.sources_of(block)) for channel, block in zip(self.trajectories, blocks, strict=True)]
        with self.timers.measure("update"):
            updating = self.learners.update.each([(*share, batch.env_ids, iteration, total) for share in shares])
            losses = updating.wait()[0]
        publish_s = self.publish(self.version + 1)
        missing = self.config.env.num_envs - len(batch.env_ids)
        numbers = {
            "env_steps": sum(part.env_steps for part in batch.stats.values()),
            "time/rollout_s": batch.seconds,
            "time/step_s": batch.mean(lambda part: part.step_s),
            "time/reset_s": batch.mean(lambda part: part.reset_s),
            "time/act_s": batch.mean(lambda part: part.wait_s),
            "time/publish_s": publish_s,
            "faults/restarts": self.crew.restarts - restarts,
            "faults/lost_decisions": missing * self.config.algo.rollout_decisions,
        }
        finished = [result for _, part in sorted(batch.stats.items()) for result in part.finished]
        return finished, numbers | losses

    def collect(self) -> Batch:
        """A rollout of all sims. Of those that die, the part is played again where half or more is missing, or all that
        a learner rank would get; otherwise it is left out."""
        batch, missing = Batch(), list(range(len(self.sims)))
        while missing:
            calls, routes = self.crew.play(missing, self._collect, self.config.pipeline.stages, 1.0, "train")
            for sim, call in calls.items():
                if call.succeeded():
                    batch.stats[sim] = call.wait()[0]
                    batch.sources |= self._parts(sim, routes[sim])
            batch.seconds += max((call.seconds() for call in calls.values() if call.succeeded()), default=0.0)
            missing = [sim for sim in missing if sim not in batch.stats]
            if not self._too_little(batch, missing):
                break
        self.crew.read_journal()
        self.crew.ledger.finish(result for part in batch.stats.values() for result in part.finished)
        return batch

    @property
    def version(self) -> int:
        """Of the weights that act."""
        return self.delivery.version

    def publish(self, version: int) -> float:
        """Make the learner's weights the ones that act, as this version."""
        with self.timers.measure("publish"):
            publishing = self.learners.publish(version)
            self.crew.settle(publishing)
            self.crew.settle(*self.delivery.deliver(publishing.wait()[0], self.learners[0].send))
        return publishing.seconds("max")

    def adopt(self, weights: Weights | None) -> None:
        """Act with weights that come from a checkpoint instead of a learner; None: the policy needs none."""
        self.crew.settle(*self.delivery.adopt(weights or Weights(0, {})))

    def evaluate(self, folder: Path) -> list[EpisodeResult]:
        """Play the fixed evaluation episodes with the current version; results in episode order."""
        film = frozenset(range(self.config.eval.videos))

        def begin(sim: int, share: list[EpisodeSpec], route: Route, alone: frozenset[int]) -> Handle:
            return self.sims[sim].evaluate(share, route, film, folder, self.notes, alone)

        with self.timers.measure("evaluate"):
            self.eval_spec = self.crew.ask(self.sims.eval_spec)[0]
            return play_fixed(self.crew, self.eval_episodes, begin, self.notes, self.config.eval.temperature)

    def save_sims(self) -> dict[str, np.ndarray]:
        """The state of all env rows, one array row per env id."""
        parts = [part for part in self.crew.ask(self.sims.get_state) if part]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}

    def restore(self, checkpoint: Path, sims: dict[str, np.ndarray], version: int) -> int:
        """Continue from a checkpoint; returns the number of open episodes that had to be abandoned."""
        self.learners.load(checkpoint).wait()
        self.publish(version)
        if not sims:
            return 0
        self.crew.ledger.restore(sims)
        return sum(self.crew.ask(lambda: self.sims.set_state(sims, self.train_episodes)))

    def _collect(self, sim: int, route: Route) -> Handle:
        horizon = self.config.algo.rollout_decisions
        return self.sims[sim].collect(self.train_episodes, horizon, route, tuple(self.trajectories))

    def _parts(self, sim: int, route: Route) -> dict[str, range]:
        """Which env rows each stage of a sim plays."""
        rows, stages = self.crew.rows(sim), len(route.sources)
        size = len(rows) // stages
        return {source: rows[i * size : (i + 1) * size] for i, source in enumerate(route.sources)}

    def _too_little(self, batch: Batch, missing: list[int]) -> bool:
        blocks = env_blocks(self.config.env.num_envs, len(self.learners))
        return 2 * len(missing) >= len(self.sims) or not all(batch.sources_of(block) for block in blocks)


def eval_rows(num_episodes: int, num_envs: int, num_sims: int) -> int:
    """Env rows of each sim worker that play evaluation episodes: no more than it takes to get through them in as many
    turns, 50 instead of 64 for 200 episodes."""
    share = -(-num_episodes // num_sims)
    most = max(1, min(-(-num_envs // num_sims), share))
    turns = max(1, -(-share // most))
    return max(1, -(-share // turns))
