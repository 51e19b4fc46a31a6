"""The machines to plan for: nodes with GPUs, cores and other devices. Nothing is probed here.

    8xGPU        one node with eight GPUs of 80 GB, sixteen cores to each, and 8 GB of memory to each core
    64x8xGPU     64 such nodes; H100, A100, L4 ... may stand for GPU (memory from the table below)
    16xCPU       one node with sixteen cores and as much to each
    file.yaml    nodes one by one:
                   nodes:
                     - {name: big, count: 2, gpus: 8, gpu: H100, gpu_memory_gb: 80, cores: 128, memory_gb: 1024}
                     - {name: desk, cores: 16, devices: ["arm:0"]}

GPUs of one model are one class of devices, cores are another; `fake` devices only exist in plans and tests.
`PlacementError` says why a placement is impossible.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

GB = 1e9
GPU_GB = {"GPU": 80.0, "H200": 141.0, "H100": 80.0, "A100": 80.0, "L40S": 48.0, "A10": 24.0, "L4": 24.0, "T4": 16.0}
PEAK_FLOPS = {  # of dense products in bfloat16 (fp16 on a T4), by the data sheets
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
    "L4": 121e12,
    "T4": 65e12,
}
MOST = 9999  # devices of a kind on a node
CORES_PER_GPU = 16
CORE_GB = 8.0  # memory of a machine, per core
TEXT = re.compile(r"(?:(?P<nodes>\d+)x)?(?P<count>\d+)x(?P<model>[A-Za-z][\w-]*)")
CLUSTER_EXAMPLES = "examples: 8xGPU, 64x8xGPU, 8xH100, 16xCPU, 4xFAKE, or a file.yaml"


class PlacementError(ValueError):
    """An impossible placement. The text shows the arithmetic and a placement that works."""


def number(count: int, noun: str) -> str:
    """1 core, 2 cores."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def span(numbers: tuple[int, ...]) -> str:
    """0-3,6 for (0, 1, 2, 3, 6)."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in parts)


def spans(devices: Iterable[str]) -> str:
    """gpu:0-7 for eight."""
    by_kind: dict[str, set[int]] = {}
    for device in devices:
        kind, _, place = device.partition(":")
        by_kind.setdefault(kind, set()).add(int(place))
    return ", ".join(f"{kind}:{span(tuple(places))}" for kind, places in by_kind.items())


@dataclass(frozen=True)
class DeviceClass:
    """Equal devices: GPUs of one model, or CPU cores."""

    name: str
    kind: str  # gpu, cpu, fake
    count: int
    memory_bytes: float
    num_nodes: int = 1
    model: str = ""  # of GPUs

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of these devices in a profile's costs, most specific first: gpu-H100, gpu."""
        return tuple(dict.fromkeys([self.name, *([f"{self.kind}-{self.model}"] if self.model else []), self.kind]))

    @property
    def peak_flops(self) -> float:
        """Operations a second in bfloat16 that one of these devices cannot exceed; infinite where that is unknown."""
        return PEAK_FLOPS.get(self.model, max(PEAK_FLOPS.values())) if self.kind == "gpu" else inf

    def __str__(self) -> str:
        return f"{self.kind}-{self.model}" if self.model not in ("", "GPU") else self.name


@dataclass(frozen=True)
class Gpu:
    index: int  # index among the GPUs of its node that the run may use
    model: str = "GPU"
    memory_bytes: float = GPU_GB["GPU"] * GB
    numa: int | None = None
    render: str = ""  # its device file for EGL and Vulkan, such as renderD128
    card: int | None = None  # its index in nvidia-smi (by PCI address); None: unknown
    uuid: str = ""

    @property
    def cuda_name(self) -> str:
        """Its name in CUDA_VISIBLE_DEVICES: the UUID if known. A UUID does not depend on the order of devices, and MIG
        slices need it."""
        return self.uuid or str(self.index if self.card is None else self.card)


