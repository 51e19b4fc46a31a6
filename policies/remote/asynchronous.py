"""Drives a robot with a policy server, without waiting for it: the next chunk is computed while this one is played.

    robot = ChunkClient("ws://127.0.0.1:8000", overlap=4, blend="real_time")
    while True:
        arm.move(robot.act({"state": state, "images": {"wrist": image}, "instruction": "open the drawer"}))

Delays are counted in control steps, the calls of `act`. It needs numpy, msgpack, pydantic and websockets, and a server
of ours (`embodied.serve`), which answers with whole chunks.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import numpy as np

from embodied.core.chunks import ChunkRule
from embodied.core.errors import ConfigError
from embodied.policies.config import RemoteConfig
from embodied.policies.remote.client import Connection

REMEMBERED = 10  # delays; the next answer is expected after the longest of them


class ChunkClient:
    """One robot. `overlap` and `blend` are those of `policy.chunks`; `delay` is the first guess, in control steps."""

    def __init__(
        self,
        url: str,
        overlap: int = 0,
        blend: Literal["linear", "real_time"] = "linear",
        delay: int = 2,
        connection: Any = None,
        **options: Any,
    ) -> None:
        """`options` are those of policy.name=remote, such as `token_from`."""
        self.connection = connection or Connection(RemoteConfig(url=url, **options))
        self.length = self.connection.hello.get("action_chunk", 1)
        self.overlap, self.real_time = overlap, blend == "real_time"
        self.delays: deque[int] = deque([delay], maxlen=REMEMBERED)
        self.pool = ThreadPoolExecutor(1)
        self.answer: Future | None = None
        self.plan = np.empty((0, 0))  # the actions from this control step on
        self.steps = 0  # control steps since the last request
        ChunkRule(delay, overlap).check(self.length, f"{url} with chunks of {self.length} actions")

    @property
    def delay(self) -> int:
        """The control steps in which the next answer is expected."""
        return min(max(self.delays), self.length - self.overlap - 1)

    def act(self, observation: dict[str, Any]) -> np.ndarray:
        """The action of this control step. Waits for the server only if the chunk is over: at the beginning, and when
        an answer is later than the ones before."""
        if self.answer and (self.answer.done() or not len(self.plan)):
            self._take()
        while not len(self.plan):  # it also passes over chunks that are over when they come
            self._ask(observation)
            self._take()
        if self.answer is None and len(self.plan) <= self.delay + self.overlap:
            self._ask(observation)
        action, self.plan = self.plan[0], self.plan[1:]
        self.steps += 1
        return action

    def reset(self) -> None:
        """Forget the present chunk, when another episode begins."""
        if self.answer:
            self.answer.result()
        self.answer, self.plan = None, self.plan[:0]

    def close(self) -> None:
        self.pool.shutdown()
        self.connection.close()

    def _ask(self, observation: dict[str, Any]) -> None:
        sent = {
            "images": {},
            **observation,
            "task_description": observation.get("instruction", ""),
            "whole_chunk": True,
        }
        if self.real_time and len(self.plan):
            weights = ChunkRule(self.delay, self.overlap).weights()[: len(self.plan)]
            sent["previous"] = {"actions": self.plan[: len(weights)].astype(np.float32), "weights": weights}
        self.answer, self.steps = self.pool.submit(self.connection.ask, "observation", sent, "action"), 0

    def _take(self) -> None:
        """Take the answer's actions from this control step on, joined with the rest of the chunk before."""
        assert self.answer is not None, "it was asked for"
        given = np.asarray(self.answer.result()["actions"])
        self.answer = None
        if given.ndim != 2:
            raise ConfigError(f"{self.connection.name} answers with single actions; ask a server of ours")
        self.delays.append(max(self.steps, 1))
        new, rest = given[self.steps :], self.plan[: self.overlap]
        rule = ChunkRule(0, min(len(rest), len(new)), self.real_time)
        self.plan = rule.join(rest[None, : rule.overlap], new[None])[0] if len(rest) else new
