"""A plan: the processes, their roles, cores and other devices. Equal inputs give equal plans; nothing is started or
probed.

A placement is a map from roles to devices, or a mode. `choose` makes the map of a mode by the rules below, when nothing
has been measured yet; with a measured profile `run/launch.py` uses `profile_planner.py` instead. `run/memory_check.py`
checks memory afterwards.

Networks compute on cores or on GPUs; simulators on cores, or on GPUs with `gpu_sims`. Devices are taken from all
machines in turn, so that every mode uses all machines.

all on one kind    collocated     {sim + policy} and {learner} on every device; rollout and update take turns
                   disaggregated  sims, policies and learners on devices of their own
                   hybrid         sims on devices of their own; {policy + learner} on the rest
                   auto           collocated: on cores the simulator is the work, and idle cores are the loss; but one
                                  learner where gradient steps are small (`small_steps`): several would wait for each
                                  other longer than they compute, above all beside other programs
sims on cores      as many sim workers as there are cores to feed them, in processes of their own: a sim in a policy's
beside GPUs        process would play all rows of a GPU on one core
                   collocated     {policy} and {learner} on every GPU, taking turns
                   disaggregated  policies on half of the GPUs, learners on the rest
                   hybrid         {policy + learner} on every GPU
                   auto           hybrid: policy and learner of a GPU share one copy of the weights
learners overlap   learners that work during the rollout (pipeline.schedule) have devices of their own: collocated and
                   hybrid give them none
                   auto           {sim + policy} on three quarters of the cores, learners on the rest; on GPUs on one
                                  half, learners on the other; beside GPUs policies on one half, learners on the other
policies of        (`policy_gpus`) share no process with learners, which have one GPU each
several GPUs       auto           collocated: policies and learners take turns on all GPUs
other roles        of a program go with the policy in collocated and hybrid plans, with the learner if they work in
                   the update, or with the role that their declaration names; disaggregated, or if it names none, each
                   has one device of its own; while learners overlap with the rollout, roles that work in the rollout
                   and name the learner go beside the policies
other programs     lack one of the three roles and follow their roles' declarations: a role beside another one shares
                   its processes, and a role beside none heads a group
                   collocated     groups on all devices, taking turns; a role with devices of its own gets a share
                   hybrid         groups on equal shares of the devices
                   disaggregated  roles on equal shares of the devices, none beside another
                   auto           collocated
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from embodied.placement.grammar import (
    EMBODIED,
    PARALLEL,
    PlacedRole,
    Slot,
    extra_roles,
    is_loop,
    join_devices,
    parse_map,
    roles_of,
    text_of,
)
from embodied.placement.topology import (
    Gpu,
    Node,
    PlacementError,
    Topology,
    cores_beside,
    cores_of,
    gpus_of,
    not_there,
    number,
    one_machine,
    span,
    spans,
)

Device = tuple[str, str, int]  # node, kind, number
T = TypeVar("T")
Groups = list[tuple[str, list[Device]]]

ENVS_PER_SIM = 4  # a batched simulator is hardly faster with fewer rows
MOST_LEARNERS = 8  # with more ranks, a small network's gradients take longer to exchange than to compute


class DeviceRequest(NamedTuple):
    key: str  # the key that asks for devices
    instead: str = ""  # a setting that works with fewer devices; "": another mode


def choose(
    mode: str,
    machines: Topology,
    num_envs: int,
    stages: int,
    networks: str = "cpu",
    gpu_sims: bool = False,
    rows: int = ENVS_PER_SIM,
    most_sims: int | None = None,
    draws: bool = False,
    roles: Sequence[PlacedRole] = EMBODIED,
    overlap: str = "",
    small_steps: bool = False,
    policy_gpus: int = 1,
) -> tuple[dict[str, Any], str]:
    """Returns the map, and the reason if there was a choice. `networks` compute on "cpu" or "gpu". Beside GPUs a sim
    worker has at least `rows` rows, and there are at most `most_sims` of them; with `draws` they render on the GPUs of
    their machine. `overlap`: the option under which learners work during the rollout. `small_steps`: gradient steps are
    too short to be divided among learners. `policy_gpus`: GPUs of every policy worker, all of one machine."""
    policy_gpus = policy_gpus if networks == "gpu" else 1
    cores, gpus = devices_of(machines, "cpu"), devices_of(machines, "gpu", policy_gpus)
    request = DeviceRequest(f"placement={mode}")
    if overlap:
        several = len(gpus if networks == "gpu" else cores) > 1 and mode != "auto"
        key = overlap if mode == "auto" else f"placement={mode}"
        request = DeviceRequest(key, "placement=auto" if several else "pipeline.schedule=sync")
    more, draws = extra_roles(roles), draws and not gpu_sims
    if not is_loop(roles):
        apart = [role for role in roles if networks == "gpu" and not (role.network or gpu_sims)]
        own_cores = cores[: even_workers(num_envs, stages, min(len(cores), most_sims or len(cores)))]
        left, devices = [role for role in roles if role not in apart], gpus if networks == "gpu" else cores
        groups = [*((role.name, own_cores) for role in apart), *by_declaration(mode, left, devices, num_envs, stages)]
        return as_map(groups, machines, draws), "collocated: roles take turns" * (mode == "auto")
    by_rule = mode == "auto"
    mode, reason = resolve_auto(mode, networks, gpu_sims or policy_gpus > 1, overlap)
    if by_rule and mode == "collocated" and policy_gpus > 1:
        reason = "collocated: policies and learners take turns on all GPUs"
    if mode == "hybrid" and policy_gpus > 1:
        mode, reason = "collocated", "hybrid: policies and learners take turns on all GPUs, in processes of their own"
    homeless = [role for role in more if mode == "disaggregated" or not role.home]
    names = [role.name for role in homeless if networks == "cpu" or not role.network]
    cores, kept_cores = cut_last(cores, names, "cores", request)
    names = [role.name for role in homeless if networks == "gpu" and role.network]
    gpus, kept_gpus = cut_last(gpus, names, "GPUs", request)
    if networks == "gpu" and not gpu_sims:
        sims = num_sims(num_envs, stages, min(len(cores), most_sims or len(cores)), rows)
        groups = beside_gpus(mode, cores[:sims], gpus, num_envs, stages, request, policy_gpus)
    else:
        on = on_gpus if networks == "gpu" else on_cores
        groups = on(mode, gpus if networks == "gpu" else cores, num_envs, stages, request)
    apart = [
        role for role in more if overlap and role not in homeless and (role.phase, role.home) == ("rollout", "learner")
    ]
    acting = next((own_cores for names, own_cores in groups if "policy" in names.split(",")), [])
    groups = [with_roles_beside(group, [role for role in more if role not in [*homeless, *apart]]) for group in groups]
    groups += [*((role.name, acting) for role in apart), *kept_cores, *kept_gpus]
    if by_rule and mode == "collocated" and networks == "cpu" and small_steps:
        groups = [(names, own_cores[:1] if names == "learner" else own_cores) for names, own_cores in groups]
        reason = "collocated: sims take turns with one learner, since gradient steps are small"
    if len(machines.nodes) > 1:
        groups = learner_at_home(groups, machines.nodes[0].name)
    return as_map(groups, machines, draws), reason


# From groups of roles to a map


def as_map(groups: Groups, machines: Topology, draws: bool) -> dict[str, Any]:
    """The groups in the notation of `grammar.py`."""
    order = {node.name: place for place, node in enumerate(machines.nodes)}
    in_order = {
        roles: sorted(devices, key=lambda device: (order.get(device[0], 0), device[2])) for roles, devices in groups
    }
    devices_by_roles: dict[str, Any] = {roles: text_of(devices) for roles, devices in in_order.items()}
    return with_drawing(devices_by_roles, machines) if draws else devices_by_roles


def by_declaration(mode: str, roles: Sequence[PlacedRole], devices: list[Device], num_envs: int, stages: int) -> Groups:
    """Returns the groups of a program without simulators, policies or learners."""
    names, apart = [role.name for role in roles], mode == "disaggregated"
    heads = [role for role in roles if apart or role.home not in names]
    keys = {head: ",".join([head.name] if apart else with_those_beside(head.name, roles)) for head in heads}
    turns = [head for head in heads if mode in ("auto", "collocated") and (head in EMBODIED or head.beside != "")]
    shares = [share for share in (turns, *([head] for head in heads if head not in turns)) if share]
    works = json.dumps({key: text_of(devices[:1]) for key in keys.values()})
    kind = "GPUs" if any(kind == "gpu" for _, kind, _ in devices) else "cores"
    request = DeviceRequest(f"placement={mode}", f"placement='{works}'")
    require_devices(request, " and ".join(keys.values()), len(shares), len(devices), mode, kind)
    size = len(devices) // len(shares)
    workers = even_workers(num_envs, stages, size)
    return [(keys[head], devices[i * size :][:workers]) for i, share in enumerate(shares) for head in share]


def resolve_auto(mode: str, networks: str, gpu_sims: bool, overlap: str) -> tuple[str, str]:
    """Returns the mode that auto stands for, and the reason. If learners overlap with the rollout, the mode has no name
    and `overlap` is returned."""
    if mode != "auto":
        return mode, ""
    kind = "GPUs" if networks == "gpu" else "cores"
    if overlap:
        return overlap, f"with {overlap} learners work during the rollout, on {kind} of their own"
    if networks == "gpu" and not gpu_sims:
        return "hybrid", "hybrid: sims on cores; policy and learner of a GPU share its weights"
    roles = "all" if networks == "gpu" else "sims and learners"
    return "collocated", f"collocated: {roles} take turns on all {kind}"


def cut_last(devices: list[Device], names: list[str], kind: str, request: DeviceRequest) -> tuple[list[Device], Groups]:
    """Splits off the last devices, one for each of these roles."""
    if names:
        what = f"{' and '.join(names)} and the others"
        require_devices(request, what, len(names) + 1, len(devices), "collocated", kind)
    first = len(devices) - len(names)
    return devices[:first], [(name, [device]) for name, device in zip(names, devices[first:])]


def with_roles_beside(group: tuple[str, list[Device]], more: Sequence[PlacedRole]) -> tuple[str, list[Device]]:
    """Adds to a group the roles that are beside one of its roles, each behind that role."""
    names, devices = group
    return ",".join(name for head in names.split(",") for name in with_those_beside(head, more)), devices


def with_those_beside(name: str, roles: Sequence[PlacedRole]) -> list[str]:
    """A role and all roles beside it, also indirectly."""
    return [name, *(placed for role in roles if role.home == name for placed in with_those_beside(role.name, roles))]


def with_drawing(placement: dict[str, Any], machines: Topology) -> dict[str, Any]:
    """The map with sims on cores that render on GPUs, if every machine with sims has GPUs."""
    most = min(len(node.gpus) for node in machines.nodes)
    roles = next((roles for roles in placement if "sim" in roles.split(",")), None)
    if not (most and roles):
        return placement
    return {**placement, roles: {"devices": placement[roles], "render": text_of([("", "gpu", i) for i in range(most)])}}


def learner_at_home(groups: Groups, home: str) -> Groups:
    """Ensures that the first learner is on the machine that starts the run: it writes the checkpoints."""
    learning = next(devices for roles, devices in groups if "learner" in roles.split(","))
    theirs = [
        device for _, devices in groups for device in devices if device[0] == home and device[1] == learning[0][1]
    ]
    if not theirs or any(device[0] == home for device in learning):
        return groups
    other = {learning[0]: theirs[0], theirs[0]: learning[0]}
    return [(roles, [other.get(device, device) for device in devices]) for roles, devices in groups]


def devices_of(machines: Topology, kind: str, together: int = 1) -> list[Device]:
    """The devices of all machines, taken in turn, so many `together`. A single machine has no name."""
    several = len(machines.nodes) > 1
    numbers = [
        [(node.name if several else "", kind, i) for i in range(node.cores if kind == "cpu" else len(node.gpus))]
        for node in machines.nodes
    ]
    parts = [[devices[first : first + together] for first in range(0, len(devices), together)] for devices in numbers]
    return [device for turn in zip_longest(*parts) for block in turn if block is not None for device in block]


# Which group gets which devices


def on_cores(mode: str, cores: list[Device], num_envs: int, stages: int, request: DeviceRequest) -> Groups:
    if mode == "collocated":
        sims, learners = num_sims(num_envs, stages, len(cores)), min(len(cores), num_envs, MOST_LEARNERS)
        return [("sim,policy", cores[:sims]), ("learner", cores[:learners])]
    if mode == "disaggregated":  # a quarter of the cores learns, an eighth acts, the rest simulates
        require_devices(
            request, "sims, policies and learners", 3, len(cores), "collocated" if len(cores) < 2 else "hybrid"
        )
        learners, policies = max(1, len(cores) // 4), max(1, len(cores) // 8)
        rest = len(cores) - learners - policies
        sims = num_sims(num_envs, stages, rest)
        acting, learning = cores[rest : rest + policies], cores[rest + policies :]
        return [
            ("sim", cores[:sims]),
            ("policy", acting[: sims * stages]),
            ("learner", learning[: min(num_envs, MOST_LEARNERS)]),
        ]
    hybrid = mode == "hybrid"
    what = "sims and {policy + learner}" if hybrid else "learners and the others"
    require_devices(request, what, 2, len(cores), "collocated")
    rest = len(cores) - max(1, len(cores) // 4)
    sims, learning = num_sims(num_envs, stages, rest), cores[rest:][: min(num_envs, MOST_LEARNERS)]
    if hybrid:
        return [("sim", cores[:sims]), ("policy,learner", learning[: sims * stages])]
    return [("sim,policy", cores[:sims]), ("learner", learning)]


def beside_gpus(
    mode: str,
    sims: list[Device],
    gpus: list[Device],
    num_envs: int,
    stages: int,
    request: DeviceRequest,
    policy_gpus: int = 1,
) -> Groups:
    parts = len(sims) * stages
    if policy_gpus > 1:
        if apart := mode != "collocated":
            require_devices(request, "policies and learners", 2, len(gpus), "collocated", "GPUs")
        acting = whole_parts(gpus[len(gpus) // 2 :] if apart else gpus, policy_gpus, request)[: parts * policy_gpus]
        learning = [gpu for gpu in gpus if gpu not in acting] if apart else gpus
        return [("sim", sims), ("policy", acting), ("learner", learning[:num_envs])]
    if mode == "hybrid":
        return [("sim", sims), ("policy,learner", gpus[: min(num_envs, parts)])]
    if mode == "collocated":
        return [("sim", sims), ("policy", gpus[:parts]), ("learner", gpus[:num_envs])]
    require_devices(request, "policies and learners", 2, len(gpus), "hybrid", "GPUs")
    policies = min(len(gpus) // 2, parts)
    return [("sim", sims), ("policy", gpus[:policies]), ("learner", gpus[policies:][:num_envs])]


def whole_parts(gpus: list[Device], count: int, request: DeviceRequest) -> list[Device]:
    """As many of these GPUs as give policy workers `count` GPUs of one machine each, machine by machine."""
    if whole := whole_workers(gpus, count):
        return whole
    most = max(Counter(node for node, _, _ in gpus).values(), default=0)
    fits = next(fewer for fewer in range(max(most, 1), 0, -1) if not count % fewer)  # divides the model as `count` does
    raise PlacementError(
        f"{PARALLEL}={count} gives a policy worker {count} GPUs of one machine, and with {request.key} there are {most}"
        f"; try {PARALLEL}={fits}"
    )


def whole_workers(devices: Sequence[T], count: int, node_of: Callable[[Any], Any] = itemgetter(0)) -> list[T]:
    """As many of these devices as give workers `count` devices of one machine each; [] if no machine has enough."""
    by_node: dict[Any, list[T]] = {}
    for device in devices:
        by_node.setdefault(node_of(device), []).append(device)
    return [
        device
        for devices_of_node in by_node.values()
        for device in devices_of_node[: len(devices_of_node) // count * count]
    ]


def on_gpus(mode: str, gpus: list[Device], num_envs: int, stages: int, request: DeviceRequest) -> Groups:
    """Groups for simulators on GPUs. A simulator keeps `stages` policies busy."""
    if mode == "collocated":
        return [("sim,policy", gpus[: even_workers(num_envs, stages, len(gpus))]), ("learner", gpus[:num_envs])]
    if mode == "hybrid":
        require_devices(request, "sims and {policy + learner}", 2, len(gpus), "collocated", "GPUs")
        sims = even_workers(num_envs, stages, -(-len(gpus) // (1 + stages)))
        return [("sim", gpus[:sims]), ("policy,learner", gpus[sims:][: min(num_envs, sims * stages)])]
    if mode == "disaggregated":
        instead = "hybrid" if len(gpus) > 1 else "collocated"
        require_devices(request, "sims, policies and learners", 3, len(gpus), instead, "GPUs")
        sims = even_workers(num_envs, stages, max(1, len(gpus) // 4))
        policies = min((len(gpus) - sims) // 2, sims * stages)
        return [
            ("sim", gpus[:sims]),
            ("policy", gpus[sims : sims + policies]),
            ("learner", gpus[sims + policies :][:num_envs]),
        ]
    require_devices(request, "learners and the others", 2, len(gpus), "collocated", "GPUs")
    sims = even_workers(num_envs, stages, len(gpus) // 2)
    return [("sim,policy", gpus[:sims]), ("learner", gpus[sims:][:num_envs])]


def require_devices(request: DeviceRequest, what: str, least: int, have: int, mode: str, kind: str = "cores") -> None:
    """Raise PlacementError if there are too few devices. It names what works: `mode`, or `request.instead`."""
    if have < least:
        raise PlacementError(
            f"{request.key} gives {what} {kind} of their own: that needs {least} {kind}, this run may use {have}; "
            f"try {request.instead or f'placement={mode}'}"
        )


def num_sims(num_envs: int, stages: int, most: int, rows: int = ENVS_PER_SIM) -> int:
    """The number of sim workers: at most one per core and per `rows` rows, each with the same number of rows."""
    return even_workers(num_envs, stages, max(1, min(most, num_envs // (stages * rows))))


def even_workers(num_envs: int, stages: int, most: int) -> int:
    """The largest number of sim workers up to `most` for which all stages of all workers have equally many envs."""
    return next((n for n in range(most, 0, -1) if num_envs % (n * stages) == 0), 1)


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
    def device_names(self) -> tuple[str, ...]:
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
    idle_gpus: tuple[str, ...] = ()  # GPUs that no host uses, as text by node
    memory: tuple[str, ...] = ()  # known uses of memory, as text

    def count(self, role: str) -> int:
        """The number of workers of a role."""
        return sum(role in host.roles for host in self.hosts)

    def has_own_devices(self, *roles: str) -> bool:
        """True if the workers of these roles share no device with other roles."""
        mine = {name for host in self.hosts if {*roles} & {*host.roles} for name in host.device_names}
        return not any(mine & {*host.device_names} for host in self.hosts if {*host.roles} - {*roles})

    def restricted_to(self, *roles: str) -> PlacementPlan:
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
        return [*lines, *self.idle_gpus]


def places(hosts: list[PlannedHost]) -> str:
    """The devices of equal hosts, as text."""
    if hosts[0].devices:
        cores_of_host = f", {len(hosts[0].devices)} each" if len(hosts[0].devices) > 1 and len(hosts) > 1 else ""
        return f"{spans(device for host in hosts for device in host.devices)}{cores_of_host}"
    cores = span(tuple({core for host in hosts for core in host.cores}))
    cores_of_host = f", {len(hosts[0].cores)} each" if len(hosts) > 1 else ""
    return f"{'core' if cores.isdigit() else 'cores'} {cores}{cores_of_host}"


def drawn_on(hosts: list[PlannedHost]) -> str:
    cards = spans(host.render for host in hosts if host.render)
    return f", drawing on {cards}" if cards else ""


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
    `choose` describes the other arguments."""
    if not isinstance(machines, Topology):
        machines = one_machine(machines)
    roles = roles_of(roles)
    reason, mode = "", "explicit"
    if isinstance(placement, str):
        mode = placement
        placement, reason = choose(
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
    plan = replace(plan, idle_gpus=idle_gpus(plan.hosts, machines))
    if any(host.node or host.device for host in plan.hosts):
        return plan
    cores = {core for host in plan.hosts for core in host.cores}
    return replace(plan, idle=tuple(core for core in machines.nodes[0].core_numbers if core not in cores))


def idle_gpus(hosts: Iterable[PlannedHost], machines: Topology) -> tuple[str, ...]:
    """The GPUs that no host uses, as text by node."""
    lines, first = [], machines.nodes[0].name
    used = {(host.node or first, name) for host in hosts for name in (*host.devices, host.render)}
    for node in machines.nodes:
        if idle := [name for gpu in node.gpus if (node.name, name := f"gpu:{gpu.index}") not in used]:
            of_node = f" of {node.name}" if len(machines.nodes) > 1 else ""
            lines.append(f"{number(len(idle), 'GPU')} idle: {spans(idle)}{of_node}")
    return tuple(lines)


def working_map(machines: Topology, num_envs: int, stages: int, networks: str, *how: Any) -> str:
    """A map that works on the machine that starts the run, if it has the networks' devices."""
    here = Topology(machines.nodes[:1])
    where = machines if networks == "gpu" and not here.gpus else here
    return json.dumps(choose("auto", where, num_envs, stages, networks, *how)[0])


def named_nodes(placement: str | dict[str, Any]) -> set[str]:
    """The machines that a map names."""
    parsed = parse_map(placement, more=True) if isinstance(placement, dict) else {}
    return {slot.node for slots in parsed.values() for slot in slots} - {""}


def explicit_hosts(
    placement: dict[str, Any], machines: Topology, roles: Sequence[PlacedRole], more: bool = False, policy_gpus: int = 1
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
            slots = join_devices(slots, policy_gpus)
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
    nodes = ", ".join(f"{node.name} ({number(node.cores, 'core')})" for node in machines.nodes if node.name)
    alone = f"this run uses one machine; leave out {name}/, or join a Ray cluster: cluster.address=host:port"
    raise PlacementError(f"placement names the node {name!r}, but {f'the cluster has {nodes}' if nodes else alone}")


def check_alike(roles: tuple[str, ...], slots: list[Slot]) -> None:
    """Refuse workers of one role on both cores and GPUs: learners compute together, policies must answer alike."""
    kinds = {slot.kind for slot in slots}
    if "gpu" in kinds and len(kinds) > 1:
        raise PlacementError(f"{','.join(roles)!r} is on {' and on '.join(sorted(kinds))}; its workers must be alike")


def check_hardware(hosts: list[PlannedHost]) -> None:
    """Refuse workers of a role that share a device other than a fake one, a GPU or cores."""
    uses = sorted((name, role) for h in hosts for role in h.roles for name in h.device_names if h.device)
    for (name, role), (other, other_role) in pairwise(uses):
        if (name, role) == (other, other_role) and name.rpartition("/")[2].partition(":")[0] not in ("gpu", "fake"):
            raise PlacementError(f"two {role} workers are on {name}, and there is one of it")


def check_shares(plan: PlacementPlan, stages: int, shared: bool) -> None:
    """Refuse counts that do not divide: all stages of all sim workers have equally many envs, and every learner and
    policy worker has at least one env (without `shared`: a policy worker at least one stage of a sim worker)."""
    sims, policies, learners = (plan.count(role) for role in ("sim", "policy", "learner"))
    if not sims:
        return  # a program without simulators
    envs, parts = plan.num_envs, sims * stages
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
