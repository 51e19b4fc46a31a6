"""Starts the hosts of a plan, launches worker groups on them, makes channels, and leaves nothing behind.

One rule for errors: whatever fails first is what every wait reports. A failed worker closes the channels it was given,
so those who wait for it there are told at once; the ChannelClosed they raise follows from it and never hides it.
"""

from __future__ import annotations

import itertools
import secrets
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from embodied.errors import DeadlineExceeded, WorkerFailed
from embodied.runtime.backend import Events, make_backend
from embodied.runtime.channel import DEFAULT_CAPACITY, Channel, Choose
from embodied.runtime.group import Handle, WorkerGroup
from embodied.runtime.hosts import DRIVER, MAX_WORKERS, HostPlan, WorkerSpec
from embodied.runtime.worker import Worker

_FIRST_CAUSE_S = 0.5  # how long a consequence waits for its cause to be reported
CLOSE_S = 5.0  # how long workers may take to close before they are killed
CLOSE_AFTER_ERROR_S = 1.0


class RemoteTraceback(Exception):
    """Carries the traceback of a worker as text: the `__cause__` of a WorkerFailed."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass
class Failure:
    worker: str
    cause: str
    traceback: str
    follows: tuple[str, str] | None = None  # (worker, cause) of the ChannelClosed that this is a consequence of
    fatal: bool = False  # the worker is gone: its process died or its constructor failed
    told: bool = False

    def error(self) -> WorkerFailed:
        self.told = True
        error = WorkerFailed(self.worker, self.cause)
        if self.traceback:
            error.__cause__ = RemoteTraceback(self.traceback)
        return error


class Cluster:
    """Use it as a context manager. `hosts` is the plan; a role's replicas are numbered in the order of the hosts."""

    def __init__(
        self,
        backend: str = "auto",
        hosts: Sequence[HostPlan] = (),
        log_dir: str | Path | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        names = [plan.name for plan in hosts]
        if len({*names, DRIVER}) != len(names) + 1:
            raise ValueError(f"host names must differ from each other and from {DRIVER!r}: {names}")
        self.timeout_s = timeout_s
        self.hosts = list(hosts)
        self._run = secrets.token_hex(8)
        self._changed = threading.Condition()
        self._calls: dict[int, tuple[str, Handle]] = {}  # call id -> (worker, handle)
        self._call_ids = itertools.count()
        self._failures: list[Failure] = []
        self._groups: dict[str, WorkerGroup] = {}
        self._slots: dict[str, int] = {}
        self._channels: dict[str, Channel] = {}
        self._channels_of: dict[str, set[str]] = defaultdict(set)  # worker -> names of the channels it was given
        self._dead_hosts: dict[str, Failure] = {}
        self._closed = False
        events = Events(self._on_report, self._on_death)
        log_dir = Path(log_dir) if log_dir is not None else None
        self._backend = make_backend(backend, self._run, self.hosts, log_dir, timeout_s, events)
        self.unpack = self._backend.unpack
        try:
            for plan in self.hosts:
                self._backend.spawn(plan)
        except BaseException:
            self.close(0)
            raise

    def describe(self) -> list[str]:
        """A line for the backend and one per host."""
        return [f"{self._backend.name}: {self._backend.promise}", *(plan.describe() for plan in self.hosts)]

    # What programs use

    def launch(self, cls: type[Worker], role: str, *args: Any, **kwargs: Any) -> WorkerGroup:
        """Starts one replica on every host that lists the role. Returns at once: waits tell if a constructor failed."""
        hosts = [plan.name for plan in self.hosts for r in plan.roles if r == role]
        if not hosts:
            known = sorted({r for plan in self.hosts for r in plan.roles})
            raise ValueError(f"no host runs the role {role!r}; the plan has: {', '.join(known)}")
        if role in self._groups:
            raise ValueError(f"the role {role!r} is already launched")
        workers = [f"{role}-{rank}" for rank in range(len(hosts))]
        if len(self._slots) + len(workers) > MAX_WORKERS:
            raise ValueError(f"a cluster runs at most {MAX_WORKERS} workers")
        group = self._groups[role] = WorkerGroup(self, cls, role, workers, hosts)
        handle = Handle(self, f"{role}.__init__", workers)
        packed = self._backend.pack((cls, args, kwargs))
        module = cls.partition(":")[0] if isinstance(cls, str) else cls.__module__
        file = getattr(sys.modules.get(module), "__file__", None)
        for rank, worker in enumerate(workers):
            slot = self._slots[worker] = len(self._slots)
            spec = WorkerSpec(worker, rank, len(workers), slot, module, file)
            self._send(handle, worker, hosts[rank], ("make", spec), packed, (args, kwargs))
        return group

    def channel(
        self,
        name: str,
        home: WorkerGroup | None = None,
        capacity: int | None = DEFAULT_CAPACITY,
        choose: Choose | None = None,
    ) -> Channel:
        """`home` is the one worker that consumes (default: the driver's host, which is also right for a few consumers).
        `capacity` is per producer; None is unbounded. `choose` picks the next item instead of the oldest."""
        if name in self._channels:
            raise ValueError(f"there is already a channel {name!r}")
        if home is not None and len(home) != 1:
            raise ValueError(f"the home of channel {name!r} must be one worker, like group[0]; got {home}")
        if capacity is not None and capacity < 1:
            raise ValueError(f"channel {name!r}: capacity={capacity} must be at least 1")
        host = home.hosts[0] if home is not None else DRIVER
        channel = self._channels[name] = Channel(self._run, name, host, capacity, choose)
        return channel

    def call(self, group: WorkerGroup, method: str, per_rank: Sequence[tuple[tuple, dict]]) -> Handle:
        handle = Handle(self, f"{group.role}.{method}", group.workers)
        urgent = getattr(getattr(group.cls, method, None), "served_while_busy", False)
        packed, packed_arguments = None, None
        for worker, host, arguments in zip(group.workers, group.hosts, per_rank):
            if arguments is not packed_arguments:  # the same for all ranks: packed once
                packed, packed_arguments = self._backend.pack(arguments), arguments
            self._send(handle, worker, host, ("call", worker, method, urgent), packed, arguments)
        return handle

    def wait_for(self, handle: Handle, timeout_s: float | None) -> None:
        seconds = self.timeout_s if timeout_s is None else timeout_s
        until = time.monotonic() + seconds
        with self._changed:
            while True:
                if (failure := self._failure_for(handle)) is not None:
                    raise failure.error()
                if not handle.running():
                    return
                if not self._changed.wait(max(until - time.monotonic(), 0)) and time.monotonic() >= until:
                    raise DeadlineExceeded(self._late(handle, seconds))

    def progress(self, group: WorkerGroup) -> list[tuple[int, float]]:
        """Per rank: how often the worker ticked, and how many seconds ago it last did."""
        return [self._backend.progress(host, self._slots[w]) for w, host in zip(group.workers, group.hosts)]

    def close(self, seconds: float = CLOSE_S) -> None:
        """Ends everything: blocked workers get ChannelClosed, idle ones close, the rest is killed after `seconds`."""
        if self._closed:
            return
        self._closed = True
        try:
            for channel in self._channels.values():
                channel.end.close("the driver", "the cluster is closing")
        finally:
            self._backend.stop(seconds)
            with self._changed:
                for worker, handle in self._calls.values():
                    handle.failed[worker] = Failure(worker, f"the cluster was closed during {handle.what}", "")
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
            self._calls[call_id] = (worker, handle)
        self._backend.call(host, (*message, call_id), packed)

    def _failure_for(self, handle: Handle) -> Failure | None:
        """What this wait must report. Called with the lock."""
        if (cause := self._news()) is not None or not handle.failed:
            return cause
        failure = next(iter(handle.failed.values()))
        while failure.follows is not None:
            cause = next((f for f in self._failures if (f.worker, f.cause) == failure.follows), None)
            if cause is None:  # a worker closed the channel itself, and may be about to say why
                self._changed.wait_for(partial(self._spoke, failure.follows[0]), _FIRST_CAUSE_S)
                return self._news() or failure
            failure = cause
        return failure

    def _spoke(self, peer: str) -> bool:
        return self._news() is not None or all(worker != peer for worker, _ in self._calls.values())

    def _news(self) -> Failure | None:
        """The first cause that no wait has raised yet, or that nobody can recover from."""
        return next((f for f in self._failures if f.follows is None and (f.fatal or not f.told)), None)

    def _on_report(self, host: str, message: tuple, packed: Any) -> None:
        kind, call_id, *rest = message
        with self._changed:
            worker, handle = self._calls.pop(call_id, (None, None))
            if handle is None:
                return
            if kind == "done":
                handle.finish(worker, rest[0], packed)
                self._changed.notify_all()
                return
        cause, traceback, follows = rest
        constructing = handle.what.endswith(".__init__")
        doing = "constructor" if constructing else handle.what.split(".")[1]
        cause = f"{doing} failed: {cause} [{self._backend.where(self._host_of(worker))}]"
        self._fail([(worker, handle)], Failure(worker, cause, traceback, follows, constructing), [worker])

    def _on_death(self, host: str, cause: str) -> None:
        workers = [w for g in list(self._groups.values()) for w, h in zip(g.workers, g.hosts) if h == host]
        with self._changed:
            if self._closed:
                return
            calls = {i: c for i, c in self._calls.items() if c[0] in workers}
            for call_id in calls:
                del self._calls[call_id]
            worker = next((w for w, _ in calls.values()), workers[0] if workers else host)
            doing = f" during {calls[min(calls)][1].what}" if calls else ""
            cause = f"its process {cause}{doing} [{self._backend.where(host)}]"
            failure = self._dead_hosts[host] = Failure(worker, cause, "", fatal=True)
        for plan in self.hosts:
            if plan.name not in self._dead_hosts:
                self._backend.call(plan.name, ("died", host, worker, cause))
        self._backend.host.control(("died", host, worker, cause))
        self._fail(calls.values(), failure, workers)

    def _fail(self, calls: Iterable[tuple[str, Handle]], failure: Failure, workers: list[str]) -> None:
        with self._changed:
            self._failures.append(failure)
            names = {name for worker in workers for name in self._channels_of[worker]}
        for name in names:
            self._channels[name].end.close(failure.worker, failure.cause)
        with self._changed:
            for worker, handle in calls:
                handle.failed[worker] = failure
            self._changed.notify_all()

    def _host_of(self, worker: str) -> str:
        return next(h for g in self._groups.values() for w, h in zip(g.workers, g.hosts) if w == worker)

    def _late(self, handle: Handle, seconds: float) -> str:
        lines = [f"{handle.what} did not finish within {seconds:g} s on {', '.join(handle.running())}:"]
        for worker in handle.running():
            host = self._host_of(worker)
            ticks, ago = self._backend.progress(host, self._slots[worker])
            sign = f"last sign of life {ago:.1f} s ago" if ticks else "no sign of life yet"
            lines.append(f"  {worker} [{self._backend.where(host)}]: {sign}")
        return "\n".join(lines)


def _channels_in(item: Any) -> Iterable[Channel]:
    """The channels in arguments: as such, or inside lists, tuples, dicts and dataclasses."""
    if isinstance(item, Channel):
        yield item
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from _channels_in(part)
    elif isinstance(item, dict):
        yield from _channels_in(list(item.values()))
    elif is_dataclass(item) and not isinstance(item, type):
        yield from _channels_in([getattr(item, f.name) for f in fields(item)])
