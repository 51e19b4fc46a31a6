"""A plan: the processes, their roles, cores and other devices. Equal inputs give equal plans; nothing is started or
probed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from embodied.placement import mode_rules
from embodied.placement.grammar import EMBODIED, PARALLEL, PlacedRole, Slot, joined, parse_map, roles_of
from embodied.placement.mode_rules import ENVS_PER_SIM
from embodied.placement.placement_errors import PlacementError, number, span
from embodied.placement.topology import Gpu, Node, Topology, gpu_of, gpus_of, not_there, one_machine


@dataclass(frozen=True)
class PlannedHost:
    """One process: its workers' roles, the cores it may run on, and how many threads its arithmetic uses."""

    name: str
    roles: tuple[str, ...]
    cores: tuple[int, ...]
    threads: int
    node: str = ""  # node of a cluster; "" is the machine that starts the run
    devices: tuple[str, ...] = ()  # gpu:3, fake:0, arm:0: its devices besides cores; several GPUs for some engines
    render: str = ""  # gpu:0: the GPU on which its simulator renders
    gpus: tuple[Gpu, ...] = ()  # its GPUs, for computing or rendering

    @property
    def device(self) -> str:
        """The first of its devices besides cores, or ""."""
        return next(iter(self.devices), "")

    @property
    def held(self) -> tuple[str, ...]:
        """The names of its devices, unique in the cluster."""
        names = self.devices or tuple(f"cpu:{core}" for core in self.cores)
        return tuple(f"{self.node}/{name}" if self.node else name for name in names)


@dataclass(frozen=True)
class PlacementPlan:
    mode: str  # the requested mode, or "explicit"
    hosts: tuple[PlannedHost, ...]  # the workers of a role are numbered in this order
    num_envs: int
    reason: str = ""  # why the planner chose this mode
    idle: tuple[int, ...] = ()  # cores that no host uses
    memory: tuple[str, ...] = ()  # known uses of memory, as text

    def count(self, role: str) -> int:
        """The number of workers of a role."""
        return sum(role in host.roles for host in self.hosts)

    def apart(self, *roles: str) -> bool:
        """True if the workers of these roles share no device with other roles."""
        mine = {name for host in self.hosts if {*roles} & {*host.roles} for name in host.held}
        return not any(mine & {*host.held} for host in self.hosts if {*host.roles} - {*roles})

    def only(self, *roles: str) -> PlacementPlan:
        """The plan with only these roles, for commands that need only these."""
        kept = [(host, tuple(r for r in host.roles if r in roles)) for host in self.hosts]
        hosts = tuple(replace(host, roles=roles) for host, roles in kept if roles)
        return replace(self, hosts=hosts)

    def describe(self) -> list[str]:
        """A few lines for the first screen of a run."""
        lines = [f"{self.mode}{f' ({self.reason})' if self.reason else ''}"]
        groups: dict[tuple[tuple[str, ...], str, bool], list[PlannedHost]] = {}
        for host in self.hosts:
            groups.setdefault((host.roles, host.node, bool(host.device)), []).append(host)
        for (roles, node, _), hosts in groups.items():
            where = f"{places(hosts)}{f' of {node}' if node else ''}{drawn_on(hosts)}"
            lines.append(f"{len(hosts)} x {' + '.join(roles)} on {where}")
        if sims := self.count("sim"):
            lines.append(f"{self.num_envs} envs = {number(sims, 'sim worker')} x {self.num_envs // sims}")
        if self.idle:
            lines.append(f"{number(len(self.idle), 'core')} idle: {span(self.idle)}")
        return lines


def places(hosts: list[PlannedHost]) -> str:
    """The devices of equal hosts, as text."""
    if hosts[0].devices:
        each = f", {len(hosts[0].devices)} each" if len(hosts[0].devices) > 1 and len(hosts) > 1 else ""
        return f"{in_words(device for host in hosts for device in host.devices)}{each}"
    cores = span(tuple({core for host in hosts for core in host.cores}))
    each = f", {len(hosts[0].cores)} each" if len(hosts) > 1 else ""
    return f"{'core' if cores.isdigit() else 'cores'} {cores}{each}"


def drawn_on(hosts: list[PlannedHost]) -> str:
    cards = in_words(host.render for host in hosts if host.render)
    return f", drawing on {cards}" if cards else ""


def in_words(devices: Iterable[str]) -> str:
    """gpu:0-7 for eight."""
    by_kind: dict[str, set[int]] = {}
    for device in devices:
        kind, _, place = device.partition(":")
        by_kind.setdefault(kind, set()).add(int(place))
    return ", ".join(f"{kind}:{span(tuple(places))}" for kind, places in by_kind.items())


