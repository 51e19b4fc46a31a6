"""Measured (or published) costs of the parts of a dataflow: the input of the planner, as one JSON file.

`embodied/profiling` measures; this module has the format, the curves through the measured points, and the cost of a
component by its number of devices. Sizes are items per worker and call: envs for a sim, rows for a policy, items of a
gradient step for a learner. A curve is piecewise linear and never falls. Beyond the last point it keeps its slope;
below the first point it falls at most in proportion to the size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from embodied.placement.dataflow import Component, Dataflow, dataflow_from_json
from embodied.placement.topology import DeviceClass, PlacementError

AFFINE_ERROR = 0.05  # a floor and a line within this relative error are preferred to a piecewise linear curve


@dataclass(frozen=True)
class Curve:
    """`error`: the largest relative error if each inner measurement is predicted from the other ones. `spread`: the
    largest interquartile range of the repetitions at one size, relative to their median."""

    sizes: tuple[float, ...]
    values: tuple[float, ...]
    error: float = 0.0
    spread: float = 0.0
    measured: tuple[tuple[float, float], ...] = ()  # (size, median) behind the fit

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.values):
            raise ValueError(f"a curve needs as many sizes as values, at least one; got {self.sizes} and {self.values}")
        if any(b <= a for a, b in zip(self.sizes, self.sizes[1:])) or self.sizes[0] < 0:
            raise ValueError(f"the sizes of a curve must rise from 0 or more; got {self.sizes}")
        if any(b < a for a, b in zip(self.values, self.values[1:])) or self.values[0] < 0:
            raise ValueError(f"the values of a curve must not fall or be negative; got {self.values}; use fit()")

    def at(self, size: Any) -> Any:
        """The value at a size, or an array of values at an array of sizes."""
        s, v = self.sizes, self.values
        size = np.asarray(size, float)
        inside = np.interp(size, s, v)
        if len(s) > 1:
            inside = inside + np.maximum(size - s[-1], 0) * ((v[-1] - v[-2]) / (s[-1] - s[-2]))
            slope = (v[1] - v[0]) / (s[1] - s[0])
            below = np.maximum(v[0] - slope * (s[0] - size), v[0] * size / s[0] if s[0] else 0.0)
            inside = np.where(size < s[0], below, inside)
        return inside if inside.ndim else float(inside)

    def shifted_by(self, amount: float) -> Curve:
        """The curve with `amount` added to all values."""
        points = tuple((size, value + amount) for size, value in self.measured)
        return replace(self, values=tuple(value + amount for value in self.values), measured=points)

    def to_json(self) -> Any:
        if self == constant(self.values[0]):
            return self.values[0]
        plain = {"sizes": list(self.sizes), "values": list(self.values)}
        fit = {"error": self.error, "spread": self.spread, "measured": [list(point) for point in self.measured]}
        return plain | {key: value for key, value in fit.items() if value}


def constant(value: float) -> Curve:
    return Curve((1.0,), (float(value),))


def curve_from_json(content: Any) -> Curve:
    """A number is a constant."""
    if isinstance(content, int | float):
        return constant(content)
    measured = tuple((float(size), float(value)) for size, value in content.get("measured", ()))
    sizes, values = (tuple(map(float, content[key])) for key in ("sizes", "values"))
    return Curve(sizes, values, float(content.get("error", 0)), float(content.get("spread", 0)), measured)


def fit(samples: Mapping[float, Sequence[float]]) -> Curve:
    """Fits a curve to repeated measurements at several sizes: a floor and a line if these fit well, else straight lines
    between the medians. Neighbouring medians that fall with size are replaced by their mean."""
    sizes = sorted(samples)
    medians = [median(samples[size]) for size in sizes]
    points = simplest_points(sizes, medians)
    error = max((miss_without(i, sizes, medians) for i in range(1, len(sizes) - 1)), default=0.0)
    spread = max(relative_range(samples[size]) for size in sizes)
    at, values = zip(*points)
    return Curve(at, values, error=error, spread=spread, measured=tuple(zip(map(float, sizes), medians)))


def simplest_points(sizes: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """Points of the curve: (size, value), rising."""
    level = nearest_rising(values)
    if len(sizes) >= 4:
        points = floor_and_line(sizes, level)
        if points is not None:
            return points
    return [(float(size), value) for size, value in zip(sizes, level)]


def nearest_rising(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls: neighbours in the wrong order become their mean."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([float(value)])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return [float(np.mean(block)) for block in blocks for _ in block]


def floor_and_line(sizes: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]] | None:
    """max(floor, a + b * size) if its relative error is at most AFFINE_ERROR at every size, else None."""
    best, least = None, AFFINE_ERROR
    x, y = np.array(sizes, float), np.array(values, float)
    if not y.any():
        return None
    weights = 1 / np.maximum(y, 1e-6 * y.max())
    for flat in range(len(x) - 2):  # how many of the first sizes lie on the floor
        slope, start = np.polyfit(x[flat:], y[flat:], 1, w=weights[flat:])
        floor = float(y[:flat].mean()) if flat else max(float(start), 0.0)
        if slope <= 0 or start + slope * x[-1] <= floor:
            continue
        knee = max((floor - start) / slope, 0.0)
        line = np.maximum(floor, start + slope * x)
        miss = float(np.max(np.abs(line - y) / np.maximum(y, 1e-12)))
        if miss < least:
            least = miss
            best = [(0.0, floor)] if knee > 0 else []
            best += [(knee, floor), (float(x[-1]), float(start + slope * x[-1]))]
    return best


def miss_without(left_out: int, sizes: Sequence[float], values: Sequence[float]) -> float:
    kept = [i for i in range(len(sizes)) if i != left_out]
    points = simplest_points([sizes[i] for i in kept], [values[i] for i in kept])
    at, guesses = zip(*points)
    guess = Curve(at, guesses).at(sizes[left_out])
    return abs(guess - values[left_out]) / max(values[left_out], 1e-12)


def relative_range(values: Sequence[float]) -> float:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return float((high - low) / max(middle, 1e-12))


FORMAT = "embodied-profile/1"
NOTHING = constant(0)
CURVES = ("bytes", "last_s", "exchange_s")  # of a Cost, besides `seconds`
SAME = ("work", "placement", "stages", "granularity")  # of a forecast, and of a run of it
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
    item_flop: float = 0.0  # operations for an item of a call, as few as its network allows; 0: unknown


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
    runs: Sequence[Mapping[str, Any]] = ()  # real ones: a forecast and its timed rounds; the newest last

    def __post_init__(self) -> None:
        missing = [c.name for c in self.dataflow.components if not self.costs.get(c.name)]
        if missing:
            raise PlacementError(f"the profile has no costs for {', '.join(missing)}; measure again")

    def cost(self, component: str, on: DeviceClass) -> Cost | None:
        """The cost of a component on devices of this class; None where it does not run."""
        costs = self.costs[component]
        return next((costs[key] for key in on.keys if key in costs), None)

    def measured_s(self, forecast: Mapping[str, Any]) -> float | None:
        """The median seconds of an iteration of this work under this placement; None if it was never timed."""
        runs = [run for run in self.runs if all(run[key] == forecast[key] for key in SAME)]
        return median(timed["seconds"] for timed in runs[-1]["rounds"]) if runs else None

    def check_speed(self, classes: Sequence[DeviceClass]) -> None:
        """Refuse costs in which a device does more operations a second than its data sheet allows."""
        for name in self.costs:
            for on in classes:
                cost = self.cost(name, on)
                if cost is None or not cost.item_flop or on.peak_flops == inf:
                    continue
                sizes = [size for size in cost.seconds.sizes if size]
                rate, size = max((cost.item_flop * size / max(cost.seconds.at(size), 1e-9), size) for size in sizes)
                if rate > on.peak_flops:
                    raise PlacementError(
                        f"the profile's {name} takes {cost.seconds.at(size):.3g} s for {size:g} items of "
                        f"{cost.item_flop / 1e12:.3g} TFLOP, {rate / 1e12:.0f} TFLOP/s, and {on} does at most "
                        f"{on.peak_flops / 1e12:.0f}; measure again, or mend costs.{name}"
                    )

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
            content.get("runs", ()),
        )
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as err:
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
    more = {"sources": dict(profile.sources), "runs": [*profile.runs]}
    return content | {key: value for key, value in more.items() if value}


def cost_from_json(content: Mapping[str, Any]) -> Cost:
    fields = Cost.__dataclass_fields__
    if unknown := set(content) - set(fields):
        raise ValueError(f"{', '.join(sorted(unknown))} among the costs; known: {', '.join(fields)}")
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
