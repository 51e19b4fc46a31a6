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
                raise PlacementError(
                    f"{layout} uses {zone.device_class}; this machine runs workers on its cores so far"
                )
            for roles in hosts_of(zone, {name: int(pricer.count(name, at, layout.stages)) for name in zone.components}):
                count = int(pricer.count(roles[0], at, layout.stages))
                placement[",".join(roles)] = (
                    f"cpu:{first}" if count == 1 else f"cpu:{first}-{first + count - 1}*{count}"
                )
            first += zone.devices
    return placement


def hosts_of(zone: Zone, counts: dict[str, int]) -> list[tuple[str, ...]]:
    """Which roles of a zone share processes."""
    hosts: list[tuple[str, ...]] = []
    for name in zone.components:
        beside = next(
            (h for h in hosts if counts[h[0]] == counts[name] and not ("sim" in h and name == "learner")), None
        )
        if beside is None:
            hosts.append((name,))
        else:
            hosts[hosts.index(beside)] = (*beside, name)
    return hosts
