"""A clock for deadlines that stands still while this process or its driver is stopped.

For a process that was stopped (Ctrl-Z, a paused container), all other processes seem to have been silent. Waits read
the clock at least every second, so a much longer gap between two readings is a stop, or work without waiting, and no
delay of another process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

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
