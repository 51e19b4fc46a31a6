"""The cyclic loop of embodied RL: simulate, act, learn, publish.

`EmbodiedLoop.iterate` is the story. Which workers there are is declared in `roles`; launching them is in `workers.py`,
how a batch is collected below (`HorizonCollector`, PPO) and in `group_collector.py` (GRPO), which policy worker answers
which sim, and what happens when one dies, in `rollout_manager.py`, which weights act in `runtime/weights.py`,
evaluation in `evaluator.py`. Where each worker runs is the plan's business.

`pipeline.schedule` names two settings (`PipelineSection` in `config/sections.py`): by how many versions rollouts lag,
and whether learners begin early. They change when the steps of an iteration happen, never what these compute:

    sync      collect a batch with version n, update on it, publish version n + 1
    periodic  the same, but learners take groups of episodes as they finish (`GroupStream`) and make one step at the end
    async     rollout n uses version max(0, n - `pipeline.async_level`), so update, publishing and collecting overlap
              (`LaggingVersions`)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from embodied.algorithms.config import PPOConfig
from embodied.core.errors import ConfigError, WorkerFailed
from embodied.core.types import (
    BatchEnd,
    EpisodeList,
    EpisodeResult,
    Merging,
    RolloutStats,
    Route,
    Unit,
    env_blocks,
)
from embodied.envs import env_class
from embodied.placement.balance import balance_ratio
from embodied.policies import WORKERS
from embodied.reporting.timeline import Timeline
from embodied.run.checkpoints import write_checkpoint
from embodied.runtime import Cluster, Handle, WorkerGroup
from embodied.runtime.weights import Publication
from embodied.workflows.contract import ROLLOUT, UPDATE, Batch, BatchSource, Role
from embodied.workflows.evaluator import Evaluator
from embodied.workflows.group_collector import GroupCollector
from embodied.workflows.lagging_versions import LaggingVersions
from embodied.workflows.relay import Relays
from embodied.workflows.workers import Workers

if TYPE_CHECKING:
    from embodied.config.recipe import RunConfig
    from embodied.reporting.partial_evaluation import PartialEvaluation


def sim_worker(config: RunConfig) -> str:
    """The import path of the env's sim worker class: `SimWorker`, or `TextWorker` for text envs."""
    return env_class(config.env).worker


def policy_worker(config: RunConfig) -> str:
    return WORKERS.get(config.policy.name, "embodied.policies.worker:PolicyWorker")


def sim_arguments(workers: Workers) -> tuple:
    config = workers.config
    whole_episodes = not workers.stages or config.algo.whole_episodes
    evaluation = workers.evaluation
    return config.env, workers.stages, workers.journal, evaluation.env, evaluation.rows, whole_episodes


def policy_arguments(workers: Workers) -> tuple:
    config = workers.config
    merging = Merging(config.merged_rows, config.pipeline.merge_wait_s)
    return config.policy, config.seed, config.learner.precision, workers.torch_device("policy"), merging


def learner_arguments(workers: Workers, algo: Any = None) -> tuple:
    """`algo` are the options of how the learners learn; None: the recipe's."""
    config = workers.config
    options = (config.policy, algo or config.algo, config.learner, config.seed)
    return *options, workers.cluster.rendezvous("learner"), workers.torch_device("learner")


# By name: the driver never imports torch or a simulator.
SIM = Role("sim", sim_worker, sim_arguments, sends_to=("policy",))
POLICY = Role("policy", policy_worker, policy_arguments, holds_policy=True)
LEARNER = Role(
    "learner",
    "embodied.learners.worker:LearnerWorker",
    learner_arguments,
    phase=UPDATE,
    sends_to=("policy",),
    holds_policy=True,
)
AHEAD = "schedule.ahead"  # in a checkpoint: the number of batches that were collected ahead
PLAYERS = (SIM, POLICY)  # all that an evaluation needs


