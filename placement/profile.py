"""Measured (or published) costs of the parts of a dataflow: the input of the planner, as one JSON file.

This module has the format and the reader; `embodied/profiling` measures. Sizes are items per worker and call: envs for
a sim, rows for a policy, items of a gradient step for a learner.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from embodied.placement.cost_curves import Curve, constant, curve_from_json
from embodied.placement.dataflow import Component, Dataflow, dataflow_from_json
from embodied.placement.layout import DeviceClass
from embodied.placement.placement_errors import PlacementError

FORMAT = "embodied-profile/1"
NOTHING = constant(0)
CURVES = ("bytes", "last_s", "exchange_s")  # of a Cost, besides `seconds`
NETWORKS = ("policy", "learner")  # components that run on one kind of device
Array = Any  # numpy array, or a number


@dataclass(frozen=True)
class Cost:
    """The cost of one worker of a component on one device of a kind, while all other devices of its class work, too."""

    seconds: Curve  # of one call, by items per worker
    bytes: Curve = NOTHING  # of device memory while it works, by items per worker
    fixed_s: float = 0.0  # once per pass, whatever the size
    last_s: Curve = NOTHING  # in a cycle: of the request after the last decision (a value), by items
    exchange_s: Curve = NOTHING  # per call, by number of workers: to exchange gradients, or until the slowest sim ends
    alone: float = 1.0  # duration with idle neighbours, relative to busy ones
    ahead_s: float = 0.0  # per item that frozen parts compute before the calls
    onload_s: float = 0.0  # to take its memory, once per turn
    offload_s: float | None = None  # to free its memory; None: not possible
    weight_bytes: float = 0.0  # of `bytes`, weights that are shared in a learner's process
    split_bytes: float = 0.0  # of `bytes`, the part that shards divide; `bytes` is for one worker
    kept_bytes: float = 0.0  # stays on the device after offloading
    item_bytes: float = 0.0  # of an item in a batch that waits for its update


@dataclass(frozen=True)
class Sync:
    """The weight sync from learners to policies."""

    shared_s: float = 0.0  # if every policy worker is in a learner's process
    copy_s: Curve = NOTHING  # otherwise, by number of policy workers


@dataclass(frozen=True)
class Link:
    """A transfer of data between processes."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Profile:
    """`costs[component][kind]`; a kind is cpu (one core), gpu-H100 (of this model), gpu (of any), or fake."""

    dataflow: Dataflow
    costs: Mapping[str, Mapping[str, Cost]]
    sync: Sync = Sync()
    link: Link = Link()
    made: Mapping[str, Any] = field(default_factory=dict)  # how, when, where and from which recipe; not used here
    sources: Mapping[str, str] = field(default_factory=dict)  # dotted path of a number or section -> source

    def __post_init__(self) -> None:
        missing = [c.name for c in self.dataflow.components if not self.costs.get(c.name)]
        if missing:
            raise PlacementError(f"the profile has no costs for {', '.join(missing)}; measure again")

    def cost(self, component: str, on: DeviceClass) -> Cost | None:
        """The cost of a component on devices of this class; None where it does not run."""
        known = self.costs[component]
        return next((known[key] for key in on.keys if key in known), None)

    def knows(self, on: DeviceClass) -> bool:
        return any(self.cost(name, on) for name in self.costs)

    def missing(
        self, classes: Sequence[DeviceClass], homes: Mapping[str, Sequence[DeviceClass]] | None = None
    ) -> list[tuple[str, DeviceClass]]:
        """Components and device classes without costs that are needed to use all of these devices. `homes` says where
        each component runs. Without it: a component with costs on other devices than cores runs on such devices, and
        policies run on the learners' devices; devices that were present at the measurement but have no costs stay
        unused."""
        if homes is not None:
            wanted = [(name, c) for name in self.costs for c in homes.get(name, ())]
        else:
            new = [
                c for c in classes if c.kind != "cpu" and (self.knows(c) or str(c) not in self.made.get("devices", {}))
            ]
            movable = [name for name, on in self.costs.items() if {*on} - {"cpu"}] or list(self.costs)
            networks = [name for name in NETWORKS if name in self.costs]
            wanted = [(name, c) for c in new if not self.knows(c) for name in movable]
            wanted += [(name, c) for c in new if any(self.cost(n, c) for n in networks) for name in networks]
        return [(name, c) for name, c in wanted if self.cost(name, c) is None]


def read_profile(path: Path) -> Profile:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as err:
        raise PlacementError(f"{path} cannot be read as a profile: {err}") from None
    return profile_from_json(content, str(path))


