"""The machines that a run may use, the devices that a process sees, and the devices of its networks.

Modes, `auto`, profiles, benchmarks and the memory check all call `machines`, so they plan for the same machines. The
devices of a machine (cores of the process's affinity mask, NUMA nodes, memory, NVIDIA GPUs) are read from the kernel's
files and from nvidia-smi, without imports that touch a device.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied.config.recipe import RunConfig
from embodied.core.errors import ConfigError
from embodied.core.options import written
from embodied.envs import env_class
from embodied.placement import PlacedRole, PlacementError, PlacementPlan, PlannedHost, make_plan
from embodied.placement.grammar import parse_devices, parse_map, text_of
from embodied.placement.topology import Gpu, Node, Topology, read_topology
from embodied.policies import policy_class
from embodied.policies.config import PolicyOptions
from embodied.run import memory_check
from embodied.run.memory_check import NETWORKS, measured_memory, needs, vllm_cache
from embodied.runtime import HostPlan, nodes_of

if TYPE_CHECKING:
    from embodied.system.drawing import Result

SYS = Path("/sys")
QUERY_S = 20.0
MIB = 2**20
SMALL_STEP = 16_000_000  # items times weights: about 4 ms on a core; a second core saves at most 1 ms
SMALL_WEIGHTS = 1_000_000  # of an MLP: up to this size, a core computes a pass faster than a GPU's kernels are launched


def machines(config: RunConfig) -> Topology:
    """The declared machines for a dry run, else all nodes of a Ray cluster, else this machine. The driver's machine is
    first."""
    cluster = config.cluster
    if cluster.machines:
        try:
            topology = read_topology(cluster.machines)
        except PlacementError as err:
            raise ConfigError(f"cluster.machines={cluster.machines}: {err}") from None
    elif address := cluster.joined:
        nodes = nodes_of(address, on_ray_node)
        topology = Topology(tuple(replace(node, name=name) for name, node in nodes.items()), address)
    else:
        topology = discover()
        topology = replace(topology, nodes=(replace(topology.nodes[0], name=""),))
    return replace(
        topology, nodes=tuple(with_hardware(node, i == 0, cluster.devices) for i, node in enumerate(topology.nodes))
    )


def with_hardware(node, first: bool, declared: tuple[str, ...]):
    """The node with the user's own devices: arm:0 is on the first machine, node1/arm:0 on node 1."""
    parted = [name.rpartition("/") for name in declared]
    devices = tuple(device for where, _, device in parted if (where == node.name if where else first))
    return replace(node, devices=(*node.devices, *devices))


def networks_on(config: RunConfig, machines: Topology) -> str:
    """ "gpu" or "cpu": the networks' device unless placement is a map."""
    wanted = config.learner.device
    if wanted == "cuda" and not machines.gpus:
        raise ConfigError(
            "learner.device=cuda needs an NVIDIA GPU, and this machine shows none; try learner.device=cpu"
        )
    if wanted != "auto":
        return "gpu" if wanted == "cuda" else "cpu"
    if not machines.gpus:
        return "cpu"
    return "gpu" if config.env.on_gpu or not is_small(config.policy) else "cpu"


def for_all_gpus(config: RunConfig, machines: Topology) -> RunConfig:
    """The recipe with env rows and minibatch of one GPU multiplied by the GPUs of the run. All modes use all GPUs, so
    they are compared at the same work; a map of roles to devices says on which GPUs it simulates."""
    env, where = config.env, config.placement
    if not (env.on_gpu and config.run.per_gpu):
        return config
    count = max(1, machines.gpus)
    if not isinstance(where, str):
        with suppress(PlacementError):  # which planning reports
            slots = [
                slot
                for roles, slots_of_roles in parse_map(where, more=True).items()
                if "sim" in roles
                for slot in slots_of_roles
            ]
            count = len({(slot.node, slot.devices) for slot in slots})
    config = config.with_values("run", per_gpu=False).with_values("env", num_envs=count * env.num_envs)
    size = config.algo.minibatch_size
    return config.with_values("algo", minibatch_size=size and count * size)


