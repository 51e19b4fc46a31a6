"""Time that counts for deadlines: it stands still while this process, or the driver it works for, is stopped.

A process that is stopped (Ctrl-Z, a paused container) notices nothing; when it goes on, all others seem to have been
silent for as long. A wait reads the time at least every second, so a much longer gap between two readings is such a
stop, or work in which it waited for nobody: neither is anybody else's delay.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

LOOK_S = 1.0
GAP_S = 5.0


class AwakeClock:
    """Seconds, of which only differences mean something, without the gaps."""

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
        """Seconds since the last gap: for longer nobody can have been silent to us."""
        self()
        return self._clock() - self._woke


def wait_awake(
    attempt: Callable[[float], bool],
    seconds: float,
    driver: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Calls `attempt` with a second at most until it gives True; False when `seconds` have passed without gaps, and
    without those in which the driver's process was stopped, since then nothing comes."""
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
