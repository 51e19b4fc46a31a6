"""Workers that take turns on the devices they share, phase by phase of an iteration.

    phases = {"rollout": [actors, critics], "update": [trainers]}
    sharing = share_devices(cluster, phases, timers)
    with sharing.phase("update"):
        trainers.update().wait()

The groups of a phase work at the same time and get their devices together. A worker holds the devices of its host. A
phase waits for devices of another thread's phase, and for devices that are released when a call ends (`ends_with`). It
does not wait for preemptible workers: they join when another phase frees their devices, and leave when another phase
needs these, as soon as the phase's own thread handles that.

When several runs share the devices (`embodied.share`), their parent process decides instead (`shared_leases.py`), and
workers on other runs' devices give way, too.

Memory moves only if a limit is known and two phases do not fit beside each other. `device_leases.py` decides which
workers get which devices when; `device_memory.py` counts and moves a worker's memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from embodied.core.errors import DeadlineExceeded
from embodied.runtime.cluster import Cluster
from embodied.runtime.device_leases import GB, GENERATE, SHARE, TRAIN, Action, Claim, Coordinator, LeaseError
from embodied.runtime.host import HostPlan
from embodied.runtime.worker import Handle, Needs, Timers, WorkerGroup

if TYPE_CHECKING:
    from embodied.runtime.shared_leases import SharedLeases

LOOK_S = 1.0


@dataclass
class _Phase:
    """A phase in progress."""

    thread: int  # the thread in this phase
    call: Handle | None = None  # the call that ends its turn, if any
    parts: list[str] = field(default_factory=list)  # that hold their devices, or wait for them

    def over(self) -> bool:
        return self.call is not None and self.call.done()


class DeviceSharing:
    """Gives devices to the groups of a phase and takes them back, as the lease coordinator decides. Usable from any
    thread."""

    def __init__(
        self,
        coordinator: Coordinator,
        groups: Sequence[WorkerGroup],
        timers: Timers,
        growing: Mapping[str, Callable[[Collection[str]], list[Claim]]] | None = None,
        parts: Mapping[str, Sequence[str]] | None = None,
        timeout_s: float = 600.0,
        wake: Callable[[], object] = lambda: None,
        interrupt: Callable[[], object] = lambda: None,
    ) -> None:
        """`growing`: by phase, a function that returns its workers' claims after it, without given workers; claims may
        have grown. `parts`: by phase, its preemptible gangs. A phase waits `timeout_s` for its devices. `wake` is
        called when workers can join or should leave, `interrupt` in every wait, which an exception ends."""
        self.coordinator: Coordinator | SharedLeases = coordinator
        self.growing = growing or {}
        self.parts = parts or {}
        self.part_of = {c.worker: part for parts in self.parts.values() for part in parts for c in self._claims(part)}
        self.workers = {name: group[i] for group in groups for i, name in enumerate(group.workers)}
        self.timers = timers
        self.timeout_s, self.wake, self.interrupt = timeout_s, wake, interrupt
        self.moves: list[Action] = []  # all executed actions
        self.changes = 0  # counts events that may let workers join or leave
        self.unbuilt: set[str] = set()  # restarted workers without their devices
        self._phases: dict[str, _Phase] = {}  # phases that hold their devices
        self._changed = threading.Condition(threading.RLock())

    def share_with_other_runs(self, shared: SharedLeases, tiers: Mapping[str, int]) -> None:
        """Use the coordinator of several runs. Waits for other runs' updates have no deadline."""
        assert isinstance(self.coordinator, Coordinator)
        self.timeout_s = float("inf")
        self.coordinator = shared.join(self.coordinator, tiers, self._follow)

    def report_progress(self, fraction: float) -> None:
        """Report the collected part of the batch."""
        self.coordinator.report_progress(fraction)

    def clear_progress(self) -> None:
        """Report the end of an iteration."""
        self.coordinator.clear_progress()

    def report_idle(self, workers: Collection[str]) -> None:
        """Report that these workers of a phase have no work for now: other runs may use their devices."""
        idle = [gang for gang in self.part_of.values() if all(c.worker in workers for c in self._claims(gang))]
        self.coordinator.report_idle(idle)

    def report_load_time(self, seconds: float) -> None:
        """Report how long a worker that joined a phase took to load its weights."""
        self.coordinator.report_load_time(seconds)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, the phase's groups hold their devices. Other workers' memory is offloaded only if both do not fit."""
        with self._changed:
            actions = self.coordinator.acquire(name)
            try:
                self._carry_out(actions)
                self._wait_for(name, lambda: self.coordinator.granted(name))
            except BaseException:
                self._give_up(name)
                raise
            phase = self._phases[name] = _Phase(threading.get_ident())
        try:
            with self._changed:
                for part in self.parts.get(name, ()):
                    actions = self.coordinator.acquire(part)
                    phase.parts.append(part)
                    self._carry_out(actions)
            yield
            self._grow(name)
        finally:
            self._end(name)

    def has_memory(self, worker: str) -> bool:
        """True if a worker's memory is on its device; otherwise its successor offloads at once."""
        return worker in self.coordinator.resident

    def add(self, name: str, worker: WorkerGroup, needs: Needs, plan: HostPlan) -> None:
        """One more worker of a phase, which is built on the devices of this plan; LeaseError if it does not fit."""
        assert isinstance(self.coordinator, Coordinator)
        devices = plan.devices or (plan.name,)
        num_bytes, kept_bytes = needs.num_bytes / len(devices), needs.kept_bytes / len(devices)
        claim = Claim(worker.workers[0], devices, num_bytes, kept_bytes, num_bytes > kept_bytes)
        with self._changed:
            self.coordinator.add(name, claim, plan.device_bytes)
            self.workers[claim.worker] = worker

    def remove(self, worker: str) -> None:
        """A worker is gone for good."""
        assert isinstance(self.coordinator, Coordinator)
        with self._changed:
            self.coordinator.remove(worker)
            self.unbuilt.discard(worker)
            self.part_of.pop(worker, None)
            del self.workers[worker]

    # Inside a phase

    def ends_with(self, name: str, call: Handle | None) -> None:
        """Make the phase release its devices before its end: when this call is done (`go_on`), or now without a
        call."""
        self._phases[name].call = call
        if call is None:
            self._end(name)

    def is_due(self) -> bool:
        """True if an ended phase has not released its devices."""
        return any(phase.over() for phase in list(self._phases.values()))

    def go_on(self) -> None:
        """Release the devices of ended phases."""
        with self._changed:
            for name in [name for name, phase in self._phases.items() if phase.over()]:
                self._grow(name)
                self._end(name)

    def gives_way(self, worker: str) -> bool:
        """True if a worker may join its phase late and leave it early."""
        return worker in self.part_of

    def takes_part(self, worker: str) -> bool:
        """True if a worker of a current phase holds its devices and need not leave."""
        gang = self.part_of.get(worker)
        with self._changed:
            return gang is None or (self.coordinator.granted(gang) and gang not in self.coordinator.leaving())

    def leave(self, busy: Collection[str]) -> None:
        """Release the devices of workers that should leave and are not `busy`. They rejoin after the other phase's
        turn."""
        with self._changed:
            for part in self.coordinator.leaving():
                if not any(claim.worker in busy for claim in self._claims(part)):
                    self._carry_out(self.coordinator.release(part))
                    self._carry_out(self.coordinator.acquire(part))

    def wait_for_one(self, workers: Sequence[str]) -> None:
        """Block until one of these idle workers joins."""

        def found() -> bool:
            self.leave(())
            return any(map(self.takes_part, workers))

        with self._changed:
            self._wait_for(self.part_of.get(workers[0], ""), found)

    # Internals; called with the lock held, except _grow

    def _claims(self, gang: str) -> Sequence[Claim]:
        return self.coordinator.gangs[gang]

    def _grow(self, name: str) -> None:
        if name in self._phases and name in self.growing:
            needs = self.growing[name](self.unbuilt)
            with self._changed:
                self.coordinator.revise(needs)

    def _wait_for(self, gang: str, granted: Callable[[], bool]) -> None:
        """Block until the gang is granted."""
        until = time.monotonic() + self.timeout_s
        while not granted():
            self._wait_for_others(gang, until)

    def _wait_for_others(self, gang: str, until: float) -> None:
        """Wait until something changes. Phases of this thread only change by the calls that end them."""
        self.interrupt()
        holders = self.coordinator.in_the_way(gang)
        phases = {n: p for n, p in self._phases.items() if holders.intersection((n, *self.parts.get(n, ())))}
        of_thread = {name: phase for name, phase in phases.items() if phase.thread == threading.get_ident()}
        calls = [phase.call for phase in of_thread.values() if phase.call]
        if len(calls) < len(of_thread):
            raise LeaseError(f"{gang} needs devices of another phase: phases that share devices cannot be nested")
        for call in calls:
            call.wait()
        if of_thread:
            self.go_on()
        elif not self._changed.wait(max(0.0, min(until - time.monotonic(), LOOK_S))) and time.monotonic() >= until:
            held = " and ".join(phases) or "others"
            raise DeadlineExceeded(f"{gang} has waited {self.timeout_s:g} s for devices that {held} still held")

    def _end(self, name: str) -> None:
        """Release all devices of a phase; its workers stop waiting for devices."""
        with self._changed:
            if phase := self._phases.pop(name, None):
                for gang in (*phase.parts, name):
                    self._give_up(gang)

    def _give_up(self, gang: str) -> None:
        """A gang stops waiting for its devices, or releases them."""
        give_up = self.coordinator.cancel if gang in self.coordinator.waiting else self.coordinator.release
        self._carry_out(give_up(gang))

    def _follow(self, actions: list[Action]) -> None:
        with self._changed:
            self._carry_out(actions)

    def _carry_out(self, actions: list[Action]) -> None:
        """Execute all actions of a step concurrently, then the actions that they make possible."""
        with self.timers.measure("switch") if actions else nullcontext():
            while actions:
                built = [action for action in actions if action.worker not in self.unbuilt]
                calls = [getattr(self.workers[action.worker], action.verb)() for action in built]
                for call in calls:
                    call.survivors()  # the memory of a dead process is free anyway
                self.moves += actions
                actions = [further for action in actions for further in self.coordinator.done(action)]
        self.changes += 1
        self._changed.notify_all()
        self.wake()