def check_simulator(config: RunConfig, machines: Topology) -> None:
    """Raise ConfigError if the simulator needs a GPU and the machine has none."""
    env = config.env
    if env.on_gpu and not machines.gpus:
        asked, usual = getattr(env, "backend", env.physics), type(env).model_fields["backend"].default
        raise ConfigError(
            f"env.backend={asked} needs an NVIDIA GPU, and this machine shows none; try env.backend={usual}"
        )


def is_small(policy: PolicyOptions) -> bool:
    """True if one core is enough for the policy."""
    return policy.few_weights <= SMALL_WEIGHTS


def has_small_steps(config: RunConfig) -> bool:
    """True if a core computes a gradient step so fast that more ranks save nothing."""
    weights = max(config.policy.few_weights, config.policy.least_weights)  # 0: unknown
    items = config.algo.minibatch_size or memory_check.decisions_of(config)
    return 0 < items * weights < SMALL_STEP and not config.learner.shard


def draws_on_gpus(env: Any) -> bool:
    """True if simulators of this env run on cores and render on the machine's GPUs."""
    chosen = getattr(env, "renderer", "auto")
    return chosen != "cores" and bool(env.observed_images) and env_class(env).draws_on_gpus


def torch_device(kind: str) -> str:
    """Torch's name for this kind of device."""
    return "cuda" if kind == "gpu" else "cpu"


def environment(host: PlannedHost) -> dict[str, str]:
    """Environment variables of a host's process, set before it imports anything. GPUs are counted by PCI address, as
    nvidia-smi does: CUDA would put the fastest first."""
    variables = {"EMBODIED_DEVICE": host.device} if host.device else {}
    if host.gpus:
        first, names = host.gpus[0], ",".join(gpu.cuda_name for gpu in host.gpus)
        variables |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": names}
        variables |= {"MUJOCO_EGL_DEVICE_ID": str(first.index if first.card is None else first.card)}
        variables |= {"EMBODIED_RENDER_FILE": first.render} if first.render else {}
    return variables | ({"EMBODIED_RENDER": host.render} if host.render else {})


def seats_of(plan: PlacementPlan) -> list[dict[str, str]]:
    """The environment variables of the plan's processes that draw on GPUs."""
    return [environment(host) for host in plan.hosts if host.render]


def seats_on(cards: Sequence[Gpu], count: int) -> list[dict[str, str]]:
    """The same for `count` processes that draw on these GPUs in turns."""
    used = [cards[i % len(cards)] for i in range(count)]
    return [environment(PlannedHost("", ("sim",), (), 1, render=f"gpu:{card.index}", gpus=(card,))) for card in used]


def known_drawing(env: Any, machines: Topology) -> Result | None:
    """What a probe on this machine found about drawing on its GPUs in the last days; None if nothing is known, or if
    these are other machines."""
    from embodied.system.drawing import newest

    here = machines.nodes[0].gpus if len(machines.nodes) == 1 else ()
    is_asked = bool(here) and bool(env.observed_images) and env_class(env).draws_on_gpus
    return newest(env, seats_on(here, len(here))) if is_asked else None


def with_known_renderer(config: RunConfig, machines: Topology) -> RunConfig:
    """The config with images drawn on cores if GPUs are known not to draw while they compute."""
    recorded = known_drawing(config.env, machines)
    if (
        recorded is None
        or recorded.on_gpus
        or not recorded.software_s
        or getattr(config.env, "renderer", "gpu") != "auto"
    ):
        return config
    return config.with_values("env", renderer="cores")


