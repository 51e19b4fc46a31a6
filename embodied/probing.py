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

from embodied.config import RunConfig
from embodied.data import Route
from embodied.envs.worker import SimWorker
from embodied.episodes import EpisodeList
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
    bytes: int = 0  # of this process's memory that came with the envs


class Directly:
    """A channel to a policy in the same process: a question put here is answered at once."""

    def __init__(self, policy: PolicyWorker) -> None:
        self.policy = policy
        self.answers: deque = deque()
        self.act_s: list[float] = []
        self.value_s: list[float] = []

    def put(self, request: Any) -> None:
        started = perf_counter()
        reply = self.policy._answer(request, 1.0, "train")
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


class ProbeWorker(Worker):
    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.sims: dict[int, tuple[SimWorker, Samples]] = {}
        self.trajectories: dict[int, Kept] = {}

    def rollout(self, num_envs: int, decisions: int, repeats: int) -> Samples:
        """Play rollouts of so many decisions in so many envs, one more than `repeats`: the first builds and resets
        everything."""
        sim, samples = self._sim(num_envs)
        policy = self._policy(sim)
        kept = self.trajectories.setdefault(num_envs, Kept())
        episodes = EpisodeList(self.config.seed + self.rank, "profile", tasks_of(self.config))
        for repeat in range(repeats + 1):
            direct = Directly(policy)
            started = perf_counter()
            sim.collect(episodes, decisions, Route(("probe",), (direct,), (direct,)), (kept,))
            whole = perf_counter() - started - sum(direct.act_s) - sum(direct.value_s)
            self.tick()
            if repeat:
                samples.seconds.setdefault("sim", []).append(whole / decisions)
                samples.seconds.setdefault("policy", []).append(float(np.mean(direct.act_s)))
                samples.seconds.setdefault("value", []).append(float(np.mean(direct.value_s)))
        return samples

    def update(self, num_envs: int, decisions: int, minibatch: int, repeats: int) -> dict[str, list[float]]:
        """Learn from the last rollout in so many envs: seconds of a gradient step, and what an update takes besides."""
        times = {1: [], 2: []}
        steps = -(-num_envs * decisions // minibatch)
        for epochs, found in times.items():
            algo = self.config.algo.model_copy(update={"minibatch_size": minibatch, "epochs": epochs})
            options = (self.config.policy, algo, self.config.learner.model_copy(update={"shard": False}))
            learner = real(LearnerWorker, *options, self.config.seed, None, tick=self.tick)
            learner.build(self.sims[num_envs][0].spec(), new_name(), snapshot=False)
            for repeat in range(repeats + 1):
                started = perf_counter()
                learner.update(self.trajectories[num_envs], ("probe",), np.arange(num_envs), 0, 100)
                if repeat:
                    found.append(perf_counter() - started)
                self.tick()
            learner.close()
        once, twice = min(times[1]), min(times[2])
        epoch = max(twice - once, 0.1 * once)
        each = [seconds / steps * epoch / once for seconds in times[1]]
        return {"step": each, "fixed": [max(once - epoch, 0.0)]}

    def forget(self, num_envs: int) -> None:
        sim, _ = self.sims.pop(num_envs)
        self.trajectories.pop(num_envs, None)
        sim.close()
        gc.collect()

    def _sim(self, num_envs: int) -> tuple[SimWorker, Samples]:
        if num_envs not in self.sims:
            before = resident_bytes()
            env = self.config.env.model_copy(update={"num_envs": num_envs})
            sim = real(SimWorker, env, tick=self.tick)
            sim.spec()
            self.sims[num_envs] = sim, Samples(bytes=max(resident_bytes() - before, 0))
        return self.sims[num_envs]

    def _policy(self, sim: SimWorker) -> PolicyWorker:
        policy = real(PolicyWorker, self.config.policy, self.config.seed, self.config.learner.precision)
        policy.build(sim.spec())
        policy.policy = make_policy(self.config.policy, sim.spec(), self.config.seed).eval()  # with initial weights
        policy.weights.version = 0
        return policy


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
