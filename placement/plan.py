"""A plan: which processes there are, which roles each runs, on which cores and other devices.

The same placement, cores and numbers always give the same plan; nothing is started or probed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

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
    device: str = ""  # gpu:3, fake:0, arm:0: what it holds besides cores
    render: str = ""  # gpu:0: where its simulator draws

    @property
    def held(self) -> tuple[str, ...]:
        """The devices it works on, by names that no other machine's have."""
        names = (self.device,) if self.device else tuple(f"cpu:{core}" for core in self.cores)
        return tuple(f"{self.node}/{name}" if self.node else name for name in names)


@dataclass(frozen=True)
class Offer:
    """What a machine has for this run: the numbers of its cores, and other devices by name."""

    cores: tuple[int, ...]
    devices: tuple[str, ...] = ()

    def of_kind(self, kind: str) -> list[str]:
        return [name for name in self.devices if name.startswith(f"{kind}:")]


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

    def apart(self, role: str) -> bool:
        """Whether the workers of a role share no device with others."""
        mine = {name for host in self.hosts if role in host.roles for name in host.held}
        return not any(mine & set(host.held) for host in self.hosts if set(host.roles) - {role})

    def without(self, role: str) -> PlacementPlan:
        """The plan of a command that does not need this role."""
        kept = [(host, tuple(r for r in host.roles if r != role)) for host in self.hosts]
        hosts = tuple(replace(host, roles=roles) for host, roles in kept if roles)
        return replace(self, hosts=hosts)

    def describe(self) -> list[str]:
        """A few lines for the first screen of a run."""
        lines = [f"{self.mode}{f' ({self.reason})' if self.reason else ''}"]
        groups: dict[tuple[tuple[str, ...], str, bool], list[Host]] = {}
        for host in self.hosts:
            groups.setdefault((host.roles, host.node, bool(host.device)), []).append(host)
        for (roles, node, _), hosts in groups.items():
            where = f"{places(hosts)}{f' of {node}' if node else ''}{drawn_on(hosts)}"
            lines.append(f"{len(hosts)} x {' + '.join(roles)} on {where}")
        sims = self.count("sim")
        lines.append(f"{self.num_envs} envs = {number(sims, 'sim worker')} x {self.num_envs // sims}")
        if self.idle:
            lines.append(f"{number(len(self.idle), 'core')} idle: {span(self.idle)}")
        return lines


def places(hosts: list[Host]) -> str:
    """Where hosts that are alike are, in words."""
    if hosts[0].device:
        return ", ".join(dict.fromkeys(host.device for host in hosts))
    cores = span(tuple({core for host in hosts for core in host.cores}))
    each = f", {len(hosts[0].cores)} each" if len(hosts) > 1 else ""
    return f"{'core' if cores.isdigit() else 'cores'} {cores}{each}"


def drawn_on(hosts: list[Host]) -> str:
    cards = list(dict.fromkeys(host.render for host in hosts if host.render))
    return f", drawing on {', '.join(cards)}" if cards else ""


def make_plan(
    placement: str | dict[str, Any],
    cores: tuple[int, ...],
    num_envs: int,
    stages: int = 1,
    nodes: Mapping[str, Offer] | None = None,
    devices: tuple[str, ...] = (),
    gpu_sims: bool = False,
) -> PlacementPlan:
    """Who runs where. `cores` are the numbers of the cores this run may use here, `devices` what else there is; `nodes`
    are the machines that a placement can name. A mode uses the GPUs there are, simulators only with `gpu_sims`. Raises
    PlacementError."""
    here = Offer(cores, devices)
    if isinstance(placement, dict):
        try:
            hosts = explicit_hosts(placement, {"": here, **(nodes or {})})
            plan = PlacementPlan("explicit", hosts, num_envs)
            check_shares(plan, stages)
        except PlacementError as err:
            raise PlacementError(f"{err}; try placement='{working_map(cores, num_envs, stages)}'") from None
    elif gpus := len(here.of_kind("gpu")):
        placed, reason = modes.on_gpus(placement, gpus, len(cores), num_envs, stages, gpu_sims)
        plan = PlacementPlan(placement, explicit_hosts(placed, {"": here}), num_envs, reason)
        check_shares(plan, stages)
    else:
        groups, reason = modes.choose(placement, cores, num_envs, stages)
        hosts = [host for roles, shares in groups for host in make_hosts(roles, shares)]
        plan = PlacementPlan(placement, tuple(hosts), num_envs, reason)
        check_shares(plan, stages)
    if any(host.node or host.device for host in plan.hosts):
        return plan
    used = {core for host in plan.hosts for core in host.cores}
    return replace(plan, idle=tuple(core for core in cores if core not in used))


def working_map(cores: tuple[int, ...], num_envs: int, stages: int) -> str:
    """A map that holds on these cores."""

    def place(shares: list[tuple[int, ...]]) -> str:
        return "cpu:0" if len(shares) == 1 else f"cpu:0-{len(shares) - 1}*{len(shares)}"

    (_, sims), (_, learners) = modes.collocated(cores, num_envs, stages)
    return f'{{"sim,policy": "{place(sims)}", learner: "{place(learners)}"}}'


def named_nodes(placement: str | dict[str, Any]) -> set[str]:
    return {slot.node for slot in slots_of(placement)} - {""}


def named_kinds(placement: str | dict[str, Any]) -> set[str]:
    """Of devices: cpu, gpu, ..."""
    slots = slots_of(placement)
    return {slot.kind for slot in slots} | {"gpu" for slot in slots if slot.render}


