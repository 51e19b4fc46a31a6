"""Kills hosts that hang, and decides which dead hosts are started again.

The backend notices deaths (`local.py`). `Watchdog` kills hosts that have been silent for too long, and asks the
`Supervisor`, a state machine without processes, threads or clock, whether a dead host is started again. The cluster
calls the watchdog from its waits and callbacks, under its lock. `workflows/rollout_manager.py` starts dead hosts again,
and ends the run if an error repeats after every restart (`Repetitions`); `workflows/collector.py` collects lost data
again. A restarted worker that reads weights acts only once it has the current ones (`weights.py`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from embodied.core.arrays import gather
from embodied.runtime.backend import Backend
from embodied.runtime.heartbeat import AwakeClock
from embodied.runtime.worker import Failure


@dataclass(frozen=True)
class Budget:
    """Limits of supervision."""

    max_restarts: int  # restarts of one host within the window
    window_s: float
    hang_s: float  # seconds of silence after which a host is killed


class Supervisor:
    """Decides whether a dead host is started again."""

    def __init__(self, budget: Budget, hosts: Iterable[str], unique: Iterable[str] = ()) -> None:
        """`unique` hosts are watched like `hosts`, but not started again."""
        self.budget = budget
        self.hosts = (*hosts, *unique)
        self._unique = frozenset(unique)
        self._restarts: Counter[str] = Counter()
        self._recent: dict[str, deque[float]] = {host: deque() for host in self.hosts}  # restarts within the window
        self._away: set[str] = set()  # hosts that have died and are not constructed again

    def add(self, host: str) -> None:
        """One more host is watched and started again."""
        self.hosts = (*self.hosts, host)
        self._recent[host] = deque()

    def remove(self, host: str) -> None:
        """A host was ended on purpose."""
        self.hosts = tuple(other for other in self.hosts if other != host)

    def restarts(self, host: str) -> int:
        """The number of restarts of this host in the whole run."""
        return self._restarts[host]

    def replaces(self, host: str) -> bool:
        return host in self._recent and host not in self._unique

    def at_work(self, host: str) -> bool:
        """True if the host has been constructed: later exceptions are not constructor failures."""
        return host not in self._away

    def died(self, host: str, now: float) -> str | None:
        """Returns None if the host is to be started again, otherwise the reason why not ("": the cause is enough)."""
        self._away.add(host)
        if host in self._unique:
            return ""
        recent, budget = self._recent[host], self.budget
        while recent and now - recent[0] > budget.window_s:
            recent.popleft()
        if len(recent) >= budget.max_restarts:
            return (
                f"this was after {len(recent)} restarts within {budget.window_s:g} s "
                f"(faults.max_restarts={budget.max_restarts})"
            )
        recent.append(now)
        self._restarts[host] += 1
        return None

    def constructed(self, host: str) -> None:
        """A host that was started again works."""
        self._away.discard(host)


SAME_LINE = 3  # failures of a worker at one line after which the run ends: not by chance, a restart would fail, too


class Repetitions:
    """Distinguishes a bug, which every replacement repeats, from an error that a new worker may not have.

    Before a worker's first finished round its code may not work at all, so the same error twice ends the run. Later it
    takes SAME_LINE errors in a row, which hardly happen by chance.
    """

    def __init__(self) -> None:
        self._errors: dict[str, list[tuple[str, str]]] = {}  # worker -> (line, message) since its last finished round
        self._working: set[str] = set()

    def count_error(self, worker: str, line: str, words: str) -> str:
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


REBUILD_S = 60.0  # a restarted worker may be silent for at least this long: it is not forked with imports done
REBUILD_FACTOR = 3  # the same, as a multiple of its first construction time


@dataclass(frozen=True)
class Call:
    """A call that a worker has not answered yet."""

    worker: str
    host: str
    slot: int
    handle: Any
    sent_at: float


class Watchdog:
    def __init__(
        self, backend: Backend, supervisor: Supervisor, clock: AwakeClock, built_s: Mapping[str, float]
    ) -> None:
        """`built_s`: host -> the longest call of its first construction."""
        self.supervisor, self._backend, self._clock = supervisor, backend, clock
        self.hang_s = supervisor.budget.hang_s
        self.check_s = min(1.0, self.hang_s / 4)
        self._rebuild_s = {host: self._allowed_s(built_s.get(host, 0.0)) for host in supervisor.hosts}
        self._next_check = 0.0
        self._condemned: dict[str, Failure] = {}  # host -> why it is being killed
        self._rebuilding: dict[str, Sequence[Any]] = {}  # host -> the calls that construct its workers again

    def add(self, host: str, built_s: float) -> None:
        """One more host works; its construction took so long."""
        self.supervisor.add(host)
        self._rebuild_s[host] = self._allowed_s(built_s)

    def remove(self, host: str) -> None:
        """A host was ended on purpose."""
        self.supervisor.remove(host)
        for records in (self._condemned, self._rebuilding):
            records.pop(host, None)

    def _allowed_s(self, built_s: float) -> float:
        """How long a worker may be silent that is built again, if it was first built in this time."""
        return max(self.hang_s, REBUILD_S, REBUILD_FACTOR * built_s)

    def replaceable(self, host: str) -> bool:
        """True if restarting the host can recover from its errors."""
        self._advance()
        return self.supervisor.replaces(host) and self.supervisor.at_work(host)

    def kill_failed(self, host: str, failure: Failure) -> None:
        """Kills the process of a failed worker; the first reason is reported."""
        if host not in self._condemned:
            self._condemned[host] = failure
            self._backend.kill(host)

    def end_of(self, peer: str) -> Failure | None:
        """Returns why a worker, or a worker of a role, is being killed for good. Consequences of its death may be
        reported first."""
        for host, failure in self._condemned.items():
            if not self.supervisor.replaces(host) and peer in (failure.worker, failure.worker.rpartition("-")[0]):
                return failure.final("")
        return None

    def check(self, calls: Iterable[Call]) -> None:
        """Kills hosts that have been silent for too long; checks every `check_s`."""
        now = self._clock()
        if now < self._next_check:
            return
        self._next_check = now + self.check_s
        self._advance()
        calls_by_host = gather((running.host, running) for running in calls)
        for host in self.supervisor.hosts:
            if host in self._condemned or not (self.supervisor.at_work(host) or host in self._rebuilding):
                continue
            silence, call = self._silence(host, calls_by_host.get(host, []), now)
            if silence >= self.hang_s:
                where = "; its log says where" if self._backend.write_stacks(host) else ""
                doing = f" during {call.handle.what}" if call else ""
                cause = (
                    f"hung: no sign of life for {silence:.0f} s{doing} (faults.hang_s={self.hang_s:g}), so it was "
                    f"killed{where} [{self._backend.describe_host(host)}]"
                )
                self.kill_failed(host, Failure(call.worker if call else host, cause))

    def died(self, host: str, failure: Failure) -> tuple[Failure, bool]:
        """Returns the failure to report, and True if the host will be restarted."""
        self._advance()
        failure = self._condemned.pop(host, failure)
        self._rebuilding.pop(host, None)
        reason = self.supervisor.died(host, self._clock())
        return (replace(failure, will_restart=True), True) if reason is None else (failure.final(reason), False)

    def watch_rebuilding(self, host: str, construction: Sequence[Any]) -> None:
        """The host works again when these calls are done."""
        self._rebuilding[host] = construction

    def _advance(self) -> None:
        for host, construction in list(self._rebuilding.items()):
            if all(handle.succeeded() for handle in construction):
                self.supervisor.constructed(host)
                del self._rebuilding[host]

    def _silence(self, host: str, calls: list[Call], now: float) -> tuple[float, Call | None]:
        """Returns the longest silence of the process or of a busy worker, and that worker's call. A rebuilt worker has
        more time; its process must send heartbeats all the same."""
        heard_s, pulse = self._clock.awake_s(), self._backend.pulse(host).ago_s
        allowed_s = 0.0 if self.supervisor.at_work(host) else self._rebuild_s[host]
        longest, whose = min(pulse, heard_s) if pulse < float("inf") else 0.0, next(iter(calls), None)
        for call in calls:
            sign = self._backend.progress(host, call.slot)
            seconds = min(sign.ago_s, now - call.sent_at, heard_s)  # an idle worker is silent without being hung
            if not sign.waits and seconds > longest and seconds >= allowed_s:
                longest, whose = seconds, call
        return longest, whose
