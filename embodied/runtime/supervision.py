"""When a host is suspected, killed, replaced or given up: a state machine without processes, threads or a clock.

It gets what happened and when, and answers what to do. `failures.py` asks it and kills hung hosts;
`workflows/rollout_manager.py` starts dead ones again, makes good what was lost in a rollout, and ends the run where an
error comes back in every life (`Repetitions`).

    healthy <-> suspect      silent for half of hang_s, or heard again
    any -> restarting        it died or hung, while it was built again too, and the budget allows another life
    restarting -> stale      its workers are constructed, but one among them has no weights yet
    restarting -> healthy    constructed, and nothing is missing
    stale -> healthy         it has the current weights
    any -> dead              it died once too often, or holds what cannot be had again: the run ends
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
    """Limits of patience with a host."""

    max_restarts: int  # of one host within the window
    window_s: float
    hang_s: float  # silence after which it is killed


@dataclass
class _Host:
    state: State = State.HEALTHY
    restarts: int = 0
    recent: deque[float] = field(default_factory=deque)  # when it was restarted, within the window


class Supervisor:
    def __init__(
        self, budget: Budget, hosts: Iterable[str], stale: Iterable[str] = (), unique: Iterable[str] = ()
    ) -> None:
        """`stale` hosts need the current weights before they may serve again. `unique` hosts are watched like `hosts`,
        but not restarted."""
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
        """The number of times that this host was started again in the whole run."""
        return self._hosts[host].restarts

    def replaces(self, host: str) -> bool:
        return host in self._hosts and host not in self._unique

    def at_work(self, host: str) -> bool:
        """The host was constructed, so later exceptions are no constructor's failure."""
        return self.state(host) in (State.HEALTHY, State.SUSPECT, State.STALE)

    def silent(self, host: str, seconds: float) -> bool:
        """No sign of life for so long; -> whether it must be killed, also while it is built again."""
        if self.state(host) in (State.HEALTHY, State.SUSPECT):
            self._hosts[host].state = State.SUSPECT if seconds >= self.budget.hang_s / 2 else State.HEALTHY
        return seconds >= self.budget.hang_s

    def died(self, host: str, now: float) -> str | None:
        """None if it is started again, otherwise why it is not (empty: the cause says it all)."""
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
        """It has the current weights."""
        if self.state(host) is State.STALE:
            self._hosts[host].state = State.HEALTHY


SAME_LINE = 3  # times that a worker fails at one line before the run ends: not chance, a restart would fail too


class Repetitions:
    """Distinguishes an error of the code, which every replacement repeats, from an error that a fresh worker may not
    have.

    Before a worker has come through a round, nobody knows whether its code works at all, and the same error twice is
    enough. Later it has to be as many times in a row as chance hardly makes it.
    """

    def __init__(self) -> None:
        self._errors: dict[str, list[tuple[str, str]]] = {}  # worker -> (line, words) since it last came through
        self._working: set[str] = set()

    def raised(self, worker: str, line: str, words: str) -> str:
        """A worker raised this at that line of its code; -> why it is not started again, empty where it is."""
        before = self._errors.setdefault(worker, [])
        before.append((line, words))
        if worker not in self._working and before.count((line, words)) == 2:
            return "started again, it failed with the same error, so it is not tried a third time"
        if sum(place == line for place, _ in before) == SAME_LINE:
            return "this line has now failed three times in a row, so it is not tried again"
        return ""

    def came_through(self, workers: Iterable[str]) -> None:
        """A round is over, at whose end these workers were well."""
        for worker in workers:
            self._working.add(worker)
            self._errors.pop(worker, None)
