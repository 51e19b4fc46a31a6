"""Searches one layer: its nodes on all devices while the other layers wait.

`LayerSearch` prices the splits of every arrangement of zones, thousands at a time. It returns the fastest split, or
the Pareto front of time and memory. `profile_planner.py` puts layers together, compares modes and refuses what does not
fit; without a profile `placement_plan.py` chooses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations

import numpy as np

from embodied.placement.iteration_cost import Pricer
from embodied.placement.layout import DeviceClass, Layer, Zone, arrangements, named
from embodied.placement.profile import Array, max_of
from embodied.placement.schedule_overlap import has_learner_devices, overlaps

PARTS = 4  # into which a range of sizes is cut, or into more while there are fewer boxes than
MANY = 1000
ASKS, RECEIVES = 2, 1  # ranks of zones with components that send requests in a cycle, or that receive weights
MARGIN = 1 + 1e-9  # bounds add up in another order than prices


@dataclass(frozen=True)
class Way:
    """A layer with stages, chunks and swaps, without the sizes of its zones."""

    layer: Layer
    swapped: frozenset[str] = frozenset()


@dataclass
class Points:
    """Priced splits of several ways. `memory` has rows of bytes per class of devices: first those kept while other
    layers work, then those added while this layer works."""

    ways: list[Way]
    which: np.ndarray  # [n] index into ways
    devices: np.ndarray  # [zones, n]
    seconds: np.ndarray  # [n]
    memory: np.ndarray  # [2 * classes, n]

    def take(self, chosen: np.ndarray) -> Points:
        return Points(
            self.ways, self.which[chosen], self.devices[:, chosen], self.seconds[chosen], self.memory[:, chosen]
        )

    def __len__(self) -> int:
        return len(self.seconds)


class Bounds:
    """Lower bounds on the seconds of parts of an iteration. Candidates whose bound is too high are not priced."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        self.floor = cache(self._floor)

    def _floor(self, names: tuple[str, ...], device_class: str, stages: int) -> tuple[np.ndarray, np.ndarray]:
        """Lower bounds for components of a node in one zone of at most 0, 1, 2, ... devices: busy seconds of the zone
        in a pass, and seconds that a stage waits for it."""
        asker = self.pricer.asker_for(names[0])
        if asker is None:
            seconds = self.pricer.table(names[0], device_class, stages).seconds
            floors = (seconds * self.pricer.cost(names[0], device_class).alone,)
        else:
            floors = self._round_least(names, asker, device_class, stages)
        least = []
        for seconds in floors:
            spent = np.where(np.isnan(seconds), np.inf, seconds)
            spent[0] = np.inf
            least.append(np.minimum.accumulate(spent))
        return least[0], least[-1]

    def _round_least(
        self, names: Sequence[str], asker: str, device_class: str, stages: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same for all calls of a cycle, for any place of the asker, with all other devices idle."""
        here, count = Zone(tuple(names), device_class), np.arange(self.pricer.classes[device_class].count + 1)
        calls, alone = (
            self.pricer.dataflow[asker].calls,
            {name: self.pricer.cost(name, device_class).alone for name in names},
        )
        if asker in names:
            at = dict.fromkeys(names, (here, count))
            rounds = [self.pricer.station(name, asker, at, stages, alone[name]) for name in names]
            return calls * sum(whole for _, _, whole, _ in rounds), calls * sum(least for least, _, _, _ in rounds)
        busy, waits = np.full((2, len(count)), np.inf)
        for name in self.pricer.runs_on()[asker]:
            asking = np.flatnonzero(np.diff(self.pricer.table(asker, name, stages).workers) > 0) + 1
            at = {asker: (Zone((asker,), name), asking[:, None]), **dict.fromkeys(names, (here, count))}
            if len(asking):
                rounds = [self.pricer.station(name, asker, at, stages, alone[name]) for name in names]
                every = len(asking), len(count)
                whole, least = (np.broadcast_to(sum(r[i] for r in rounds), every).min(axis=0) for i in (2, 0))
                busy, waits = np.minimum(busy, whole), np.minimum(waits, least)
        return calls * busy, calls * waits

    def least_seconds(self, layer: Layer, most: Sequence[Array], stages: int, chunks: int) -> Array:
        """A lower bound on the seconds of this layer if its zones have at most `most` devices (numbers, or arrays)."""
        work = {}
        for turn in self.pricer.turns(layer):
            floors = [self.floor(names, layer[z].device_class, stages) for z, names in turn.parts]
            counts = [most[z] for z, _ in turn.parts]
            busiest = max_of(*(busy[count] for (busy, _), count in zip(floors, counts)))
            if len(floors) > 1:
                busiest = max_of(busiest, sum(one[count] for (_, one), count in zip(floors, counts)))
            work[turn.node] = busiest
        return self.pricer.least_turns(layer, work, chunks)


# The search of one layer


class LayerSearch:
    def __init__(
        self, bounds: Bounds, classes: Sequence[DeviceClass], nodes: frozenset[int], stages: int, chunks: int
    ) -> None:
        self.bounds, self.pricer = bounds, bounds.pricer
        self.classes = tuple(classes)
        self.limits = np.array([c.memory_bytes for c in classes], float)
        self.stages, self.chunks = stages, chunks
        self.components = tuple(name for node in sorted(nodes) for name in self.pricer.dataflow.order[node])
        self.groups: dict[tuple, list[Layer]] = {}  # layers by label, which decides the mode
        names = named(self.pricer.dataflow.by_name)
        for layer in arrangements(self.components, classes, self.pricer.runs_on()):
            if has_learner_devices(self.pricer.dataflow, layer):
                self.groups.setdefault(label_of(layer, names), []).append(layer)
        self._fastest: dict[tuple, Points] = {}
        self._slower: dict[tuple, float] = {}  # label -> a lower bound on its seconds, from failed searches
        self.sizes = cache(self._sizes)
        self.leasts = {layer: self.least(layer) for layers in self.groups.values() for layer in layers}
        for layers in self.groups.values():
            layers.sort(key=self.leasts.get)
        self._least = {label: self.leasts[layers[0]] for label, layers in self.groups.items()}

    def least_of(self, label: tuple) -> float:
        """A lower bound on the seconds of all splits with this label."""
        return self._fastest[label].seconds[0] if label in self._fastest else self._least[label]

    def fastest(self, label: tuple, bound: float = np.inf) -> Points | None:
        """The fastest split, ignoring memory; None if no split takes less than `bound`."""
        if label not in self._fastest and bound > self._slower.get(label, 0.0):
            best: Points | None = None
            limit = bound
            for layer in self.groups[label]:
                if self.leasts[layer] >= limit:
                    break
                split = self.splits(layer, limit, only_fastest=True)
                if split.size:
                    best = self.price(Way(layer), split)
                    limit = best.seconds[0]
            if best:
                self._fastest[label] = best
            else:
                self._slower[label] = bound
        known = self._fastest.get(label)
        return known if known and known.seconds[0] < bound else None

    def least(self, layer: Layer) -> float:
        """A lower bound on the seconds of a layer, in which every zone gets all devices that other zones do not
        need."""
        zones = Counter(zone.device_class for zone in layer)
        most = [max(self.count(zone) - zones[zone.device_class] + 1, 0) for zone in layer]
        return float(self.bounds.least_seconds(layer, most, self.stages, self.chunks))

    def count(self, zone: Zone) -> int:
        return self.pricer.classes[zone.device_class].count

    def front(self, label: tuple, bound: float) -> Points | None:
        """Splits of less than `bound` seconds on the Pareto front of seconds and bytes."""
        fronts: list[Points] = []
        for layer in self.groups[label]:
            splits = self.splits(layer, bound)
            for swapped in self.swaps(self.components):
                points = self.price(Way(layer, swapped), splits)
                points = points.take(fit(points, self.limits) & (points.seconds < bound))
                if len(points):
                    fronts.append(pareto_front(points))
        return pareto_front(concatenated(fronts)) if fronts else None

    def swaps(self, components: Sequence[str]) -> list[frozenset[str]]:
        """All sets of components that can give their memory back, small ones first."""
        able = [name for name in components if self.pricer.can_swap(name)]
        return [frozenset(s) for size in range(len(able) + 1) for s in combinations(able, size)]

    def price(self, way: Way, devices: np.ndarray) -> Points:
        priced = self.pricer.layer(way.layer, list(devices), self.stages, self.chunks, way.swapped)
        shape = devices.shape[1]
        none = np.zeros(shape)
        idle = [np.broadcast_to(priced.idle.get(c.name, none), shape) for c in self.classes]
        active = [np.broadcast_to(priced.active.get(c.name, none), shape) for c in self.classes]
        memory = np.stack([*idle, *(a - i for a, i in zip(active, idle))])
        points = Points([way], np.zeros(shape, int), devices, np.broadcast_to(priced.seconds, shape), memory)
        return points.take(np.isfinite(points.seconds))

    def seconds(self, layer: Layer, devices: np.ndarray) -> np.ndarray:
        """Seconds of every split (column of `devices`)."""
        priced = self.pricer.seconds(layer, list(devices), self.stages, self.chunks)
        return np.broadcast_to(priced, devices.shape[1])

    # Numbers of devices to try

    def splits(self, layer: Layer, bound: float, only_fastest: bool = False) -> np.ndarray:
        """Sizes of the zones, one column per split, that could take less than `bound` seconds; with `only_fastest` the
        fastest split, or no column.

        Branch and bound: a box is a range of sizes for every zone. Boxes that cannot take less than `bound` seconds are
        dropped and the others divided, until every box is one split. With `only_fastest` the smallest split of every
        box is priced, and the fastest split so far is the bound."""
        rest, rank = self.rest(layer), self.rank(layer)
        sizes = [np.ones(1, int) if i in rest else self.sizes(zone) for i, zone in enumerate(layer)]
        first, last = np.zeros((len(layer), 1), int), np.array([[len(s) - 1] for s in sizes])  # indices of sizes
        fastest = least = np.zeros((len(layer), 0), int)
        whole = min(map(len, sizes)) == 0  # no worker fits
        while not whole:
            least, most = (np.stack([s[i] for s, i in zip(sizes, of)]) for of in (first, last))
            left = self.left(layer, least)
            most = np.minimum(most, least + left)
            least[rest] = most[rest] = (least + left)[rest]
            kept = (left >= 0).all(axis=0)
            if bound < np.inf:
                kept[kept] = self.least_seconds(layer, least[:, kept], most[:, kept], rank) < bound
            first, last, least = first[:, kept], last[:, kept], least[:, kept]
            if only_fastest and least.size and (seconds := self.seconds(layer, least)).min() < bound:
                fastest, bound = least[:, [seconds.argmin()]], seconds.min()
            whole = np.array_equal(first, last)
            if not whole:
                first, last = divided(first, last, rank)
        return fastest if only_fastest else least

    def least_seconds(self, layer: Layer, least: np.ndarray, most: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Lower bounds on the seconds of boxes (columns), in which each zone has `least` to `most` devices."""
        single, beside = least == most, overlaps(self.pricer.dataflow)
        if beside or self.pricer.work_slowed_by_more(self.components) or not single[rank == ASKS].all():
            seconds = self.bounds.least_seconds(layer, list(most), self.stages, self.chunks)
        else:
            seconds = self.pricer.work_seconds(layer, at_zones(layer, most), self.stages, self.chunks)
        if not beside:
            fewest, at = at_zones(layer, least), at_zones(layer, most)
            sync = self.pricer.least_sync_seconds(fewest, at, self.stages)
            exact = self.pricer.sync_seconds(at, self.stages)
            seconds = seconds + np.where(single[rank > 0].all(axis=0), exact, sync)
        return np.broadcast_to(seconds, most.shape[1])

    def rank(self, layer: Layer) -> np.ndarray:
        """ASKS, RECEIVES or 0 for every zone. Bounds are close once zones of a higher rank have one size."""
        receives = [RECEIVES * self.pricer.receives(zone.components) for zone in layer]
        return np.array([ASKS if self.asks(zone.components) else rank for zone, rank in zip(layer, receives)])

    def rest(self, layer: Layer) -> list[int]:
        """Zones that take all remaining devices, one in every class of devices: of the zones that more devices never
        slow down, the one with the most sizes."""
        rest: dict[str, int] = {}
        for i, zone in enumerate(layer):
            if not self.asks(zone.components) and not self.pricer.slowed_by_more(zone.components):
                other = rest.setdefault(zone.device_class, i)
                if len(self.sizes(zone)) > len(self.sizes(layer[other])):
                    rest[zone.device_class] = i
        return list(rest.values())

    def left(self, layer: Layer, splits: np.ndarray) -> np.ndarray:
        """For every zone, the number of devices of its class that the splits leave."""
        left = {
            c.name: c.count - sum(sizes for sizes, zone in zip(splits, layer) if zone.device_class == c.name)
            for c in self.classes
        }
        return np.stack([left[zone.device_class] for zone in layer])

    def _sizes(self, where: Zone) -> np.ndarray:
        """The numbers of devices at which one of a zone's components can have one worker more."""
        count = self.pricer.classes[where.device_class].count
        won = np.zeros(count + 1, bool)
        for name in where.components:
            asker = self.pricer.asker_for(name)
            if asker in (None, name):
                workers = self.pricer.table(name, where.device_class, self.stages).workers
                won[1:] |= np.diff(workers) > 0
            elif asker not in where.components:
                won |= self.pricer.useful_answerers(name, count, self.stages)
        return np.flatnonzero(won)

    def asks(self, components: Sequence[str]) -> bool:
        return any(self.pricer.dataflow[name].splits for name in components)


# Sets of points


def divided(first: np.ndarray, last: np.ndarray, rank: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cuts one range of every box (column): the longest range of the zones with the highest rank."""
    urgency = np.where(last > first, last - first + 1e6 * rank[:, None], 0)
    zone, box = urgency.argmax(axis=0), np.arange(first.shape[1])
    start, length = first[zone, box], (last - first)[zone, box] + 1
    parts = max(PARTS, MANY // len(box))
    edges = start + length * np.arange(parts + 1)[:, None] // parts
    first, last = np.tile(first, (1, parts)), np.tile(last, (1, parts))
    zone, box = np.tile(zone, parts), np.arange(first.shape[1])
    first[zone, box], last[zone, box] = edges[:-1].ravel(), edges[1:].ravel() - 1
    filled = (first <= last).all(axis=0)
    return first[:, filled], last[:, filled]


def at_zones(layer: Layer, devices: np.ndarray) -> dict[str, tuple[Zone, np.ndarray]]:
    """The zone and the numbers of devices of every component."""
    return {name: (zone, count) for zone, count in zip(layer, devices) for name in zone.components}


def label_of(layer: Layer, names: Sequence[str]) -> tuple:
    """What decides the mode: the roles that share a zone, and the device class of each."""
    home = {name: zone for zone in layer for name in zone.components}
    placed = [role for role in names if role in home]
    together = tuple((a, b) for a, b in combinations(placed, 2) if home[a] is home[b])
    return together, tuple((role, home[role].device_class) for role in placed)


def fit(points: Points, limits: np.ndarray) -> np.ndarray:
    idle, extra = np.split(points.memory, 2)
    return (idle + extra <= limits[:, None]).all(axis=0)


def concatenated(parts: Sequence[Points]) -> Points:
    zones = max(len(part.devices) for part in parts)
    first = np.cumsum([0] + [len(part.ways) for part in parts])
    return Points(
        list(chain.from_iterable(part.ways for part in parts)),
        np.concatenate([part.which + start for part, start in zip(parts, first)]),
        np.concatenate([np.pad(p.devices, ((0, zones - len(p.devices)), (0, 0))) for p in parts], axis=1),
        np.concatenate([part.seconds for part in parts]),
        np.concatenate([part.memory for part in parts], axis=1),
    )


def pareto_front(points: Points) -> Points:
    """Removes points that another point beats or equals in seconds and in every row of memory."""
    return points.take(np.fromiter(unbeaten_indices(points.seconds, points.memory), int))


def unbeaten_indices(seconds: np.ndarray, memory: np.ndarray) -> Iterator[int]:
    left = np.argsort(seconds, kind="stable")
    while len(left):
        best = left[0]
        yield int(best)
        worse = (memory[:, left] >= memory[:, [best]]).all(axis=0)
        worse[0] = True
        left = left[~worse]
