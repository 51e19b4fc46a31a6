"""The queue of a player's requests that wait for a policy worker, and the client that sends them and takes the answers.

Workers pull: participating workers take waiting requests while they have room, about equally many rows each. If a
worker dies or leaves, its requests wait again. An answer depends only on the request, so any worker may give it, and a
second answer to the same request is ignored.

    queue = RequestQueue()
    queue.workers({"policy-0": inf, "policy-1": inf})
    queue.put(Waiting(key=(7, 0), request=request, rows=64))
    queue.take()       -> {"policy-0": [rows 0 to 31], "policy-1": [rows 32 to 63]}
    queue.workers({"policy-1": inf})   # policy-0's devices are learning: its rows wait again
    queue.take()       -> {"policy-1": [rows 0 to 31]}
    queue.take_answer((7, 32))

The driver has such a queue for the prompts of several language engines (`workflows/prompt_queue.py`).
`RequestClient` is a player's end of a round: its own queue, the channels of its workers, and the channel of answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from embodied.core.arrays import Observation, concatenate, join_rows
from embodied.core.types import ActReply, ActRequest, Answerers, PolicyOutput


@dataclass(frozen=True)
class Waiting:
    """A request, or a part of one; `request.for_rows(rows)` makes a part of more than one row."""

    key: Hashable  # identifies its answer
    request: Any
    rows: int = 1
    conversation: Hashable = None  # conversation to continue, if possible on the worker with its cache
    goes_on: bool = False  # another request of this conversation may follow

    def split(self, count: int) -> tuple[Waiting, Waiting]:
        """The first `count` rows, and the rest."""
        parts = [self.request.for_rows(rows) for rows in (range(count), range(count, self.rows))]
        first, rest = (replace(self, key=piece.key, request=piece, rows=piece.rows) for piece in parts)
        return first, rest


class RequestQueue:
    """Waiting requests in order of arrival, and the requests of each worker."""

    def __init__(self) -> None:
        self.waiting: deque[Waiting] = deque()
        self.taken: dict[str, dict[Hashable, Waiting]] = {}  # by worker, in the order of taking
        self.most: dict[str, float] = {}  # by active worker: its largest number of rows
        self.kept_by: dict[Hashable, str] = {}  # conversation -> the worker with its cache

    def put(self, *requests: Waiting) -> None:
        self.waiting += requests

    def drop(self, unwanted: Callable[[Waiting], bool]) -> None:
        """Forget cancelled waiting requests."""
        self.waiting = deque(request for request in self.waiting if not unwanted(request))

    def workers(self, most: Mapping[str, float], others: Collection[str] = ()) -> None:
        """Set the active workers, each with its largest number of rows. Workers in `others` only finish their requests.
        Requests of all remaining workers wait again, in front."""
        self.most = dict(most)
        for gone in [worker for worker in self.taken if worker not in most and worker not in others]:
            self.waiting.extendleft(reversed(self.taken.pop(gone).values()))

    def give_back(self, key: Hashable) -> None:
        """A worker returns a request that it cannot answer: it waits again, in front."""
        for had in self.taken.values():
            if (request := had.pop(key, None)) is not None:
                self.waiting.appendleft(request)

    def take_answer(self, key: Hashable) -> bool:
        """Forget an answered request. False if no worker has it: then this is a second answer."""
        return any(had.pop(key, None) is not None for had in self.taken.values())

    @property
    def unanswered(self) -> int:
        """The number of waiting and taken requests."""
        return len(self.waiting) + sum(map(len, self.taken.values()))

    def load(self, worker: str) -> int:
        """The number of rows of a worker's requests."""
        return sum(request.rows for request in self.taken.get(worker, {}).values())

    def take(self) -> dict[str, list[Waiting]]:
        """The requests that workers take now. A conversation continues on the worker with its cache, if there is room.
        Other rows are divided equally, neighbouring rows together."""
        if not self.waiting or not self.most:
            return {}
        loads = {worker: self.load(worker) for worker in self.most}
        requests: dict[str, list[Waiting]] = {worker: [] for worker in self.most}
        others: deque[Waiting] = deque()
        for request in self.waiting:
            worker = self.kept_by.get(request.conversation, "")
            if worker in loads and self.most[worker] - loads[worker] >= request.rows:
                requests[worker].append(request)
                loads[worker] += request.rows
            else:
                others.append(request)
        shares = level(loads, self.most, sum(request.rows for request in others))
        for worker, share in shares.items():
            while share:
                request = others.popleft()
                if request.rows > share:
                    request, rest = request.split(share)
                    others.appendleft(rest)
                requests[worker].append(request)
                share -= request.rows
        self.waiting = others
        for worker, batch in requests.items():
            self.taken.setdefault(worker, {}).update((request.key, request) for request in batch)
            self.kept_by |= {request.conversation: worker for request in batch if request.goes_on}
        return {worker: batch for worker, batch in requests.items() if batch}


