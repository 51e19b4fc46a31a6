"""Starts the hosts of a plan, launches worker groups on them, makes channels, and leaves nothing behind.

Every wait reports the first failure. A failed worker closes its channels, so workers that wait on these notice at once;
their ChannelClosed is a consequence and never hides the cause. Supervised hosts are an exception: `settle` reports
their failures and `replace` restarts them.

All replicas of a role, and the handle of a call to them.
"""

from __future__ import annotations

import itertools
import os
import secrets
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from embodied.core.errors import DeadlineExceeded, WorkerFailed
from embodied.runtime.backend import make_backend
from embodied.runtime.channel import CLOSING, DEFAULT_CAPACITY, Channel
from embodied.runtime.heartbeat import LOOK_S, MAX_WORKERS, AwakeClock, readable
from embodied.runtime.host import DRIVER, GIVEN, Events, HostPlan, WorkerSpec
from embodied.runtime.rendezvous import InProcessRendezvous, RendezvousFile, rendezvous_point
from embodied.runtime.supervision import Budget, Call, Failure, Supervisor, Watchdog
from embodied.runtime.worker import Worker

CLOSE_S = 5.0  # how long workers may take to close before they are killed
CLOSE_AFTER_ERROR_S = 1.0


class Cluster:
    """Use it as a context manager. `hosts` is the plan; a role's replicas are numbered in the order of the hosts."""

    def __init__(
        self,
        backend: str = "auto",
        hosts: Sequence[HostPlan] = (),
        log_dir: str | Path | None = None,
        timeout_s: float = 600.0,
        address: str | None = None,
        modules: Sequence[str] = (),
        start_s: float = 300.0,
        on_start: Callable[[str, int], None] = lambda host, pid: None,
    ) -> None:
        """`address` of a running Ray cluster; `modules` are user modules that its nodes may lack. A Ray cluster of the
        run's own has `start_s` seconds to start. `on_start` gets the process id whenever a host starts."""
        names = [plan.name for plan in hosts]
        if len({*names, DRIVER}) != len(names) + 1:
            raise ValueError(f"host names must differ from each other and from {DRIVER!r}: {names}")
        self.timeout_s = timeout_s
        for name in GIVEN:  # the driver has no device, even if the shell's environment names one
            os.environ.pop(name, None)
        self.hosts = list(hosts)
        self._run = secrets.token_hex(8)
        self._changed = threading.Condition()
        self._calls: dict[int, Call] = {}
        self._call_ids = itertools.count()
        self._failures: list[Failure] = []
        self._groups: dict[str, WorkerGroup] = {}
        self._makings: dict[str, tuple[WorkerSpec, Any, Any]] = {}  # worker -> (spec, packed arguments, arguments)
        roles = {role: None for plan in hosts for role in plan.roles}
        self._homes = {role: [(plan.name, plan.gpu) for plan in hosts if role in plan.roles] for role in roles}
        self._channels: dict[str, Channel] = {}
        self._channels_of: dict[str, set[str]] = defaultdict(set)  # worker -> names of the channels it was given
        self._started: list[str] = []  # hosts
        self._dead_hosts: dict[str, Failure] = {}
        self._losses: dict[str, Failure] = {}  # dead replaceable hosts that `settle` has not reported yet
        self._watchdog: Watchdog | None = None
        self._built_s: dict[str, float] = {}  # host -> its longest call before supervision began
        self._clock = AwakeClock()
        self._closed = False
        self._given_up: set[str] = set()  # hosts that were ended on purpose
        self.interrupt: Callable[[], object] = lambda: None  # called in waits; an exception ends the wait
        events = Events(self._on_report, on_start, self._on_death)
        self._log_dir = Path(log_dir) if log_dir is not None else None
        options = (self._log_dir, timeout_s, events, address, modules, start_s)
        self._backend = make_backend(backend, self._run, self.hosts, *options)
        self.unpack = self._backend.unpack
        try:
            for plan in self.hosts:
                self._backend.spawn(plan)
                self._started.append(plan.name)
        except BaseException:
            self.close(0)
            raise

    # What programs use

    def launch(self, cls: type[Worker] | str, role: str, *args: Any, **kwargs: Any) -> WorkerGroup:
        """Starts one replica on every host that lists the role. Returns at once; waits report failed constructors."""
        if role not in self._homes:
            raise ValueError(f"no host runs the role {role!r}; the plan has: {', '.join(sorted(self._homes))}")
        hosts = [host for host, _ in self._homes[role]]
        if role in self._groups:
            raise ValueError(f"the role {role!r} is already launched")
        workers = [f"{role}-{rank}" for rank in range(len(hosts))]
        if len(self._makings) + len(workers) > MAX_WORKERS:
            raise ValueError(f"a cluster runs at most {MAX_WORKERS} workers")
        group = self._groups[role] = WorkerGroup(self, cls, role, workers, hosts)
        handle = Handle(self, f"{role}.__init__", workers)
        packed = self._backend.pack((cls, args, kwargs, self._homes))
        module = cls.partition(":")[0] if isinstance(cls, str) else cls.__module__
        file = getattr(sys.modules.get(module), "__file__", None)
        for rank, worker in enumerate(workers):
            spec = WorkerSpec(worker, rank, len(workers), len(self._makings), module, file)
            self._makings[worker] = (spec, packed, (args, kwargs))
            self._send(handle, worker, hosts[rank], ("make", spec), packed, (args, kwargs))
        return group

    def channel(
        self,
        name: str,
        home: WorkerGroup | None = None,
        capacity: int | None = DEFAULT_CAPACITY,
    ) -> Channel:
        """`home` is the consuming worker (default: the driver's host, also suitable for a few consumers). `capacity` is
        per producer; None is unbounded."""
        if name in self._channels:
            raise ValueError(f"there is already a channel {name!r}")
        if home is not None and len(home) != 1:
            raise ValueError(f"the home of channel {name!r} must be one worker, like group[0]; got {home}")
        if capacity is not None and capacity < 1:
            raise ValueError(f"channel {name!r}: capacity={capacity} must be at least 1")
        host = home.hosts[0] if home is not None else DRIVER
        gpu = next((plan.gpu for plan in self.hosts if plan.name == host), "")
        channel = self._channels[name] = Channel(self._run, name, host, capacity, gpu)
        return channel

    def rendezvous(self, role: str) -> RendezvousFile | InProcessRendezvous | None:
        """The place where the ranks of a role meet on one machine, for sums over them; None for a single rank."""
        return rendezvous_point(len(self._homes[role]), self._backend.name, self._log_dir, self.timeout_s)

    def call(self, group: WorkerGroup, method: str, per_rank: Sequence[tuple[tuple, dict]]) -> Handle:
        handle = Handle(self, f"{group.role}.{method}", group.workers)
        packed, packed_arguments = None, None
        for worker, host, arguments in zip(group.workers, group.hosts, per_rank):
            if arguments is not packed_arguments:  # the same for all ranks: packed once
                packed, packed_arguments = self._backend.pack(arguments), arguments
            self._send(handle, worker, host, ("call", worker, method), packed, arguments)
        return handle

    def wait_for(self, handle: Handle, timeout_s: float | None, without_losses: bool = False) -> None:
        started = self._clock()
        with self._changed:
            while True:
                failure = self._failure_for(handle)
                if failure is not None and not (without_losses and (failure.mendable or failure.accepted)):
                    raise failure.error()
                if not handle.running():
                    return
                self._wait([handle], started, timeout_s, self.interrupt if not without_losses else lambda: None)

    # Supervision

    def supervise(self, groups: Sequence[WorkerGroup], budget: Budget) -> None:
        """From now on replaces hosts that run only these groups if they die or hang; a hanging host with another role
        ends the run. A backend without isolation can replace nothing."""
        roles = {group.role for group in groups}
        names = {plan.name: roles.issuperset(plan.roles) for plan in self.hosts if self._backend.isolates}
        supervisor = Supervisor(budget, [n for n in names if names[n]], [n for n in names if not names[n]])
        self._watchdog = Watchdog(self._backend, supervisor, self._clock, self._built_s)

    def settle(self, *handles: Handle, until: Callable[[], bool] = lambda: False) -> dict[str, Failure]:
        """Blocks until the handles are done or `until` is true (returns {}), or until replaceable hosts have died
        (returns host -> failure, each once). Raises other failures. `until` is called whenever a call ends or an item
        arrives in a watched channel."""
        started = self._clock()
        with self._changed:
            while True:
                for handle in handles:
                    if (failure := self._failure_for(handle)) is not None and not failure.mendable:
                        raise failure.error()
                if self._losses:
                    losses, self._losses = self._losses, {}
                    return losses
                if until() or not any(handle.running() for handle in handles):
                    return {}
                self._wait(handles, started, None, self.interrupt)

    def watch(self, channel: Channel, watched: bool = True) -> None:
        """Makes `settle` react to items in a channel whose home is the driver, or no longer."""
        channel.end.heard = self.wake if watched else lambda: None  # type: ignore[union-attr]  # a Queue: it is here

    def wake(self) -> None:
        """Makes waits check their condition again. Thread-safe."""
        with self._changed:
            self._changed.notify_all()

    def end(self, host: str, cause: str) -> None:
        """Kills the process of a host, which `settle` then reports; DeadlineExceeded if it cannot be replaced."""
        worker = self._workers_of(host)[0]
        with self._changed:
            if not (self._watchdog and self._watchdog.supervisor.replaces(host)):
                raise DeadlineExceeded(f"{worker} {cause} [{self._backend.where(host)}]")
            self._watchdog.condemn(host, Failure(worker, f"{cause}, so it was killed [{self._backend.where(host)}]"))

    def replace(self, host: str) -> list[Handle]:
        """Starts a dead host again with the same plan, and its workers with the same arguments."""
        with self._changed:  # the new process must be known before its end is reported
            del self._dead_hosts[host]
            self._backend.spawn(next(plan for plan in self.hosts if plan.name == host))
            for plan in self.hosts:
                if (failure := self._dead_hosts.get(plan.name)) is not None:
                    self._backend.call(host, ("died", plan.name, failure.worker, failure.cause, failure.mendable))
                elif plan.name != host:
                    self._backend.call(plan.name, ("revived", host))
            self._backend.host.control(("revived", host))
        handles = []
        for worker in self._workers_of(host):
            spec, packed, arguments = self._makings[worker]
            handles.append(handle := Handle(self, f"{worker.rpartition('-')[0]}.__init__", [worker]))
            self._send(handle, worker, host, ("make", spec), packed, arguments)
        return handles

    def rebuilt_by(self, host: str, construction: Sequence[Handle]) -> None:
        """A replaced host works when these calls are done."""
        assert self._watchdog is not None
        with self._changed:
            self._watchdog.rebuilt_by(host, construction)

    def restarts(self, host: str) -> int:
        """Returns how often this host was started again in this run."""
        assert self._watchdog is not None
        return self._watchdog.supervisor.restarts(host)

    def accept_failures(self) -> None:
        """Allows calls of other workers after some have failed for good: their waits no longer report those
        failures."""
        with self._changed:
            for failure in (*self._failures, *self._dead_hosts.values()):
                failure.accept()

    def give_up(self, groups: Sequence[WorkerGroup]) -> None:
        """Kills the hosts that run only these groups, whatever their workers do. Waits for other workers go on."""
        roles = {group.role for group in groups}
        hosts = [plan.name for plan in self.hosts if self._backend.isolates and roles.issuperset(plan.roles)]
        with self._changed:
            self._given_up.update(hosts)
            for host in [host for host in hosts if host not in self._dead_hosts]:
                self._backend.kill(host)

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Inside, waits do not end by `interrupt`."""
        interrupt, self.interrupt = self.interrupt, lambda: None
        try:
            yield
        finally:
            self.interrupt = interrupt

    def close(self, seconds: float = CLOSE_S) -> None:
        """Ends everything: blocked workers get ChannelClosed, idle ones close, the rest is killed after `seconds`."""
        if self._closed:
            return
        self._closed = True
        try:
            for channel in self._channels.values():
                channel.end.close(*CLOSING)
        finally:
            self._backend.stop(seconds)
            with self._changed:
                for call in self._calls.values():
                    what = f"the cluster was closed during {call.handle.what}"
                    call.handle.failed[call.worker] = Failure(call.worker, what)
                self._calls.clear()
                self._changed.notify_all()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.close(CLOSE_S if kind is None else CLOSE_AFTER_ERROR_S)

    # Inside

    def _send(self, handle: Handle, worker: str, host: str, message: tuple, packed: Any, arguments: Any) -> None:
        with self._changed:
            if self._closed:
                raise WorkerFailed(worker, f"{handle.what} was called after the cluster was closed")
            self._channels_of[worker].update(channel.name for channel in _channels_in(arguments))
            if host in self._dead_hosts:
                handle.failed[worker] = self._dead_hosts[host]
                return
            call_id = next(self._call_ids)
            self._calls[call_id] = Call(worker, host, self._slot(worker), handle, self._clock())
        self._backend.call(host, (*message, call_id), packed)

    def _wait(
        self, handles: Sequence[Handle], started: float, timeout_s: float | None, interrupt: Callable[[], object]
    ) -> None:
        """Called with the lock: waits for an event, or until the next check for hung hosts."""
        interrupt()
        allowed = self.timeout_s if timeout_s is None else timeout_s
        left = started + allowed - self._clock()
        if left <= 0 and timeout_s is None:
            left = allowed - self._silence(handles)
        if left <= 0:
            if timeout_s is not None or not self._end_silent(handles, allowed):
                raise DeadlineExceeded(self._late(next(handle for handle in handles if handle.running()), allowed))
            left = LOOK_S
        self._changed.wait(min(left, self._watchdog.check_s if self._watchdog else LOOK_S))
        if self._watchdog is not None:
            self._watchdog.check(self._calls.values())

    def _silence(self, handles: Sequence[Handle]) -> float:
        """Seconds since the last sign of life of the awaited workers."""
        waited = [worker for handle in handles for worker in handle.running()]
        signs = [self._backend.progress(self._host_of(worker), self._slot(worker)) for worker in waited]
        return min(self._clock.awake_s(), *(sign.ago_s for sign in signs))

    def _end_silent(self, handles: Sequence[Handle], seconds: float) -> bool:
        """Kills the replaceable hosts of silent awaited workers; False if there are none. Workers that wait on a
        channel are not counted as silent."""
        watchdog, ended = self._watchdog, False
        for worker in [worker for handle in handles for worker in handle.running()]:
            host = self._host_of(worker)
            waits = self._backend.progress(host, self._slot(worker)).waits
            if watchdog is not None and watchdog.supervisor.replaces(host) and not waits:
                cause = f"hung: no answer within {seconds:g} s (faults.timeout_s), so it was killed"
                watchdog.condemn(host, Failure(worker, f"{cause} [{self._backend.where(host)}]"))
                ended = True
        return ended

    def _failure_for(self, handle: Handle) -> Failure | None:
        """Returns the failure that this wait must report. Called with the lock."""
        if (cause := self._news()) is not None or not handle.failed:
            return cause
        failure = next(iter(handle.failed.values()))
        while failure.follows is not None:
            cause = next((f for f in self._failures if (f.worker, f.cause) == failure.follows), None)
            if cause is None:  # a worker closed the channel and may be about to report why
                peer = failure.follows[0]
                if self._watchdog and (ended := self._watchdog.ended(peer)):
                    return ended
                self._changed.wait_for(partial(self._spoke, peer), self._backend.notice_s)
                return self._news() or failure
            failure = cause
        return failure

    def _spoke(self, peer: str) -> bool:
        """`peer` is a worker, or a role whose ranks work together."""
        working = {name for call in self._calls.values() for name in (call.worker, call.worker.rpartition("-")[0])}
        return self._news() is not None or peer not in working

    def _news(self) -> Failure | None:
        """The first failure that no wait has raised yet, or that is final."""
        return next((f for f in self._failures if f.follows is None and (f.fatal or not f.raised)), None)

    def _on_report(self, host: str, message: tuple, packed: Any) -> None:
        kind, call_id, *rest = message
        with self._changed:
            call = self._calls.pop(call_id, None)
            if call is None:
                return
            worker, handle = call.worker, call.handle
            if kind == "done":
                handle.finish(worker, rest[0], packed)
                if self._watchdog is None:
                    seconds = self._clock() - call.sent_at
                    self._built_s[call.host] = max(seconds, self._built_s.get(call.host, 0.0))
                self._changed.notify_all()
                return
            cause, traceback, follows, retry, code = rest
            constructing = handle.what.endswith(".__init__")
            doing = "constructor" if constructing else handle.what.split(".")[1]
            cause = f"{doing} failed: {cause} [{self._backend.where(call.host)}]"
            failure = Failure(worker, cause, traceback, follows, constructing, exit_code=code)
            if retry and self._watchdog is not None and self._watchdog.replaceable(call.host):
                self._calls[call_id] = call  # fails with its host
                self._watchdog.condemn(call.host, failure)
                return
            self._failures.append(failure)  # before anybody sees the end of the call
        self._fail([call], failure, [worker])

    def _on_death(self, host: str, cause: str) -> None:
        workers = self._workers_of(host)
        with self._changed:
            if self._closed:
                return
            calls = {i: call for i, call in self._calls.items() if call.host == host}
            for call_id in calls:
                del self._calls[call_id]
            worker = next((call.worker for call in calls.values()), workers[0] if workers else host)
            doing = f" during {calls[min(calls)].handle.what}" if calls else ""
            guess = f"out of memory? It held {readable(self._backend.pulse(host).resident_bytes)}"
            hint = f" ({guess})" if cause.endswith("SIGKILL") else ""
            failure = Failure(worker, f"its process {cause}{hint}{doing} [{self._backend.where(host)}]")
            if host in self._given_up:
                failure.accept()
                self._dead_hosts[host] = failure
                self._mark(calls.values(), failure)
                return
            failure, again = self._watchdog.died(host, failure) if self._watchdog else (failure.final(""), False)
            failure.lost_state = self._watchdog is not None and not self._watchdog.supervisor.replaces(host)
            self._dead_hosts[host] = failure
            if not again:
                self._failures.append(failure)
            died = ("died", host, failure.worker, failure.cause, again)
            for other in list(self._started):
                if other not in self._dead_hosts:
                    self._backend.call(other, died)
            self._backend.host.control(died)
        if not again:
            self._fail(calls.values(), failure, workers)
            return
        with self._changed:
            self._losses[host] = failure
            self._mark(calls.values(), failure)

    def _fail(self, calls: Iterable[Call], failure: Failure, workers: list[str]) -> None:
        """Closes the channels of failed workers, whose failure is already in `_failures`."""
        with self._changed:
            names = {name for worker in workers for name in self._channels_of[worker]}
            others = [host for host in self._started if host not in self._dead_hosts and not self._closed]
        for name in names:
            self._channels[name].end.close(failure.worker, failure.cause, drain=True)
        for host in others:  # closes its direct channels to workers there
            self._backend.call(host, ("failed", failure.worker, failure.cause))
        with self._changed:
            self._mark(calls, failure)

    def _mark(self, calls: Iterable[Call], failure: Failure) -> None:
        for call in calls:
            call.handle.failed[call.worker] = failure
        self._changed.notify_all()

    def _workers_of(self, host: str) -> list[str]:
        return [w for g in list(self._groups.values()) for w, h in zip(g.workers, g.hosts) if h == host]

    def _host_of(self, worker: str) -> str:
        return next(h for g in self._groups.values() for w, h in zip(g.workers, g.hosts) if w == worker)

    def _slot(self, worker: str) -> int:
        return self._makings[worker][0].slot

    def _late(self, handle: Handle, seconds: float) -> str:
        lines = [f"{handle.what} did not finish within {seconds:g} s on {', '.join(handle.running())}:"]
        for worker in handle.running():
            host = self._host_of(worker)
            sign = self._backend.progress(host, self._slot(worker))
            seen = f"last sign of life {sign.ago_s:.1f} s ago" if sign.ticks else "no sign of life yet"
            waits = ", waits on a channel" if sign.waits else ""
            where = "; its log says where it is" if self._backend.write_stacks(host) else ""
            lines.append(f"  {worker} [{self._backend.where(host)}]: {seen}{waits}{where}")
        return "\n".join(lines)


def _channels_in(item: Any) -> Iterable[Channel]:
    """The channels in arguments: as such, or inside lists, tuples, dicts and dataclasses."""
    if isinstance(item, Channel):
        yield item
    elif isinstance(item, (list, tuple)):
        for part in item:
            if not isinstance(part, (str, int, float)):  # skip these quickly: items may have thousands
                yield from _channels_in(part)
    elif isinstance(item, dict):
        yield from _channels_in(list(item.values()))
    elif is_dataclass(item) and not isinstance(item, type):
        yield from _channels_in([getattr(item, f.name) for f in fields(item)])


_REDUCE: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "mean": lambda s: sum(s) / len(s)}


class Handle:
    """A call that may still run. Results are in rank order."""

    def __init__(self, cluster: Cluster, what: str, workers: Sequence[str]) -> None:
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
        self._cluster.wait_for(self, None, without_losses=True)
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
        self, cluster: Cluster, cls: type[Worker] | str, role: str, workers: Sequence[str], hosts: Sequence[str]
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
        part = WorkerGroup(self._cluster, self.cls, self.role, self.workers[ranks], self.hosts[ranks])
        if not part.workers:
            raise IndexError(f"{self.role} has {len(self)} workers; there is no rank {rank}")
        return part

    def __repr__(self) -> str:
        return f"WorkerGroup({', '.join(self.workers)})"

    def __getattr__(self, method: str) -> Method:
        if method.startswith("_"):
            raise AttributeError(method)
        if not isinstance(self.cls, str) and not callable(getattr(self.cls, method, None)):
            known = [n for n in dir(self.cls) if not n.startswith("_") and callable(getattr(self.cls, n))]
            raise AttributeError(f"{self.cls.__name__} has no method {method!r}; it has: {', '.join(known)}")
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
