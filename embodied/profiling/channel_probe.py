"""Stand-ins for channels and for what is at their other end, around a worker that is measured by itself."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.core.arrays import num_rows
from embodied.core.types import ActReply, ActRequest, PolicyOutput, Trajectory, join

if TYPE_CHECKING:
    from embodied.policies.worker import PolicyWorker


class Directly:
    """A channel to a policy in the same process: a question put here is answered at once, as if `copies` sims asked."""

    def __init__(self, policy: PolicyWorker, copies: int = 1) -> None:
        self.policy, self.copies = policy, copies
        self.answers: deque = deque()
        self.act_s: list[float] = []
        self.value_s: list[float] = []

    def put(self, request: ActRequest) -> None:
        asked = self.policy.completed(request)
        started = perf_counter()
        with self.policy.computing.counted():
            reply, *_ = self.policy._answer([asked] * self.copies, 1.0, "train")
        (self.value_s if request.value_only else self.act_s).append(perf_counter() - started)
        self.answers.append(reply)

    def get(self) -> ActReply:
        return self.answers.popleft()


class Noise:
    """The same with noise for actions, at no cost."""

    def __init__(self, shape: tuple[int, int], seed: int) -> None:
        """`shape`: actions of a decision, numbers of an action."""
        self.shape = shape
        self.draw = np.random.default_rng(seed)
        self.answers: deque = deque()
        self.act_s: list[float] = []
        self.value_s: list[float] = []

    def put(self, request: ActRequest) -> None:
        count = len(request.episodes)
        values = np.zeros(count, np.float32)
        finals = None if request.final_obs is None else np.zeros(num_rows(request.final_obs), np.float32)
        actions = self.draw.uniform(-1, 1, (count, *self.shape)).astype(np.float32)
        (self.value_s if request.value_only else self.act_s).append(0.0)
        output = None if request.value_only else PolicyOutput(actions, np.zeros_like(actions), values)
        self.answers.append(ActReply(request.source, request.number, output, values, finals, 0))

    def get(self) -> ActReply:
        return self.answers.popleft()


class Kept:
    """A channel that keeps what is put, and gives it again and again, as if `copies` sims had played it."""

    def __init__(self, copies: int = 1) -> None:
        self.copies = copies
        self.items: deque = deque(maxlen=1)

    def put(self, item: Any, weight: float = 1) -> None:
        self.items.append(copied(item, self.copies))

    def get(self) -> Any:
        return self.items[0]


def copied(played: Trajectory, copies: int) -> Trajectory:
    """As if so many sims had played the same, each in env rows or episodes of its own."""
    each = int(played.ids.max()) + 1
    parts = [replace(played, ids=played.ids + copy * each) for copy in range(copies)]
    return replace(join(parts), source=played.source)
