"""The cyclic loop of embodied RL: simulate, act, learn, publish.

`EmbodiedLoop.iterate` is one iteration, and `roles` declares the workers. `launched_workers.py` launches them;
`collector.py` (PPO), with `group_collector.py` for GRPO, collects batches; `rollout_manager.py` runs the rounds of sims
and policies and replaces dead workers; `runtime/weights.py` versions the weights; `evaluator.py` evaluates. The plan
decides where each worker runs.

`pipeline.schedule` names two settings (`PipelineSection` in `config/sections.py`): by how many versions rollouts lag,
and whether learners begin early. They change when the steps of an iteration happen, never their results:

    sync      collect a batch with version n, update on it, publish version n + 1
    periodic  the same, but learners process groups of episodes as they end and take one step after the last
    async     rollout n uses version max(0, n - `pipeline.async_level`), so update, publishing and collecting overlap
              (`LaggingVersions`)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from embodied.core.errors import WorkerFailed
from embodied.core.types import EpisodeResult, Merging
from embodied.envs import env_class
from embodied.records.timeline import Timeline
from embodied.run.run_folder import write_checkpoint
from embodied.runtime import Cluster, Handle, WorkerGroup
from embodied.runtime.published_weights import Publication
from embodied.workflows import ROLLOUT, UPDATE, Role, roles_of_run
from embodied.workflows.evaluator import Evaluator, evaluation_plan
from embodied.workflows.launched_workers import Workers

if TYPE_CHECKING:
    from embodied.config.recipe import RunConfig
    from embodied.records.results import PartialEvaluation
    from embodied.workflows.collector import Batch, Collector


def sim_worker(config: RunConfig) -> str:
    """The import path of the env's sim worker class: `SimWorker`, or `TextWorker` for text envs."""
    return env_class(config.env).worker


def policy_worker(config: RunConfig) -> str:
    return config.policy.worker


def sim_arguments(workers: Workers) -> tuple:
    config = workers.config
    whole_episodes = not workers.stages or config.algo.whole_episodes
    evaluation = workers.evaluation
    return config.env, workers.stages, workers.inbox, evaluation.env, evaluation.rows, whole_episodes


def policy_arguments(workers: Workers) -> tuple:
    config = workers.config
    merging = Merging(config.merged_rows, config.pipeline.merge_wait_s)
    device, learner = workers.torch_device("policy"), config.learner
    return config.policy, config.seed, learner.precision, device, merging, learner.graphs if device == "cuda" else "off"


def learner_arguments(workers: Workers, algo: Any = None) -> tuple:
    """`algo` are the learners' options; None: the recipe's."""
    config = workers.config
    options = (config.policy, algo or config.algo, config.learner, config.seed)
    apart = config.roles.reference and algo is None
    asks = () if algo or not config.algo.imitation or not env_class(config.env).speaks else (config.env,)
    return *asks, *options, workers.cluster.rendezvous("learner"), workers.torch_device("learner"), apart


def learner_worker(config: RunConfig) -> str:
    if config.algo.name == "dagger":
        return "embodied.learners.dagger:DaggerLearner"
    if config.algo.imitation is None:
        return "embodied.learners.learner_worker:LearnerWorker"
    return f"embodied.learners.imitation:Imitating{'Text' if env_class(config.env).speaks else ''}Learner"


# By name, since the driver never imports torch or a simulator.
SIM = Role("sim", sim_worker, sim_arguments, sends_to=("policy",))
POLICY = Role("policy", policy_worker, policy_arguments, holds_policy=True)
LEARNER = Role(
    "learner",
    learner_worker,
    learner_arguments,
    phase=UPDATE,
    sends_to=("policy",),
    holds_policy=True,
)
AHEAD = "schedule.ahead"  # in a checkpoint: the number of batches that were collected ahead
EVALUATION_ROLES = (SIM, POLICY)  # the roles of an evaluation


