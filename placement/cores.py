"""How CPU cores are shared out to hosts: those that a placement names in equal, disjoint parts; a host on a GPU gets
its share of the cores of the GPU's NUMA node, one on other hardware may use all.

Nothing is pinned here: `embodied/runtime/local.py`, `fork_server.py` and `ray/guard.py` bind a host's process to its
cores. How many workers there are is the business of `mode_rules.py`, or of the map that a recipe writes.
"""

from __future__ import annotations

from embodied.placement.placement_errors import PlacementError, number, span
from embodied.placement.topology import Node, gpu_of, not_there


def split_cores(cores: tuple[int, ...], workers: int, part: str) -> list[tuple[int, ...]]:
    """Equal, disjoint parts of cores, one for each worker; refused where cores would be left. `part` is the text that
    asks for it."""
    each, rest = divmod(len(cores), workers)
    if rest or not each:
        first = cores[0]
        if not each:
            works = f"cpu:{first}-{first + workers - 1}*{workers}, or fewer workers: cpu:{span(cores)}*{len(cores)}"
        else:
            works = f"cpu:{span(cores[: each * workers])}*{workers}"
        uneven = f"{part!r} splits {number(len(cores), 'core')} among {workers} workers"
        raise PlacementError(f"{uneven}, which leaves no equal parts; try {works}")
    return [cores[i * each : (i + 1) * each] for i in range(workers)]


def cores_of(devices: tuple[int, ...], node: Node) -> tuple[int, ...]:
    """The core numbers behind devices `cpu:N`, if its machine has them."""
    cores = node.core_numbers
    if devices[-1] >= len(cores):
        have = f"{len(cores)} cores, cpu:0-{len(cores) - 1}" if len(cores) > 1 else "one core, cpu:0"
        raise PlacementError(f"cpu:{span(devices)} is not there: this run may use {have}")
    return tuple(cores[device] for device in devices)


def cores_beside(device: str, node: Node) -> tuple[int, ...]:
    """The cores that go with a device: GPUs share out the cores of their NUMA node in order, others may use all."""
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
