"""The state of a server in a pool (`server_pool.py`): its open calls, its speed, and its answers that were used."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from embodied.policies.language.engine import Request
from embodied.policies.language.remote_server import SHORTEST_S, RemoteServer
from embodied.policies.language.trust import GapRecord


@dataclass(frozen=True)
class PooledRequest:
    """A request and its JSON, without the server's model."""

    request: Request
    body: dict[str, Any]


@dataclass
class FailingRequest:
    """A request that was asked again, and not yet answered."""

    since: float  # first failure
    servers: set[str] = field(default_factory=set)  # at which it failed since then
    slow_tries: int = 0  # failures after a long time


class WritingSpeed:
    """A server's smoothed tokens per second while requests wait."""

    rate: float | None = None

    def __init__(self, answers: int) -> None:
        """A measurement lasts `answers` answers."""
        self.answers = answers
        self.began: float | None = None

    def wrote(self, tokens: int, now: float, busy: bool) -> None:
        """Counts an answer; `busy`: requests still wait. Measurements without a queue are dropped."""
        if not busy or self.began is None:
            self.began, self.tokens, self.count = (now if busy else None), 0, 0
            return
        self.tokens, self.count = self.tokens + tokens, self.count + 1
        if self.count >= self.answers and now > self.began:
            rate = self.tokens / (now - self.began)
            self.rate = rate if self.rate is None else (self.rate + rate) / 2
            self.began, self.tokens, self.count = now, 0, 0


def request_limits(most: dict[str, int], rates: dict[str, float | None]) -> dict[str, int]:
    """The number of concurrent requests of each server, in proportion to its throughput and within its cache. Example:
    servers with room for 8 that write 30 and 10 tokens/s get 8 and 4; before measurements both get 8.
    """
    if any(rates[name] is None for name in most):
        return dict(most)
    total, speed = sum(most.values()), sum(rates[name] or 0.0 for name in most)
    return {name: max(1, min(each, ceil(total * (rates[name] or 0.0) / speed))) for name, each in most.items()}


@dataclass
class UsedAnswers:
    """The answers of a server that the run has used."""

    answers: int = 0
    tokens: int = 0
    versions: list[int] = field(default_factory=list)  # of the weights: the first and the last

    def add(self, tokens: int, version: int) -> None:
        self.answers, self.tokens = self.answers + 1, self.tokens + tokens
        self.versions = [*self.versions[:1], version]

    def __str__(self) -> str:
        if not self.answers:
            return "none of its answers was used before"
        of = " to ".join(f"{version}" for version in dict.fromkeys(self.versions))
        return f"{self.answers} of its answers, of {self.tokens} tokens, were used before (versions of weights: {of})"


@dataclass(eq=False)
class PooledServer:
    """A server and its state."""

    remote: RemoteServer
    takes: bool = False  # True: it takes requests
    is_dropped: bool = False  # True: for the rest of the run
    is_refused: bool = False  # True: until the next version
    is_paused: bool = False  # True: by its owner, and the user was told
    away_since: float | None = None  # time of the first of the current failures; None: it can be reached
    is_failing: bool = False  # True: since its last good answer it has failed, and the user was told
    pause: float = SHORTEST_S  # pause before the next attempt
    loads: int = 0  # number of loads of the current weights
    doubt: asyncio.Event = field(default_factory=asyncio.Event)  # set if its weights must be checked
    calls: dict[int, asyncio.Task] = field(default_factory=dict)  # by request
    asked_at: dict[int, float] = field(default_factory=dict)  # by request
    longest_s: float = 0.0  # longest time of an answer
    answered_at: float = 0.0  # time of the last answer
    unreleased: dict[int, Any] = field(default_factory=dict)  # unreleased answers, by request
    gap: GapRecord = field(default_factory=GapRecord)
    used: UsedAnswers = field(default_factory=UsedAnswers)
    evidence: str = ""  # why its answers are of other weights; "": no evidence
    speed: WritingSpeed = field(default_factory=lambda: WritingSpeed(1))

    @property
    def name(self) -> str:
        return self.remote.name
