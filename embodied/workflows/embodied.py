"""The cyclic loop of embodied RL: simulate, act, learn, publish.

This is the macro program. It launches the three groups, lays the channels between them and says who does what in an
iteration; where each worker runs is the plan's business.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embodied.data import EnvSpec, EpisodeResult, Route, Weights
from embodied.episodes import EpisodeList, num_deliveries
from embodied.runtime import Cluster, Timers, WorkerGroup

if TYPE_CHECKING:
    from embodied.config import RunConfig

# By name: the driver never imports torch or a simulator.
SIM = "embodied.envs.worker:SimWorker"
POLICY = "embodied.policies.worker:PolicyWorker"
LEARNER = "embodied.learners.worker:LearnerWorker"


class EmbodiedLoop:
    def __init__(self, config: RunConfig, cluster: Cluster, learn: bool = True, meeting=None) -> None:
        self.config = config
        self.cluster = cluster
        self.version = -1
        self.timers = Timers()
        self.train_episodes = EpisodeList(config.seed, "train", config.env.task)
        self.eval_episodes = EpisodeList(config.eval.seed, "eval", config.env.task)
        self.sims = cluster.launch(SIM, "sim", config.env, config.pipeline.stages)
        self.policies = cluster.launch(POLICY, "policy", config.policy, config.seed)
        self.learners = None
        if learn:
            self.learners = cluster.launch(LEARNER, "learner", config.policy, config.algo, config.seed, meeting)

    @property
    def groups(self) -> list[WorkerGroup]:
        return [group for group in (self.sims, self.policies, self.learners) if group]

    def start(self) -> EnvSpec:
        """Wait for the simulators, build policy and learner for what they offer, lay the channels."""
        self.spec = self.sims.spec().wait()[0]
        builds = [self.policies.build(self.spec)]
        if self.learners:
            builds.append(self.learners.build(self.spec, self.config.env.num_envs))
        for build in builds:
            build.wait()
        self._lay_channels()
        return self.spec

    def iterate(self, iteration: int, total: int) -> tuple[list[EpisodeResult], dict[str, float]]:
        """Collect a batch, update, publish. Returns the finished episodes and the numbers of the iteration."""
        horizon = self.config.algo.rollout_decisions
        rollout = self.sims.collect.each(
            [(self.train_episodes, horizon, route, tuple(self.trajectories)) for route in self.routes]
        )
        serving = self._serve(self.routes, greedy=False, stream="train")
        expected = num_deliveries(
            self.config.env.num_envs, len(self.sims), self.config.pipeline.stages, len(self.learners)
        )
        updating = self.learners.update.each(
            [(channel, count, iteration, total) for channel, count in zip(self.trajectories, expected, strict=True)]
        )
        with self.timers.measure("rollout"):
            stats = rollout.wait()
            serving.wait()
        with self.timers.measure("update"):
            losses = updating.wait()[0]
        publish_s = self.publish(self.version + 1)
        numbers = {
            "env_steps": sum(part.env_steps for part in stats),
            "time/rollout_s": rollout.seconds("max"),
            "time/step_s": float(np.mean([part.step_s for part in stats])),
            "time/reset_s": float(np.mean([part.reset_s for part in stats])),
            "time/act_s": float(np.mean([part.wait_s for part in stats])),
            "time/publish_s": publish_s,
        }
        return [result for part in stats for result in part.finished], numbers | losses

    def publish(self, version: int) -> float:
        """Make the learner's weights the ones that act, as this version."""
        with self.timers.measure("publish"):
            sent = self.learners[0].publish(version, tuple(self.weights))
            self._load_weights(version)
            sent.wait()
        return sent.seconds("max")

    def adopt(self, weights: Weights | None) -> None:
        """Act with weights that come from a checkpoint instead of a learner; None: the policy needs none."""
        weights = weights or Weights(0, {})
        for channel in self.weights:
            channel.put(weights)
        self._load_weights(weights.version)

    def evaluate(self, folder: Path, num_films: int) -> list[EpisodeResult]:
        """Play the fixed evaluation episodes greedily with the current version; results in episode order."""
        episodes = self.eval_episodes.first(self.config.eval.episodes)
        film = frozenset(range(num_films))
        num_envs = self.config.eval.num_envs or self.config.env.num_envs
        routes = [Route(route.requests[:1], route.replies[:1]) for route in self.routes]
        playing = self.sims.evaluate.each(
            [(episodes, min(num_envs, len(episodes)), route, film, folder) for route in routes]
        )
        serving = self._serve(routes, greedy=self.config.eval.greedy, stream="eval")
        with self.timers.measure("evaluate"):
            parts = playing.wait()
            serving.wait()
        return sorted((result for part in parts for result in part), key=lambda result: result.index)

    def save_sims(self) -> dict[str, np.ndarray]:
        """The state of all env rows, one array row per env id."""
        parts = [part for part in self.sims.get_state().wait() if part]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}

    def restore(self, checkpoint: Path, sims: dict[str, np.ndarray], version: int) -> int:
        """Continue from a checkpoint; returns the number of open episodes that had to be abandoned."""
        self.learners.load(checkpoint).wait()
        self.publish(version)
        return sum(self.sims.set_state(sims, self.train_episodes).wait()) if sims else 0

    def _load_weights(self, version: int) -> None:
        self.policies.load_weights.each([(channel,) for channel in self.weights]).wait()
        self.version = version

    def _serve(self, routes: list[Route], greedy: bool, stream: str):
        """Every policy worker answers the sim stages that ask it."""
        calls = []
        for requests in self.requests:
            replies = {
                reply.name.removeprefix("replies-"): reply
                for route in routes
                for request, reply in zip(route.requests, route.replies, strict=True)
                if request is requests
            }
            calls.append((requests, replies, greedy, stream))
        return self.policies.serve.each(calls)

    def _lay_channels(self) -> None:
        """Requests and weights live with the policy, replies with the sim, trajectories with the learner."""
        stages, num_sims, num_policies = self.config.pipeline.stages, len(self.sims), len(self.policies)
        channel = self.cluster.channel
        self.requests = [channel(f"requests-{p}", home=self.policies[p]) for p in range(num_policies)]
        self.weights = [channel(f"weights-{p}", home=self.policies[p]) for p in range(num_policies)]
        ranks = range(len(self.learners)) if self.learners else range(0)
        self.trajectories = [channel(f"trajectories-{r}", home=self.learners[r]) for r in ranks]
        self.routes = []
        for sim in range(num_sims):
            asked = [(sim * stages + s) * num_policies // (num_sims * stages) for s in range(stages)]
            replies = [channel(f"replies-sim-{sim}/{s}", home=self.sims[sim]) for s in range(stages)]
            self.routes.append(Route(tuple(self.requests[p] for p in asked), tuple(replies)))