class EmbodiedLoop:
    """The workflow of PPO and GRPO on simulators."""

    command: ClassVar[str] = "train"  # that runs and resumes it: python -m embodied.train
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
        warning. `start_folder` holds the policy whose weights are the first ones; for a resumed run its checkpoint,
        unless algo.kl_coef or roles.judge need the start."""
        self.config = config
        start_folder = start_folder and start_folder.absolute()
        roles, evaluation = roles_of_run(type(self), config), evaluation_plan(config, cluster)
        self.workers = Workers(roles, config, cluster, evaluation, self.plays, notify, start_folder)
        self.collector: Collector = self.make_collector(self.workers)
        self.evaluator, self.timers, self.spec = Evaluator(self.workers), self.workers.timers, self.workers.spec
        self.learners, self.weight_sync = self.workers.learners, self.workers.weight_sync
        self.rollouts, self.device_sharing = self.workers.rollouts, self.workers.device_sharing
        self.ahead: deque[Batch] = deque()  # collected batches that wait for their update
        self.lagging = LaggingVersions(self) if config.pipeline.lag else None
        self.dropped = 0
        self.beside: Callable[[], object] | None = None  # finishes the evaluation beside the next rollout
        self.updating: tuple[Batch, Handle | None] | None = None  # a batch and its unfinished update

    @staticmethod
    def make_collector(workers: Workers) -> Collector:
        """The collector of PPO (a fixed horizon), or of GRPO and conversations (whole episodes in groups)."""
        if workers.config.algo.imitation:
            from embodied.workflows.demonstrations import open_data

            open_data(workers, workers.config.algo.imitation)
        if workers.config.algo.whole_episodes:
            from embodied.workflows.group_collector import Groups

            return Groups(workers)
        from embodied.workflows.collector import Horizon

        return Horizon(workers)

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
            losses = self.learner_results(updating)[0] if updating else {}
        if "time/first_backward_s" in losses:  # on rank 0: seconds since its update began
            losses["time/first_backward_s"] += before_s
        self._end_evaluation()  # of the version that acted in this rollout
        # The learners' weights are the next version, which policies load before they act again.
        publish_s = self.lagging.updated() if self.lagging else self.publish(self.version + 1)
        self.updating = None
        self.device_sharing.clear_progress()
        measured = {"time/publish_s": publish_s, "faults/restarts": self.rollouts.restarts - restarts}
        return batch.finished, self.collector.metrics(batch) | measured | losses

    def begin_update(self, batch: Batch, iteration: int, total: int) -> Handle | None:
        """Have the learners update on this batch."""
        updating = self.collector.update(batch, iteration, total)
        self.updating = batch, updating
        return updating

    def collect(self) -> Batch:
        """Collect a batch with the current version: sims step envs, policies answer with its weights, and trajectories
        go to the learners' channels."""
        measured, workers = self.timers.measure("rollout"), self.workers
        with measured, self.device_sharing.phase(ROLLOUT), workers.ended_if_given_up():
            if self.lagging:
                self.lagging.choose_version()
            return self.collector.collect(self.weight_sync.version)

    def act_with_newest(self) -> None:
        """Let policies act with the learners' weights after the lagging rollouts are collected."""
        if self.lagging:
            self.lagging.act_with_newest()

    def evaluate_beside(self, kept: PartialEvaluation, finish: Callable[[], object]) -> None:
        """Let the next rollout, which uses the same weights, also play this evaluation's episodes. `finish` plays the
        remaining episodes before the next weights are published."""
        self.rollouts.beside, self.beside = self.evaluator.missing_of(kept), finish

    def _end_evaluation(self) -> None:
        if self.beside:
            finish, self.beside, self.rollouts.beside = self.beside, None, None
            finish()

    def publish(self, version: int) -> float:
        """Use the learners' weights for rollouts from now on, under this version; returns the learners' seconds."""
        seconds = self._publish_and_load(version)
        self.weight_sync.learned = version
        if self.lagging:
            self.lagging.begin(version)
        return seconds

    @contextmanager
    def acting_with_mean(self) -> Iterator[None]:
        """Inside, policies act with the mean of the last weights, if the recipe keeps one."""
        if self.config.algo.average:
            self._publish_and_load(self.version, mean=True)
        yield
        if self.config.algo.average:
            self._publish_and_load(self.version)

    def _publish_and_load(self, version: int, mean: bool = False) -> float:
        """Publish the learners' weights, or their mean, under this version, and let policies load them."""
        with self.timers.measure("publish"):
            with self.device_sharing.phase(UPDATE):
                publishing = self.learners.publish(version, mean)
                publication = self.learner_results(publishing)[0]
            with self.device_sharing.phase(ROLLOUT):
                self.deliver(publication)
        return publishing.seconds("max")

    def deliver(self, publication: Publication) -> None:
        """Let policies load a published version and only act with it from now on."""
        loading = self.weight_sync.deliver(publication, self.learners[0].send_weights, self.rollouts.ask)
        self.rollouts.wait_and_replace(*loading)

    def learner_results(self, handle: Handle) -> list[Any]:
        """Wait for the learners' results. Sim and policy workers that die meanwhile are replaced. A stop waits for
        these."""
        with self.workers.cluster.uninterrupted():
            self.rollouts.wait_and_replace(handle)
            return handle.wait()

    # The state of a run

    @property
    def version(self) -> int:
        """Version of the learners' weights, which the next checkpoint holds."""
        return self.weight_sync.learned

    @property
    def exhausted(self) -> str:
        """Why the run should end before its last iteration; empty otherwise."""
        return self.collector.exhausted

    @property
    def solved(self) -> bool:
        """True if the run ends before its last iteration since every episode succeeds."""
        return bool(self.exhausted) and self.collector.solved

    @property
    def groups(self) -> list[WorkerGroup]:
        return list(self.workers.groups.values())

    def take_dropped(self) -> int:
        """Number of batches collected before the checkpoint and replaced by new ones after resuming, since the last
        call."""
        count, self.dropped = self.dropped, 0
        return count

    def timeline(self, trace: Path, iterations: int) -> Timeline:
        """Record where the time goes from now on; the first `iterations` in detail, into `trace`."""
        return Timeline(self.groups, self.timers, trace, iterations)

    # Checkpoints

    def save(self, checkpoints: Path, state: dict[str, Any]) -> Path:
        """Write a checkpoint of this version into the folder of checkpoints, with the run's counters."""
        with self.timers.measure("save"), self.workers.cluster.uninterrupted():
            return self._write(checkpoints, state, self.collector.save())

    def save_what_is_learned(self, checkpoints: Path, state: dict[str, Any]) -> Path | None:
        """Write a checkpoint after a final failure of sim or policy workers, or after a rollout was given up; None
        before the first update. A current update is finished and counted in `state`."""
        self.workers.cluster.accept_failures()
        with self.workers.cluster.uninterrupted():
            return self._save_what_is_learned(checkpoints, state)

    def _save_what_is_learned(self, checkpoints: Path, state: dict[str, Any]) -> Path | None:
        if self.updating and self._has_learned(self.updating[1]):
            self.weight_sync.learned = state["version"] = self.version + 1
            state["iteration"] += 1
            state["env_steps"] += int(self.collector.metrics(self.updating[0])["env_steps"])
        self.updating = None
        if not state["iteration"]:
            return None
        given_up = self.collector.abandon()
        state["abandoned_episodes"] += self.rollouts.take_abandoned()
        return self._write(checkpoints, state, given_up)

    def _has_learned(self, updating: Handle | None) -> bool:
        """False if an update ended without a step because its data were lost with a sim."""
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
        """Write policy and optimizer into an unfinished checkpoint; its path is the same on every machine."""
        with self.device_sharing.phase(UPDATE):
            self.learners.save(draft.absolute()).wait()

    def restore(self, checkpoint: Path, sims: dict[str, np.ndarray], version: int) -> int:
        """Continue from a checkpoint; returns the number of open episodes that had to be abandoned."""
        with self.device_sharing.phase(UPDATE):
            self.learners.load(checkpoint.absolute()).wait()
        self.publish(version)
        begun = self.workers.restore(sims)
        self.dropped += int(begun.pop(AHEAD, 0))
        return self.collector.restore(begun) if begun else 0


