"""A worker that measures the parts of a recipe in one process: its env, its policy and its learner, at several sizes.

The real, unchanged workers do the work on their role's device; only the channels between them are replaced by calls. So
measurements include all work of a run (recording, resets, noise, checks), but no transfers. If simulators and networks
have different devices, they are measured separately: sims with random actions, networks with repeated observations of a
few rows.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from embodied.config.recipe import RunConfig
from embodied.core.arrays import num_rows, take_rows, text_lists
from embodied.core.errors import DeadlineExceeded
from embodied.core.types import (
    ActReply,
    ActRequest,
    Answerers,
    BatchEnd,
    EpisodeList,
    Job,
    PolicyOutput,
    Route,
    SamplingRule,
    Trajectory,
    Unit,
    join,
)
from embodied.envs import env_class
from embodied.envs.sim_worker import SimWorker
from embodied.envs.store import arrays_of
from embodied.learners.learner_worker import LearnerWorker
from embodied.learners.memory_estimate import Memory, unsharded_gradient
from embodied.policies import make_policy
from embodied.policies.policy_worker import PolicyWorker
from embodied.runtime import Timers, Worker
from embodied.runtime.device_memory import Computing, num_bytes
from embodied.runtime.weights import new_name

PAGE = os.sysconf("SC_PAGE_SIZE")
PARTS = ("sim", "policy", "learner")
ROWS = 4  # rows of a sim that only feeds networks


@dataclass
class Samples:
    """Repeated measurements at one size."""

    seconds: dict[str, list[float]] = field(default_factory=dict)  # of a sim's decision, a policy's answer, its value
    reset_s: list[float] = field(default_factory=list)  # of whole episodes' resets, per episode of a row
    bytes: int = 0  # of this process's memory for the envs
    horizon: int = 1  # decisions of a rollout, or of a whole episode
    decision_s: float = 0.0  # wall-clock seconds per decision of the last rollout
    policy_bytes: float = 0.0  # the policy's reported need after answering this size
    conversations: list[tuple[int, int]] = field(default_factory=list)  # tokens of the prompt, and of the rest
    pass_cost: tuple[float, ...] = (1.0, 0.0)  # as `Policy.pass_cost`


@dataclass(frozen=True)
class Moves:
    """A worker's device memory, and the seconds to offload and onload it."""

    bytes: float
    offload_s: float
    onload_s: float
    weight_bytes: float = 0.0  # weights among these that are shared with a learner in the process
    split_bytes: float = 0.0  # part of these that learners with shards divide


@dataclass
class ProbedPart:
    """A sim, its last rollout, and the policy it asks, if the policy is measured."""

    sim: SimWorker
    kept: ReplayedChannel
    policy: PolicyWorker | None
    bytes: int  # memory for the sim
    limit: int  # env steps of its episodes