def parent() -> SharedLeases | None:
    """The connection to the process that started this run beside others; None if the run shares no devices."""
    if not os.environ.get(SHARE):
        return None
    from embodied.runtime.shared_leases import connection

    return connection(os.environ[SHARE])


def begin_beside_other_runs(cluster: Cluster, memory_gb: float | None) -> None:
    """If the run shares devices: wait until its workers can be built on them."""
    if shared := parent():
        limits = device_limits(cluster, memory_gb)
        shared.begin({device: limit for device, limit in limits.items() if limit < float("inf")})


def device_limits(cluster: Cluster, memory_gb: float | None) -> dict[str, float]:
    """The memory limit of each device of a cluster, in bytes."""
    return {
        device: host.device_bytes if memory_gb is None else memory_gb * GB
        for host in cluster.hosts
        for device in host.devices or (host.name,)
    }


def share_devices(
    cluster: Cluster,
    phases: Mapping[str, Sequence[WorkerGroup]],
    timers: Timers,
    memory_gb: float | None = None,
    sharing: Sequence[WorkerGroup] = (),
    giving_way: Sequence[WorkerGroup] = (),
    borrowing: Sequence[WorkerGroup] = (),
    training: Collection[str] = (),
) -> DeviceSharing:
    """Returns the sharing of a cluster's devices among the groups of each phase; phases are in the order of an
    iteration.

    All groups are built and have their memory. `memory_gb` limits the memory of every device. Groups in `sharing` use
    the same weights if they share a process. Workers of groups in `giving_way` take part in their phase while no other
    phase needs their devices. When several runs share the devices, groups in `borrowing` do the same, and phases in
    `training` come first.
    """
    other_runs = parent()
    limits = device_limits(cluster, memory_gb)
    groups = {group.role: group for members in phases.values() for group in members}
    shared = shared_weights(sharing)
    claims = {name: partial(claims_of, members, shared, cluster) for name, members in phases.items()}
    leases = {name: first_claims() for name, first_claims in claims.items()}
    moving = {worker for group in (*giving_way, *(borrowing if other_runs else ())) for worker in group.workers}
    parts = parts_of(leases, moving, other_runs.lent if other_runs else ())
    everyone = [claim.worker for members in leases.values() for claim in members]
    # Memory use is known after the work; without a limit it is not asked for.
    limited = min(limits.values()) < float("inf")
    growing = claims if limited else {}
    late = {part: claims for found in parts.values() for part, claims in found.items()}
    left = {
        name: [c for c in gang_claims if all(c not in part for part in late.values())]
        for name, gang_claims in leases.items()
    }
    coordinator = Coordinator(limits, left | late, everyone, dict.fromkeys(late, 1), preemptible=late)
    parts_by_phase = {phase: tuple(found) for phase, found in parts.items()}
    waking = (parts_by_phase, cluster.timeout_s, cluster.wake, lambda: cluster.interrupt())
    device_sharing = DeviceSharing(coordinator, list(groups.values()), timers, growing, *waking)
    if other_runs:
        tiers = {gang: TRAIN if gang in training else GENERATE for gang in coordinator.gangs}
        device_sharing.share_with_other_runs(other_runs, tiers)
    return device_sharing