def make_plan(
    placement: str | dict[str, Any],
    machines: Topology | tuple[int, ...],
    num_envs: int = 0,
    stages: int = 1,
    networks: str = "cpu",
    gpu_sims: bool = False,
    rows: int = ENVS_PER_SIM,
    most_sims: int | None = None,
    draws: bool = False,
    roles: Sequence[PlacedRole | str] = EMBODIED,
    more: bool = False,
    overlap: str = "",
    shared: bool = False,
    small_steps: bool = False,
    policy_gpus: int = 1,
) -> PlacementPlan:
    """Returns the plan of a placement on `machines`, or on one machine with these cores; raises PlacementError. `roles`
    need a place; `more`: a map may place other roles, too; `shared`: several policy workers may answer a request.
    `mode_rules.choose` describes the other arguments."""
    if not isinstance(machines, Topology):
        machines = one_machine(machines)
    roles = roles_of(roles)
    reason, mode = "", "explicit"
    if isinstance(placement, str):
        mode = placement
        placement, reason = mode_rules.choose(
            *(placement, machines, num_envs, stages, networks, gpu_sims, rows, most_sims, draws, roles, overlap),
            small_steps=small_steps,
            policy_gpus=policy_gpus,
        )
        plan = PlacementPlan(mode, explicit_hosts(placement, machines, roles, False, policy_gpus), num_envs, reason)
        check_shares(plan, stages, shared)
    else:
        try:
            plan = PlacementPlan(mode, explicit_hosts(placement, machines, roles, more, policy_gpus), num_envs)
            check_shares(plan, stages, shared)
        except PlacementError as err:
            how = (gpu_sims, rows, most_sims, draws, roles, overlap, False, policy_gpus)
            works = working_map(machines, num_envs, stages, networks, *how)
            raise PlacementError(f"{err}; try placement='{works}'") from None
    if any(host.node or host.device for host in plan.hosts):
        return plan
    used = {core for host in plan.hosts for core in host.cores}
    return replace(plan, idle=tuple(core for core in machines.nodes[0].core_numbers if core not in used))


def working_map(machines: Topology, num_envs: int, stages: int, networks: str, *how: Any) -> str:
    """A map that works on the machine that starts the run, if it has the networks' devices."""
    here = Topology(machines.nodes[:1])
    where = machines if networks == "gpu" and not here.gpus else here
    return json.dumps(mode_rules.choose("auto", where, num_envs, stages, networks, *how)[0])


def named_nodes(placement: str | dict[str, Any]) -> set[str]:
    """The machines that a map names."""
    parsed = parse_map(placement, more=True) if isinstance(placement, dict) else {}
    return {slot.node for slots in parsed.values() for slot in slots} - {""}


def explicit_hosts(
    placement: dict[str, Any],
    machines: Topology,
    roles: Sequence[PlacedRole],
    more: bool = False,
    policy_gpus: int = 1,
) -> tuple[PlannedHost, ...]:
    hosts: list[PlannedHost] = []
    for names, slots in parse_map(placement, roles, more).items():
        check_alike(names, slots)
        if policy_gpus > 1 and "policy" in names and slots[0].kind in ("gpu", "fake"):
            if len(names) > 1:
                raise PlacementError(
                    f"{','.join(names)!r} share processes with one GPU each, but with {PARALLEL}={policy_gpus} a "
                    "policy worker has several; give policy a place of its own"
                )
            slots = joined(slots, policy_gpus)
        hosts += hosts_on(names, slots, machines)
    check_hardware(hosts)
    return tuple(hosts)


def hosts_on(roles: tuple[str, ...], slots: Sequence[Slot], machines: Topology) -> list[PlannedHost]:
    """Returns a host for each slot; refuses devices that a machine lacks."""
    hosts = []
    for i, slot in enumerate(slots):
        node = node_of(slot.node, machines)
        name = f"{'+'.join(roles)}-{i}"
        if slot.render and slot.render not in node.named:
            raise PlacementError(f"{not_there(slot.render, node)}, so nothing can be drawn on it")
        if slot.kind == "cpu":
            cores, devices = cores_of(slot.devices, node), []
            threads, gpus = len(cores), gpus_of([slot.render], node)
        else:
            devices = [f"{slot.kind}:{number}" for number in slot.devices]
            cores = tuple(dict.fromkeys(core for device in devices for core in cores_beside(device, node)))
            threads, gpus = len(cores) if slot.kind == "gpu" else 1, gpus_of(devices, node)
        hosts.append(PlannedHost(name, roles, cores, threads, slot.node, tuple(devices), slot.render, gpus))
    return hosts