def with_gpu_physics(
    config: RunConfig,
    topology: Topology,
    dry: bool,
    say: Callable[[str], object] = lambda line: None,
    named: bool = False,
) -> tuple[RunConfig, str]:
    """The config with physics on GPUs where the env's `auto` means them and they draw while they compute, and a reason
    for the plan. Machines that are only `named` are trusted; a dry run of this one only reads a remembered probe."""
    env = env_class(config.env).on_gpus(config.env)
    if env is None or not topology.gpus or config.learner.device == "cpu" or not isinstance(config.placement, str):
        return config, ""
    on_gpus = config.model_copy(update={"env": env})
    if named or config.cluster.machines:
        return on_gpus, "physics on GPUs if they draw while they compute, which a run tries first"
    if len(topology.nodes) > 1 or config.cluster.joined:
        return config, "physics on cores, since nobody tried whether the cluster's GPUs draw (env.backend=cuda: GPUs)"
    from embodied.system import drawing

    gpus = topology.nodes[0].gpus
    seats = seats_on(gpus, len(gpus))
    result = drawing.recorded(env, seats) if dry else drawing.ask(env, seats, say)
    if result is None:
        return config, "physics on cores; a run tries first whether GPUs draw while they compute, and then uses them"
    if result.on_gpus:
        return on_gpus, f"physics on GPUs, since {result.describe()}"
    return config, f"physics on cores, since {result.describe()}"


def host_plans(
    plan: PlacementPlan, with_policy: Collection[str] = (), imports: tuple[str, ...] = ("torch",)
) -> list[HostPlan]:
    """The hosts that a cluster starts for this plan. Roles `with_policy` have networks, which need these `imports`."""
    return [
        HostPlan(
            *(host.name, host.roles, host.cores, host.threads, environment(host), host.node, host.device_names),
            min((gpu.memory_bytes for gpu in host.gpus if host.devices), default=float("inf")),
            imports=imports if {*with_policy} & {*host.roles} else (),
        )
        for host in plan.hosts
    ]


def check_devices(config: RunConfig, plan: PlacementPlan) -> None:
    """Raise ConfigError if a device option of the recipe contradicts the placement."""
    wanted = config.learner.device
    for host in plan.hosts:
        on_gpu = host.device.startswith("gpu:")
        where = host.device or f"cpu:{','.join(map(str, host.cores))}"
        if on_gpu and host.roles == ("sim",) and not config.env.on_gpu:
            raise ConfigError(
                f"placement: sim on {host.device}, but {config.env.name} simulates on CPU cores here; "
                f'try sim: {{devices: "cpu:0", render: "{host.device}"}} to draw on the GPU, or env.backend=cuda'
            )
        if not on_gpu and "sim" in host.roles and config.env.on_gpu:
            raise ConfigError(
                f"placement: sim on {where}, but env.backend=cuda simulates on a GPU; try gpu:0, or placement=auto"
            )
        if host.render and getattr(config.env, "renderer", "auto") == "cores":
            raise ConfigError(f"placement: sim draws on {host.render}, but env.renderer=cores; leave out one of them")
        if {"policy", "learner"} & {*host.roles} and wanted != "auto" and on_gpu != (wanted == "cuda"):
            raise ConfigError(
                f"placement: {' and '.join(host.roles)} on {where}, but learner.device={wanted}; "
                "try learner.device=auto"
            )
    learning = [
        device for host in plan.hosts if "learner" in host.roles for device in host.device_names if "gpu:" in device
    ]
    if shared := [device for device in learning if learning.count(device) > 1]:
        raise ConfigError(
            f"placement: {len(shared)} learners on {shared[0]}, but NCCL, which sums gradients on GPUs, takes one of "
            f"a GPU; try learner: {shared[0]}"
        )


def divides_requests(config: RunConfig) -> bool:
    """True if several policy workers may share a request: by prompts, or by rows if requests are merged."""
    return env_class(config.env).speaks or config.merged_rows > 1


def plan_of_map(
    config: RunConfig, placement: Any, topology: Topology, roles: Sequence[PlacedRole], stages: int = 1
) -> PlacementPlan:
    """The plan of a map that a planner has made for this recipe."""
    how = {"shared": divides_requests(config), "policy_gpus": config.policy.worker_gpus}
    return make_plan(placement, topology, config.env.num_envs, stages, roles=roles, **how)


def discover() -> Topology:
    """The topology of this machine, without the user's own devices, such as arm:0."""
    return Topology((this_node(visible_gpus(gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))),), "this machine")