def write_profile(profile: Profile, path: Path) -> None:
    """Write the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".draft")
    draft.write_text(json.dumps(profile_to_json(profile), indent=1) + "\n")
    draft.replace(path)


def profile_from_json(content: Any, name: str = "the profile") -> Profile:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise PlacementError(f"{name} is not a profile of this version: its `format` is not {FORMAT!r}; measure again")
    try:
        costs = {c: {kind: cost_from_json(cost) for kind, cost in on.items()} for c, on in content["costs"].items()}
        sync, link = content.get("sync", {}), content.get("link", {})
        return Profile(
            dataflow_from_json(content["workflow"]),
            costs,
            Sync(float(sync.get("shared_s", 0)), curve_from_json(sync.get("copy_s", 0))),
            Link(**link),
            content.get("made", {}),
            content.get("sources", {}),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        raise PlacementError(f"{name} is damaged: {type(err).__name__}: {err}; measure again") from None


def profile_to_json(profile: Profile) -> dict[str, Any]:
    content = {
        "format": FORMAT,
        "made": dict(profile.made),
        "workflow": profile.dataflow.to_json(),
        "costs": {c: {kind: cost_to_json(cost) for kind, cost in on.items()} for c, on in profile.costs.items()},
        "sync": {"shared_s": profile.sync.shared_s, "copy_s": profile.sync.copy_s.to_json()},
    }
    if profile.link != Link():
        content["link"] = {"latency_s": profile.link.latency_s, "bytes_per_s": profile.link.bytes_per_s}
    return content | ({"sources": dict(profile.sources)} if profile.sources else {})


def cost_from_json(content: Mapping[str, Any]) -> Cost:
    known = Cost.__dataclass_fields__
    if unknown := set(content) - set(known):
        raise ValueError(f"{', '.join(sorted(unknown))} among the costs; known: {', '.join(known)}")
    curves = {key: curve_from_json(content[key]) for key in ("seconds", *CURVES) if key in content}
    return Cost(**{**content, **curves})


def cost_to_json(cost: Cost) -> dict[str, Any]:
    content = {"seconds": cost.seconds.to_json()}
    for key in CURVES:
        if getattr(cost, key) != NOTHING:
            content[key] = getattr(cost, key).to_json()
    for key, field_of_cost in Cost.__dataclass_fields__.items():
        if key not in content and key not in CURVES and getattr(cost, key) != field_of_cost.default:
            content[key] = getattr(cost, key)
    return content


# The cost of a component on 0, 1, 2, ... devices of a class, with the best number of workers


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
    component: Component,
    cost: Cost,
    on: DeviceClass,
    stages: int,
    groups: int = 1,
    held_items: int = 0,
    ratios: np.ndarray | None = None,
) -> Table:
    """Returns the table. A component uses the fastest number of workers that fits, so more devices make it neither
    slower nor fuller; a component that sends requests in a cycle uses as many as possible. `groups`: parts of its items
    that a worker takes one by one; `held_items` are held by all workers together. `ratios`: maximum over mean load by
    number of workers; None: equal loads."""
    count = np.arange(on.count + 1)
    workers = np.minimum(np.maximum(count, 1), component.items)
    size = -(-component.items // (workers if groups == 1 else groups))
    seconds = cost.seconds.at(size / stages)
    if ratios is not None:
        seconds = ratios[workers] * (groups / workers if groups > 1 else 1) * seconds
    elif groups > 1:
        seconds = -(-groups // workers) * seconds
    seconds = seconds + cost.exchange_s.at(workers) / stages
    if not component.splits:
        seconds = component.calls * seconds + cost.fixed_s
    used = cost.bytes.at(size) - cost.split_bytes * (1 - 1 / workers) + cost.item_bytes * held_items / workers
    allowed = (count > 0) & (used <= on.memory_bytes)
    if component.even or component.splits:
        allowed &= component.items % (workers * stages) == 0
    seconds = np.where(allowed, seconds, np.inf)
    better = np.where(allowed, count, 0) if component.splits else records(seconds, used)
    best = np.maximum.accumulate(better)
    fits = best > 0
    return Table(
        np.where(fits, workers[best], 0), np.where(fits, seconds[best], np.inf), np.where(fits, used[best], 0.0)
    )


def records(seconds: np.ndarray, used: np.ndarray) -> np.ndarray:
    """The indices at which (seconds, bytes) is less than at all smaller indices, 0 elsewhere."""
    order = np.lexsort((used, seconds))
    rises = (seconds[order][1:] > seconds[order][:-1]) | (used[order][1:] > used[order][:-1])
    rank = np.empty(len(order), int)
    rank[order] = np.concatenate([[0], np.cumsum(rises)])
    least = np.minimum.accumulate(np.concatenate([[len(order)], rank[:-1]]))
    return np.where((rank < least) & np.isfinite(seconds), np.arange(len(rank)), 0)
