"""Finds the fastest layout by the costs of a profile.

A candidate cuts the order of nodes into layers that take turns (cycles stay whole). It puts each layer's components
into zones, each on one class of devices and of any size; devices may stay idle. It chooses the numbers of stages and
chunks, and the components that offload their memory between turns. If learners work during the rollout
(`schedule_overlap.py`), candidates have one layer, in which learners have their own devices.

The search is best first. A way is a candidate without the sizes of its zones; a box is a range of sizes for every zone
of a way. The least value of every term of the price over a box gives a lower bound on its seconds and bytes. The way
with the lowest bound is refined: boxes that cannot beat the fastest known layout are dropped, the others are divided.
Up to EXACT devices of a class the result is that of an exhaustive search. Above, sizes come from a grid if there are
many. After THOROUGH priced boxes, gains below TOLERANCE are not searched for, and only the BOXES most promising boxes
of a way are divided.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from itertools import accumulate, combinations, pairwise, product
from typing import Any

import numpy as np

from embodied.placement.dataflow import Component, Dataflow
from embodied.placement.iteration_cost import Choice, Pricer, Terms, zone_bytes, zones_at
from embodied.placement.layout import Layer, Layout, Zone, arrangements, layer_sets
from embodied.placement.profile import Array, Profile
from embodied.placement.schedule_overlap import has_learner_devices, overlaps
from embodied.placement.topology import DeviceClass

MODES = ("collocated", "hybrid", "disaggregated", "custom")
STAGES = (1, 2, 4)
EXACT = 64  # devices of a class up to which no layout is faster than the result
THOROUGH = 40_000  # priced boxes, after which small gains are left out
TOLERANCE = 0.005  # of the seconds of an iteration
GRID = 24  # sizes per factor of two above EXACT
BOXES = 1024  # of a way that are divided
CORNERS = 8  # boxes of a way whose corners are priced
FEW = 100  # boxes are divided again before they are priced if there are fewer
ROUNDING = 1e-9


class LayerTerms:
    """The terms of a layer's price on a grid of all useful sizes of its zones, and of all sets of swapped components
    (the last axis)."""

    def __init__(self, pricer: Pricer, layer: Layer, stages: int, swaps: Sequence[frozenset[str]]) -> None:
        self.pricer, self.layer, self.stages = pricer, layer, stages
        self.sizes = [self._possible_sizes(zone) for zone in layer]
        self.axes: dict[
            tuple, list[int]
        ] = {}  # by term: the zones whose sizes matter, and the sets of swapped components
        self.local: dict[tuple, np.ndarray] = {}  # by term: for every set, the index on the term's last axis
        self.terms: Terms = {}
        if all(map(len, self.sizes)):  # else a zone is too small for a worker
            grid = np.ix_(*self.sizes, [0])[:-1]
            for key, term in pricer.terms(layer, grid, stages).items():
                self._add(key, self._on_axes(term))
            self._add_swap_terms(grid, swaps)
            self._drop_useless_sizes()

    def _possible_sizes(self, zone: Zone) -> np.ndarray:
        """The numbers of devices that may be better than smaller ones."""
        beside = sum(other.device_class == zone.device_class for other in self.layer) - 1
        count = self.pricer.classes[zone.device_class].count - beside
        sizes = np.unique(np.concatenate([self._sizes_for(name, zone, max(count, 0)) for name in zone.components]))
        return sizes[sizes <= count].astype(int)

    def _sizes_for(self, name: str, zone: Zone, count: int) -> np.ndarray:
        """The numbers of devices at which a component has one worker more; one that answers works on all of them."""
        asker = self.pricer.asker_for(name)
        if asker in (None, name):
            return thinned(np.flatnonzero(np.diff(self.pricer.table(name, zone.device_class, self.stages).workers)) + 1)
        if asker in zone.components:
            return np.zeros(0, int)
        home = next(other.device_class for other in self.layer if asker in other.components)
        parts = np.unique(self.pricer.table(asker, home, self.stages).workers[1:]) * self.stages
        equal = np.concatenate([marks for k in range(1, 17) for marks in (-(-parts // k), parts * k)])
        return np.union1d(thinned(np.arange(1, count + 1)), equal[equal > 0])

    def _on_axes(self, term: Array) -> np.ndarray:
        term = np.asarray(term)
        return term if term.ndim else term.reshape((1,) * (len(self.layer) + 1))

    def _add(self, key: tuple, term: np.ndarray) -> None:
        axes = range(len(self.layer) + 1)
        self.axes[key] = [axis for axis in axes if term.shape[axis] > 1]
        self.terms[key] = np.squeeze(term, tuple(axis for axis in axes if term.shape[axis] == 1))

    def _add_swap_terms(self, grid: Sequence[np.ndarray], swaps: Sequence[frozenset[str]]) -> None:
        at, able = zones_at(self.layer, grid), swaps[-1]

        def add(key: tuple, names: Sequence[str], term: Callable[[frozenset[str]], Array]) -> None:
            """Add a term that depends on which of these components are swapped."""
            local = subsets([name for name in names if name in able])
            each = np.broadcast_arrays(*(self._on_axes(term(swapped)) for swapped in local))
            self._add(key, np.concatenate(each, axis=-1))
            self.local[key] = np.array([local.index(swapped & {*names}) for swapped in swaps])

        for turn in self.pricer.turns(self.layer) if able else ():
            node = self.pricer.dataflow.order[turn.node]
            for which in ("onload", "offload"):
                add((which, turn.node), node, partial(self.pricer.swap_seconds, node, at, which=f"{which}_s"))
        for i, zone in enumerate(self.layer):
            both = cache(zone_bytes(self.pricer, zone, at, self.stages))
            add(("active", i), zone.components, lambda s, both=both: both(s)[0])
            add(("idle", i), zone.components, lambda s, both=both: both(s)[1])

    def _drop_useless_sizes(self) -> None:
        """Drop sizes at which no term is lower than at the next smaller size."""
        for axis, sizes in enumerate(self.sizes):
            kept = np.zeros(len(sizes), bool)
            kept[0] = True
            touched = {key: axes.index(axis) for key, axes in self.axes.items() if axis in axes}
            for key, place in touched.items():
                term = np.moveaxis(self.terms[key], place, 0)
                kept[1:] |= (term[1:] < term[:-1]).any(axis=tuple(range(1, term.ndim)))
            self.sizes[axis] = sizes[kept]
            self.terms |= {key: self.terms[key].compress(kept, place) for key, place in touched.items()}

    @cached_property
    def levels(self) -> list[tuple[list[np.ndarray], Terms]]:
        """Smallest sizes and lowest terms of single sizes, of pairs of neighbours, of pairs of pairs, ..."""
        levels = [(self.sizes, self.terms)]
        while max(len(sizes) for sizes in levels[-1][0]) > 1:
            sizes, terms = levels[-1]
            levels.append(([s[::2] for s in sizes], {key: self._of_pairs(key, term) for key, term in terms.items()}))
        return levels

    def at_level(self, level: int) -> tuple[list[np.ndarray], Terms]:
        return self.levels[min(level, len(self.levels) - 1)]

    def _of_pairs(self, key: tuple, term: np.ndarray) -> np.ndarray:
        for place, axis in enumerate(self.axes[key]):
            if axis < len(self.layer):
                before = (slice(None),) * place
                lowest, others = term[*before, ::2].copy(), term[*before, 1::2]
                pairs = lowest[*before, : others.shape[place]]
                np.minimum(pairs, others, out=pairs)
                term = lowest
        return term

    def at(self, boxes: np.ndarray, level: int) -> tuple[list[np.ndarray], Terms]:
        """Smallest sizes and terms of boxes [zones + 1, n], given as indices at a level."""
        sizes, terms = self.at_level(level)
        picked = {}
        for key, term in terms.items():
            rows = [boxes[axis] for axis in self.axes[key]]
            if key in self.local and self.axes[key][-1:] == [len(self.layer)]:
                rows[-1] = self.local[key][rows[-1]]
            picked[key] = term[tuple(rows)]
        return [s[index] for s, index in zip(sizes, boxes)], picked


class Way:
    """A candidate without the sizes of its zones, and the boxes of sizes that are left: [zones + 1, n] indices at a
    level; the last row is the set of swapped components."""

    def __init__(self, planner: Planner, layers: tuple[Layer, ...], stages: int, chunks: int) -> None:
        self.planner, self.layers, self.stages, self.chunks = planner, layers, stages, chunks
        self.parts = planner.terms_of(layers, stages)
        ends = [0, *accumulate(map(len, layers))]
        self.rows = [[*range(first, end), -1] for first, end in pairwise(ends)]
        classes = planner.pricer.classes
        self.counts = np.array([[classes[zone.device_class].count] for layer in layers for zone in layer])
        places = [(number, zone.device_class) for number, layer in enumerate(layers) for zone in layer]
        self.beside = np.array([[place == other for other in places] for place in places], int)
        self.level = max(len(part.levels) for part in self.parts) - 1
        self.boxes = np.zeros((len(places) + 1, len(planner.swaps)), int)
        self.boxes[-1] = np.arange(len(planner.swaps))
        self._drop_too_large()

    def divide(self, bound: float) -> float:
        """Divides the boxes, and drops those that fit nowhere or take `bound` seconds or more. Returns a lower bound on
        the seconds of all others, of which the best come first."""
        self._halve()
        while self.level and self.boxes.shape[1] < FEW:
            self._halve()
        seconds, fits = self.price(self.boxes, self.level)
        kept = np.flatnonzero(fits & (seconds < bound))
        kept = kept[np.argsort(seconds[kept], kind="stable")][: None if self.planner.is_exact else BOXES]
        self.boxes = self.boxes[:, kept]
        return float(seconds[kept].min(initial=np.inf))

    def _halve(self) -> None:
        if self.level == 0:
            return
        self.level -= 1
        for axis, size in enumerate(self._sizes(self.level)):
            self.boxes = np.repeat(self.boxes, 2, axis=1)
            self.boxes[axis] = 2 * self.boxes[axis] + np.arange(self.boxes.shape[1]) % 2
            self.boxes = self.boxes[:, self.boxes[axis] < len(size)]
        self._drop_too_large()

    def _drop_too_large(self) -> None:
        """Drop boxes whose smallest sizes need more devices than there are."""
        self.boxes = self.boxes[:, (self._devices_left(self.boxes, self._sizes(self.level)) >= 0).all(axis=0)]

    def _sizes(self, level: int) -> list[np.ndarray]:
        return [sizes for part in self.parts for sizes in part.at_level(level)[0]]

    def _devices_left(self, boxes: np.ndarray, sizes: Sequence[np.ndarray]) -> np.ndarray:
        """[zones, n] How many devices the smallest sizes leave in the layer and class of each zone."""
        return self.counts - self.beside @ np.stack([size[index] for size, index in zip(sizes, boxes)])

    def price(self, boxes: np.ndarray, level: int, exact: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Lower bounds on the seconds of boxes (`exact`: the seconds of single sizes), and whether they may fit in
        memory."""
        pricer, priced = self.planner.pricer, [p.at(boxes[rows], level) for p, rows in zip(self.parts, self.rows)]
        if exact:
            priced = [
                (d, t | pricer.overlapped_terms(layer, d, self.stages)) for layer, (d, t) in zip(self.layers, priced)
            ]
        terms = [terms for _, terms in priced]
        seconds = sum(pricer.layer_seconds(layer, t, self.chunks) for layer, t in zip(self.layers, terms))
        fits = np.broadcast_to(np.isfinite(seconds), boxes.shape[1:]).copy()
        for c in self.planner.classes:
            fits &= pricer.used_bytes(self.layers, terms, c.name) <= c.memory_bytes
        self.planner.priced += len(fits)
        return np.broadcast_to(seconds + pricer.dataflow.fixed_s, fits.shape), fits

    def fastest_corner(self) -> tuple[float, Layout | None]:
        """The fastest layout among the smallest sizes of the first boxes, of which one zone may have the other devices,
        too; infinite seconds if none fits."""
        points = self.boxes
        if self.level:
            corners, sizes = self.boxes[:, :CORNERS].copy(), self._sizes(0)
            corners[:-1] *= 2**self.level
            left, points = self._devices_left(corners, sizes), np.tile(corners, len(sizes))
            for axis, size in enumerate(sizes):
                most = np.searchsorted(size, size[corners[axis]] + left[axis], "right") - 1
                points[axis, axis * len(most) : (axis + 1) * len(most)] = most
        seconds, fits = self.price(points, 0, exact=True)
        first = int(np.where(fits, seconds, np.inf).argmin())
        return (float(seconds[first]), self._layout(points[:, first])) if fits[first] else (np.inf, None)

    def _layout(self, point: np.ndarray) -> Layout:
        sizes = iter(int(size[index]) for size, index in zip(self._sizes(0), point))
        layers = tuple(tuple(Zone(z.components, z.device_class, next(sizes)) for z in layer) for layer in self.layers)
        return Layout(layers, self.stages, self.chunks, self.planner.swaps[point[-1]])


