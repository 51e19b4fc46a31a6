"""The base class of all roles, also of users' programs; the group of a role's replicas, the handle of a call, and the
timers of a worker.

Each replica lives in one host and works in a separate thread: constructor, methods and `close` run there, one call
after the other. The driver calls a group, and gets a handle at once.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from embodied.core.errors import WorkerFailed
from embodied.runtime.channel import DEFAULT_CAPACITY, Channel, Pair, hosts_of_runs, put_all

SIGN_S = 5.0
FRAME = re.compile(r'^ *File "(.+", line \d+)', re.MULTILINE)
MAX_SPANS = 10_000  # kept per worker between two collections; about 100 bytes each


@dataclass(frozen=True)
class Total:
    count: int
    seconds: float
    own_s: float


@dataclass(frozen=True)
class Spans:
    """Spans that one worker recorded: (name, start, seconds) by its own clock, in the order of their ends."""

    spans: list[tuple[str, float, float]]
    lost: int  # spans beyond MAX_SPANS


class Timers:
    """Measures named pieces of work: always their sums, and every single piece while a timeline is recorded.

    Every public method of a worker is measured under its own name. Pieces nest: an inner piece counts in both, and
    `own_s` is a piece's time without its inner pieces. Waiting is measured as "wait" everywhere. Safe to read from one
    thread while other threads measure.
    """

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

    def record(self, on: bool) -> Spans:
        """Starts or stops recording single pieces; returns the pieces recorded since the last call."""
        with self._lock:
            kept = Spans(self._spans or [], self._lost)
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


def served_while_busy(method: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a short method that answers from the host's control thread even while the worker is at work."""
    method.served_while_busy = True  # type: ignore[attr-defined]
    return method


@dataclass(frozen=True)
class Needs:
    """Bytes of device memory: at work, and after offloading."""

    num_bytes: int = 0
    kept_bytes: int = 0


