"""Which workers of a run take turns on which devices, with how much memory.

Rollouts are the sims' and the policies', updates the learners'. A worker holds the devices of its host. Memory moves
only where a limit is known and both do not fit: a GPU's own, or `cluster.memory_gb`.
"""

from __future__ import annotations

from collections.abc import Mapping

from embodied.runtime import Cluster, Timers, WorkerGroup
from embodied.runtime.leases import GB, Claim, Coordinator
from embodied.runtime.turns import Turns

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
    gangs = {ROLLOUT: claims_of(sims, devices, [False] * len(sims)) + claims_of(policies, devices, shared)}
    if learners:
        gangs[UPDATE] = claims_of(learners, devices, [where in acting for where in learning])
    limits = {
        device: host.device_bytes if memory_gb is None else memory_gb * GB
        for host in cluster.hosts
        for device in devices[host.name]
    }
    everyone = [claim.worker for gang in gangs.values() for claim in gang]
    groups = {group.role: group for group in (sims, policies, learners) if group}
    # How much memory policies act in is known when they have acted; where nothing is limited nobody asks.
    limited = min(limits.values()) < float("inf")
    growing = {ROLLOUT: lambda: claims_of(policies, devices, shared, some=True)} if limited else {}
    return Turns(Coordinator(limits, gangs, resident=everyone), groups, timers, growing)


def claims_of(
    group: WorkerGroup, devices: Mapping[str, tuple[str, ...]], shared: list[bool], some: bool = False
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
