"""Measures how many of our cores other programs keep busy, before and during a measurement."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

BUSY = 0.1  # share of cores used by other programs: above it a measurement is unreliable
SETTLE_S = 1.0  # seconds of watching before a measurement
IDLE = (3, 4)  # columns of /proc/stat: idle, and waiting for a disk


class LoadMeter:
    """Measures the cores that other programs keep busy, from its construction on."""

    def __init__(
        self,
        stat: Path = Path("/proc/stat"),
        cores: set[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        own_s: Callable[[], float] | None = None,
    ) -> None:
        self.stat, self.clock, self.own_s = stat, clock, own_s or own_cpu_s
        self.cores = os.sched_getaffinity(0) if cores is None else cores
        self.begun = clock(), self.busy_s(), self.own_s()

    def others(self) -> float | None:
        """The mean number of our cores kept busy by other programs than this one and its ended children; None if
        unknown."""
        begun, busy_s, own_s = self.begun
        now, elapsed = self.busy_s(), self.clock() - begun
        if now is None or busy_s is None or elapsed <= 0:
            return None
        return round(min(max((now - busy_s - (self.own_s() - own_s)) / elapsed, 0.0), len(self.cores)), 2)

    def busy_s(self) -> float | None:
        """Core-seconds that our cores have worked since the system started."""
        try:
            lines = [line.split() for line in self.stat.read_text().splitlines() if line.startswith("cpu")]
            rows = {words[0][3:]: list(map(int, words[1:9])) for words in lines}
        except (OSError, ValueError):
            return None
        of_cores = [row for name, row in rows.items() if name.isdigit() and int(name) in self.cores]
        ticks = sum(value for row in of_cores for place, value in enumerate(row) if place not in IDLE)
        return (
            ticks / os.sysconf("SC_CLK_TCK") if len(of_cores) == len(self.cores) and any(map(any, of_cores)) else None
        )


def own_cpu_s() -> float:
    """Seconds of computing of this process and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def load_before() -> dict[str, Any]:
    """The load of other programs now: `others`, the cores kept busy over a second, and the load `average`."""
    meter = LoadMeter()
    time.sleep(SETTLE_S)
    return {"others": meter.others(), "average": round(os.getloadavg()[0], 2)}


def under_load(load: Mapping[str, Any], cores: int) -> str:
    """A phrase if other programs kept too many of these cores busy for a reliable measurement; else "". `load`: cores
    kept busy `before` and `during` it."""
    kept = {when: load[when] for when in ("before", "during") if load.get(when) is not None}
    times = [f"{others:.1f} {when} it" for when, others in kept.items() if others > BUSY * cores]
    return f"other programs kept cores busy ({' and '.join(times)}, of {cores})" if times else ""