class Worker:
    """Public methods are callable on the group and timed per rank. The attributes are set before the constructor."""

    name: str  # role and rank, like "critic-0"
    rank: int
    world_size: int
    timers: Timers
    run: str  # of the cluster
    homes: Mapping[str, Sequence[tuple[str, str]]]  # by role, the host and GPU ("": none) of each rank
    tick: Callable[[], None] = staticmethod(lambda: None)
    """Sends a sign of life during long work; calls and channel operations do so by themselves."""
    waiting: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    """Inside, the worker waits for another worker and may be silent; channel operations do that by themselves."""

    def send(self, item: Any, to: tuple[str, int], tag: Any = None, timeout_s: float | None = None) -> None:
        """Sends an item directly to a worker, by role and rank; blocks while many of its items wait there."""
        self._channel(self.name, f"{to[0]}-{to[1]}").put(item, tag, timeout_s)

    def recv(self, source: tuple[str, int], tag: Any = None, timeout_s: float | None = None) -> Any:
        """Takes the next item from a worker under this tag, or the next of any tag without one. Raises ChannelClosed if
        the worker failed or died, DeadlineExceeded after `timeout_s`."""
        return self._channel(f"{source[0]}-{source[1]}", self.name).get(tag, timeout_s)

    def broadcast(self, item: Any, to: str, tag: Any = None, timeout_s: float | None = None) -> None:
        """Sends an item to all other workers of a role; for other processes it is encoded once."""
        workers = [f"{to}-{rank}" for rank in range(max(1, len(self.homes.get(to, ()))))]
        put_all([self._channel(self.name, worker) for worker in workers if worker != self.name], item, tag, timeout_s)

    def all_reduce(self, array: Any) -> Any:
        """The sum of all workers' arrays in this role, added in rank order."""
        role = self.name.rpartition("-")[0]
        self.broadcast(copy(array), role, "all_reduce")  # a copy: the array may change before readers copy it
        ranks = range(self.world_size)
        return sum(array if rank == self.rank else self.recv((role, rank), "all_reduce") for rank in ranks)

    def _channel(self, source: str, receiver: str) -> Channel:
        """The direct channel between two workers."""
        (source_host, _), (home, gpu) = self._home(source), self._home(receiver)
        pair = Pair(source, source_host, receiver)
        return Channel(self.run, f"{source} -> {receiver}", home, DEFAULT_CAPACITY, gpu, pair)

    def _home(self, worker: str) -> tuple[str, str]:
        role, _, rank = worker.rpartition("-")
        if int(rank) >= len(self.homes.get(role, ())):
            roles = ", ".join(f"{role} ({len(hosts)})" for role, hosts in self.homes.items())
            raise ValueError(f"the plan has no worker {worker}; it has by role: {roles}")
        return self.homes[role][int(rank)]

    @contextmanager
    def alive(self, at_most_s: float) -> Iterator[None]:
        """Sends signs of life every few seconds during a long library call."""
        over = threading.Event()

        def live() -> None:
            for _ in range(round(at_most_s / SIGN_S)):
                if over.wait(SIGN_S):
                    return
                self.tick()

        thread = threading.Thread(target=live, name="alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def needs(self, shared: bool = False) -> Needs:
        """Returns its device memory; `shared`: another role in this process uses the same weights."""
        return Needs()

    def onload(self) -> None:
        """Takes device memory; does nothing if it has it."""

    def offload(self) -> None:
        """Releases device memory; does nothing if it has released it."""

    def close(self) -> None:
        """Runs once when the cluster closes, unless the process died before."""

    @served_while_busy
    def timings(self) -> dict[str, Total]:
        """Seconds per public method, and per section the worker measured with `self.timers.measure(name)`."""
        return self.timers.totals()

    @served_while_busy
    def record(self, on: bool) -> Spans:
        """Starts or stops recording every measured piece of work; returns the pieces recorded since the last call."""
        return self.timers.record(on)

    @served_while_busy
    def clock(self) -> float:
        """`time.perf_counter` in the worker's process: equal for all processes of a machine."""
        return perf_counter()

    @served_while_busy
    def flows(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Returns, for channels whose home is this process, (producer, consumer) -> (first, last time) since the last
        call."""
        flows_by_edge: dict[tuple[str, str], tuple[float, float]] = {}
        for host in list(hosts_of_runs.values()):
            flows, host.flows = host.flows, {}
            flows_by_edge |= flows
        return flows_by_edge

    @served_while_busy
    def process(self) -> tuple[str, int]:
        """Returns its machine and process id."""
        return machine(), os.getpid()

    @served_while_busy
    def peak_bytes(self) -> int:
        """Returns the peak host memory of its process."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def machine() -> str:
    """Names this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# For the driver


class RemoteTraceback(Exception):
    """Carries the traceback of a worker as text: the `__cause__` of a WorkerFailed."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass
class Failure:
    worker: str
    cause: str
    traceback: str = ""
    follows: tuple[str, str] | None = None  # (worker, cause) of the ChannelClosed that led to this failure
    fatal: bool = False  # the worker is gone for good: its process died or its constructor failed
    will_restart: bool = False  # its host will be restarted
    exit_code: int = WorkerFailed.exit_code  # a user's mistake has its own code
    raised: bool = False  # raised at a caller
    accepted: bool = False  # the run ends with it, after other workers have saved their state
    lost_state: bool = False  # as of WorkerFailed

    @property
    def raised_at(self) -> str | None:
        """The line that raised it; None for a process that died without a traceback."""
        frames = FRAME.findall(self.traceback)
        return frames[-1] if frames else None

    @property
    def exception(self) -> str:
        """The error's type and message, without the process."""
        return self.traceback.rstrip().rpartition("\n")[2]

    def error(self) -> WorkerFailed:
        self.raised = True
        error = WorkerFailed(self.worker, self.cause)
        error.exit_code, error.lost_state = self.exit_code, self.lost_state
        if self.traceback:
            error.__cause__ = RemoteTraceback(self.traceback)
        return error

    def accept(self) -> None:
        """Let waits for other workers continue."""
        self.fatal, self.raised, self.accepted = False, True, True

    def final(self, reason: str) -> Failure:
        """The same failure as final, with the reason why the worker is not replaced."""
        return replace(self, cause=f"{self.cause}; {reason}" if reason else self.cause, fatal=True)


class Caller(Protocol):
    """What calls need of a `Cluster`."""

    def call(self, group: WorkerGroup, method: str, per_rank: Sequence[tuple[tuple, dict]]) -> Handle: ...

    def wait_for(self, handle: Handle, timeout_s: float | None, without_dead: bool = False) -> None: ...

    def unpack(self, packed: Any) -> Any: ...


_REDUCE: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "mean": lambda s: sum(s) / len(s)}


class Handle:
    """A call that may still run. Results are in rank order."""

    def __init__(self, cluster: Caller, what: str, workers: Sequence[str]) -> None:
        self.what = what  # "critic.score"
        self.workers = tuple(workers)
        self._cluster = cluster
        self._results: dict[str, Any] = {}
        self._seconds: dict[str, float] = {}
        self.failed: dict[str, Failure] = {}  # worker -> why

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """Blocks until every rank is done. Raises the first failure of the cluster, and DeadlineExceeded after
        `timeout_s` (default: when no rank has shown a sign of life for the cluster's timeout)."""
        self._cluster.wait_for(self, timeout_s)
        return [self._cluster.unpack(self._results[worker]) for worker in self.workers]

    def survivors(self) -> dict[str, Any]:
        """Like `wait`, but returns results by worker, without ranks whose host died and will be replaced. For short
        calls, which `interrupt` does not end: memory that moves between devices must arrive."""
        self._cluster.wait_for(self, None, without_dead=True)
        return {worker: self._cluster.unpack(result) for worker, result in self._results.items()}

    def done(self) -> bool:
        """True if no rank is running; `wait` then returns or raises at once."""
        return not self.running()

    def succeeded(self) -> bool:
        return all(worker in self._results for worker in self.workers)

    def seconds(self, reduce: str = "max") -> float:
        """Returns how long the call took on its ranks, after `wait`: "max", "min" or "mean"."""
        return _REDUCE[reduce]([self._seconds[worker] for worker in self.workers])

    def running(self) -> list[str]:
        return [w for w in self.workers if w not in self._results and w not in self.failed]

    def finish(self, worker: str, seconds: float, result: Any) -> None:
        self._seconds[worker] = seconds
        self._results[worker] = result


class WorkerGroup:
    """`group.method(*args)` calls every replica and returns a Handle at once; `group[0]` is a group of one replica."""

    def __init__(
        self, cluster: Caller, cls: type[Worker] | str, role: str, workers: Sequence[str], hosts: Sequence[str]
    ) -> None:
        self.role = role
        self.workers = tuple(workers)  # "critic-0", "critic-1", ...
        self.hosts = tuple(hosts)  # the host of each
        self._cluster = cluster
        self.cls = cls

    def __len__(self) -> int:
        return len(self.workers)

    def __getitem__(self, rank: int | slice) -> WorkerGroup:
        ranks = rank if isinstance(rank, slice) else slice(rank, rank + 1 or None)
        group = WorkerGroup(self._cluster, self.cls, self.role, self.workers[ranks], self.hosts[ranks])
        if not group.workers:
            raise IndexError(f"{self.role} has {len(self)} workers; there is no rank {rank}")
        return group

    def __repr__(self) -> str:
        return f"WorkerGroup({', '.join(self.workers)})"

    def __getattr__(self, method: str) -> Method:
        if method.startswith("_"):
            raise AttributeError(method)
        if not isinstance(self.cls, str) and not callable(getattr(self.cls, method, None)):
            methods = [n for n in dir(self.cls) if not n.startswith("_") and callable(getattr(self.cls, n))]
            raise AttributeError(f"{self.cls.__name__} has no method {method!r}; it has: {', '.join(methods)}")
        return Method(self, method)

    def call(self, method: str, per_rank: Sequence[tuple[tuple, dict]]) -> Handle:
        """Calls the method with separate (args, kwargs) for each rank."""
        if len(per_rank) != len(self):
            raise ValueError(f"{self.role}.{method}: arguments for {len(per_rank)} ranks, but there are {len(self)}")
        getattr(self, method)
        return self._cluster.call(self, method, per_rank)


class Method:
    """`group.collect`: call it, or call it with `each` for arguments that differ by rank."""

    def __init__(self, group: WorkerGroup, name: str) -> None:
        self._group = group
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Handle:
        return self._group.call(self._name, [(args, kwargs)] * len(self._group))

    def each(self, per_rank: Sequence[tuple | dict]) -> Handle:
        """One entry per rank: a tuple of positional or a dict of keyword arguments."""
        return self._group.call(self._name, [((), a) if isinstance(a, dict) else (tuple(a), {}) for a in per_rank])
