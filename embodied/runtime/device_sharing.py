"""Workers that take turns on the devices they share, phase by phase of an iteration.

    phases = {"rollout": [actors, critics], "update": [trainers]}
    turns = take_turns(cluster, phases, timers)
    with turns.phase("update"):
        trainers.update().wait()

The groups of a phase work at the same time and get their devices together. A worker holds the devices of its host.
Memory moves only where a limit is known and what two phases need does not fit beside each other. Who gets which devices
when is decided in `leases.py`; what a worker has on its device is counted and moved in `device_memory.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from embodied.runtime.cluster import Cluster
from embodied.runtime.group import WorkerGroup
from embodied.runtime.leases import GB, Action, Claim, Coordinator, LeaseError
from embodied.runtime.timers import Timers


class Turns:
    """Carries out what the coordinator of the leases asks for, around a phase."""

    def __init__(
        self,
        coordinator: Coordinator,
        groups: Sequence[WorkerGroup],
        timers: Timers,
        growing: Mapping[str, Callable[[], list[Claim]]] | None = None,
    ) -> None:
        """`growing`: by phase, what its workers need after it, which may be more than they knew of before."""
        self.coordinator = coordinator
        self.growing = growing or {}
        self.workers = {name: group[i] for group in groups for i, name in enumerate(group.workers)}
        self.timers = timers
        self.moves: list[Action] = []  # all that were carried out

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, its groups hold their devices; others' memory leaves only if there is no room for both."""
        if actions := self.coordinator.acquire(name):
            with self.timers.measure("switch"):
                self._carry_out(actions)
        if not self.coordinator.granted(name):
            raise LeaseError(f"{name} needs devices that others hold: phases that share devices cannot be nested")
        try:
            yield
            if name in self.growing:
                self.coordinator.revise(self.growing[name]())
        finally:
            self._carry_out(self.coordinator.release(name))

    def has_memory(self, worker: str) -> bool:
        """Whether its memory lies on its device: one that is started again gives it back at once where it does not."""
        return worker in self.coordinator.resident

    def _carry_out(self, actions: list[Action]) -> None:
        """Carries out all actions of a step at once, then what they make possible."""
        while actions:
            calls = [getattr(self.workers[action.worker], action.verb)() for action in actions]
            for call in calls:
                call.survivors()  # the memory of a process that died moved in its way
            self.moves += actions
            actions = [further for action in actions for further in self.coordinator.done(action)]


def take_turns(
    cluster: Cluster,
    phases: Mapping[str, Sequence[WorkerGroup]],
    timers: Timers,
    memory_gb: float | None = None,
    sharing: Sequence[WorkerGroup] = (),
) -> Turns:
    """Turns on the devices of a cluster, from the groups that work in each phase; phases in the order of an iteration.

    All groups are built, and so have their memory. `memory_gb` is the limit of every device, if there is one. Groups in
    `sharing` use the same weights where two of them are in one process.
    """
    devices = {host.name: host.devices or (host.name,) for host in cluster.hosts}
    limits = {
        device: host.device_bytes if memory_gb is None else memory_gb * GB
        for host in cluster.hosts
        for device in devices[host.name]
    }
    groups = {group.role: group for members in phases.values() for group in members}
    shared = shared_weights(sharing)
    claims = {name: partial(claims_of, members, shared, devices) for name, members in phases.items()}
    leases = {name: first_claims() for name, first_claims in claims.items()}
    everyone = [claim.worker for members in leases.values() for claim in members]
    # How much memory work takes is known when it was done; where nothing is limited nobody asks.
    limited = min(limits.values()) < float("inf")
    growing = {name: partial(claim, survivors=True) for name, claim in claims.items()} if limited else {}
    return Turns(Coordinator(limits, leases, resident=everyone), list(groups.values()), timers, growing)


def shared_weights(groups: Sequence[WorkerGroup]) -> set[str]:
    """The workers of these groups that are in one process with a worker of another of them."""
    places = {group.role: group.process().wait() for group in groups}
    return {
        worker
        for group in groups
        for worker, place in zip(group.workers, places[group.role], strict=True)
        if any(place in others for role, others in places.items() if role != group.role)
    }


def claims_of(
    groups: Sequence[WorkerGroup],
    shared: set[str],
    devices: Mapping[str, tuple[str, ...]],
    survivors: bool = False,
) -> list[Claim]:
    """What the workers of these groups report to need, spread over the devices of each; `survivors`: only those that
    have not died."""
    claims = []
    for group in groups:
        asked = group.needs.each([(worker in shared,) for worker in group.workers])
        needs = asked.survivors() if survivors else dict(zip(group.workers, asked.wait(), strict=True))
        for worker, host in zip(group.workers, group.hosts, strict=True):
            if worker in needs:
                held, need = devices[host], needs[worker]
                movable = need.num_bytes > need.kept_bytes
                claims.append(Claim(worker, held, need.num_bytes / len(held), need.kept_bytes / len(held), movable))
    return claims
