"""Sends a player's requests to policy workers, and takes the answers of any of them (`core/request_queue.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from embodied.core.arrays import Observation, concatenate, join_rows
from embodied.core.request_queue import RequestQueue, Waiting
from embodied.core.types import ActReply, ActRequest, PolicyOutput, Servers


class RequestClient:
    """A player's end of the requests of one round. When a worker dies or leaves, the player gets the remaining workers'
    names and sends them its requests."""

    def __init__(self, servers: Servers, room: float = float("inf")) -> None:
        """A worker has at most `room` rows of its requests at a time."""
        self.source, self.replies, self.room = servers.source, servers.replies, room
        self.queue = RequestQueue()
        self._begin_with(servers)

    def put(self, *requests: Waiting) -> None:
        self.queue.put(*requests)
        self._send()

    def get(self, timeout_s: float | None = None) -> Any:
        """The next message to this source, awaited for at most `timeout_s`; None if it was no answer."""
        reply = self.replies.get(timeout_s=timeout_s)
        if reply.source != self.source:  # of an earlier round
            return None
        if isinstance(reply, Servers):
            self._begin_with(reply)
            self._send()
            return None
        return reply

    def _begin_with(self, servers: Servers) -> None:
        self.channels = servers.channels
        self.queue.workers(dict.fromkeys(servers.channels, self.room), servers.others)

    def _send(self) -> None:
        for worker, requests in self.queue.take().items():
            for message in self.messages([one.request for one in requests]):
                self.channels[worker].put(message)

    def messages(self, requests: list[Any]) -> Sequence[Any]:
        """The messages for a worker's channel."""
        return requests


class PolicyClient(RequestClient):
    """Asks about the env rows of a stage, one decision after the other."""

    def __init__(self, servers: Servers) -> None:
        super().__init__(servers)
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
        while sum(len(part.values) for part in parts) < self.rows:
            reply = self.get()
            if reply is not None and self.queue.answered(reply.key):
                parts.append(reply)
        return joined(parts)


def joined(parts: list[ActReply]) -> ActReply:
    """The answer to a request that several workers answered in parts."""
    if len(parts) == 1:
        return parts[0]
    parts.sort(key=lambda part: part.key[1])
    outputs = [vars(part.output) for part in parts if part.output is not None]
    final = [part.final_values for part in parts if part.final_values is not None]
    values = concatenate([part.values for part in parts])
    return replace(
        parts[0],
        key=(parts[0].key[0], 0, len(values)),
        output=PolicyOutput(**join_rows(outputs)) if outputs else None,
        values=values,
        final_values=concatenate(final) if final else None,
    )