def on_ray_node(num_gpus: int, num_cpus: int) -> Node:
    """This node, from inside a Ray task. The task's environment hides the GPUs, but the Ray node's environment names
    them. It has as many cores as Ray counts."""
    environ = Path(f"/proc/{os.getppid()}/environ").read_bytes().decode(errors="replace").split("\0")
    started_with = dict(line.partition("=")[::2] for line in environ)
    return this_node(visible_gpus(gpus(), started_with.get("CUDA_VISIBLE_DEVICES"))[:num_gpus], num_cpus)


def this_node(cards: list[Gpu], num_cpus: int | None = None) -> Node:
    used_cores = cores()[:num_cpus]
    return Node(
        platform.node(),
        len(used_cores),
        tuple(cards),
        memory_bytes(),
        numa_nodes(SYS, list(used_cores)),
        core_ids=used_cores,
    )


def memory_bytes(sys: Path = SYS) -> float:
    """Memory of the machine, or of its container if that has less."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [whole]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max", or another version of cgroups
            limits.append(int((sys / "fs/cgroup" / name).read_text()))
    return float(min(limits))


def visible_gpus(cards: list[Gpu], chosen: str | None) -> list[Gpu]:
    """The GPUs (or slices of GPUs) in CUDA_VISIBLE_DEVICES, by number or UUID up to the first unknown one, renumbered
    from 0."""
    if chosen is None:
        return cards
    gpus: list[Gpu] = []
    for name in (word.strip() for word in chosen.split(",")):
        same = [
            c for c in cards if name == str(c.card) or (name.startswith(("GPU-", "MIG-")) and c.uuid.startswith(name))
        ]
        if len(same) != 1:
            break
        gpus.append(replace(same[0], index=len(gpus)))
    return gpus


def numa_nodes(sys: Path, ours: list[int]) -> tuple[tuple[int, ...], ...]:
    """The process's cores, by NUMA node."""
    nodes = {}
    for folder in (sys / "devices/system/node").glob("node[0-9]*"):
        nodes[int(folder.name[4:])] = read_span((folder / "cpulist").read_text().strip()) & set(ours)
    return tuple(tuple(sorted(nodes.get(i, ()))) for i in range(max(nodes, default=-1) + 1))


def read_span(text: str) -> set[int]:
    """The numbers in a list of ranges: {0, 1, 2, 5} for 0-2,5."""
    numbers: set[int] = set()
    for piece in filter(None, text.split(",")):
        first, _, last = piece.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def gpus(sys: Path = SYS) -> list[Gpu]:
    """The GPUs reported by the driver; none without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=index,name,memory.total,pci.bus_id,uuid", "--format=csv,noheader,nounits"]
    try:
        done, listed = (
            subprocess.run(asked, capture_output=True, text=True, timeout=QUERY_S, check=True)
            for asked in (query, [program, "-L"])
        )
    except (OSError, subprocess.SubprocessError):
        return []  # a driver that does not answer offers no GPU; `doctor` says why
    cards = [read_gpu(row, sys) for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True)]
    return with_slices(cards, listed.stdout)


def with_slices(cards: list[Gpu], listed: str) -> list[Gpu]:
    """The GPUs, with a GPU in MIG mode replaced by its slices (`nvidia-smi -L`): programs cannot use it as a whole."""
    of: dict[str, list[tuple[float, str]]] = {}
    for line in listed.splitlines():
        if match := re.search(r"\(UUID: (GPU-[\w-]+)\)", line):
            slices = of.setdefault(match[1], [])
        elif match := re.search(r"MIG \S*\.(\d+)gb\S* .*\(UUID: (MIG-[\w-]+)\)", line):
            slices.append((float(match[1]) * 1e9, match[2]))
    parts = [
        slice_of_card
        for card in cards
        for slice_of_card in [replace(card, memory_bytes=size, uuid=uuid) for size, uuid in of.get(card.uuid, ())]
        or [card]
    ]
    return [replace(slice_of_card, index=index) for index, slice_of_card in enumerate(parts)]


def read_gpu(row: list[str], sys: Path) -> Gpu:
    """The GPU in a line of nvidia-smi's answer."""
    index, name, mebibytes, bus, uuid = row
    device = sys / "bus/pci/devices" / bus.lower()[-12:]
    numa_file = device / "numa_node"
    numa = int(numa_file.read_text()) if numa_file.is_file() else -1
    render = next((path.name for path in (device / "drm").glob("renderD*")), "")
    size = float(mebibytes) * MIB
    return Gpu(int(index), model_of(name), size, numa if numa >= 0 else None, render=render, card=int(index), uuid=uuid)