class EmbodiedLoop:
    """The workflow of PPO and GRPO on simulators."""

    command: ClassVar[str] = "train"
    roles: ClassVar[tuple[Role, ...]] = (SIM, POLICY, LEARNER)
    plays: ClassVar[bool] = True  # sims play the batches; else evaluations only

    def __init__(
        self,
        config: RunConfig,
        cluster: Cluster,
        notify: Callable[[str], None] = lambda line: None,
        start_folder: Path | None = None,
    ) -> None:
        """Launch all workers, build and connect them. `notify` is called with a line per restart of a worker or
        warning. `start_folder` holds the policy whose weights are the first ones."""
        self.config = config
        start_folder = start_folder and start_folder.absolute()
        self.workers = Workers(self.roles, config, cluster, self.plays, notify, start_folder)
        self.source: BatchSource = self.make_source(self.workers)
        self.evaluator, self.timers, self.spec = Evaluator(self.workers), self.workers.timers, self.workers.spec
        self.learners, self.weight_sync = self.workers.learners, self.workers.weight_sync
        self.rollouts, self.device_sharing = self.workers.rollouts, self.workers.device_sharing
        self.ahead: deque[Batch] = deque()  # batches that are collected and not learned from
        self.lagging = LaggingVersions(self) if config.pipeline.lag else None
        self.dropped = 0
        self.beside: tuple[PartialEvaluation, Callable[[], object]] | None = None  # with the next rollout
        self.updating: tuple[Batch, Handle | None] | None = None  # a batch, and the update that is not counted yet

    @staticmethod
    def make_source(workers: Workers) -> BatchSource:
        """The collector of PPO (a fixed horizon), or of GRPO and conversations (whole episodes in groups)."""
        return (GroupCollector if workers.config.algo.whole_episodes else HorizonCollector)(workers)

    # One iteration

    def iterate(self, iteration: int, total: int) -> tuple[list[EpisodeResult], dict[str, float]]:
        """Collect a batch, update, publish. Returns the finished episodes and the iteration's metrics."""
        restarts, started = self.rollouts.restarts, perf_counter()
        if self.lagging:
            self.lagging.collect_ahead(total - iteration)
        else:
            self.ahead.append(self.collect())
        batch = self.ahead.popleft()
        # Advantages: GAE at each learner, or each group's scores compared. Then epochs of minibatches; rank 0 reports.
        with self.timers.measure("update"), self.device_sharing.phase(UPDATE):
            before_s = perf_counter() - started
            if self.lagging:
                updating = self.lagging.update(batch, iteration, total)
            else:
                updating = self.begin_update(batch, iteration, total)
            losses = self.settled(updating)[0] if updating else {}
        if "time/first_backward_s" in losses:  # as rank 0 saw it: since its update began
            losses["time/first_backward_s"] += before_s
        self._end_evaluation()
        # The learners' weights are the next version, which policies load before they act again.
        publish_s = self.lagging.updated() if self.lagging else self.publish(self.version + 1)
        self.updating = None
        self.device_sharing.clear_progress()
        own = {"time/publish_s": publish_s, "faults/restarts": self.rollouts.restarts - restarts}
        return batch.finished, self.source.metrics(batch) | own | losses

    def begin_update(self, batch: Batch, iteration: int, total: int) -> Handle | None:
        """Have the learners update on this batch."""
        updating = self.source.update(batch, iteration, total)
        self.updating = batch, updating
        return updating

    def collect(self) -> Batch:
        """A batch of the current version: sims step envs, policies answer with its weights, and trajectories go to the
        learners' channels."""
        with self.timers.measure("rollout"), self.device_sharing.phase(ROLLOUT):
            if self.lagging:
                self.lagging.choose_version()
            return self.source.collect(self.weight_sync.version)

    def act_with_newest(self) -> None:
        """Let policies act with the learners' weights, once the rollouts that lag behind are collected."""
        if self.lagging:
            self.lagging.act_with_newest()

    def evaluate_beside(self, kept: PartialEvaluation, finish: Callable[[], object]) -> None:
        """Let the next rollout, which uses the same weights, hold the conversations of this evaluation too. `finish` is
        called before others are published, and plays what is missing then."""
        self.rollouts.beside, self.beside = self.evaluator.shares(kept), (kept, finish)

    def _end_evaluation(self) -> None:
        if self.beside:
            (kept, finish), self.beside, self.rollouts.beside = self.beside, None, {}
            kept.add(self.evaluator.noted())
            finish()

    def publish(self, version: int) -> float:
        """Use the learners' weights for rollouts from now on, under this version; returns the learners' seconds."""
        with self.timers.measure("publish"):
            with self.device_sharing.phase(UPDATE):
                publishing = self.learners.publish(version)
                publication = self.settled(publishing)[0]
            with self.device_sharing.phase(ROLLOUT):
                self.deliver(publication)
        self.weight_sync.learned = version
        if self.lagging:
            self.lagging.begin(version)
        return publishing.seconds("max")

    def deliver(self, publication: Publication) -> None:
        """Let policies load a published version, and act with nothing else from now on."""
        loading = self.weight_sync.deliver(publication, self.learners[0].send_weights, self.rollouts.ask)
        self.rollouts.settle(*loading)

    def settled(self, handle: Handle) -> list[Any]:
        """The learners' results; sim and policy workers that die meanwhile are replaced meanwhile."""
        self.rollouts.settle(handle)
        return handle.wait()

    # The state of a run

    @property
    def version(self) -> int:
        """Version of the learners' weights, which the next checkpoint holds."""
        return self.weight_sync.learned

    @property
    def exhausted(self) -> str:
        """Why the run should end before its last iteration; empty otherwise."""
        return self.source.exhausted

    @property
    def solved(self) -> bool:
        """True if the run ends before its last iteration since every episode succeeds."""
        return bool(self.exhausted) and getattr(self.source, "solved", False)

    @property
    def groups(self) -> list[WorkerGroup]:
        return list(self.workers.groups.values())

    def total_iterations(self) -> int:
        """The number of iterations that the recipe asks for."""
        return self.source.total_iterations()

    def take_abandoned(self) -> int:
        """Episodes that were abandoned since the last call."""
        return self.rollouts.take_abandoned()

    def take_samples(self) -> list[dict[str, Any]]:
        """Conversations of the last iteration for samples.jsonl; none where no language policy plays."""
        return self.source.samples if isinstance(self.source, GroupCollector) else []

    def take_dropped(self) -> int:
        """Batches collected ahead of a checkpoint that a run resumed from it recollects, since the last call."""
        count, self.dropped = self.dropped, 0
        return count

    def timeline(self, trace: Path, iterations: int) -> Timeline:
        """Record where the time goes from now on; the first `iterations` in detail, into `trace`."""
        return Timeline(self.groups, self.timers, trace, iterations)

    # Checkpoints

    def save(self, checkpoints: Path, state: dict[str, Any]) -> Path:
        """Write a checkpoint of this version into the folder of checkpoints, with the run's counters."""
        with self.timers.measure("save"):
            return self._write(checkpoints, state, self.source.save())

    def save_what_is_learned(self, checkpoints: Path, state: dict[str, Any]) -> Path | None:
        """The same once sim or policy workers have failed for good; None where nothing was learned yet. An update in
        progress is waited for, and counted in `state`."""
        self.workers.cluster.accept_failures()
        if self.updating and self._has_learned(self.updating[1]):
            self.weight_sync.learned = state["version"] = self.version + 1
            state["iteration"] += 1
            state["env_steps"] += int(self.source.metrics(self.updating[0])["env_steps"])
        self.updating = None
        if not state["iteration"]:
            return None
        given_up = self.source.abandon()
        state["abandoned_episodes"] += self.take_abandoned()
        return self._write(checkpoints, state, given_up)

    def _has_learned(self, updating: Handle | None) -> bool:
        """False if an update ended before its first step, for want of data that went down with a sim."""
        if updating is None:
            return True
        try:
            updating.wait()
        except WorkerFailed:
            if any(failure.follows is None for failure in updating.failed.values()):
                raise
        return updating.succeeded()

    def _write(self, checkpoints: Path, state: dict[str, Any], source: dict[str, np.ndarray]) -> Path:
        arrays = source | self.workers.save()
        if self.ahead:
            arrays[AHEAD] = np.array(len(self.ahead))
        return write_checkpoint(checkpoints, self.version, self.save_learners, state, arrays)

    def save_learners(self, draft: Path) -> None:
        """Policy and optimizer, into a checkpoint that is being written, under the same path wherever a learner is."""
        with self.device_sharing.phase(UPDATE):
            self.learners.save(draft.absolute()).wait()

    def restore(self, checkpoint: Path, sims: dict[str, np.ndarray], version: int) -> int:
        """Continue from a checkpoint; returns the number of open episodes that had to be abandoned."""
        with self.device_sharing.phase(UPDATE):
            self.learners.load(checkpoint.absolute()).wait()
        self.publish(version)
        begun = self.workers.restore(sims)
        self.dropped += int(begun.pop(AHEAD, 0))
        return self.source.restore(begun) if begun else 0