@dataclass(frozen=True)
class Node:
    name: str
    cores: int
    gpus: tuple[Gpu, ...] = ()
    memory_bytes: float = float("inf")
    numa: tuple[tuple[int, ...], ...] = ()  # cores of every NUMA node, by its number
    devices: tuple[str, ...] = ()  # names of other hardware: arm:0
    fakes: int = 0
    core_ids: tuple[int, ...] = ()  # the operating system's numbers of the cores; (): 0, 1, 2, ...

    @property
    def core_numbers(self) -> tuple[int, ...]:
        return self.core_ids or tuple(range(self.cores))

    @property
    def named(self) -> tuple[str, ...]:
        """Devices besides cores, as placements name them."""
        return (*(f"gpu:{gpu.index}" for gpu in self.gpus), *self.devices)


@dataclass(frozen=True)
class Topology:
    """Machines that a run may use. The first machine starts the run."""

    nodes: tuple[Node, ...]
    name: str = ""  # the text that described it

    @property
    def gpus(self) -> int:
        return sum(len(node.gpus) for node in self.nodes)

    def classes(self) -> list[DeviceClass]:
        """GPUs by model, then fake devices, then cores."""
        models = list(dict.fromkeys(gpu.model for node in self.nodes for gpu in node.gpus))
        classes = [self._gpus(model, "gpu" if len(models) == 1 else f"gpu-{model}") for model in models]
        fakes = sum(node.fakes for node in self.nodes)
        if fakes:
            classes.append(DeviceClass("fake", "fake", fakes, GPU_GB["GPU"] * GB, len(self.nodes)))
        memory = min((node.memory_bytes / node.cores for node in self.nodes if node.cores), default=0.0)
        return [*classes, DeviceClass("cpu", "cpu", self.cores, memory, len(self.nodes))]

    @property
    def cores(self) -> int:
        return sum(node.cores for node in self.nodes)

    def _gpus(self, model: str, name: str) -> DeviceClass:
        nodes = [node for node in self.nodes if any(gpu.model == model for gpu in node.gpus)]
        gpus = [gpu for node in nodes for gpu in node.gpus if gpu.model == model]
        memory = min(gpu.memory_bytes for gpu in gpus)
        return DeviceClass(name, "gpu", len(gpus), memory, len(nodes), model)

    def describe(self) -> list[str]:
        """A line for every kind of node."""
        kinds: dict[Node, list[str]] = {}
        for node in self.nodes:
            gpus = tuple(Gpu(gpu.index, gpu.model, gpu.memory_bytes) for gpu in node.gpus)
            plain = replace(node, name="", numa=(), core_ids=(), gpus=gpus)
            kinds.setdefault(plain, []).append(node.name)
        return [f"{number(len(names), 'node')}: {describe_node(node)}" for node, names in kinds.items()]


def describe_node(node: Node) -> str:
    parts = []
    for model in dict.fromkeys(gpu.model for gpu in node.gpus):
        gpus = [gpu for gpu in node.gpus if gpu.model == model]
        parts.append(f"{len(gpus)} x {model}, {gpus[0].memory_bytes / GB:.0f} GB each")
    parts += [number(node.fakes, "fake device")] if node.fakes else []
    parts.append(number(node.cores, "core"))
    return ", ".join([*parts, *node.devices])


def one_machine(cores: tuple[int, ...]) -> Topology:
    """A machine with these cores and no other devices."""
    return Topology((Node("", len(cores), core_ids=cores),))


def gpu_of(device: str, node: Node) -> Gpu | None:
    """The GPU that a placement calls gpu:N on this machine."""
    return next((gpu for gpu in node.gpus if device == f"gpu:{gpu.index}"), None)


def gpus_of(devices: Iterable[str], node: Node) -> tuple[Gpu, ...]:
    """The GPUs among these devices."""
    return tuple(gpu for device in devices if (gpu := gpu_of(device, node)))


def not_there(device: str, node: Node) -> str:
    """The error text for a device that a machine lacks, with the available devices of that kind."""
    kind = device.partition(":")[0]
    if of_kind := [name for name in node.named if name.startswith(f"{kind}:")]:
        return f"{device} is not there: this run may use {', '.join(of_kind)}"
    if kind == "gpu":
        return f"{device} is not there: no NVIDIA GPU is seen here"
    kinds = sorted({"cpu", "gpu", "fake", *(name.partition(":")[0] for name in node.devices)})
    return (
        f"{device} is not there: devices are {', '.join(kinds)}, and hardware that the recipe declares: "
        f"cluster.devices=[{device}]"
    )