def node_of(name: str, machines: Topology) -> Node:
    """The machine with this name; "" is the machine that starts the run."""
    if not name:
        return machines.nodes[0]
    if named := next((node for node in machines.nodes if node.name == name), None):
        return named
    known = ", ".join(f"{node.name} ({number(node.cores, 'core')})" for node in machines.nodes if node.name)
    alone = f"this run uses one machine; leave out {name}/, or join a Ray cluster: cluster.address=host:port"
    raise PlacementError(f"placement names the node {name!r}, but {f'the cluster has {known}' if known else alone}")


def check_alike(roles: tuple[str, ...], slots: list[Slot]) -> None:
    """Refuse workers of one role on both cores and GPUs: learners compute together, policies must answer alike."""
    kinds = {slot.kind for slot in slots}
    if "gpu" in kinds and len(kinds) > 1:
        raise PlacementError(f"{','.join(roles)!r} is on {' and on '.join(sorted(kinds))}; its workers must be alike")


def check_hardware(hosts: list[PlannedHost]) -> None:
    """Refuse workers of a role that share a device other than a fake one, a GPU or cores."""
    uses = sorted((name, role) for h in hosts for role in h.roles for name in h.held if h.device)
    for (name, role), (other, other_role) in pairwise(uses):
        if (name, role) == (other, other_role) and name.rpartition("/")[2].partition(":")[0] not in ("gpu", "fake"):
            raise PlacementError(f"two {role} workers are on {name}, and there is one of it")


def check_shares(plan: PlacementPlan, stages: int, shared: bool) -> None:
    """Refuse counts that do not divide: all stages of all sim workers have equally many envs, and every learner and
    policy worker has at least one env (without `shared`: a policy worker at least one stage of a sim worker)."""
    sims, policies, learners = (plan.count(role) for role in ("sim", "policy", "learner"))
    if not sims:
        return  # a program without simulators
    envs = plan.num_envs
    parts = sims * stages
    if envs % parts:
        what = f"{sims} sim workers" + (f" x pipeline.stages={stages} = {parts} parts" if stages > 1 else "")
        below, above = envs // parts * parts, (envs // parts + 1) * parts
        fit = " or ".join(f"env.num_envs={n}" for n in (below, above) if n)
        raise PlacementError(f"env.num_envs={envs} does not divide among {what}; {fit} does")
    if shared and policies > envs // stages:
        what = f"env.num_envs={envs}" + (f" / pipeline.stages={stages} = {envs // stages}" if stages > 1 else "")
        raise PlacementError(f"{policies} policy workers share {what}, so {policies - envs // stages} would have none")
    if policies > parts and not shared:
        raise PlacementError(
            f"{policies} policy workers serve {number(sims, 'sim worker')} x pipeline.stages={stages} = {parts} parts, "
            f"so {policies - parts} would have no work"
        )
    if learners > envs:
        raise PlacementError(f"{learners} learners share env.num_envs={envs}, so {learners - envs} would have none")


# CPU cores: a placement names them; a host on a GPU gets a share of the cores of the GPU's NUMA node, a host on other
# hardware may use all cores. `embodied/runtime/local.py` and `ray/guard.py` bind processes to their cores.


def cores_of(devices: tuple[int, ...], node: Node) -> tuple[int, ...]:
    """The core numbers of devices `cpu:N`; refuses cores that the machine lacks."""
    cores = node.core_numbers
    if devices[-1] >= len(cores):
        have = f"{len(cores)} cores, cpu:0-{len(cores) - 1}" if len(cores) > 1 else "one core, cpu:0"
        raise PlacementError(f"cpu:{span(devices)} is not there: this run may use {have}")
    return tuple(cores[device] for device in devices)


def cores_beside(device: str, node: Node) -> tuple[int, ...]:
    """The cores of a device: GPUs divide the cores of their NUMA node in order, other devices may use all cores."""
    kind = device.partition(":")[0]
    if kind != "fake" and device not in node.named:
        raise PlacementError(not_there(device, node))
    gpu = gpu_of(device, node)
    if gpu is None:
        return node.core_numbers
    near, cores = node.gpus, node.core_numbers
    if gpu.numa is not None and gpu.numa < len(node.numa) and node.numa[gpu.numa]:
        near, cores = tuple(other for other in node.gpus if other.numa == gpu.numa), node.numa[gpu.numa]
    each, place = len(cores) // len(near), near.index(gpu)
    return cores[place * each : (place + 1) * each] if each else cores