class LaggingVersions:
    """Decides for an `EmbodiedLoop` when a batch is collected, with which version, and when a version is copied.

    With a lag of k, rollout n uses version max(start, n - k). Learners copy a version, and the copy is sent to the
    policies during a rollout with the previous version:

        k = 1   rollout n + 1 with version n beside update n; version n + 1 is copied after update n, travels at once
        k > 1   rollout n + k - 1 with version n - 1 beside update n, while version n travels

    With R, U and P seconds of rollout, update and transfer, an iteration takes max(R, U, P, (R + U + P) / (k + 1)).
    There are two copies of the weights (`WeightStore`): the acting copy and the copy in transfer.
    """

    def __init__(self, loop: EmbodiedLoop) -> None:
        self.loop, self.weight_sync, self.ahead = loop, loop.weight_sync, loop.ahead
        self.lag = loop.config.pipeline.lag
        self.depth = max(1, self.lag - 1)  # batches that wait for their update
        self.updating = False
        self.rollouts_left = 0  # remaining rollouts of the run
        self.start = self.copied = 0  # first version of the run; newest copied version
        self.copying: Handle | None = None  # the last copy, until it is announced to the policies
        self.copy_s = 0.0  # seconds of the previous copy
        self.waiting: deque[Publication] = deque()  # versions for rollouts to come
        loop.rollouts.background.append(self)

    def begin(self, version: int) -> None:
        """Begin: policies and learners have this version."""
        self.start = self.copied = version
        self.waiting.clear()

    def collect_ahead(self, batches_left: int) -> None:
        """Collect batches until enough are waiting; beside earlier updates most are already collected."""
        self.rollouts_left = batches_left - len(self.ahead)
        while self.rollouts_left and len(self.ahead) < self.depth:
            self._collect()

    def update(self, batch: Batch, iteration: int, total: int) -> Handle | None:
        """Begin the update on this batch, and collect the next one meanwhile."""
        if self.lag > 1 and self.rollouts_left:
            self._copy(self.weight_sync.learned)
        last = updating = self.loop.begin_update(batch, iteration, total)
        if self.lag == 1 and self.rollouts_left > 1:
            last = self._copy(self.weight_sync.learned + 1)  # the learners copy after the update
        if self.rollouts_left and (len(self.ahead) < self.depth or self.loop.beside):
            self.loop.device_sharing.ends_with(UPDATE, last or self.copying)
            self.updating = True
            self._collect()
            self.updating = False
        if self.copying:
            self.loop.rollouts.wait_and_replace(self.copying)
        return updating

    def updated(self) -> float:
        """The learners have the next version. Returns the seconds of their last copy."""
        self.weight_sync.learned += 1
        if self.copying:
            self.go_on()
        return self.copy_s

    def choose_version(self) -> None:
        """Let policies act with the version of the next rollout, which they have received by now."""
        next_batch = len(self.ahead) + self.updating  # after the batch of the next or current update
        self._load_published(max(self.start, self.weight_sync.learned + next_batch - self.lag))

    def act_with_newest(self) -> None:
        """Collect the rollouts with older versions; then let policies act with the learners' version."""
        while self.rollouts_left and len(self.ahead) < self.lag:
            self._collect()
        if self.weight_sync.version != self.weight_sync.learned:
            with self.loop.device_sharing.phase(UPDATE):
                self._copy(self.weight_sync.learned)
                if self.copying:
                    self.loop.rollouts.wait_and_replace(self.copying)
                    self.go_on()
            with self.loop.device_sharing.phase(ROLLOUT):
                self._load_published(self.weight_sync.learned)

    # During a rollout

    def is_due(self) -> bool:
        """True if a copied version is not yet announced to policies."""
        return self.copying is not None and self.copying.done()

    def go_on(self) -> None:
        """Begin to send the copied version to the policies."""
        assert self.copying is not None
        publication, self.copy_s, self.copying = self.copying.wait()[0], self.copying.seconds("max"), None
        self.waiting.append(publication)
        self.weight_sync.announce(publication, self.loop.learners[0].send_weights)

    # Inside

    def _collect(self) -> None:
        self.ahead.append(self.loop.collect())
        self.rollouts_left -= 1

    def _copy(self, version: int) -> Handle | None:
        """Let the learners copy their weights as this version, once. It replaces the copy two versions older, which no
        rollout uses."""
        if version > self.copied:
            self.copied = version
            self.copying = self.loop.learners.publish(version)
        return self.copying

    def _load_published(self, version: int) -> None:
        while self.weight_sync.version < version:
            publication = self.waiting.popleft()
            if publication.version == version:
                self.loop.deliver(publication)
