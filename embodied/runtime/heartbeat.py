"""What tells a hung process from a busy one: signs of life, and a clock that stands still while we are stopped.

Signs of life lie in shared memory, per worker and for the whole process. The driver can read them while a host is
stuck.

A worker that computes must tick now and then. A worker that waits on a channel need not, so a worker that waits for a
hung worker does not count as hung. The process sends heartbeats from a separate thread: it falls silent if it is
stopped, or if native code never releases the interpreter lock.

`AwakeClock`, for deadlines, stands still while this process or its driver is stopped. For a process that was stopped
(Ctrl-Z, a paused container), all other processes seem to have been silent. Waits read the clock at least every second,
so a much longer gap between two readings is a stop, or work without waiting, and no delay of another process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

MAX_WORKERS = 1024  # in a cluster; each has a slot in the progress memory of every host
_WORDS = 3  # of 8 bytes: ticks, time of the last tick, whether it waits (for the process: its resident bytes)
_PROCESS = MAX_WORKERS  # the slot of the process itself
PROGRESS_BYTES = (MAX_WORKERS + 1) * _WORDS * 8
BEAT_S = 0.5
NOTICE_S = 10.0  # limit for noticing the end of a process


class Sign(NamedTuple):
    """The last sign of life of a worker."""

    ticks: int
    ago_s: float
    waits: bool  # on a channel


class Pulse(NamedTuple):
    """The last heartbeat of a process."""

    ago_s: float
    resident_bytes: int


class Progress:
    def __init__(self, memory: Any) -> None:
        self._words = memoryview(memory).cast("B").cast("Q")

    def tick(self, slot: int) -> None:
        at = _WORDS * slot
        self._words[at] += 1
        self._words[at + 1] = time.monotonic_ns()

    @contextmanager
    def waiting(self, slot: int) -> Iterator[None]:
        self.tick(slot)
        self._words[_WORDS * slot + 2] = 1
        try:
            yield
        finally:
            self.tick(slot)  # before the mark is cleared, or the wait would count as silence
            self._words[_WORDS * slot + 2] = 0

    def beat(self) -> None:
        self._words[_WORDS * _PROCESS + 2] = resident_bytes()
        self.tick(_PROCESS)

    def read(self, slot: int) -> Sign:
        ticks, when, waits = self._words[_WORDS * slot : _WORDS * slot + _WORDS]
        return Sign(ticks, _ago_s(ticks, when), bool(waits))

    def pulse(self) -> Pulse:
        beats, when, resident = self._words[_WORDS * _PROCESS : _WORDS * _PROCESS + _WORDS]
        return Pulse(_ago_s(beats, when), resident)

    def changed_slots(self, seen: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """Returns the slots that differ from `seen`: slot -> words for `note`, for a driver that cannot read this
        memory."""
        words = (
            (slot, (self._words[at], self._words[at + 2])) for slot, at in enumerate(range(0, len(self._words), _WORDS))
        )
        return {slot: pair for slot, pair in words if pair != seen.get(slot, (0, 0))}

    def note(self, news: dict[int, tuple[int, int]]) -> None:
        """Writes the words that another process sent, with this process's clock."""
        for slot, (ticks, extra) in news.items():
            at = _WORDS * slot
            self._words[at], self._words[at + 1], self._words[at + 2] = ticks, time.monotonic_ns(), extra

    def release(self) -> None:
        self._words.release()

    def start_beating(self) -> None:
        """Sends heartbeats from a separate thread while the process lives."""

        def beat() -> None:
            while True:
                self.beat()
                time.sleep(BEAT_S)

        threading.Thread(target=beat, name="heart", daemon=True).start()


def _ago_s(ticks: int, when: int) -> float:
    return (time.monotonic_ns() - when) / 1e9 if ticks else float("inf")


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def readable(num_bytes: int) -> str:
    """1300234240 -> "1.2 GiB"."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


LOOK_S = 1.0
GAP_S = 5.0


class AwakeClock:
    """Seconds without the gaps; only differences are meaningful."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen = self._woke = clock()
        self._asleep = 0.0

    def __call__(self) -> float:
        now = self._clock()
        if now - self._seen > GAP_S:
            self._asleep += now - self._seen
            self._woke = now
        self._seen = now
        return now - self._asleep

    def awake_s(self) -> float:
        """Seconds since the last gap: an upper bound on the silence of another process."""
        self()
        return self._clock() - self._woke


def wait_awake(
    attempt: Callable[[float], bool],
    seconds: float,
    driver: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Calls `attempt` with at most a second until it returns True. Returns False after `seconds`, not counting gaps and
    times in which the driver was stopped."""
    left, seen = seconds, clock()
    while not attempt(max(0.0, min(LOOK_S, left))):
        now = clock()
        if now - seen <= GAP_S and not (driver and is_stopped(driver)):
            left -= now - seen
        if left <= 0:
            return False
        seen = now
    return True


def is_stopped(pid: int) -> bool:
    """Returns whether a signal has stopped this process of this machine."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    return False