def level(loads: Mapping[str, int], most: Mapping[str, float], rows: int) -> dict[str, int]:
    """Distribute rows so that workers have about equally many, and none more than `most`: of 5 rows, workers with loads
    0, 3 and 3 and room for 4 each get 4, 1 and 0."""
    given = dict.fromkeys(loads, 0)
    has = dict(loads)
    while rows and (free := [worker for worker in has if has[worker] < most[worker]]):
        lowest = min(has[worker] for worker in free)
        low = [worker for worker in free if has[worker] == lowest]
        above = min((has[worker] for worker in free if has[worker] > lowest), default=inf)
        step = int(min(above - lowest, min(most[worker] for worker in low) - lowest, rows // len(low)))
        for worker in low if step else low[:rows]:
            given[worker] += step or 1
            has[worker] += step or 1
            rows -= step or 1
    return given


class RequestClient:
    """A player's end of the requests of one round. When a worker dies or leaves, the player gets the remaining workers'
    names and sends them its requests."""

    def __init__(self, answerers: Answerers, room: float = float("inf")) -> None:
        """A worker has at most `room` rows of its requests at a time."""
        self.source, self.replies, self.room = answerers.source, answerers.replies, room
        self.queue = RequestQueue()
        self._begin_with(answerers)

    def put(self, *requests: Waiting) -> None:
        self.queue.put(*requests)
        self._send()

    def get(self, timeout_s: float | None = None) -> Any:
        """The next message to this source, awaited for at most `timeout_s`; None if it was no answer."""
        reply = self.replies.get(timeout_s=timeout_s)
        if reply.source != self.source:  # of an earlier round
            return None
        if isinstance(reply, Answerers):
            self._begin_with(reply)
            self._send()
            return None
        return reply

    def _begin_with(self, answerers: Answerers) -> None:
        self.channels = answerers.channels
        self.queue.workers(dict.fromkeys(answerers.channels, self.room), answerers.others)

    def _send(self) -> None:
        for worker, requests in self.queue.take().items():
            for message in self.messages([waiting.request for waiting in requests]):
                self.channels[worker].put(message)

    def messages(self, requests: list[Any]) -> Sequence[Any]:
        """The messages for a worker's channel."""
        return requests


class PolicyClient(RequestClient):
    """Asks about the env rows of a stage, one decision after the other."""

    def __init__(self, answerers: Answerers) -> None:
        super().__init__(answerers)
        self.number = 0
        self.rows = 0  # of the last request

    def begin(self, rows: np.ndarray) -> None:
        """Do nothing when episodes begin: a policy has no memory."""

    def ask(self, obs: Observation, episodes: Any, decisions: Any, **what: Any) -> None:
        self.number, self.rows = self.number + 1, len(episodes)
        request = ActRequest(self.source, self.number, obs, episodes, decisions, **what)
        self.put(Waiting(request.key, request, request.rows))

    def answer(self) -> ActReply:
        """The answer to the last request, once all its parts have come."""
        parts: list[ActReply] = []
        while sum(len(came.values) for came in parts) < self.rows:
            reply = self.get()
            if reply is not None and self.queue.take_answer(reply.key):
                parts.append(reply)
        return join_answers(parts)


def join_answers(parts: list[ActReply]) -> ActReply:
    """The answer to a request that several workers answered in parts."""
    if len(parts) == 1:
        return parts[0]
    parts.sort(key=lambda reply: reply.key[1])
    outputs = [vars(reply.output) for reply in parts if reply.output is not None]
    final = [reply.final_values for reply in parts if reply.final_values is not None]
    values = concatenate([reply.values for reply in parts])
    return replace(
        parts[0],
        key=(parts[0].key[0], 0, len(values)),
        output=PolicyOutput(**join_rows(outputs)) if outputs else None,
        values=values,
        final_values=concatenate(final) if final else None,
    )
