"""The cyclic loop of embodied RL: simulate, act, learn, publish.

This is the macro program. It launches the three groups and says who does what in an iteration; where each worker runs
is the plan's business, and what happens when one dies is told in `rollout_manager.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.core.episodes import EpisodeList
from embodied.core.types import EnvSpec, EpisodeResult, EpisodeSpec, Recording, Route
from embodied.envs import env_class
from embodied.envs.protocols import choose_protocol
from embodied.placement.grammar import EMBODIED
from embodied.policies.request_batching import Merging
from embodied.run import devices
from embodied.runtime import Budget, Cluster, Handle, Timers, WorkerGroup
from embodied.runtime.weights import new_name
from embodied.workflows.device_claims import ROLLOUT, UPDATE, take_turns
from embodied.workflows.eval_outputs import first_recording, to_film_again, write_dataset
from embodied.workflows.fixed_episodes import Heard, ignore, never, play_fixed
from embodied.workflows.group_collector import GroupCollector
from embodied.workflows.horizon_collector import HorizonCollector
from embodied.workflows.rollout_manager import RolloutManager
from embodied.workflows.weight_sync import Weights, WeightSync

if TYPE_CHECKING:
    from embodied.config.recipe import RunConfig
    from embodied.reporting.partial_evaluation import PartialEvaluation

# By name: the driver never imports torch or a simulator.
SIM = "embodied.envs.worker:SimWorker"
POLICY = "embodied.policies.worker:PolicyWorker"
LEARNER = "embodied.learners.worker:LearnerWorker"


class EmbodiedLoop:
    command = "train"  # what runs this loop
    roles: tuple[Any, ...] = EMBODIED
    learner = LEARNER
    collects = True  # whether sims play for the learners

    def __init__(
        self,
        config: RunConfig,
        cluster: Cluster,
        learn: bool = True,
        rendezvous=None,
        tell: Callable[[str], None] = lambda line: None,
        eval_tasks: tuple[str, ...] = (),
        start_folder: Path | None = None,
    ) -> None:
        """`tell` hears of every restart of a worker. `eval_tasks` are all tasks of an evaluation of which this env
        plays some. `start_folder` is that of a policy whose weights are the first ones."""
        self.config = config
        self.start_folder = start_folder and start_folder.absolute()
        self.cluster = cluster
        self.timers = Timers()
        kind = env_class(config.env)
        tasks = kind.tasks(config.env)
        self.protocol = choose_protocol(kind, config.env, config.eval.protocol)
        self.eval_env = self.protocol.apply(config.env)
        self.collection = self.what_to_learn_from(config, tasks)
        fixed = EpisodeList(config.eval.seed, "eval", eval_tasks or tasks, self.protocol.stored_states)
        self.eval_episodes = [spec for spec in fixed.first(config.eval.episodes) if spec.task in tasks]
        stages = config.pipeline.stages if learn and self.collects else 0
        journal = cluster.channel("journal", capacity=None)
        self.notes = cluster.channel("evaluation notes", capacity=None)
        num_sims = sum(host.roles.count("sim") for host in cluster.hosts)
        rows = eval_rows(len(self.eval_episodes), config.eval.num_envs or config.env.num_envs, num_sims)
        self.sims = cluster.launch(SIM, "sim", config.env, stages, journal, self.eval_env, rows)
        options = (config.policy, config.seed, config.learner.precision, self.torch_device("policy"))
        merging = Merging(config.merged_rows, config.pipeline.merge_wait_s)
        self.policies = cluster.launch(POLICY, "policy", *options, merging)
        self.rollouts = RolloutManager(
            cluster, self.sims, self.policies, max(stages, 1), journal, config.env.num_envs, tell
        )
        self.learners = None
        if learn:
            options = (config.policy, self.algorithm, config.learner)
            device = self.torch_device("learner")
            self.learners = cluster.launch(self.learner, "learner", *options, config.seed, rendezvous, device)

    def what_to_learn_from(self, config: RunConfig, tasks: tuple[str, ...]) -> HorizonCollector | GroupCollector:
        return (HorizonCollector if config.algo.name == "ppo" else GroupCollector)(config, tasks)

    def torch_device(self, role: str) -> str:
        """Where a role's networks compute: on its hosts' GPUs, else on cores."""
        on_gpus = {r for host in self.cluster.hosts if any("gpu:" in d for d in host.devices) for r in host.roles}
        return devices.torch_device("gpu" if role in on_gpus else "cpu")

    @property
    def algorithm(self):
        """The options of how the learners learn."""
        return self.config.algo

    def total_iterations(self) -> int:
        """`run.env_steps` in whole iterations (unmasked steps may be a little fewer with chunks), or
        `run.iterations`."""
        run, algo = self.config.run, self.config.algo
        if run.iterations is not None:
            return run.iterations
        chunk = getattr(self.config.policy, "chunk", 1)
        return max(1, run.env_steps // (self.config.env.num_envs * algo.rollout_decisions * chunk))

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
            builds.append(self.learners.build(spec, new_name(), snapshot=bool(others), start=self.start_folder))
        for build in builds:
            build.wait()
        channel, faults = self.cluster.channel, self.config.faults
        self.weight_sync = WeightSync(self.cluster, self.policies)
        ranks = range(len(self.learners)) if self.learners else range(0)
        self.trajectories = [  # bounded by what a rollout is: nobody takes anything before it has ended
            channel(f"trajectories-{r}", home=self.learners[r], capacity=None) for r in ranks
        ]
        budget = Budget(faults.max_restarts, faults.window_s, faults.hang_s)
        self.rollouts.start(spec, self.collection.noted if self.learners else None, self.weight_sync, budget)
        if self.learners:
            self.collection.start(self.rollouts, self.learners, self.trajectories)
        groups = (self.sims, self.policies, self.learners)
        self.turns = take_turns(self.cluster, *groups, self.config.cluster.memory_gb, self.timers)
        self.rollouts.has_memory = self.turns.has_memory
        return spec

    def iterate(self, iteration: int, total: int) -> tuple[list[EpisodeResult], dict[str, float]]:
        """Collect a batch, update, publish. Returns the finished episodes and the numbers of the iteration."""
        restarts, started = self.rollouts.restarts, perf_counter()
        with self.timers.measure("rollout"), self.turns.phase(ROLLOUT):
            batch = self.collection.collect(self.version)
        with self.timers.measure("update"), self.turns.phase(UPDATE):
            before_s = perf_counter() - started
            updating = self.collection.update(batch, iteration, total)
            losses = self.settled(updating) if updating else {}
        if "time/first_backward_s" in losses:  # as rank 0 saw it: since its update began
            losses["time/first_backward_s"] += before_s
        publish_s = self.publish(self.version + 1)
        own = {"time/publish_s": publish_s, "faults/restarts": self.rollouts.restarts - restarts}
        return batch.finished, self.collection.numbers(batch) | own | losses

    def settled(self, updating: Handle) -> dict[str, float]:
        """Rank 0's result. Who dies meanwhile is replaced meanwhile."""
        self.rollouts.settle(updating)
        return updating.wait()[0]

    @property
    def version(self) -> int:
        """Of the weights that act."""
        return self.weight_sync.version

    def publish(self, version: int) -> float:
        """Make the learner's weights the ones that act, as this version."""
        with self.timers.measure("publish"):
            with self.turns.phase(UPDATE):
                publishing = self.learners.publish(version)
                self.rollouts.settle(publishing)
            with self.turns.phase(ROLLOUT):
                loading = self.weight_sync.deliver(publishing.wait()[0], self.learners[0].send, self.rollouts.ask)
                self.rollouts.settle(*loading)
        return publishing.seconds("max")

    def adopt(self, weights: Weights | None) -> None:
        """Act with weights that come from a checkpoint instead of a learner; None: with those a run begins with."""
        with self.turns.phase(ROLLOUT):
            if weights is None:
                weights = Weights(0, self.rollouts.ask(lambda: self.policies[0].initial_weights(self.rollouts.spec))[0])
            self.rollouts.settle(*self.weight_sync.adopt(weights, self.rollouts.ask))

    def evaluate(
        self,
        out: Path,
        dataset: Path | None = None,
        kept: PartialEvaluation | None = None,
        stop: Callable[[], bool] = never,
    ) -> list[EpisodeResult]:
        """Play those of the fixed evaluation episodes that `kept` lacks with the current version; all results in
        episode order. Films go into `out/videos`, the dataset to its path (None: `out/dataset`). `stop`: `play_fixed`.
        """
        options = self.config.eval
        recording = first_recording(options, out)
        results = dict(kept.finished) if kept else {}
        with self.timers.measure("evaluate"):
            self.eval_spec = self.rollouts.ask(self.sims.eval_spec)[0]
            missing = [spec for spec in self.eval_episodes if spec.index not in results]
            played = self._play(missing, recording, heard=kept.add if kept else ignore, stop=stop)
            results |= {result.index: result for result in played}
            results = [results[spec.index] for spec in self.eval_episodes]
            again = to_film_again(options, self.eval_episodes, results)
            if again and any((out / "videos").glob("*.mp4")):  # else they cannot be filmed here
                film = frozenset(spec.index for spec in again)
                self._play(again, replace(recording, film=film, failures_only=True, drafts=None), stop=stop)
        if options.dataset:
            write_dataset(out, dataset or out / "dataset", self.eval_spec, results)
        return results

    def _play(
        self,
        episodes: list[EpisodeSpec],
        recording: Recording,
        expert: str | None = None,
        heard: Heard = ignore,
        stop: Callable[[], bool] = never,
    ) -> list[EpisodeResult]:
        def begin(sim: int, share: list[EpisodeSpec], route: Route, alone: frozenset[int]) -> Handle:
            return self.sims[sim].evaluate(share, route, recording, self.notes, alone, expert)

        with self.turns.phase(ROLLOUT):
            options = (self.config.eval.temperature, bool(expert), heard, stop)
            return play_fixed(self.rollouts, episodes, begin, self.notes, *options)

    def save_learners(self, draft: Path) -> None:
        """Policy and optimizer, into a checkpoint that is being written, under the same path wherever a learner is."""
        with self.turns.phase(UPDATE):
            self.learners.save(draft.absolute()).wait()

    def save_sims(self) -> dict[str, np.ndarray]:
        """What has been begun and not yet learned from, as arrays."""
        return self.collection.save()

    def restore(self, checkpoint: Path, sims: dict[str, np.ndarray], version: int) -> int:
        """Continue from a checkpoint; returns the number of open episodes that had to be abandoned."""
        with self.turns.phase(UPDATE):
            self.learners.load(checkpoint.absolute()).wait()
        self.publish(version)
        return self.collection.restore(sims) if sims else 0


def eval_rows(num_episodes: int, num_envs: int, num_sims: int) -> int:
    """Env rows of each sim worker that play evaluation episodes: no more than it takes to get through them in as many
    turns, 50 instead of 64 for 200 episodes."""
    share = -(-num_episodes // num_sims)
    most = max(1, min(-(-num_envs // num_sims), share))
    turns = max(1, -(-share // most))
    return max(1, -(-share // turns))
