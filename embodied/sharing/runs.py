"""Several runs that share the devices of a machine or a cluster: the devices of each, their processes, and their common
folder.

    share.json     the runs: arguments, devices, folder, how each ended
    share.jsonl    which run held which device when (`sharing/run_turns.py`)
    logs/          the output of each run

Each run is an `embodied.train` command in a separate process, with a placement that puts its simulators and learners on
its own devices and a policy worker on every device that it may borrow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, islice
from pathlib import Path
from shlex import join
from typing import Any

from embodied.config.recipe import Loaded, RunConfig, load
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.files import reading
from embodied.placement import PlacementError, PlacementPlan, Topology, roles_of
from embodied.placement.placement_plan import whole_workers
from embodied.placement.topology import Node
from embodied.run import launch
from embodied.run.devices import divides_requests, machines
from embodied.run.memory_check import CUDA_BYTES, PROCESS_BYTES, needs
from embodied.run.run_group import ListedRuns, read_listed
from embodied.runtime import HostPlan
from embodied.runtime.backend import reserve_devices
from embodied.sharing.children import Children, ChildRun, Place
from embodied.sharing.lease_server import RecordedLeases
from embodied.sharing.page import SHARE
from embodied.sharing.run_turns import FORMAT
from embodied.workflows import roles_of_run
from embodied.workflows.rl_loop import EmbodiedLoop

MOST_SETS = 10_000  # sets of runs that are tried


@dataclass(frozen=True)
class SharedRun:
    """One of the runs in share.json."""

    name: str
    words: tuple[str, ...]  # its arguments, without the placement
    own: tuple[str, ...]  # its devices
    weight: float = 1.0
    placement: dict[str, Any] | None = None  # None: the recipe's placement
    folder: str = ""
    ended: str = ""  # finished, ended early, stopped or failed; "" while it runs

    def __str__(self) -> str:
        return self.name

    key = property(__str__)


# Devices


def own_devices(devices: Sequence[str], weights: Sequence[float]) -> list[tuple[str, ...]]:
    """The devices of each run, in proportion to its weight and next to each other. If there are more runs than devices,
    runs share them."""
    count, total = len(devices), sum(weights)
    if len(weights) > count:
        return [(devices[i * count // len(weights)],) for i in range(len(weights))]
    sizes = [max(1, int(count * weight / total)) for weight in weights]
    while sum(sizes) > count:
        sizes[max((i for i in range(len(sizes)) if sizes[i] > 1), key=lambda i: sizes[i] / weights[i])] -= 1
    while sum(sizes) < count:
        sizes[min(range(len(sizes)), key=lambda i: (sizes[i] + 1) / weights[i])] += 1
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [tuple(devices[end - size : end]) for size, end in zip(sizes, ends)]


def devices_of(topology: Topology) -> tuple[str, ...]:
    """The devices that runs share: GPUs, or cores if there are no GPUs."""
    gpus = tuple(on_node(node, f"gpu:{gpu.index}") for node in topology.nodes for gpu in node.gpus)
    return gpus or tuple(on_node(node, f"cpu:{core}") for node in topology.nodes for core in node.core_numbers)


def on_node(node: Node, device: str) -> str:
    """The device's name, unique among all machines."""
    return f"{node.name}/{device}" if node.name else device