class Planner:
    def __init__(
        self, dataflow: Dataflow, profile: Profile, classes: Sequence[DeviceClass], stages: Sequence[int] = STAGES
    ) -> None:
        self.dataflow = dataflow
        self.classes = tuple(c for c in classes if c.count)
        self.pricer = Pricer(dataflow, profile, self.classes)
        self.stages = stages if any(len(node) > 1 for node in dataflow.order) else (1,)
        self.swaps = subsets([c.name for c in dataflow.components if self.pricer.can_swap(c.name)])
        if self._always_fits():
            self.swaps = [frozenset()]
        self.layers = cache(self._layers)
        self.terms = cache(lambda layer, stages: LayerTerms(self.pricer, layer, stages, self.swaps))
        self.least = cache(self._least)
        self.priced = 0  # number of priced boxes

    @property
    def is_exact(self) -> bool:
        """True if no gain is left out: on few devices, and while few boxes have been priced."""
        return self.priced < THOROUGH or max(c.count for c in self.classes) <= EXACT

    @property
    def margin(self) -> float:
        """The share of the fastest known time that a lower bound has to be below."""
        return 1 - (ROUNDING if self.is_exact else TOLERANCE)

    def with_schedule(self, schedule: str) -> Planner:
        """The planner of the same work under this schedule."""
        return Planner(self.dataflow.with_schedule(schedule), self.pricer.profile, self.classes, self.stages)

    def fastest(self) -> Choice | None:
        """The fastest layout; None if none fits."""
        return self._fastest([option for options in self._options.values() for option in options])

    def modes(self) -> dict[str, Choice | None]:
        """The fastest layout of every mode; None where none fits."""
        return {mode: self._fastest(self._options.get(mode, [])) for mode in MODES}

    def _fastest(self, options: Sequence[tuple[float, tuple]]) -> Choice | None:
        """The fastest layout that fits, of ways with lower bounds on their seconds."""
        heap: list[tuple[float, int, Any]] = [(least_s, i, option) for i, (least_s, option) in enumerate(options)]
        heapq.heapify(heap)
        best_s, best = np.inf, None
        while heap and heap[0][0] < best_s * self.margin:
            _, number, way = heapq.heappop(heap)
            way = way if isinstance(way, Way) else Way(self, *way)
            least_s = way.divide(best_s * self.margin)
            if way.boxes.size:
                best_s, best = min((best_s, best), way.fastest_corner(), key=lambda found: found[0])
                if way.level:
                    heapq.heappush(heap, (least_s, number, way))
        return Choice(self.pricer, best) if best else None

    @cached_property
    def _options(self) -> dict[str, list[tuple[float, tuple]]]:
        """By mode, all ways as (layers, stages, chunks) with lower bounds on their seconds, those with few layers
        first."""
        numbers = [*product(self.stages, chunk_grid(self.dataflow, self.pricer.profile))]
        options: dict[str, list[tuple[float, tuple]]] = {}
        for cut in sorted(layer_sets(self.dataflow), key=len):
            for layers in product(*map(self.layers, cut)) if len(cut) == 1 or not overlaps(self.dataflow) else ():
                streams, here = (
                    any(map(self.pricer.streams_between, layers)),
                    options.setdefault(Layout(layers).mode, []),
                )
                for stages, chunks in numbers:
                    least_s = sum(self.least(layer, stages, chunks) for layer in layers) + self.dataflow.fixed_s
                    if least_s < np.inf and (streams or chunks == 1):
                        here.append((least_s, (layers, stages, chunks)))
        return options

    def _layers(self, nodes: frozenset[int]) -> list[Layer]:
        names = tuple(name for node in sorted(nodes) for name in self.dataflow.order[node])
        layers = arrangements(names, self.classes, self.pricer.runs_on())
        return [layer for layer in layers if has_learner_devices(self.dataflow, layer)]

    def _least(self, layer: Layer, stages: int, chunks: int) -> float:
        """A lower bound on the seconds of all sizes of a layer's zones."""
        (terms,) = self.terms_of((layer,), stages)
        lowest = {key: term.min(axis=tuple(range(len(terms.axes[key])))) for key, term in terms.terms.items()}
        lowest = {key: term if term.ndim else float(term) for key, term in lowest.items()}
        return float(self.pricer.layer_seconds(layer, lowest, chunks)) if lowest else np.inf

    def terms_of(self, layers: Sequence[Layer], stages: int) -> list[LayerTerms]:
        """The terms of layers; of a layer without a cycle they do not depend on the stages."""
        cycles = [any(self.pricer.asker_for(name) for zone in layer for name in zone.components) for layer in layers]
        return [self.terms(layer, stages if cycle else 1) for layer, cycle in zip(layers, cycles)]

    def _always_fits(self) -> bool:
        """True if all components fit on one device together."""

        def needs(component: Component, on: DeviceClass) -> float:
            if (cost := self.pricer.cost(component.name, on.name)) is None:
                return 0.0
            return max(self.pricer.table(component.name, on.name, 1).bytes.max(), cost.bytes.at(component.items))

        return all(sum(needs(f, c) for f in self.dataflow.components) <= c.memory_bytes for c in self.classes)