class ProbeWorker(Worker):
    sim_worker: type[Worker] = SimWorker
    policy_worker: type[Worker] = PolicyWorker

    def __init__(self, config: RunConfig, device: str = "cpu", parts: tuple[str, ...] = PARTS) -> None:
        """`device` is the torch device of policy and learner; `parts` are the measured ones."""
        self.config = config
        self.device = device
        self.measured = parts
        self.grouped = config.algo.whole_episodes
        self.parts: dict[int, ProbedPart] = {}  # by number of the sim's rows
        self.samples: dict[int, Samples] = {}  # by number of rows
        self.steps = 0  # step limit of episodes in groups

    def rollout(self, num_envs: int, decisions: int, repeats: int) -> Samples:
        """Play `repeats` + 1 rollouts with these numbers of decisions and envs; the first one builds and resets
        everything. Whole episodes end after this number of decisions; their resets' time is spread over a real
        episode."""
        rows = self._rows(num_envs)
        part, copies = self._make_part(rows), num_envs // rows
        horizon = self._horizon(part.limit)
        samples = self.samples.setdefault(num_envs, Samples(bytes=part.bytes, horizon=horizon))
        part.kept.copies = copies
        if part.policy:  # larger requests are not counted
            part.policy.computing, part.policy.cache_bytes = Computing(), 0
        self.steps = decisions * self._chunk
        for repeat in range(repeats + 1):
            direct = self._answers(part, copies)
            started = perf_counter()
            reset_s = self._play(part, rows, decisions, (Answerers("probe", {"probe": direct}, replies=direct),))
            wall = perf_counter() - started
            self.tick()
            if repeat:
                self._note(samples, direct, wall, reset_s)
        samples.policy_bytes = part.policy.needs().num_bytes if part.policy else 0.0
        return samples

    def _answers(self, part: ProbedPart, copies: int) -> DirectChannel:
        if part.policy:
            return PolicyAnswers(part.policy, copies)
        return NoiseAnswers((self._chunk, part.sim.build().action.dim), self.config.seed)

    def _note(self, samples: Samples, direct: DirectChannel, wall: float, reset_s: float) -> None:
        whole = wall - sum(direct.act_s) - sum(direct.value_s)
        decisions = self._num_decisions(direct)
        samples.decision_s = wall / decisions
        times = {}
        if "sim" in self.measured:
            samples.reset_s.append(reset_s)
            times["sim"] = (whole - reset_s) / decisions + reset_s / samples.horizon
        if "policy" in self.measured:
            times["policy"] = sum(direct.act_s) / decisions
            times |= {"value": float(np.mean(direct.value_s))} if direct.value_s else {}
        for name, seconds in times.items():
            samples.seconds.setdefault(name, []).append(seconds)

    def _rows(self, num_envs: int) -> int:
        """The sim's number of rows: all if it is measured, else a few."""
        if "sim" in self.measured:
            return num_envs
        return next(rows for rows in range(min(ROWS, num_envs), 0, -1) if num_envs % rows == 0)

    @property
    def _chunk(self) -> int:
        return self.config.policy.chunk

    def _num_decisions(self, direct: DirectChannel) -> int:
        """The divisor of a rollout's seconds."""
        return len(direct.act_s)

    def update(self, num_envs: int, minibatch: int, repeats: int) -> dict[str, list[float]]:
        """Update on the last rollout of this many envs. Returns seconds of a gradient step ("step"), of the rest of an
        update ("fixed"), of encoding an item with frozen parts ("ahead"), of the whole measurement ("whole"); and bytes
        of the learner ("bytes") and of an item waiting for it ("item_bytes")."""
        part = self.parts[self._rows(num_envs)]
        first = 2 if self._has_frozen_parts(part) else 1  # epochs: with a single one no frozen features are kept
        times, encoding = {first: [], first + 1: []}, []
        items = self._num_items(part.kept.get())
        steps = -(-items // minibatch)
        with self._without_policy(part):
            for epochs, found in times.items():
                algo = self.config.algo.model_copy(update={"minibatch_size": minibatch, "epochs": epochs})
                encoded, needed = self._updates(algo, part, repeats, found)
                encoding += [seconds / items for seconds in encoded]
        less, more = min(times[first]), min(times[first + 1])
        epoch = max(more - less, 0.1 * less)
        update_s = [seconds / steps * epoch / less for seconds in times[first]]
        fixed = max(less - first * epoch, 0.0)
        return {
            "step": update_s,
            "fixed": [fixed],
            "ahead": encoding if first > 1 else [0.0],
            "whole": [less + more],
            "bytes": [needed],
            "item_bytes": [sum(array.nbytes for array in arrays_of(part.kept.get()).values()) / items],
        }

    def _num_items(self, played: Trajectory) -> int:
        """The number of items that gradient steps and their minibatches count."""
        return len(played.mask)

    def _updates(self, algo: Any, part: ProbedPart, repeats: int, seconds: list[float]) -> tuple[list[float], float]:
        """Adds the seconds of updates of a new learner to `seconds`. Returns seconds of encoding, and needed bytes."""
        learner, encoding = self._learner(algo, part), []
        for repeat in range(repeats + 1):
            started, before = perf_counter(), learner.timers.totals()
            self._learn(learner, part)
            if repeat:
                encoding += [0.0] if self.grouped else learner.timers.seconds_since(before, "encode")
                seconds.append(perf_counter() - started - encoding[-1])
            self.tick()
        needed = learner.needs().num_bytes
        learner.close()
        return encoding, needed

    @contextmanager
    def _without_policy(self, part: ProbedPart) -> Iterator[None]:
        """Inside, the policy is offloaded: the GPU may be too small for a learner beside it."""
        moves = self.device != "cpu"
        if moves:
            part.policy.offload()
        yield
        if moves:
            part.policy.onload()

    def _has_frozen_parts(self, part: ProbedPart) -> bool:
        if self.config.algo.epochs == 1:
            return False
        played = part.kept.get()
        obs = text_lists(take_rows(played.obs, slice(0, 1)))
        with torch.no_grad():
            return bool(part.policy.policy.frozen_features(obs))

    def moves(self, num_envs: int) -> dict[str, Moves]:
        """Measures how the policy, and a learner after its first update, are offloaded and onloaded."""
        part = self.parts[self._rows(num_envs)]
        measured = {"policy": moves_of(part.policy)}
        with self._without_policy(part):
            learner = self._learner(self.config.algo.model_copy(update={"epochs": 1}), part)
            self._learn(learner, part)
            measured["learner"] = moves_of(learner)
            if self.config.learner.shard:
                measured["learner"] = in_shards(learner, measured["learner"])
            learner.close()
            del learner
        return measured

    def _play(self, part: ProbedPart, num_envs: int, decisions: int, route: Route) -> float:
        """Play the rollout; returns the seconds of whole episodes' resets."""
        alike = self.config.algo.group_size if self.grouped and not self.config.policy.speaks else 1
        tasks = env_class(self.config.env).tasks(self.config.env)
        episodes = EpisodeList(self.config.seed + self.rank, "profile", tasks, group_size=alike)
        if not self.grouped:
            part.sim.play([Job(episodes, horizon=decisions, outlets=(part.kept,))], route)
            return 0.0
        part.sim.forget_all_but(())
        (played,) = part.sim.play([Job(episodes.first(num_envs))], route)
        part.sim.send_stored([*part.sim.store], "probe", part.kept, 0)
        return played.reset_s

    def _learn(self, learner: LearnerWorker, part: ProbedPart) -> None:
        played = part.kept.get()
        scores = np.resize([1.0, -1.0], len(played.ids)) if self.grouped else None
        unit = Unit((played.source,), played.ids, scores, scores)
        learner.learn(Items([played, unit, BatchEnd(0, 100)]), 0, 0, None if self.grouped else played.ids)

    def _learner(self, algo: Any, part: ProbedPart) -> LearnerWorker:
        options = (self.config.policy, algo, self.config.learner.model_copy(update={"shard": False}))
        learner = standalone_worker(LearnerWorker, *options, self.config.seed, None, self.device, tick=self.tick)
        learner.build(part.sim.build(), new_name(), snapshot=False)
        return learner

    def _make_part(self, rows: int) -> ProbedPart:
        if rows not in self.parts:
            simulator = "cuda" if self.config.env.on_gpu else "cpu"
            before = used_bytes(simulator)
            sim = standalone_worker(
                self.sim_worker, self.config.env.model_copy(update={"num_envs": rows}), tick=self.tick
            )
            limit = sim.build().max_episode_steps
            num_bytes = max(used_bytes(simulator) - before, 0)
            if self.grouped:
                self._cut_episodes(sim, limit)
            policy = self._policy(sim) if "policy" in self.measured else None
            self.parts[rows] = ProbedPart(sim, ReplayedChannel(), policy, num_bytes, limit)
        return self.parts[rows]

    def _horizon(self, limit: int) -> int:
        return -(-limit // self._chunk) if self.grouped else self.config.algo.rollout_decisions

    def _cut_episodes(self, sim: SimWorker, limit: int) -> None:
        """Start episodes at a later step, so that they end after `steps`."""
        env = sim.stages[0].env
        reset = env.reset

        def late(options: dict[str, Any]) -> Any:
            return reset(options={**options, "elapsed": np.full(env.num_envs, max(limit - self.steps, 0))})

        env.reset = late

    def _policy(self, sim: SimWorker) -> PolicyWorker:
        config, precision = self.config, self.config.learner.precision
        policy = standalone_worker(self.policy_worker, config.policy, config.seed, precision, self.device)
        policy.build(sim.build())
        policy.policy.use_weights(make_policy(config.policy, sim.build(), config.seed).state_dict())
        policy.weights.version = 0
        return policy


def moves_of(worker: PolicyWorker | LearnerWorker) -> Moves:
    """Moves a worker out and back twice and measures the second time: the first one also allocates host memory."""
    for _ in range(2):
        started = perf_counter()
        worker.offload()
        left = perf_counter()
        worker.onload()
        back = perf_counter()
    shared = worker.needs(shared=True).num_bytes
    whole = worker.needs().num_bytes
    return Moves(whole, left - started, back - left, weight_bytes=whole - shared)


def in_shards(learner: LearnerWorker, moves: Moves) -> Moves:
    """Moves of one of several learners with shards of this one's weights; bytes as if it were alone."""
    parameters = list(learner.policy.parameters())
    trained = [p for p in parameters if p.requires_grad]
    blocks = [num_bytes(block.parameters()) for block in learner.policy.blocks()]
    memory = Memory(
        num_weights=sum(p.numel() for p in parameters),
        num_trained=sum(p.numel() for p in trained),
        weights=num_bytes(parameters),
        training=0,
        activations=learner.computing.num_bytes,
        reference=num_bytes(learner._reference()),
        trained=num_bytes(trained),
        gathered=num_bytes(parameters) - sum(blocks) + max(blocks, default=0),
        gradient=unsharded_gradient(learner.policy, learner.config.reduce_each_pass is not False),
    )
    split = 2 * (memory.sharded(1) - memory.sharded(2))
    return replace(moves, bytes=memory.sharded(1), split_bytes=split)


def standalone_worker(cls: type[Worker], *args: Any, tick=None, **kwargs: Any) -> Any:
    """A worker outside of a group, the only one of its role."""
    worker = cls.__new__(cls)
    worker.name, worker.rank, worker.world_size, worker.timers = f"probed-{cls.__name__}", 0, 1, Timers()
    if tick:
        worker.tick = tick
    worker.__init__(*args, **kwargs)
    return worker


def used_bytes(simulator: str) -> int:
    """Bytes in use of this process's memory, or of its GPU."""
    if simulator == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total - free
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


# Replacements for channels and their other ends, around a measured worker


class DirectChannel:
    """A channel for requests and replies: `answer` runs in this process when a reply is awaited."""

    def __init__(self) -> None:
        self.waiting: deque = deque()
        self.act_s: list[float] = []  # seconds of answers
        self.value_s: list[float] = []

    def put(self, request: Any) -> None:
        self.waiting.append(request)

    def get(self, timeout_s: float | None = None) -> Any:
        started = perf_counter()
        reply = self.answer()
        only_values = isinstance(reply, ActReply) and reply.output is None
        (self.value_s if only_values else self.act_s).append(perf_counter() - started)
        return reply


class PolicyAnswers(DirectChannel):
    """Answers of a policy, as if `copies` sims asked."""

    def __init__(self, policy: PolicyWorker, copies: int) -> None:
        super().__init__()
        self.policy, self.copies = policy, copies

    def answer(self) -> ActReply:
        asked = self.waiting.popleft()
        with self.policy.computing.measured():
            return self.policy._answer([asked] * self.copies, SamplingRule())[0]


class NoiseAnswers(DirectChannel):
    def __init__(self, shape: tuple[int, int], seed: int) -> None:
        """`shape`: actions of a decision, numbers of an action."""
        super().__init__()
        self.shape = shape
        self.draw = np.random.default_rng(seed)

    def answer(self) -> ActReply:
        request: ActRequest = self.waiting.popleft()
        count = len(request.episodes)
        values = np.zeros(count, np.float32)
        finals = None if request.final_obs is None else np.zeros(num_rows(request.final_obs), np.float32)
        actions = self.draw.uniform(-1, 1, (count, *self.shape)).astype(np.float32)
        output = None if request.value_only else PolicyOutput(actions, np.zeros_like(actions), values)
        return ActReply(request.source, request.key, output, values, finals, 0)


class ReplayedChannel:
    """A channel that keeps its items and returns them repeatedly, as if `copies` sims had sent them."""

    copies = 1

    def __init__(self) -> None:
        self.items: deque = deque(maxlen=1)

    def put(self, item: Any, key: Any = None) -> None:
        self.items.append(copies_of(item, self.copies))

    def get(self) -> Any:
        return self.items[0]


class Items:
    """A channel to a learner, with all of its items."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = deque(items)

    def get(self, key: Any = None, timeout_s: float | None = None) -> Any:
        if not self.items:
            raise DeadlineExceeded("nothing more will come")
        return self.items.popleft()


def copies_of(played: Trajectory, copies: int) -> Trajectory:
    """Copies of the trajectories, as if `copies` sims had played them in separate env rows or episodes."""
    num_ids = int(played.ids.max()) + 1
    parts = [replace(played, ids=played.ids + copy * num_ids) for copy in range(copies)]
    return replace(join(parts), source=played.source)