def part_of(topology: Topology, owned: Sequence[Sequence[str]], place: int) -> Topology:
    """The devices of run number `place` of `owned`: its cores, or its GPUs and its part of the cores beside them."""
    nodes = []
    for node in topology.nodes:
        of_node = {*devices_of(replace(topology, nodes=(node,)))}
        owners = [i for i, owned_by_run in enumerate(owned) if of_node.intersection(owned_by_run)]
        if place not in owners:
            continue
        cores = tuple(core for core in node.core_numbers if on_node(node, f"cpu:{core}") in owned[place])
        if not cores:
            turn, count = owners.index(place), len(owners)
            cores = node.core_numbers[turn * node.cores // count : max(1, (turn + 1) * node.cores // count)]
        gpus = tuple(gpu for gpu in node.gpus if on_node(node, f"gpu:{gpu.index}") in owned[place])
        nodes.append(replace(node, cores=len(cores), core_ids=cores, numa=(), gpus=gpus))
    return replace(topology, nodes=tuple(nodes))


def placement_for(
    config: RunConfig, topology: Topology, devices: Sequence[str], owned: Sequence[Sequence[str]], place: int
) -> dict[str, Any] | None:
    """The map of run number `place`, which may borrow devices; None if its recipe has a map, or it is on other
    devices."""
    if isinstance(config.placement, dict):
        return None
    part, roles = part_of(topology, owned, place), roles_of_run(EmbodiedLoop, config)
    _, plan = launch.with_placement(config, part, True, roles_of(roles))
    slots: dict[str, list[str]] = {}
    renders: dict[str, list[str]] = {}
    nodes = {node.name: node for node in topology.nodes}
    for host in plan.hosts:
        key, node = ",".join(host.roles), nodes[host.node or part.nodes[0].name]
        first = node.core_numbers.index(host.cores[0])
        cores = f"cpu:{first}-{first + len(host.cores) - 1}" if len(host.cores) > 1 else f"cpu:{first}"
        slots.setdefault(key, []).extend(on_node(node, device) for device in host.devices or (cores,))
        renders.setdefault(key, []).extend([host.render] if host.render else [])
    lent = [device for device in devices if device not in owned[place]]
    if divides_requests(config):
        owners = {device: tuple(i for i, own in enumerate(owned) if device in own) for device in lent}
        # A worker on GPUs of two owners would begin only while both have no work.
        of_one_owner = lambda device: (device.rpartition("/")[0], owners[device])  # noqa: E731
        lent = whole_workers(lent, config.policy.worker_gpus, of_one_owner)
        slots, renders = with_borrowed(slots, lent, topology), {"sim": [r for cards in renders.values() for r in cards]}
    return {
        roles: {"devices": ",".join(on), "render": ",".join(renders[roles])} if renders.get(roles) else ",".join(on)
        for roles, on in slots.items()
    }


def with_borrowed(slots: Mapping[str, list[str]], lent: Sequence[str], topology: Topology) -> dict[str, list[str]]:
    """The same slots with policy workers in separate processes, also on lent devices. Maps count cores from 0."""
    counted = {
        on_node(node, f"cpu:{core}"): on_node(node, f"cpu:{i}")
        for node in topology.nodes
        for i, core in enumerate(node.core_numbers)
    }
    roles_by_devices: dict[str, list[str]] = {}
    for key, on in slots.items():
        roles = key.split(",")
        if others := ",".join(role for role in roles if role != "policy"):
            roles_by_devices[others] = on
        if "policy" in roles:
            roles_by_devices["policy"] = [*on, *(counted.get(device, device) for device in lent)]
    return roles_by_devices


def reserve(config: RunConfig, devices: Sequence[str]) -> Callable[[], None]:
    """Reserves these devices for all runs if they are a Ray cluster's, and the cores beside GPUs; returns a
    function that releases them."""
    if config.cluster.joined is None:
        return lambda: None
    plans = []
    for node in machines(config).nodes:
        if of_node := tuple(device for device in devices if device.partition("/")[0] == node.name):
            cores = tuple(core for core in node.core_numbers if on_node(node, f"cpu:{core}") in of_node)
            plans.append(HostPlan(node.name, (), cores or node.core_numbers, node=node.name, devices=of_node))
    return reserve_devices(config.cluster.joined, plans)


# Memory


def check_memory(runs: Sequence[tuple[str, RunConfig, PlacementPlan]], topology: Topology) -> None:
    """Raise ConfigError if the runs do not fit into the memory of a machine or of a GPU."""
    names = [name for name, _, _ in runs]
    sums = memory_sums(runs, topology)
    if not (problems := [memory.text(names) for memory in sums if not memory.fits(names)]):
        return
    fewer = chain.from_iterable(combinations(names, count) for count in range(len(names) - 1, 0, -1))
    fit = next((some for some in islice(fewer, MOST_SETS) if all(memory.fits(some) for memory in sums)), ())
    short = [memory.text(fit) for memory in sums if fit and not memory.fits(names)]
    advice = f"these fit: {', '.join(fit)} ({'; '.join(short)})" if fit else "a smaller policy, or fewer env.num_envs"
    raise ConfigError(
        "\n".join([*(f"memory: {line}" for line in problems), f"that is more than the machines have; {advice}"])
    )


@dataclass(frozen=True)
class MemorySum:
    """One memory, and each run's bytes in it at work and while another run works."""

    place: str
    has: float
    at_work: Mapping[str, float]
    asleep: Mapping[str, float]

    def parts(self, names: Sequence[str]) -> dict[str, float]:
        """The bytes of each run at the peak of taking turns: the largest run works, all other runs sleep."""
        largest = max(names, key=lambda name: self.at_work[name] - self.asleep[name])
        first = {largest: self.at_work[largest]}
        kept = {name: self.asleep[name] for name in names if name != largest}
        return first | {name if size == self.at_work[name] else f"{name} asleep": size for name, size in kept.items()}

    def fits(self, names: Sequence[str]) -> bool:
        return sum(self.parts(names).values()) <= self.has

    def text(self, names: Sequence[str]) -> str:
        parts = self.parts(names)
        summands = " + ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items())
        return f"{self.place}: {summands} = {sum(parts.values()) / 1e9:.1f} of {self.has / 1e9:.1f} GB"


def memory_sums(runs: Sequence[tuple[str, RunConfig, PlacementPlan]], topology: Topology) -> list[MemorySum]:
    """The memory of each machine and of each GPU. Runs keep their host memory, which also holds data offloaded from
    GPUs; drivers are on the first machine. On a GPU a sleeping run keeps only CUDA's memory of its processes."""
    needs_by_run = {name: (needs(config, plan, topology), plan) for name, config, plan in runs}
    sums = []
    for place, node in enumerate(topology.nodes):
        names = (node.name, "") if place == 0 else (node.name,)
        whole = {}
        for run, (need, plan) in needs_by_run.items():
            processes = sum(host.node in names for host in plan.hosts) + (place == 0)
            whole[run] = sum(load.whole for load in need if load.node in names) + PROCESS_BYTES * processes
        sums.append(MemorySum(node.name or "this machine", node.memory_bytes, whole, whole))
        for gpu in node.gpus:
            device = on_node(node, f"gpu:{gpu.index}")
            least = {
                run: sum(load.least for load in need if load.place == device) for run, (need, _) in needs_by_run.items()
            }
            kept = {
                run: CUDA_BYTES * sum(device in host.device_names for host in plan.hosts)
                for run, (_, plan) in needs_by_run.items()
            }
            sums.append(MemorySum(device, gpu.memory_bytes, least, kept))
    return sums


# Command lines, and the folder of their runs


@dataclass
class SharedRuns(ListedRuns):
    """The runs that share devices, as stored in share.json."""

    FILE = SHARE
    FORMAT = FORMAT

    folder: Path
    devices: tuple[str, ...]
    rule: str
    members: tuple[SharedRun, ...] = ()
    socket: str = ""


def read_shared_runs(folder: Path) -> SharedRuns:
    if not (folder / SHARE).is_file():
        raise ConfigError(f"{folder} holds no runs that share devices: the folder of a share has a {SHARE}")
    content = read_listed(folder / SHARE, FORMAT)
    with reading(folder / SHARE):
        runs = [SharedRun(**{**run, "words": tuple(run["words"]), "own": tuple(run["own"])}) for run in content["runs"]]
        return SharedRuns(folder, tuple(content["devices"]), content["rule"], tuple(runs), content["socket"])


def load_run(words: Sequence[str]) -> Loaded:
    loaded = load(list(words))
    if loaded is None or loaded.dry_run:
        raise ConfigError("--help and --cfg are for python -m embodied.train")
    if program := loaded.arguments.get("program"):
        raise ConfigError(
            f"program={program[0]}: only runs with the roles of embodied.train share devices; run it alone: "
            f"python -m embodied.train {join(words)}"
        )
    return loaded


def planned(run: SharedRun, loaded: Loaded) -> tuple[RunConfig, PlacementPlan]:
    """The run's config and plan on its devices."""
    config = loaded.config
    if run.placement is not None:
        config = config.model_copy(update={"placement": run.placement})
    return launch.planned(config, roles=roles_of_run(EmbodiedLoop, loaded.config))


def prepare(
    shared: SharedRuns, orders: Sequence[Sequence[str]], weights: Sequence[float], topology: Topology
) -> list[SharedRun]:
    """The runs of these command lines, each with devices and a unique name. Raises all errors before anything
    starts."""
    names = {run.name for run in shared.members}
    added: list[SharedRun] = []
    going = [run for run in shared.members if not run.ended]
    plans = [(run.name, *planned(run, load_run(run.words))) for run in going]  # current runs keep their memory
    free = tuple(device for device in shared.devices if all(device not in run.own for run in going))
    if free:
        owns = own_devices(free, weights)
    else:  # new runs get the devices that a new division among all runs gives them; current runs keep theirs
        owns = own_devices(shared.devices, [*(run.weight for run in going), *weights])[len(going) :]
    owned = [*(run.own for run in going), *owns]
    for place, (words, own, weight) in enumerate(zip(orders, owns, weights), start=len(going)):
        loaded = load_run(words)
        numbered = (f"{loaded.name}-{i}" for i in range(2, 1000))
        name = next(name for name in (loaded.name, *numbered) if name not in names)
        names.add(name)
        config, _ = launch.planned(loaded.config, roles=roles_of_run(EmbodiedLoop, loaded.config))
        try:
            placement = placement_for(config, topology, shared.devices, owned, place)
        except PlacementError as err:
            raise ConfigError(f"{name}: {err}") from None
        run = SharedRun(name, tuple(words), own, weight, placement)
        plans.append((name, *planned(run, loaded)))
        added.append(run)
    check_memory(plans, topology)
    return added


# Their processes


class SharedChildren(Children):
    """The runs of a share. Another command may add runs (join=)."""

    def __init__(self, shared: SharedRuns) -> None:
        free = reserve(load_run(shared.members[0].words).config, shared.devices)
        super().__init__(shared, RecordedLeases(shared.folder, shared.devices, shared.rule, self.add, free))
        shared.socket = str(self.leases.path)
        shared.write()

    def begin(self, entry: SharedRun) -> None:
        run, folder = self.group.change(entry, ended=""), self.begun_folder(entry)
        config = load_run(run.words).config
        name, log = f"{self.folder.name}-{run.name}", self.folder / "logs" / f"{run.name}.log"
        place = Place(own=run.own, placement=run.placement)
        words = [
            *(word for word in run.words if not word.startswith("run.name=")),
            f"run.name={name}",
            *place.arguments,
        ]
        child = ChildRun(run, name, log, config.run.dir, folder, config.faults.hang_s)
        self.start(child, [f"resume={folder}"] if folder else words, place, run.weight)

    def add(self, words: list[str]) -> str:
        """Begin another run on devices of ended runs, or else on devices that it shares with current runs. Returns the
        reply to the user."""
        if self.stopping:
            return "error: these runs are being stopped"
        try:
            (run,) = prepare(self.group, [words], [1.0], machines(load_run(words).config))
        except EmbodiedError as err:
            return f"error: {err}"
        self.group.members += (run,)
        self.begin(run)
        return f"{run.name} has joined on {', '.join(run.own)}"

    def record_end(self, child: ChildRun, cause: str) -> None:
        child.entry = self.group.change(child.entry, ended=child.outcome)
        self.say(f"{child.entry} {child.outcome}{cause and f': {cause}'}; {child.folder or child.log}")