def parts_of(
    leases: Mapping[str, Sequence[Claim]], giving_way: Collection[str], lent: Collection[str] = ()
) -> dict[str, dict[str, list[Claim]]]:
    """By phase, the preemptible gangs: their workers share devices with another phase, or use `lent` devices of other
    runs, and share none with a worker of their phase that must stay. Workers that share devices with each other form
    one gang."""
    claims_by_phase: dict[str, dict[str, list[Claim]]] = {}
    for phase, claims in leases.items():
        elsewhere = {d for name, others in leases.items() if name != phase for c in others for d in c.devices} | {*lent}
        staying = {d for claim in claims if claim.worker not in giving_way for d in claim.devices}
        clusters: list[tuple[set[str], list[Claim]]] = []
        for claim in (claim for claim in claims if claim.worker in giving_way):
            touching = [cluster for cluster in clusters if cluster[0].intersection(claim.devices)]
            clusters = [cluster for cluster in clusters if cluster not in touching]
            devices = set(claim.devices).union(*(devices for devices, _ in touching))
            clusters.append((devices, [*(c for _, members in touching for c in members), claim]))
        claims_by_phase[phase] = {
            f"{phase} of {', '.join(claim.worker for claim in members)}": members
            for devices, members in clusters
            if staying and devices & elsewhere and not devices & staying
        }
    return claims_by_phase


def shared_weights(groups: Sequence[WorkerGroup]) -> set[str]:
    """The workers of these groups that share a process with a worker of another of these groups."""
    places = {group.role: group.process().wait() for group in groups}
    return {
        worker
        for group in groups
        for worker, place in zip(group.workers, places[group.role], strict=True)
        if any(place in others for role, others in places.items() if role != group.role)
    }


def claims_of(
    groups: Sequence[WorkerGroup], shared: set[str], cluster: Cluster, unbuilt: Collection[str] | None = None
) -> list[Claim]:
    """Returns the memory that the workers of these groups report, divided over each worker's devices. `unbuilt` and
    dead workers are left out."""
    devices = {host.name: host.devices or (host.name,) for host in cluster.hosts}
    asked = [
        (worker, devices[host], group[i].needs(worker in shared))
        for group in groups
        for i, (worker, host) in enumerate(zip(group.workers, group.hosts, strict=True))
        if worker not in (unbuilt or ())
    ]
    claims = []
    for worker, held, call in asked:
        for need in call.wait() if unbuilt is None else call.survivors().values():
            movable = need.num_bytes > need.kept_bytes
            claims.append(Claim(worker, held, need.num_bytes / len(held), need.kept_bytes / len(held), movable))
    return claims