def slots_of(placement: str | dict[str, Any]) -> list[Slot]:
    return [slot for slots in parse_map(placement).values() for slot in slots] if isinstance(placement, dict) else []


def make_hosts(roles: tuple[str, ...], shares: list[tuple[int, ...]]) -> list[Host]:
    return [Host(f"{'+'.join(roles)}-{i}", roles, share, len(share)) for i, share in enumerate(shares)]


def explicit_hosts(placement: dict[str, Any], nodes: Mapping[str, Offer]) -> tuple[Host, ...]:
    hosts: list[Host] = []
    for roles, slots in parse_map(placement).items():
        check_alike(roles, slots)
        for i, slot in enumerate(slots):
            offer = offer_of(slot.node, nodes)
            name, there = f"{'+'.join(roles)}-{i}", {"node": slot.node, "render": slot.render}
            if slot.render and slot.render not in offer.devices:
                raise PlacementError(f"{not_there(slot.render, offer)}, so nothing can be drawn on it")
            if slot.kind == "cpu":
                cores = cores_of(slot, offer)
                hosts.append(Host(name, roles, cores, len(cores), **there))
            else:
                device = f"{slot.kind}:{slot.devices[0]}"
                cores = cores_beside(device, offer)
                threads = len(cores) if slot.kind == "gpu" else 1
                hosts.append(Host(name, roles, cores, threads, device=device, **there))
    check_hardware(hosts)
    return tuple(hosts)


def offer_of(node: str, nodes: Mapping[str, Offer]) -> Offer:
    if node in nodes:
        return nodes[node]
    known = ", ".join(f"{name} ({number(len(offer.cores), 'core')})" for name, offer in nodes.items() if name)
    alone = f"this run uses one machine; leave out {node}/, or join a Ray cluster: cluster.address=host:port"
    has = f"the cluster has {known}" if known else alone
    raise PlacementError(f"placement names the node {node!r}, but {has}")


def cores_of(slot: Slot, offer: Offer) -> tuple[int, ...]:
    """The core numbers behind a slot, if its machine has them."""
    cores = offer.cores
    if slot.devices[-1] >= len(cores):
        have = f"{len(cores)} cores, cpu:0-{len(cores) - 1}" if len(cores) > 1 else "one core, cpu:0"
        raise PlacementError(f"cpu:{span(slot.devices)} is not there: this run may use {have}")
    return tuple(cores[device] for device in slot.devices)


def cores_beside(device: str, offer: Offer) -> tuple[int, ...]:
    """Those that go with a device: GPUs share them out in order, others may use all."""
    kind = device.partition(":")[0]
    if kind != "fake" and device not in offer.devices:
        raise PlacementError(not_there(device, offer))
    if kind != "gpu":
        return offer.cores
    cards = offer.of_kind("gpu")
    each, place = len(offer.cores) // len(cards), cards.index(device)
    return offer.cores[place * each : (place + 1) * each] if each else offer.cores


def not_there(device: str, offer: Offer) -> str:
    kind = device.partition(":")[0]
    if mine := offer.of_kind(kind):
        return f"{device} is not there: this run may use {', '.join(mine)}"
    if kind == "gpu":
        return f"{device} is not there: no NVIDIA GPU is seen here"
    known = sorted({"cpu", "gpu", "fake", *(name.partition(":")[0] for name in offer.devices)})
    return (
        f"{device} is not there: devices are {', '.join(known)}, and hardware that the recipe declares: "
        f"cluster.devices=[{device}]"
    )


def check_alike(roles: tuple[str, ...], slots: list[Slot]) -> None:
    """Learners compute together and policies answer alike: all on cores, or all on GPUs."""
    kinds = {slot.kind for slot in slots}
    if "gpu" in kinds and len(kinds) > 1:
        raise PlacementError(f"{','.join(roles)!r} is on {' and on '.join(sorted(kinds))}; its workers must be alike")


def check_hardware(hosts: list[Host]) -> None:
    """Nothing but fake devices, GPUs and cores can be shared by workers of a role."""
    held = sorted((name, role) for h in hosts for role in h.roles for name in h.held if h.device)
    for (name, role), (other, other_role) in pairwise(held):
        if (name, role) == (other, other_role) and name.rpartition("/")[2].partition(":")[0] not in ("gpu", "fake"):
            raise PlacementError(f"two {role} workers are on {name}, and there is one of it")


def check_shares(plan: PlacementPlan, stages: int) -> None:
    """Every sim worker gets the same number of envs in every stage, every learner at least one env."""
    sims, policies, learners = (plan.count(role) for role in ("sim", "policy", "learner"))
    envs = plan.num_envs
    parts = sims * stages
    if envs % parts:
        what = f"{sims} sim workers" + (f" x pipeline.stages={stages} = {parts} parts" if stages > 1 else "")
        below, above = envs // parts * parts, (envs // parts + 1) * parts
        fit = " or ".join(f"env.num_envs={n}" for n in (below, above) if n)
        raise PlacementError(f"env.num_envs={envs} does not divide among {what}; {fit} does")
    if policies > parts:
        raise PlacementError(
            f"{policies} policy workers serve {number(sims, 'sim worker')} x pipeline.stages={stages} = {parts} parts, "
            f"so {policies - parts} would have no work"
        )
    if learners > envs:
        raise PlacementError(f"{learners} learners share env.num_envs={envs}, so {learners - envs} would have none")
