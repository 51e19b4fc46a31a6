"""A worker that measures the parts of a recipe in one process: its env, its policy and its learner, at several sizes.

The real workers do the work, unchanged; only the channels between them are replaced, by calls. So what is measured
holds what their work holds in a run (recording, resets, noise, checks), and no time that goes into handing over.
"""

from __future__ import annotations

import gc
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from embodied.config import RunConfig
from embodied.data import GroupBatch, PlayedEpisodes, Route, Trajectory
from embodied.envs.base import VectorEnv
from embodied.envs.worker import SimWorker
from embodied.episodes import EpisodeList
from embodied.learners.batch import flatten_obs
from embodied.learners.intake import cut
from embodied.learners.worker import LearnerWorker
from embodied.policies import make_policy
from embodied.policies.worker import PolicyWorker
from embodied.runtime import Timers, Worker
from embodied.runtime.weights import new_name

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Samples:
    """Repeated measurements at one size."""

    seconds: dict[str, list[float]] = field(default_factory=dict)  # of a sim's decision, a policy's answer, its value
    reset_s: list[float] = field(default_factory=list)  # of the resets of whole episodes, per episode of a row
    bytes: int = 0  # of this process's memory that came with the envs
    horizon: int = 1  # decisions of a rollout, or of a whole episode


@dataclass(frozen=True)
class Moves:
    """What a worker needs of its device's memory, and how long it takes to give that back and to take it again."""

    bytes: float
    offload_s: float
    onload_s: float


class Directly:
    """A channel to a policy in the same process: a question put here is answered at once."""

    def __init__(self, policy: PolicyWorker) -> None:
        self.policy = policy
        self.answers: deque = deque()
        self.act_s: list[float] = []
        self.value_s: list[float] = []

    def put(self, request: Any) -> None:
        started = perf_counter()
        (reply,) = self.policy._answer([self.policy.completed(request)], 1.0, "train")
        (self.value_s if request.value_only else self.act_s).append(perf_counter() - started)
        self.answers.append(reply)

    def get(self) -> Any:
        return self.answers.popleft()


class Kept:
    """A channel that keeps what is put, and gives it again and again."""

    def __init__(self) -> None:
        self.items: deque = deque(maxlen=1)

    def put(self, item: Any, weight: float = 1) -> None:
        self.items.append(item)

    def get(self) -> Any:
        return self.items[0]


@dataclass
class Part:
    """A sim with its policy, and what it played last."""

    sim: SimWorker
    policy: PolicyWorker
    samples: Samples
    kept: Kept


