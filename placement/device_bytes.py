"""Bytes on the fullest device of a zone, by the same numbers as a run's leases count them.

A policy in a learner's process acts with the learner's own weights: they are there once, and stay when the learner
gives the rest of its memory back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from embodied.placement.cost_tables import Array, max_of
from embodied.placement.layout import Zone

if TYPE_CHECKING:
    from embodied.placement.costs import LayerPrice, Pricer


def zone_bytes(pricer: Pricer, zone: Zone, at: Mapping, stages: int, swapped: frozenset[str]) -> tuple[Array, Array]:
    """-> on a device of the zone at its fullest moment, and while another layer works."""
    full = {name: bytes_of(pricer, name, at, stages) for name in zone.components}
    kept = {name: pricer.cost(name, zone.device_class).kept_bytes for name in zone.components}
    rest = {name: kept[name] if name in swapped else full[name] for name in full}
    for edge in pricer.dataflow.edges:
        if edge.next_iteration and edge.target in full and edge.source in full:
            shared = pricer.shares_weights(edge, at, stages)
            once = np.where(shared, pricer.cost(edge.target, zone.device_class).weight_bytes, 0.0)
            full[edge.source] = full[edge.source] - once
            rest[edge.source] = rest[edge.source] - (0.0 if edge.source in swapped else once)
            rest[edge.target] = np.maximum(rest[edge.target], once)
    idle = sum(rest.values())
    groups = [[n for n in node if n in full] for node in pricer.dataflow.order]
    peaks = [idle + sum(full[n] - rest[n] for n in group) for group in groups if group]
    return max_of(*peaks), idle


def bytes_of(pricer: Pricer, name: str, at: Mapping, stages: int) -> Array:
    zone, devices = at[name]
    cost = pricer.cost(name, zone.device_class)
    asker = pricer.asker_for(name)
    if asker in (None, name):
        return pricer.table(name, zone.device_class, stages).bytes[devices]
    each, _, together = pricer.merging(name, asker, at, stages)
    return cost.bytes.at(np.ceil(together * each))


def used_bytes(layers: Sequence[LayerPrice], device_class: str) -> float:
    """On the fullest device: a layer at work beside what the others leave there."""
    rest = sum(float(layer.idle.get(device_class, 0.0)) for layer in layers)
    return max(
        rest + float(layer.active.get(device_class, 0.0)) - float(layer.idle.get(device_class, 0.0)) for layer in layers
    )
