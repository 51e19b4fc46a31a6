"""Turns a layout into a placement that can be run: which process holds which roles and devices."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from embodied.placement.dataflow import Dataflow
from embodied.placement.grammar import text_of
from embodied.placement.iteration_cost import Choice, Pricer
from embodied.placement.layout import Layout, Zone
from embodied.placement.placement_plan import with_drawing
from embodied.placement.reasons import describe_layout, mean_idle
from embodied.placement.topology import DeviceClass, PlacementError, Topology


def as_placement(
    pricer: Pricer, layout: Layout, topology: Topology | None = None, draws: bool = False
) -> dict[str, Any]:
    """Returns the placement map of a layout, on this machine if `topology` is None. Every worker has one device. Roles
    of a zone share a process where possible; a simulator, which may crash, shares one only with policies. On several
    machines this machine gets a learner, which writes the checkpoints. `draws`: sims on cores render on GPUs."""
    placement: dict[str, Any] = {}
    dataflow = pricer.dataflow
    askers = [c.name for c in dataflow.components if c.splits]
    several = topology is not None and len(topology.nodes) > 1
    for layer in layout.layers:
        at = {name: (zone, zone.devices) for zone in layer for name in zone.components}
        workers: dict[str, int] = {}
        for zone in sorted(layer, key=lambda zone: several and not any(map(dataflow.is_learner, zone.components))):
            first = workers.get(zone.device_class, 0)
            devices = devices_of(pricer.classes[zone.device_class], topology)[first : first + zone.devices]
            counts = {name: int(pricer.count(name, at, layout.stages)) for name in zone.components}
            for roles in hosts_of(zone, counts, dataflow):
                placement[",".join(roles)] = text_of(devices[: counts[roles[0]]])
            workers[zone.device_class] = first + zone.devices
    on_cores = draws and all(pricer.classes[layout.zone_of(name).device_class].kind == "cpu" for name in askers)
    return with_drawing(placement, topology) if on_cores and topology else placement


def forecast(choice: Choice, topology: Topology | None = None, draws: bool = False) -> dict[str, Any]:
    """What is predicted of a layout, and how it is run: as in plan.json, bench.json and the runs of a profile."""
    pricer, layout, dataflow = choice.pricer, choice.layout, choice.pricer.dataflow
    return {
        "mode": layout.mode,
        "seconds": choice.price.seconds,
        "env_steps_per_s": dataflow.env_steps / choice.price.seconds,
        "idle": mean_idle(pricer, layout),
        "used_bytes": dict(choice.price.used_bytes),
        "layout": {**asdict(layout), "swapped": sorted(layout.swapped)},
        "in_words": describe_layout(layout, pricer),
        "work": hashlib.sha256(json.dumps(dataflow.to_json()).encode()).hexdigest()[:12],  # of equal runs
        "schedule": dataflow.schedule,
        "async_level": dataflow.level if dataflow.schedule == "async" else 1,
        "placement": as_placement(pricer, layout, topology, draws),
        "stages": layout.stages,
        "granularity": granularity(layout, dataflow),
    }


def granularity(layout: Layout, dataflow: Dataflow) -> int | None:
    """The number of decisions after which sims hand on their data; None: at the end."""
    calls = max((c.calls for c in dataflow.components if c.splits), default=1)
    return None if layout.chunks == 1 else -(-calls // layout.chunks)


def devices_of(on: DeviceClass, topology: Topology | None) -> list[tuple[str, str, int]]:
    """(node, kind, number) of every device of a class, in the order of the nodes; the only node has no name."""
    if topology is None:
        if on.num_nodes > 1 or on.name != on.kind:  # then a device number is ambiguous
            raise PlacementError(f"{on.name} is on several kinds of machines or GPUs; write the map by hand")
        return [("", on.kind, i) for i in range(on.count)]
    devices = []
    for node in topology.nodes:
        name = node.name if len(topology.nodes) > 1 else ""
        if on.kind == "gpu":
            numbers = [gpu.index for gpu in node.gpus if on.name in ("gpu", f"gpu-{gpu.model}")]
        else:
            numbers = list(range(node.cores if on.kind == "cpu" else node.fakes))
        devices += [(name, on.kind, number) for number in numbers]
    return devices


def hosts_of(zone: Zone, counts: dict[str, int], dataflow: Dataflow) -> list[tuple[str, ...]]:
    """The roles of a zone, grouped by the processes they share."""
    hosts: list[tuple[str, ...]] = []
    for name in zone.components:
        same = (host for host in hosts if counts[host[0]] == counts[name])
        stays = name not in ("sim", "policy")  # sims and policies are replaced when a simulator crashes
        asked = (host for host in same if not (stays and any(dataflow[n].splits for n in host)))
        beside = next(asked, None)
        if beside is None:
            hosts.append((name,))
        else:
            hosts[hosts.index(beside)] = (*beside, name)
    return hosts
