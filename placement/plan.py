"""A plan: which processes there are, which roles each runs, on which cores.

The same placement, cores and numbers always give the same plan; nothing is started or probed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from embodied.placement import modes
from embodied.placement.grammar import PlacementError, Slot, number, parse_map, span


@dataclass(frozen=True)
class Host:
    """One process: its workers' roles, the cores it may run on, and how many threads its arithmetic uses."""

    name: str
    roles: tuple[str, ...]
    cores: tuple[int, ...]
    threads: int
    node: str = ""  # of a cluster; "" is the machine the run is started on


@dataclass(frozen=True)
class PlacementPlan:
    mode: str  # as asked for: a mode's name, or "explicit"
    hosts: tuple[Host, ...]  # the workers of a role are numbered in this order
    num_envs: int
    reason: str = ""  # why this and not another, where the planner chose
    idle: tuple[int, ...] = ()  # cores that no host uses

    def count(self, role: str) -> int:
        """How many workers a role has."""
        return sum(role in host.roles for host in self.hosts)

    def without(self, role: str) -> PlacementPlan:
        """The plan of a command that does not need this role."""
        kept = [(host, tuple(r for r in host.roles if r != role)) for host in self.hosts]
        hosts = tuple(replace(host, roles=roles) for host, roles in kept if roles)
        return replace(self, hosts=hosts)

    def describe(self) -> list[str]:
        """A few lines for the first screen of a run."""
        lines = [f"{self.mode}{f' ({self.reason})' if self.reason else ''}"]
        groups: dict[tuple[tuple[str, ...], str], list[Host]] = {}
        for host in self.hosts:
            groups.setdefault((host.roles, host.node), []).append(host)
        for (roles, node), hosts in groups.items():
            cores = span(tuple({core for host in hosts for core in host.cores}))
            each = len(hosts[0].cores)
            shared = f", {each} each" if len(hosts) > 1 else ""
            word = "core" if cores.isdigit() else "cores"
            lines.append(f"{len(hosts)} x {' + '.join(roles)} on {word} {cores}{f' of {node}' if node else ''}{shared}")
        sims = self.count("sim")
        lines.append(f"{self.num_envs} envs = {number(sims, 'sim worker')} x {self.num_envs // sims}")
        if self.idle:
            lines.append(f"{number(len(self.idle), 'core')} idle: {span(self.idle)}")
        return lines


def make_plan(
    placement: str | dict[str, str],
    cores: tuple[int, ...],
    num_envs: int,
    stages: int = 1,
    nodes: Mapping[str, tuple[int, ...]] | None = None,
) -> PlacementPlan:
    """Who runs where. `cores` are the numbers of the cores this run may use here, `nodes` those on the machines that a
    placement can name. Raises PlacementError."""
    if isinstance(placement, dict):
        plan = PlacementPlan("explicit", explicit_hosts(placement, {"": cores, **(nodes or {})}), num_envs)
    else:
        groups, reason = modes.choose(placement, cores, num_envs, stages)
        hosts = [host for roles, shares in groups for host in make_hosts(roles, shares)]
        plan = PlacementPlan(placement, tuple(hosts), num_envs, reason)
    check_shares(plan, stages)
    if any(host.node for host in plan.hosts):
        return plan
    used = {core for host in plan.hosts for core in host.cores}
    return replace(plan, idle=tuple(core for core in cores if core not in used))


def named_nodes(placement: str | dict[str, str]) -> set[str]:
    if not isinstance(placement, dict):
        return set()
    return {slot.node for slots in parse_map(placement).values() for slot in slots} - {""}


def make_hosts(roles: tuple[str, ...], shares: list[tuple[int, ...]]) -> list[Host]:
    return [Host(f"{'+'.join(roles)}-{i}", roles, share, len(share)) for i, share in enumerate(shares)]


def explicit_hosts(placement: dict[str, str], nodes: Mapping[str, tuple[int, ...]]) -> tuple[Host, ...]:
    hosts: list[Host] = []
    for roles, slots in parse_map(placement).items():
        made = make_hosts(roles, [cores_of(slot, nodes) for slot in slots])
        hosts += [replace(host, node=slot.node) for host, slot in zip(made, slots)]
    return tuple(hosts)


def cores_of(slot: Slot, nodes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The core numbers behind a slot, if its machine has them."""
    if slot.node not in nodes:
        known = ", ".join(f"{name} ({number(len(cores), 'core')})" for name, cores in nodes.items() if name)
        alone = f"this run uses one machine; leave out {slot.node}/, or join a Ray cluster: cluster.address=host:port"
        has = f"the cluster has {known}" if known else alone
        raise PlacementError(f"placement names the node {slot.node!r}, but {has}")
    cores = nodes[slot.node]
    works = f'placement={{"sim,policy": "cpu:{last_index(cores)}*{len(cores)}", learner: "cpu:{last_index(cores)}"}}'
    if slot.kind == "gpu":
        raise PlacementError(f"gpu:{slot.devices[0]}: policies and learners run on CPU cores so far; try {works}")
    if slot.devices[-1] >= len(cores):
        have = f"{len(cores)} cores, cpu:{last_index(cores)}" if len(cores) > 1 else "one core, cpu:0"
        raise PlacementError(f"cpu:{span(slot.devices)} is not there: this run may use {have}; try {works}")
    return tuple(cores[device] for device in slot.devices)


def last_index(cores: tuple[int, ...]) -> str:
    return "0" if len(cores) == 1 else f"0-{len(cores) - 1}"


def check_shares(plan: PlacementPlan, stages: int) -> None:
    """Every sim worker gets the same number of envs in every stage, every learner at least one env."""
    sims, policies, learners = (plan.count(role) for role in ("sim", "policy", "learner"))
    envs = plan.num_envs
    parts = sims * stages
    if envs % parts:
        what = f"{sims} sim workers" + (f" x pipeline.stages={stages} = {parts} parts" if stages > 1 else "")
        below, above = envs // parts * parts, (envs // parts + 1) * parts
        fit = " or ".join(f"env.num_envs={n}" for n in (below, above) if n)
        works = number(modes.even_workers(envs, stages, sims), "sim worker")
        raise PlacementError(f"env.num_envs={envs} does not divide among {what}; try {fit}, or {works}")
    if policies > parts:
        raise PlacementError(
            f"{policies} policy workers serve {number(sims, 'sim worker')} x pipeline.stages={stages} = {parts} parts, "
            f"so {policies - parts} would have no work; try {number(parts, 'policy worker')}"
        )
    if learners > envs:
        raise PlacementError(
            f"{learners} learners share env.num_envs={envs}, so {learners - envs} would have none; "
            f"try {number(envs, 'learner')}"
        )