class ProbeWorker(Worker):
    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.grouped = config.algo.name != "ppo"
        self.parts: dict[int, Part] = {}
        self.steps = 0  # env steps that episodes in groups may last

    def rollout(self, num_envs: int, decisions: int, repeats: int) -> Samples:
        """Play rollouts of so many decisions in so many envs, one more than `repeats`: the first builds and resets
        everything. Whole episodes end after so many decisions; what their resets take is spread over a real episode."""
        part = self._part(num_envs)
        self.steps = decisions * getattr(self.config.policy, "chunk", 1)
        for repeat in range(repeats + 1):
            direct = Directly(part.policy)
            route = Route(("probe",), (direct,), (direct,))
            started = perf_counter()
            reset_s = self._play(part, num_envs, decisions, route)
            whole = perf_counter() - started - sum(direct.act_s) - sum(direct.value_s)
            self.tick()
            if repeat:
                decision_s = (whole - reset_s) / len(direct.act_s) + reset_s / part.samples.horizon
                part.samples.reset_s.append(reset_s)
                found = {"sim": decision_s, "policy": float(np.mean(direct.act_s))}
                found |= {"value": float(np.mean(direct.value_s))} if direct.value_s else {}
                for name, seconds in found.items():
                    part.samples.seconds.setdefault(name, []).append(seconds)
        return part.samples

    def update(self, num_envs: int, minibatch: int, repeats: int) -> dict[str, list[float]]:
        """Learn from the last rollout in so many envs: seconds of a gradient step, what an update takes besides, of
        looking at an item with frozen parts ahead of all steps, and of the updates that were measured for that."""
        part = self.parts[num_envs]
        first = 2 if self._has_frozen_parts(part) else 1  # epochs: with one nothing is kept of what frozen parts make
        times, looks = {first: [], first + 1: []}, []
        items = num_decisions(part.kept.get())
        steps = -(-items // minibatch)
        for epochs, found in times.items():
            algo = self.config.algo.model_copy(update={"minibatch_size": minibatch, "epochs": epochs})
            learner = self._learner(algo, part)
            for repeat in range(repeats + 1):
                started, looked_before = perf_counter(), looking_s(learner)
                self._learn(learner, part)
                if repeat:
                    looked = 0.0 if self.grouped else looking_s(learner) - looked_before
                    found.append(perf_counter() - started - looked)
                    looks.append(looked / items)
                self.tick()
            learner.close()
        less, more = min(times[first]), min(times[first + 1])
        epoch = max(more - less, 0.1 * less)
        each = [seconds / steps * epoch / less for seconds in times[first]]
        fixed = max(less - first * epoch, 0.0)
        return {"step": each, "fixed": [fixed], "ahead": looks if first > 1 else [0.0], "whole": [less + more]}

    def _has_frozen_parts(self, part: Part) -> bool:
        if self.config.algo.epochs == 1:
            return False
        played = part.kept.get()
        obs = cut(played.obs, slice(0, 1)) if self.grouped else flatten_obs(cut(played.obs, slice(0, 1)))
        with torch.no_grad():
            return bool(part.policy.policy.frozen_features(obs))

    def moves(self, num_envs: int) -> dict[str, Moves]:
        """Of the policy, and of a learner that has learned once."""
        part = self.parts[num_envs]
        learner = self._learner(self.config.algo.model_copy(update={"epochs": 1}), part)
        self._learn(learner, part)
        found = {"policy": moves_of(part.policy), "learner": moves_of(learner)}
        learner.close()
        return found

    def forget(self, num_envs: int) -> None:
        self.parts.pop(num_envs).sim.close()
        gc.collect()

    def _play(self, part: Part, num_envs: int, decisions: int, route: Route) -> float:
        """-> seconds that went into resets of whole episodes."""
        group_size = self.config.algo.group_size if self.grouped else 1
        episodes = EpisodeList(self.config.seed + self.rank, "profile", tasks_of(self.config), group_size=group_size)
        if not self.grouped:
            part.sim.collect(episodes, decisions, route, (part.kept,))
            return 0.0
        part.sim.keep(())
        stats = part.sim.play([episodes[i] for i in range(num_envs)], route)
        part.sim.hand_over([np.array(part.sim.kept())], "probe", (part.kept,))
        return stats.reset_s

    def _learn(self, learner: LearnerWorker, part: Part) -> None:
        played = part.kept.get()
        if not self.grouped:
            learner.update(part.kept, ("probe",), np.arange(played.rewards.shape[1]), 0, 100)
            return
        scores = np.resize([1.0, -1.0], len(played.episodes))
        batch = GroupBatch(played.episodes, scores, scores, 0, 0, len(scores))
        learner.update_groups(part.kept, ("probe",), batch, 0, 100)

    def _learner(self, algo: Any, part: Part) -> LearnerWorker:
        options = (self.config.policy, algo, self.config.learner.model_copy(update={"shard": False}))
        learner = real(LearnerWorker, *options, self.config.seed, None, tick=self.tick)
        learner.build(part.sim.spec(), new_name(), snapshot=False)
        return learner

    def _part(self, num_envs: int) -> Part:
        if num_envs not in self.parts:
            before = resident_bytes()
            sim = real(SimWorker, self.config.env.model_copy(update={"num_envs": num_envs}), tick=self.tick)
            limit = sim.spec().max_episode_steps
            samples = Samples(bytes=max(resident_bytes() - before, 0), horizon=self._horizon(limit))
            if self.grouped:
                self._cut_episodes(sim.stages[0].env, limit)
            self.parts[num_envs] = Part(sim, self._policy(sim), samples, Kept())
        return self.parts[num_envs]

    def _horizon(self, limit: int) -> int:
        return (
            -(-limit // getattr(self.config.policy, "chunk", 1)) if self.grouped else self.config.algo.rollout_decisions
        )

    def _cut_episodes(self, env: VectorEnv, limit: int) -> None:
        """Let episodes begin so late that they end after `steps`."""
        reset = env.reset

        def late(options: dict[str, Any]) -> Any:
            return reset(options={**options, "elapsed": np.full(env.num_envs, max(limit - self.steps, 0))})

        env.reset = late

    def _policy(self, sim: SimWorker) -> PolicyWorker:
        policy = real(PolicyWorker, self.config.policy, self.config.seed, self.config.learner.precision)
        policy.build(sim.spec())
        policy.policy = make_policy(self.config.policy, sim.spec(), self.config.seed).eval()  # with initial weights
        policy.weights.version = 0
        return policy


def looking_s(learner: LearnerWorker) -> float:
    total = learner.timers.totals().get("look")
    return total.seconds if total else 0.0


def num_decisions(played: Trajectory | PlayedEpisodes) -> int:
    if isinstance(played, PlayedEpisodes):
        return int(played.lengths.sum())
    return played.rewards.shape[0] * played.rewards.shape[1]


def moves_of(worker: PolicyWorker | LearnerWorker) -> Moves:
    """The second time: the first one also gets the host memory that tensors go to."""
    for _ in range(2):
        started = perf_counter()
        worker.offload()
        left = perf_counter()
        worker.onload()
        back = perf_counter()
    return Moves(worker.needs().num_bytes, left - started, back - left)


def real(cls: type[Worker], *args: Any, tick=None, **kwargs: Any) -> Any:
    """A worker outside of a group, alone of its role."""
    worker = cls.__new__(cls)
    worker.name, worker.rank, worker.world_size, worker.timers = f"probed-{cls.__name__}", 0, 1, Timers()
    if tick:
        worker.tick = tick
    worker.__init__(*args, **kwargs)
    return worker


def tasks_of(config: RunConfig) -> Any:
    from embodied.envs import env_class

    return env_class(config.env).tasks(config.env)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
