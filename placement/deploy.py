"""Turns a layout of CPU cores into a placement that this machine can run: which process holds which roles and cores."""

from __future__ import annotations

from embodied.placement.costs import Pricer
from embodied.placement.grammar import PlacementError
from embodied.placement.layout import Layout, Zone


def as_placement(pricer: Pricer, layout: Layout) -> dict[str, str]:
    """The map of a layout. Every worker has one core; roles of a zone that can share a process do, but for learners,
    which never share one with a simulator."""
    placement: dict[str, str] = {}
    for layer in layout.layers:
        at = {name: (zone, zone.devices) for zone in layer for name in zone.components}
        first = 0
        for zone in layer:
            if zone.device_class != "cpu":
                raise PlacementError(f"{layout} uses {zone.device_class}; workers run on CPU cores so far")
            counts = {name: int(pricer.count(name, at, layout.stages)) for name in zone.components}
            for roles in hosts_of(zone, counts):
                count = counts[roles[0]]
                last = first + count - 1
                placement[",".join(roles)] = f"cpu:{first}" if count == 1 else f"cpu:{first}-{last}*{count}"
            first += zone.devices
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
