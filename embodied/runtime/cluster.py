"""Starts the hosts of a plan, launches worker groups on them, makes channels, and leaves nothing behind.

Every wait reports the first failure. A failed worker closes its channels, so workers that wait on these notice at once;
their ChannelClosed is a consequence and never hides the cause. Supervised hosts are an exception: `wait_for_calls`
reports their failures and `replace` restarts them.

A group gets one more worker by `add` and `join`, and loses one by `dismiss`:

    newcomer, construction = cluster.add(group, HostPlan("critic-2", ("critic",)))
    cluster.join(group, newcomer, construction.seconds())  # when it is done
    cluster.dismiss(group, "critic-2")
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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from embodied.core.errors import DeadlineExceeded, WorkerFailed
from embodied.runtime.backend import make_backend
from embodied.runtime.channel import CLOSING, DEFAULT_CAPACITY, Channel, channels_in
from embodied.runtime.heartbeat import LOOK_S, MAX_WORKERS, AwakeClock, readable
from embodied.runtime.host import DRIVER, GIVEN, Events, HostPlan, WorkerSpec
from embodied.runtime.rendezvous import InProcessRendezvous, RendezvousFile, rendezvous_point
from embodied.runtime.supervision import Budget, Call, Failure, Supervisor, Watchdog
from embodied.runtime.worker import Handle, Worker, WorkerGroup

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
        reserves: bool = True,
    ) -> None:
        """`address` of a running Ray cluster, on which the hosts' devices are reserved if `reserves`; `modules` are
        user modules that its nodes may lack. A Ray cluster of the run's own has `start_s` seconds to start. `on_start`
        gets the process id whenever a host starts."""
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
        self._hosts: dict[str, str] = {}  # worker -> its host
        roles = {role: None for plan in hosts for role in plan.roles}
        self._homes = {role: [(plan.name, plan.gpu) for plan in hosts if role in plan.roles] for role in roles}
        self._channels: dict[str, Channel] = {}
        self._channels_of: dict[str, set[str]] = defaultdict(set)  # worker -> names of the channels it was given
        self._started: list[str] = []  # hosts
        self._dead_hosts: dict[str, Failure] = {}
        self._new_deaths: dict[str, Failure] = {}  # dead replaceable hosts that `wait_for_calls` has not reported yet
        self._watchdog: Watchdog | None = None
        self._built_s: dict[str, float] = {}  # host -> its longest call before supervision began
        self._clock = AwakeClock()
        self._closed = False
        self._given_up: set[str] = set()  # hosts whose failures are not the run's: ended on purpose, or not joined yet
        self.interrupt: Callable[[], object] = lambda: None  # called in waits; an exception ends the wait
        events = Events(self._on_report, on_start, self._on_death)
        self._log_dir = Path(log_dir) if log_dir is not None else None
        options = (self._log_dir, timeout_s, events, address, modules, start_s, reserves)
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
        packed = self._backend.pack((cls, args, kwargs, self._homes))
        module = cls.partition(":")[0] if isinstance(cls, str) else cls.__module__
        file = getattr(sys.modules.get(module), "__file__", None)
        for rank, worker in enumerate(workers):
            spec = WorkerSpec(worker, rank, len(workers), len(self._makings), module, file)
            self._makings[worker], self._hosts[worker] = (spec, packed, (args, kwargs)), hosts[rank]
        self._make(workers)
        return group

    def add(self, group: WorkerGroup, plan: HostPlan) -> tuple[WorkerGroup, Handle]:
        """Starts a host with one more worker of the group's role, made with the same arguments; both have the plan's
        name, which is new. Until it joins the group, its failures only fail its own calls. Returns it, and its
        construction."""
        if plan.name in (DRIVER, *self._started) or len(self._makings) == MAX_WORKERS:
            raise ValueError(
                f"no host {plan.name!r} can be added: the name is used, or there are {MAX_WORKERS} workers"
            )
        spec, packed, arguments = self._makings[group.workers[0]]
        spec = replace(spec, name=plan.name, rank=len(group), world_size=len(group) + 1, slot=len(self._makings))
        with self._changed:
            self._backend.spawn(plan)
            self._given_up.add(plan.name)
            self.hosts.append(plan)
            self._started.append(plan.name)
            self._makings[plan.name], self._hosts[plan.name] = (spec, packed, arguments), plan.name
            self._tell_of_dead_hosts(plan.name)
        return WorkerGroup(self, group.cls, group.role, [plan.name], [plan.name]), self._make([plan.name])

    def join(self, group: WorkerGroup, newcomer: WorkerGroup, built_s: float) -> bool:
        """From now on an added worker, which was built in this time, is one of its group, and is replaced if it dies.
        False if it has died."""
        with self._changed:
            if newcomer.hosts[0] in self._dead_hosts:
                return False
            self._given_up.remove(newcomer.hosts[0])
            if self._watchdog is not None:
                self._watchdog.add(newcomer.hosts[0], built_s)
            group.workers, group.hosts = (*group.workers, *newcomer.workers), (*group.hosts, *newcomer.hosts)
        return True

    def dismiss(self, group: WorkerGroup, worker: str) -> None:
        """Ends the host of an idle worker that works there alone, for good. Messages to it are lost."""
        host, left = self._hosts[worker], [pair for pair in zip(group.workers, group.hosts) if pair[0] != worker]
        with self._changed:
            group.workers, group.hosts = tuple(w for w, _ in left), tuple(h for _, h in left)
            self.hosts = [plan for plan in self.hosts if plan.name != host]
            self._new_deaths.pop(host, None)
            self._given_up.add(host)
            if self._watchdog is not None:
                self._watchdog.remove(host)
            if host not in self._dead_hosts:
                self._backend.kill(host)

    def channel(self, name: str, home: WorkerGroup | None = None, capacity: int | None = DEFAULT_CAPACITY) -> Channel:
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

    def wait_for(self, handle: Handle, timeout_s: float | None, without_dead: bool = False) -> None:
        started = self._clock()
        with self._changed:
            while True:
                failure = self._failure_for(handle)
                if failure is not None and not (without_dead and (failure.will_restart or failure.accepted)):
                    raise failure.error()
                if not handle.running():
                    return
                self._wait([handle], started, timeout_s, self.interrupt if not without_dead else lambda: None)

    # Supervision

    def supervise(self, groups: Sequence[WorkerGroup], budget: Budget) -> None:
        """From now on hosts that run only these groups can be replaced if they die or hang; a hanging host with another
        role is killed, and every wait raises its failure. A backend without isolation can replace nothing."""
        roles = {group.role for group in groups}
        names = {plan.name: roles.issuperset(plan.roles) for plan in self.hosts if self._backend.isolates}
        supervisor = Supervisor(budget, [n for n in names if names[n]], [n for n in names if not names[n]])
        self._watchdog = Watchdog(self._backend, supervisor, self._clock, self._built_s)

    def wait_for_calls(self, *handles: Handle, until: Callable[[], bool] = lambda: False) -> dict[str, Failure]:
        """Blocks until the handles are done or `until` is true (returns {}), or until replaceable hosts have died
        (returns host -> failure, each once). Raises other failures. `until` is called whenever a call ends or an item
        arrives in a watched channel."""
        started = self._clock()
        with self._changed:
            while True:
                for handle in handles:
                    if (failure := self._failure_for(handle)) is not None and not failure.will_restart:
                        raise failure.error()
                if self._new_deaths:
                    deaths, self._new_deaths = self._new_deaths, {}
                    return deaths
                if until() or not any(handle.running() for handle in handles):
                    return {}
                self._wait(handles, started, None, self.interrupt)

    def watch(self, channel: Channel, watched: bool = True) -> None:
        """Makes `wait_for_calls` react to items in a channel whose home is the driver, or no longer."""
        channel.end.on_put_done = self.wake if watched else lambda: None  # type: ignore[union-attr]  # a Queue: it is here

    def wake(self) -> None:
        """Makes waits check their condition again. Thread-safe."""
        with self._changed:
            self._changed.notify_all()

    def end(self, host: str, cause: str) -> None:
        """Kills the process of a host, as `wait_for_calls` then reports; DeadlineExceeded if it cannot be replaced."""
        worker = self._workers_of(host)[0]
        with self._changed:
            if not (self._watchdog and self._watchdog.supervisor.replaces(host)):
                raise DeadlineExceeded(f"{worker} {cause} [{self._backend.describe_host(host)}]")
            self._watchdog.kill_failed(
                host, Failure(worker, f"{cause}, so it was killed [{self._backend.describe_host(host)}]")
            )

    def replace(self, host: str) -> list[Handle]:
        """Starts a dead host again with the same plan, and its workers with the same arguments."""
        with self._changed:  # the new process must be known before its end is reported
            del self._dead_hosts[host]
            self._backend.spawn(next(plan for plan in self.hosts if plan.name == host))
            self._tell_of_dead_hosts(host)
            for plan in self.hosts:
                if plan.name != host and plan.name not in self._dead_hosts:
                    self._backend.call(plan.name, ("revived", host))
            self._backend.host.control(("revived", host))
        return [self._make([worker]) for worker in self._workers_of(host)]

    def watch_rebuilding(self, host: str, construction: Sequence[Handle]) -> None:
        """A replaced host works when these calls are done."""
        assert self._watchdog is not None
        with self._changed:
            self._watchdog.watch_rebuilding(host, construction)

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

    def _make(self, workers: Sequence[str]) -> Handle:
        """Constructs workers of one role in their hosts."""
        handle = Handle(self, f"{workers[0].rpartition('-')[0]}.__init__", workers)
        for worker in workers:
            spec, packed, arguments = self._makings[worker]
            self._send(handle, worker, self._hosts[worker], ("make", spec), packed, arguments)
        return handle

    def _tell_of_dead_hosts(self, host: str) -> None:
        """Tells a new process of the hosts that have died. Called with the lock."""
        for plan in self.hosts:
            if (failure := self._dead_hosts.get(plan.name)) is not None:
                self._backend.call(host, ("died", plan.name, failure.worker, failure.cause, failure.will_restart))

    def _send(self, handle: Handle, worker: str, host: str, message: tuple, packed: Any, arguments: Any) -> None:
        with self._changed:
            if self._closed:
                raise WorkerFailed(worker, f"{handle.what} was called after the cluster was closed")
            self._channels_of[worker].update(channel.name for channel in channels_in(arguments))
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
                raise DeadlineExceeded(
                    self._describe_late(next(handle for handle in handles if handle.running()), allowed)
                )
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
                watchdog.kill_failed(host, Failure(worker, f"{cause} [{self._backend.describe_host(host)}]"))
                ended = True
        return ended

    def _failure_for(self, handle: Handle) -> Failure | None:
        """Returns the failure that this wait must report. Called with the lock."""
        if (cause := self._next_failure()) is not None or not handle.failed:
            return cause
        failure = next(iter(handle.failed.values()))
        while failure.follows is not None:
            cause = next((f for f in self._failures if (f.worker, f.cause) == failure.follows), None)
            if cause is None:  # a worker closed the channel and may be about to report why
                peer = failure.follows[0]
                if self._watchdog and (ended := self._watchdog.end_of(peer)):
                    return ended
                self._changed.wait_for(partial(self._has_spoken, peer), self._backend.notice_s)
                return self._next_failure() or failure
            failure = cause
        return failure

    def _has_spoken(self, peer: str) -> bool:
        """`peer` is a worker, or a role whose ranks work together."""
        working = {name for call in self._calls.values() for name in (call.worker, call.worker.rpartition("-")[0])}
        return self._next_failure() is not None or peer not in working

    def _next_failure(self) -> Failure | None:
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
            cause = f"{doing} failed: {cause} [{self._backend.describe_host(call.host)}]"
            failure = Failure(worker, cause, traceback, follows, constructing, exit_code=code)
            if call.host in self._given_up:
                failure.accept()
                self._mark([call], failure)
                return
            if retry and self._watchdog is not None and self._watchdog.replaceable(call.host):
                self._calls[call_id] = call  # fails with its host
                self._watchdog.kill_failed(call.host, failure)
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
            failure = Failure(worker, f"its process {cause}{hint}{doing} [{self._backend.describe_host(host)}]")
            given_up = host in self._given_up
            if given_up:
                failure.accept()
                comes_back = True  # so others send to it without an error
            else:
                failure, comes_back = (
                    self._watchdog.died(host, failure) if self._watchdog else (failure.final(""), False)
                )
                failure.lost_state = self._watchdog is not None and not self._watchdog.supervisor.replaces(host)
            self._dead_hosts[host] = failure
            if not comes_back:
                self._failures.append(failure)
            died = ("died", host, failure.worker, failure.cause, comes_back)
            for other in list(self._started):
                if other not in self._dead_hosts:
                    self._backend.call(other, died)
            self._backend.host.control(died)
        if not comes_back:
            self._fail(calls.values(), failure, workers)
            return
        with self._changed:
            if not given_up:
                self._new_deaths[host] = failure
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
        return [worker for worker, its_host in list(self._hosts.items()) if its_host == host]

    def _host_of(self, worker: str) -> str:
        return self._hosts[worker]

    def _slot(self, worker: str) -> int:
        return self._makings[worker][0].slot

    def _describe_late(self, handle: Handle, seconds: float) -> str:
        lines = [f"{handle.what} did not finish within {seconds:g} s on {', '.join(handle.running())}:"]
        for worker in handle.running():
            host = self._host_of(worker)
            sign = self._backend.progress(host, self._slot(worker))
            seen = f"last sign of life {sign.ago_s:.1f} s ago" if sign.ticks else "no sign of life yet"
            waits = ", waits on a channel" if sign.waits else ""
            where = "; its log says where it is" if self._backend.write_stacks(host) else ""
            lines.append(f"  {worker} [{self._backend.describe_host(host)}]: {seen}{waits}{where}")
        return "\n".join(lines)
