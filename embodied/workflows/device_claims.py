"""Which workers of a run take turns on which devices, with how much memory.

Rollouts are the sims' and the policies', updates the learners'. A worker holds the devices of its host. Memory moves
only where a limit is known and both do not fit: a GPU's own, or `cluster.memory_gb`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from embodied.runtime import Cluster, Timers, WorkerGroup
from embodied.runtime.device_sharing import Turns
from embodied.runtime.leases import GB, Claim, Coordinator

ROLLOUT, UPDATE = "rollout", "update"


def take_turns(
    cluster: Cluster,
    sims: WorkerGroup,
    policies: WorkerGroup,
    learners: WorkerGroup | None,
    memory_gb: float | None,
    timers: Timers,
) -> Turns:
    """All groups are built, and so have their memory. `memory_gb` is the limit of every device, if there is one."""
    devices = {host.name: host.devices or (host.name,) for host in cluster.hosts}
    acting, learning = (group.process().wait() if group else [] for group in (policies, learners))
    shared = [where in learning for where in acting]
    gangs_of: dict[str, list[Part]] = {ROLLOUT: [(sims, [False] * len(sims)), (policies, shared)]}
    if learners:
        gangs_of[UPDATE] = [(learners, [where in acting for where in learning])]
    gangs = {name: [claim for part in parts for claim in claims_of(*part, devices)] for name, parts in gangs_of.items()}
    limits = {
        device: host.device_bytes if memory_gb is None else memory_gb * GB
        for host in cluster.hosts
        for device in devices[host.name]
    }
    everyone = [claim.worker for gang in gangs.values() for claim in gang]
    groups = {group.role: group for group in (sims, policies, learners) if group}
    # How much memory work takes is known when it was done; where nothing is limited nobody asks.
    limited = min(limits.values()) < float("inf")
    growing = {name: partial(claims_now, parts, devices) for name, parts in gangs_of.items()} if limited else {}
    return Turns(Coordinator(limits, gangs, resident=everyone), groups, timers, growing)


Part = tuple[WorkerGroup, list[bool]]  # a gang's workers of a role, and which of them share weights with another's


def claims_now(parts: list[Part], devices: Mapping[str, tuple[str, ...]]) -> list[Claim]:
    """Of those that have not died."""
    return [claim for group, shared in parts for claim in claims_of(group, shared, devices, some=True)]


def claims_of(
    group: WorkerGroup, shared: list[bool], devices: Mapping[str, tuple[str, ...]], some: bool = False
) -> list[Claim]:
    """What a group's workers say they need, spread over the devices of each; `some`: without those that have died."""
    asked = group.needs.each([(one,) for one in shared])
    needs = asked.survivors() if some else dict(zip(group.workers, asked.wait(), strict=True))
    claims = []
    for worker, host in zip(group.workers, group.hosts, strict=True):
        if worker not in needs:
            continue
        held, need = devices[host], needs[worker]
        movable = need.num_bytes > need.kept_bytes
        claims.append(Claim(worker, held, need.num_bytes / len(held), need.kept_bytes / len(held), movable))
    return claims
