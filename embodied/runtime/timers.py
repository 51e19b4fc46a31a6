"""Measures named pieces of work: always their sums, and every single piece while a timeline is recorded.

Every public method of a worker is measured under its own name. Pieces nest: an inner piece counts in both, and `own_s`
is a piece's time without its inner pieces. Waiting is measured as "wait" everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

MAX_SPANS = 10_000  # kept per worker between two collections; about 100 bytes each


@dataclass(frozen=True)
class Total:
    count: int
    seconds: float
    own_s: float


@dataclass(frozen=True)
class RecordedSpans:
    """Spans that one worker recorded: (name, start, seconds) by its own clock, in the order of their ends."""

    spans: list[tuple[str, float, float]]
    lost: int  # spans beyond MAX_SPANS


class Timers:
    """Safe to read from one thread while other threads measure."""

    def __init__(self) -> None:
        self._totals: dict[str, Total] = {}
        self._lock = threading.Lock()
        self._open = threading.local()  # `inside`: seconds measured so far within the open piece of this thread
        self._spans: list[tuple[str, float, float]] | None = None
        self._lost = 0

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        before, self._open.inside = getattr(self._open, "inside", 0.0), 0.0
        start = perf_counter()
        try:
            yield
        finally:
            inside, self._open.inside = self._open.inside, before
            self._add(name, start, perf_counter() - start, inside)

    def add(self, name: str, start: float) -> float:
        """Adds a piece without inner pieces that began at `start` (time.perf_counter) and ends now; returns its
        seconds."""
        seconds = perf_counter() - start
        self._add(name, start, seconds, 0.0)
        return seconds

    def mark(self, name: str, at: float) -> None:
        """Records a moment (time.perf_counter), as a piece of length 0."""
        self._add(name, at, 0.0, 0.0)

    def totals(self) -> dict[str, Total]:
        with self._lock:
            return dict(self._totals)

    def seconds_since(self, before: Mapping[str, Total], *names: str) -> list[float]:
        """The seconds of each of these pieces since `totals` returned `before`."""
        return seconds_between(before, self.totals(), *names)

    def record(self, on: bool) -> RecordedSpans:
        """Starts or stops recording single pieces; returns the pieces recorded since the last call."""
        with self._lock:
            kept = RecordedSpans(self._spans or [], self._lost)
            self._spans, self._lost = [] if on else None, 0
        return kept

    def _add(self, name: str, start: float, seconds: float, inside: float) -> None:
        self._open.inside = getattr(self._open, "inside", 0.0) + seconds
        with self._lock:
            old = self._totals.get(name, _NOTHING)
            self._totals[name] = Total(old.count + 1, old.seconds + seconds, old.own_s + seconds - inside)
            if self._spans is not None:
                if len(self._spans) < MAX_SPANS:
                    self._spans.append((name, start, seconds))
                else:
                    self._lost += 1


_NOTHING = Total(0, 0.0, 0.0)


def seconds_between(before: Mapping[str, Total], after: Mapping[str, Total], *names: str) -> list[float]:
    """The increase of each of these pieces in seconds."""
    return [after.get(name, _NOTHING).seconds - before.get(name, _NOTHING).seconds for name in names]