def model_of(name: str) -> str:
    """The short model name: H100 for "NVIDIA H100 80GB HBM3", A100 for "NVIDIA A100-SXM4-80GB"."""
    words = name.replace("-", " ").split()
    return next((word for word in words if any(c.isdigit() for c in word) and word[0].isalpha()), words[-1])


def cores() -> tuple[int, ...]:
    """The cores this process may use: all of them on systems without affinity, such as macOS."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return tuple(sorted(usable))


Replan = Callable[[RunConfig], tuple[RunConfig, PlacementPlan]]  # raises ConfigError if there is no plan


def check_memory(
    config: RunConfig, plan: PlacementPlan, machines: Topology, learn: bool, replan: Replan | None = None
) -> tuple[str, ...]:
    """Raise ConfigError if a memory cannot hold the plan's workers; else return a line for every memory. Without
    `replan` the advice has only options of the same plan."""
    memories = memory_check.needs(config, plan, machines, learn)
    if over := [need for need in memories if need.least > need.has]:
        fewer = "policy.max_length" if config.policy.speaks else "env.num_envs"
        wanted = (config, plan, machines)
        saving = learn and (
            saving_options(*wanted, exact=True)
            or own_processes(*wanted)
            or divided_engines(config, machines, replan, exact=True)
            or saving_options(*wanted)
            or divided_engines(config, machines, replan)
        )
        works = saving or f"a smaller policy, fewer {fewer} or larger machines"
        lines = [f"memory: {line}" for line in memory_check.describe_memory(over)]
        raise ConfigError("\n".join([*lines, f"that is more than the machines have; try {works}"]))
    return tuple(memory_check.describe_memory(memories))


LORA_RANK = 32  # of the adapters in advice
ENGINE_PARTS = (2, 4, 8)  # GPUs of an engine in advice


def own_processes(config: RunConfig, plan: PlacementPlan, machines: Topology) -> str:
    """The map that gives critics and references processes of their own, where learner.shard divides them, and the
    options with which it fits; "" if they have such processes, or if it saves too little."""
    hosts: dict[str, list[PlannedHost]] = {}
    for host in plan.hosts:
        apart = [role for role in host.roles if role in NETWORKS]
        rest = ",".join(role for role in host.roles if role not in apart)
        for roles in filter(None, (rest, *apart)):
            hosts.setdefault(roles, []).append(replace(host, roles=tuple(roles.split(","))))
    divided = replace(plan, hosts=tuple(host for its in hosts.values() for host in its))
    if len(divided.hosts) == len(plan.hosts) or not config.policy.speaks:
        return ""
    fits = not any(need.excess for need in needs(config, divided, machines))
    options = "" if fits else saving_options(config, divided, machines, exact=True)
    slots = {
        roles: parse_devices(",".join(name for host in its for name in host.device_names))
        for roles, its in hosts.items()
    }
    places = {roles: text_of([(slot.node, slot.kind, slot.devices[0]) for slot in its]) for roles, its in slots.items()}
    return f"placement='{json.dumps(places)}' {options}".strip() if fits or options else ""


def divided_engines(config: RunConfig, machines: Topology, replan: Replan | None, exact: bool = False) -> str:
    """The options with which vLLM divides every layer over several GPUs and the plan fits; "" if there are none.
    `exact`: only with options that change no result."""
    if replan is None or not config.policy.speaks or config.policy.engine != "vllm" or config.policy.worker_gpus > 1:
        return ""
    for parts in ENGINE_PARTS:
        changed = config.with_values("policy", tensor_parallel=parts).model_copy(update={"placement": "collocated"})
        with suppress(ConfigError, PlacementError):
            policy_class(changed.policy.name).check_division(changed.policy)
            _, plan = replan(changed)
            fits = not any(need.excess for need in needs(changed, plan, machines))
            if (rest := "" if fits else saving_options(changed, plan, machines, exact)) or fits:
                return f"policy.tensor_parallel={parts} placement=collocated {rest}".strip()
    return ""


def saving_options(config: RunConfig, plan: PlacementPlan, machines: Topology, exact: bool = False) -> str:
    """Options with which the plan fits, the most helpful first; "" if all of them save too little. Options that change
    no result come first, a language model's precision and adapters last (`exact`: not at all); KV caches are as large
    as fits."""
    policy, recomputing = config.policy, {"checkpoint_activations": True, "reduce_each_pass": True}
    alike: list[tuple[str, dict[str, Any]]] = [("learner", {"shard": plan.count("learner") > 1})]
    alike += [("learner", {key: value}) for key, value in recomputing.items()]
    alike += [] if policy.speaks else [("learner", {"micro_batch_size": 1})]
    adapters = {"lora_rank": getattr(policy, "lora_rank", None) or LORA_RANK, "train_layers": None}
    others: list[tuple[str, dict[str, Any]]] = []
    others += [("policy", {"dtype": "bfloat16"}), ("policy", adapters)] if policy.speaks else []
    chosen: list[tuple[str, dict[str, Any]]] = []

    def excess(options: Iterable[tuple[str, dict[str, Any]]]) -> float:
        """Bytes that are too many with these options and the smallest cache; infinite if they do not go together."""
        changed = with_options(config, options)
        *_, changed = changed, *smaller_caches(changed, plan)
        return inf if is_refused(changed) else sum(need.excess for need in needs(changed, plan, machines))

    for kind in (alike, [] if exact else others):
        while kind and excess(chosen):
            best = min(kind, key=lambda option: excess([*chosen, option]))
            if excess([*chosen, best]) >= excess(chosen):
                break
            chosen.append(best)
            kind.remove(best)
    if excess(chosen):
        return ""
    for option in chosen[::-1]:  # a later option may have made an earlier one needless
        without = [other for other in chosen if other is not option]
        chosen = chosen if excess(without) else without
    whole = with_options(config, chosen)
    caches = [whole, *smaller_caches(whole, plan)]
    changed = next(smaller for smaller in caches if not any(need.excess for need in needs(smaller, plan, machines)))
    order = [f"{section}.{key}" for section, values in chosen for key in values]
    words = [(word.partition("=")[0], word) for word in differences(config, changed)]
    return " ".join(word for _, word in sorted(words, key=lambda one: [*order, one[0]].index(one[0])))


def with_options(config: RunConfig, options: Iterable[tuple[str, dict[str, Any]]]) -> RunConfig:
    for section, values in options:
        config = config.with_values(section, **values)
    return config


def is_refused(config: RunConfig) -> bool:
    """True if these options do not go together."""
    try:
        type(config).model_validate(dict(config))
        type(config.learner).model_validate(dict(config.learner))
    except ValueError:
        return True
    return False


def smaller_caches(config: RunConfig, plan: PlacementPlan) -> Iterator[RunConfig]:
    """With smaller KV caches of vLLM, the largest first: whole gigabytes, down to one conversation."""
    if smaller := range(ceil(vllm_cache(config) / 1e9) - 1, 0, -1):
        memory = measured_memory(config, plan.count("learner"))
        least = memory.acting / 1e9 if memory else 1
        yield from (config.with_values("policy", cache_gb=float(size)) for size in smaller if size >= least)


def differences(before: RunConfig, after: RunConfig) -> list[str]:
    return [
        f"{section}.{key}={written(value)}"
        for section in ("policy", "learner")
        for key, value in getattr(after, section)
        if value != getattr(getattr(before, section), key)
    ]