@dataclass
class RolloutParts:
    """A rollout as the sims have collected it: which of them gave which env rows, and where the time went."""

    number: int  # of the batch, in its channels
    version: int
    stats: dict[int, RolloutStats] = field(default_factory=dict)  # by sim
    sources: dict[str, range] = field(default_factory=dict)  # source -> its env rows
    seconds: float = 0.0
    relayed: dict[str, float] = field(default_factory=dict)  # metrics of roles that rollouts pass through

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

    def __init__(self, workers: Workers) -> None:
        """Lay a channel to each learner. Sims put rollouts into `inlets`."""
        config = workers.config
        assert isinstance(config.algo, PPOConfig)
        self.config, self.horizon = config, config.algo.rollout_decisions
        self.rollouts, self.learners = workers.rollouts, workers.learners
        self.episodes = self.rollouts.episodes = EpisodeList(config.seed, "train", workers.tasks)
        self.trajectories, self.relays = workers.trajectory_channels(), Relays(workers)
        self.inlets = self.relays.inlets(self.trajectories)
        if (pieces := config.pipeline.granularity) and self.relays.groups:
            role = self.relays.groups[0].role
            raise ConfigError(f"pipeline.granularity={pieces}: {role} workers take whole rollouts; leave it out")
        self.blocks = env_blocks(self.config.env.num_envs, len(self.learners))
        self.batches = 0  # that were collected
        self.learning: Handle | None = None  # of learners that take the pieces of a rollout as they come
        self.began = 0.0

    def total_iterations(self) -> int:
        """`run.iterations`, or `run.env_steps` in whole iterations (with chunks unmasked steps may be a little
        fewer)."""
        run, config = self.config.run, self.config
        if run.iterations is not None:
            return run.iterations
        assert run.env_steps is not None
        return max(1, run.env_steps // (config.env.num_envs * self.horizon * config.policy.chunk))

    def collect(self, version: int) -> RolloutParts:
        """A rollout of all sims. Of those that die, the part is played again where half or more is missing, or all that
        a learner rank would get; otherwise it is left out."""
        rollouts = self.rollouts
        self.batches += 1
        batch, missing = RolloutParts(self.batches, version), list(range(len(rollouts.sims)))
        if self.config.pipeline.granularity:
            self.began, self.learning = perf_counter(), self._learn(batch)
        while missing:
            begin = partial(self._collect, batch.number)
            calls, routes = rollouts.play(missing, begin, self.config.pipeline.stages, 1.0, "train")
            for sim, call in calls.items():
                if call.succeeded():
                    batch.stats[sim] = call.wait()[0]
                    batch.sources |= self._parts(sim, routes[sim])
            batch.seconds += max((call.seconds() for call in calls.values() if call.succeeded()), default=0.0)
            missing = [sim for sim in missing if sim not in batch.stats]
            if not self._too_little(batch, missing):
                break
        rollouts.read_journal()
        rollouts.episode_counter.finish(result for part in batch.stats.values() for result in part.finished)
        sources = [batch.sources_of(block) for block in self.blocks]
        batch.relayed = self.relays.pass_rollouts(batch.number, sources, self.trajectories)
        return batch

    def update(self, batch: RolloutParts, iteration: int, total: int) -> Handle:
        ids = batch.env_ids
        learning, self.learning = self.learning, None
        seconds = perf_counter() - self.began if learning else 0.0
        for channel, block in zip(self.trajectories, self.blocks, strict=True):
            channel.put(Unit(batch.sources_of(block), ids[np.isin(ids, block)]), key=batch.number)
            channel.put(BatchEnd(iteration, total, seconds), key=batch.number)
        return learning or self._learn(batch)

    def _learn(self, batch: RolloutParts) -> Handle:
        """Have each learner take its env rows of a batch, and step when it has all."""
        shares, version = zip(self.trajectories, self.blocks, strict=True), self.rollouts.weight_sync.learned
        return self.learners.learn.each(
            [(channel, batch.number, version, np.array(block)) for channel, block in shares]
        )

    def metrics(self, batch: RolloutParts) -> dict[str, float]:
        def mean(what: Callable[[RolloutStats], float]) -> float:
            return float(np.mean([what(part) for part in batch.stats.values()]))

        missing = self.config.env.num_envs - len(batch.env_ids)
        ranks = [rank for rank, block in enumerate(self.blocks) for env in batch.env_ids if env in block]
        return {
            "env_steps": sum(part.env_steps for part in batch.stats.values()),
            "time/rollout_s": batch.seconds,
            "time/step_s": mean(lambda part: part.step_s),
            "time/reset_s": mean(lambda part: part.reset_s),
            "time/act_s": mean(lambda part: part.wait_s),
            "faults/lost_decisions": missing * self.horizon,
            "train/balance_ratio": balance_ratio([1.0] * len(ranks), ranks, len(self.blocks)),
            **batch.relayed,
        }

    def save(self) -> dict[str, np.ndarray]:
        """The state of all env rows, one array row per env id."""
        parts = [part for part in self.rollouts.ask(self.rollouts.sims.get_state) if part]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}

    def abandon(self) -> dict[str, np.ndarray]:
        """The number of episodes that each row has begun; a resumed run begins the next ones."""
        self.rollouts.read_journal()
        for channel in self.trajectories:
            channel.close("the run ends")
        return self.rollouts.episode_counter.abandoned()

    def restore(self, state: dict[str, np.ndarray]) -> int:
        """Go on from `save`; returns the number of open episodes that had to be abandoned."""
        check_rows(state, self.config.env.num_envs)
        self.rollouts.episode_counter.restore(state)
        return sum(self.rollouts.ask(lambda: self.rollouts.sims.set_state(state, self.episodes)))

    def _collect(self, batch: int, sim: int, route: Route) -> Handle:
        where = (tuple(self.inlets), batch, self.config.pipeline.granularity or 0)
        return self.rollouts.sims[sim].collect(self.episodes, route, self.horizon, *where)

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
    if (state["rows.episode"] < 0).any():
        raise ValueError("rows.episode holds a negative number, and episodes are counted from 0")
