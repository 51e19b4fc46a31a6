"""Adds up the seconds of named pieces of work. Every public method of a worker is measured under its own name."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Total:
    count: int
    seconds: float


class Timers:
    """Safe to read from one thread while others measure."""

    def __init__(self) -> None:
        self._totals: dict[str, Total] = {}
        self._lock = threading.Lock()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            old = self._totals.get(name, Total(0, 0.0))
            self._totals[name] = Total(old.count + 1, old.seconds + seconds)

    def totals(self) -> dict[str, Total]:
        with self._lock:
            return dict(self._totals)