def subsets(names: Sequence[str]) -> list[frozenset[str]]:
    """All sets of these names, small ones first."""
    return [frozenset(s) for size in range(len(names) + 1) for s in combinations(names, size)]


def thinned(sizes: np.ndarray) -> np.ndarray:
    """All sizes up to EXACT, and GRID of them per factor of two above, if there are many."""
    if len(sizes) <= 2 * EXACT:
        return sizes
    grid = np.geomspace(EXACT, sizes[-1], int(GRID * np.log2(sizes[-1] / EXACT)) + 2)
    return np.union1d(sizes[sizes <= EXACT], sizes[np.searchsorted(sizes, grid.astype(int))])


def chunk_grid(dataflow: Dataflow, profile: Profile) -> tuple[int, ...]:
    """Possible numbers of chunks in which data is handed on: divisors of passes if a component streams, of decisions if
    frozen parts compute ahead or components take parts of rollouts, and 1 if groups are handed on or learners work
    during the rollout anyway."""
    if overlaps(dataflow) or dataflow.groups:
        return (1,)
    if any(c.streams for c in dataflow.components):
        return tuple(n for n in (1, 2, 4, 8, 16) if dataflow.passes % n == 0)
    encodes = any(c.ahead and any(cost.ahead_s for cost in profile.costs[c.name].values()) for c in dataflow.components)
    most = max((c.calls for c in dataflow.components if c.splits), default=1)
    by_parts = encodes or any(c.units for c in dataflow.components)
    return tuple(n for n in (1, 2, 4, 8) if n == 1 or (by_parts and n <= most))
