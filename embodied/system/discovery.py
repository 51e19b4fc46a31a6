"""Finds the devices of this machine: cores of the process's affinity mask, NUMA nodes, memory and NVIDIA GPUs.

Everything is read from the kernel's files and from nvidia-smi, without imports that touch a device.
"""

from __future__ import annotations

import csv
import os
import platform
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from embodied.placement.topology import Gpu, Node, Topology

SYS = Path("/sys")
QUERY_S = 20.0
MIB = 2**20


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
    known: list[Gpu] = []
    for name in (part.strip() for part in chosen.split(",")):
        same = [
            c for c in cards if name == str(c.card) or (name.startswith(("GPU-", "MIG-")) and c.uuid.startswith(name))
        ]
        if len(same) != 1:
            break
        known.append(replace(same[0], index=len(known)))
    return known


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
        part
        for card in cards
        for part in [replace(card, memory_bytes=size, uuid=uuid) for size, uuid in of.get(card.uuid, ())] or [card]
    ]
    return [replace(part, index=index) for index, part in enumerate(parts)]


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
    """The cores this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))
