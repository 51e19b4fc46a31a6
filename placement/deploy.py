"""Turns a layout into a placement that one machine can run: which process holds which roles and devices."""

from __future__ import annotations

from embodied.placement.costs import Pricer
from embodied.placement.grammar import PlacementError
from embodied.placement.layout import Layout, Zone


def as_placement(pricer: Pricer, layout: Layout) -> dict[str, str]:
    """The map of a layout. Every worker has one device; roles of a zone that can share a process do, but for learners,
    which never share one with a simulator."""
    placement: dict[str, str] = {}
    for layer in layout.layers:
        at = {name: (zone, zone.devices) for zone in layer for name in zone.components}
        taken: dict[str, int] = {}
        for zone in layer:
            first = taken.get(zone.device_class, 0)
            on = pricer.classes[zone.device_class]
            if on.num_nodes > 1 or on.name != on.kind:  # then numbers do not name devices
                raise PlacementError(f"{layout} is for several kinds of machines or GPUs; write the map by hand")
            counts = {name: int(pricer.count(name, at, layout.stages)) for name in zone.components}
            for roles in hosts_of(zone, counts):
                count = counts[roles[0]]
                parts = f"*{count}" if on.kind == "cpu" else ""
                several = f"{on.kind}:{first}-{first + count - 1}{parts}"
                placement[",".join(roles)] = f"{on.kind}:{first}" if count == 1 else several
            taken[zone.device_class] = first + zone.devices
    return placement


def hosts_of(zone: Zone, counts: dict[str, int]) -> list[tuple[str, ...]]:
    """Which roles of a zone share processes."""
    hosts: list[tuple[str, ...]] = []
    for name in zone.components:
        same = (host for host in hosts if counts[host[0]] == counts[name])
        beside = next((host for host in same if not ("sim" in host and name == "learner")), None)
        if beside is None:
            hosts.append((name,))
        else:
            hosts[hosts.index(beside)] = (*beside, name)
    return hosts
