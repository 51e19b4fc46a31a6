"""Decides when a host is suspected, killed, replaced or given up: a state machine without processes, threads or clock.

It gets events with their times, and returns decisions. `failures.py` asks it and kills hung hosts.
`workflows/rollout_manager.py` restarts dead hosts, collects lost data again, and ends the run if an error repeats after
every restart (`Repetitions`).

    healthy <-> suspect      silent for half of hang_s, or heard again
    any -> restarting        it died or hung, while it was built again too, and the budget allows another life
    restarting -> stale      its workers are constructed, but one among them has no weights yet
    restarting -> healthy    constructed, and nothing is missing
    stale -> healthy         it has the current weights
    any -> dead              it died once too often, or holds state that is lost: the run ends
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum


class State(Enum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    RESTARTING = "restarting"
    STALE = "stale"
    DEAD = "dead"


@dataclass(frozen=True)
class Budget:
    """Limits of supervision."""

    max_restarts: int  # restarts of one host within the window
    window_s: float
    hang_s: float  # seconds of silence after which a host is killed


@dataclass
class _Host:
    state: State = State.HEALTHY
    restarts: int = 0
    recent: deque[float] = field(default_factory=deque)  # times of restarts within the window


class Supervisor:
    def __init__(
        self, budget: Budget, hosts: Iterable[str], stale: Iterable[str] = (), unique: Iterable[str] = ()
    ) -> None:
        """Restarted `stale` hosts need the current weights first. `unique` hosts are watched like `hosts`, but not
        restarted."""
        self.budget = budget
        self._hosts = {host: _Host() for host in (*hosts, *unique)}
        self._stale = frozenset(stale)
        self._unique = frozenset(unique)

    def __contains__(self, host: str) -> bool:
        return host in self._hosts

    def __iter__(self):
        return iter(self._hosts)

    def state(self, host: str) -> State:
        return self._hosts[host].state

    def restarts(self, host: str) -> int:
        """The number of restarts of this host in the whole run."""
        return self._hosts[host].restarts

    def replaces(self, host: str) -> bool:
        return host in self._hosts and host not in self._unique

    def at_work(self, host: str) -> bool:
        """True if the host has been constructed: later exceptions are not constructor failures."""
        return self.state(host) in (State.HEALTHY, State.SUSPECT, State.STALE)

    def silent(self, host: str, seconds: float) -> bool:
        """The host has been silent for `seconds`; returns True if it must be killed, also while it is rebuilt."""
        if self.state(host) in (State.HEALTHY, State.SUSPECT):
            self._hosts[host].state = State.SUSPECT if seconds >= self.budget.hang_s / 2 else State.HEALTHY
        return seconds >= self.budget.hang_s

    def died(self, host: str, now: float) -> str | None:
        """Returns None if the host will be restarted, otherwise the reason why not ("": the cause is enough)."""
        record, budget = self._hosts[host], self.budget
        if host in self._unique:
            record.state = State.DEAD
            return ""
        while record.recent and now - record.recent[0] > budget.window_s:
            record.recent.popleft()
        if len(record.recent) >= budget.max_restarts:
            record.state = State.DEAD
            return (
                f"this was after {len(record.recent)} restarts within {budget.window_s:g} s "
                f"(faults.max_restarts={budget.max_restarts})"
            )
        record.recent.append(now)
        record.restarts += 1
        record.state = State.RESTARTING
        return None

    def constructed(self, host: str) -> None:
        if self.state(host) is State.RESTARTING:
            self._hosts[host].state = State.STALE if host in self._stale else State.HEALTHY

    def current(self, host: str) -> None:
        """The host has the current weights."""
        if self.state(host) is State.STALE:
            self._hosts[host].state = State.HEALTHY


SAME_LINE = 3  # failures of a worker at one line after which the run ends: not by chance, a restart would fail, too


class Repetitions:
    """Distinguishes a bug, which every replacement repeats, from an error that a new worker may not have.

    Before a worker's first finished round its code may not work at all, so the same error twice ends the run. Later it
    takes SAME_LINE errors in a row, which hardly happen by chance.
    """

    def __init__(self) -> None:
        self._errors: dict[str, list[tuple[str, str]]] = {}  # worker -> (line, message) since its last finished round
        self._working: set[str] = set()

    def raised(self, worker: str, line: str, words: str) -> str:
        """A worker raised an error at `line`; returns why it is not restarted, "" if it is."""
        before = self._errors.setdefault(worker, [])
        before.append((line, words))
        if worker not in self._working and before.count((line, words)) == 2:
            return "started again, it failed with the same error, so it is not tried a third time"
        if sum(place == line for place, _ in before) == SAME_LINE:
            return "this line has now failed three times in a row, so it is not tried again"
        return ""

    def came_through(self, workers: Iterable[str]) -> None:
        """A round has ended without failures of these workers."""
        for worker in workers:
            self._working.add(worker)
            self._errors.pop(worker, None)
