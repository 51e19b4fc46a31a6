"""The cost of a component on 0, 1, 2, ... devices of a class, each number of them used in the best way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied.placement.dataflow import Component
from embodied.placement.layout import DeviceClass
from embodied.placement.profile import Cost

Array = Any  # numpy array, or a number


def max_of(*values: Array) -> Array:
    most = values[0]
    for value in values[1:]:
        plain = isinstance(most, float) and isinstance(value, float)
        most = max(most, value) if plain else np.maximum(most, value)
    return most


@dataclass(frozen=True)
class Table:
    """Arrays indexed by number of devices: workers, seconds of a pass (of a stage's call where it splits), bytes."""

    workers: np.ndarray
    seconds: np.ndarray
    bytes: np.ndarray


def make_table(
    component: Component, cost: Cost, on: DeviceClass, stages: int, groups: int = 1, held_items: int = 0
) -> Table:
    """The table, which more devices make neither slower nor fuller: a component takes the fastest number of workers
    that fits. One that asks in a cycle takes as many as it can, since what the others do depends on their number.
    `groups`: parts of its items that a worker takes one by one; `held_items` are held by all workers together."""
    count = np.arange(on.count + 1)
    workers = np.minimum(np.maximum(count, 1), component.items)
    size = -(-component.items // (workers if groups == 1 else groups))
    seconds = cost.seconds.at(size / stages)
    if groups > 1:
        seconds = -(-groups // workers) * seconds
    if not component.splits:
        seconds = component.calls * (seconds + cost.exchange_s.at(workers)) + cost.fixed_s
    used = cost.bytes.at(size) - cost.split_bytes * (1 - 1 / workers) + cost.item_bytes * held_items / workers
    allowed = (count > 0) & (used <= on.memory_bytes)
    if component.even or component.splits:
        allowed &= component.items % (workers * stages) == 0
    seconds = np.where(allowed, seconds, np.inf)
    better = np.where(allowed, count, 0) if component.splits else records(seconds, used)
    best = np.maximum.accumulate(better)
    found = best > 0
    return Table(
        np.where(found, workers[best], 0), np.where(found, seconds[best], np.inf), np.where(found, used[best], 0.0)
    )


def records(seconds: np.ndarray, used: np.ndarray) -> np.ndarray:
    """The indices at which (seconds, bytes) is less than ever before, 0 elsewhere."""
    order = np.lexsort((used, seconds))
    rises = (seconds[order][1:] > seconds[order][:-1]) | (used[order][1:] > used[order][:-1])
    rank = np.empty(len(order), int)
    rank[order] = np.concatenate([[0], np.cumsum(rises)])
    least = np.minimum.accumulate(np.concatenate([[len(order)], rank[:-1]]))
    return np.where((rank < least) & np.isfinite(seconds), np.arange(len(rank)), 0)