class NodeEntry(BaseModel):
    """One entry of `nodes` in a file."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    name: str = Field("", pattern=r"^[\w.-]*$")  # as a placement can contain it
    count: int = Field(1, ge=1, le=MOST)
    gpus: int = Field(0, ge=0, le=MOST)
    gpu: str = "GPU"
    gpu_memory_gb: float | None = Field(None, gt=0)
    cores: int | None = Field(None, ge=1, le=MOST)
    memory_gb: float = Field(float("inf"), gt=0)
    devices: list[str] = []


def read_topology(text: str) -> Topology:
    """The machines described by text such as 64x8xGPU, or by a YAML file."""
    if text.endswith((".yaml", ".yml")):
        return read_file(Path(text))
    match = TEXT.fullmatch(text)
    model = match["model"].upper() if match else ""
    if not match or model not in {*GPU_GB, "CPU", "FAKE"}:
        raise PlacementError(
            f"cluster={text} does not describe machines; {CLUSTER_EXAMPLES}; models: {', '.join(GPU_GB)}"
        )
    nodes, count = int(match["nodes"] or 1), int(match["count"])
    if not nodes or not count:
        raise PlacementError(f"cluster={text} has no device; {CLUSTER_EXAMPLES}")
    if max(nodes, count) > MOST:
        raise PlacementError(f"cluster={text} counts to {max(nodes, count)}; at most {MOST} can be named")
    if model == "CPU":
        node = Node("", cores=count)
    elif model == "FAKE":
        node = Node("", cores=count * CORES_PER_GPU, fakes=count)
    else:
        gpus = tuple(Gpu(i, model, GPU_GB[model] * GB) for i in range(count))
        node = Node("", cores=count * CORES_PER_GPU, gpus=gpus)
    node = replace(node, memory_bytes=node.cores * CORE_GB * GB)
    return Topology(tuple(replace(node, name=f"node{i}") for i in range(nodes)), text)


def read_file(path: Path) -> Topology:
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeError, yaml.YAMLError) as err:
        raise PlacementError(f"cluster={path} cannot be read: {err}") from None
    entries = content.get("nodes") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise PlacementError(f"{path} has no list `nodes`; an example: nodes: [{{count: 2, gpus: 8, cores: 128}}]")
    nodes = [node for i, entry in enumerate(entries) for node in read_nodes(entry, i, path)]
    names = [node.name for node in nodes]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise PlacementError(f"{path}: nodes need names of their own; repeated: {', '.join(sorted(repeated))}")
    return Topology(tuple(nodes), path.stem)


def read_nodes(entry: Any, place: int, path: Path) -> list[Node]:
    """Reads one entry: one node, or `count` equal nodes."""
    try:
        read = NodeEntry.model_validate(entry)
    except ValidationError as err:
        wrong = (f"{'.'.join(map(str, one['loc'])) or 'it'}={one['input']!r}: {one['msg']}" for one in err.errors())
        keys = ", ".join(NodeEntry.model_fields)
        raise PlacementError(f"{path}: entry {place + 1} of nodes: {'; '.join(wrong)}; keys: {keys}") from None
    memory_gb = read.gpu_memory_gb or GPU_GB.get(read.gpu.upper())
    if memory_gb is None:
        raise PlacementError(f"{path}: a {read.gpu} is not known here, so say its memory: gpu_memory_gb: 48")
    gpus = tuple(Gpu(i, read.gpu.upper(), memory_gb * GB) for i in range(read.gpus))
    cores, name = read.cores or read.gpus * CORES_PER_GPU, read.name or f"node{place}"
    if not cores:
        raise PlacementError(f"{path}: {name} has no device; say its cores: 8, or its gpus")
    names = [name] if read.count == 1 else [f"{name}-{i}" for i in range(read.count)]
    return [Node(n, cores, gpus, read.memory_gb * GB, devices=tuple(read.devices)) for n in names]


# CPU cores: a placement names them; a host on a GPU gets a share of the cores of the GPU's NUMA node, a host on other
# hardware may use all cores. `embodied/runtime/local.py` binds processes to their cores.


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
    cores_of_gpu, place = len(cores) // len(near), near.index(gpu)
    return cores[place * cores_of_gpu : (place + 1) * cores_of_gpu] if cores_of_gpu else cores
