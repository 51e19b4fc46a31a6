"""Finds the fastest layout by the costs of a profile.

A candidate cuts the order of nodes into layers that take turns (cycles stay whole). It puts each layer's components
into zones, each on one class of devices and of any size; devices may stay idle. It chooses the numbers of stages and
chunks, and the components that offload their memory between turns. If learners work during the rollout
(`schedule_overlap.py`), candidates have one layer, in which learners have their own devices.

A way is a candidate without the sizes of its zones, and a split gives every zone a size. For every way, the search
gives zone after zone all its sizes. If each other zone had all devices that are left, the terms of the price could not
be lower than `Splits.bounds`, and splits whose seconds are then no lower than those of the fastest known layout are
dropped. The first search extends only BEAM splits by a zone: those with the lowest bounds, and others that leave more
devices to the next zones. Up to EXACT devices of a class a second search extends all splits, so that the result is that
of an exhaustive search. Above, sizes come from a grid if there are many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import combinations, product

import numpy as np

from embodied.placement.dataflow import Component, Dataflow
from embodied.placement.iteration_cost import Choice, Pricer, Terms
from embodied.placement.layout import Layer, Layout, Zone, arrangements, layer_sets
from embodied.placement.profile import Profile
from embodied.placement.schedule_overlap import has_learner_devices, overlaps
from embodied.placement.topology import DeviceClass

MODES = ("collocated", "hybrid", "disaggregated", "custom")
STAGES = (1, 2, 4)
EXACT = 64  # devices of a class up to which no layout is faster than the result
GRID = 24  # sizes per factor of two above EXACT
BEAM = 48  # splits of a way that the first search extends by a zone
ROUNDING = 1e-9

Way = tuple[tuple[Layer, ...], int, int]  # layers of zones without sizes, stages, chunks


class Splits:
    """The useful sizes of a layer's zones, and the terms of the layer's price for all of them."""

    def __init__(self, pricer: Pricer, layer: Layer, stages: int) -> None:
        self.pricer, self.layer, self.stages = pricer, layer, stages
        self.sizes = [self._possible_sizes(zone) for zone in layer]
        self.bounds: list[Terms] = []  # by the number of zones, from the first, whose size is known
        if all(map(len, self.sizes)):  # else a zone is too small for a worker
            terms = pricer.terms(layer, np.ix_(*self.sizes), stages)
            self.bounds = [{key: np.asarray(term) for key, term in terms.items()}]
        for axis in reversed(range(len(layer)) if self.bounds else ()):
            self.bounds.insert(0, {key: lowest_to(term, axis) for key, term in self.bounds[0].items()})

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
        devices_of_worker = self.pricer.devices_of_worker(name, zone.device_class)
        return devices_of_worker * np.union1d(thinned(np.arange(1, count // devices_of_worker + 1)), equal[equal > 0])

    def at(self, rows: np.ndarray, num_known: int) -> Terms:
        """The terms of splits [zones, n]: indices of sizes, or of the largest size that a zone after the first
        `num_known` may have, of which the least value of every term is taken."""
        bounds = self.bounds[max(0, min(num_known, len(self.layer)))]
        return {
            key: term[tuple(row if n > 1 else 0 for row, n in zip(rows, term.shape))] if term.ndim else term
            for key, term in bounds.items()
        }


def most_promising(seconds: np.ndarray, free: np.ndarray, width: int | None) -> np.ndarray:
    """The indices of `width` splits, the lowest seconds first. Half have the lowest seconds. The other half are splits
    of which no faster one leaves as many devices free, then the same among the rest, and so on."""
    rest = np.lexsort((-free, seconds))
    if width is None or len(rest) <= width:
        return rest
    chosen, rest = np.split(rest, [width // 2])
    while len(chosen) < width:
        most = np.maximum.accumulate(free[rest])
        leads = np.append(True, free[rest[1:]] > most[:-1])
        front = rest[leads]
        spread = np.linspace(0, len(front) - 1, min(len(front), width - len(chosen))).astype(int)
        chosen, rest = np.append(chosen, front[spread]), rest[~leads]
    return chosen


def lowest_to(term: np.ndarray, axis: int) -> np.ndarray:
    """The least value up to each place on an axis."""
    return np.minimum.accumulate(term, axis) if term.ndim > axis and term.shape[axis] > 1 else term


class Planner:
    def __init__(
        self, dataflow: Dataflow, profile: Profile, classes: Sequence[DeviceClass], stages: Sequence[int] = STAGES
    ) -> None:
        self.dataflow = dataflow
        self.classes = tuple(c for c in classes if c.count)
        self.pricer = Pricer(dataflow, profile, self.classes)
        self.stages = stages if any(len(node) > 1 for node in dataflow.order) else (1,)
        able = [] if self._always_fits() else [c.name for c in dataflow.components if self.pricer.can_swap(c.name)]
        self.swaps = [frozenset(names) for size in range(len(able) + 1) for names in combinations(able, size)]
        self.is_swapped = {name: np.array([name in swapped for swapped in self.swaps]) for name in able}
        self.layers = cache(self._layers)
        self.splits = cache(partial(Splits, self.pricer))
        self.least = cache(self._least)
        self.priced = 0  # number of priced splits

    def with_schedule(self, schedule: str) -> Planner:
        """The planner of the same work under this schedule."""
        return Planner(self.dataflow.with_schedule(schedule), self.pricer.profile, self.classes, self.stages)

    def fastest(self) -> Choice | None:
        """The fastest layout; None if none fits."""
        return self._fastest([option for options in self._options.values() for option in options])

    def modes(self) -> dict[str, Choice | None]:
        """The fastest layout of every mode; None where none fits."""
        return {mode: self._fastest(self._options.get(mode, [])) for mode in MODES}

    def _fastest(self, options: Sequence[tuple[float, Way]]) -> Choice | None:
        """The fastest layout that fits, of ways with lower bounds on their seconds."""
        best: tuple[float, Layout | None] = (np.inf, None)
        for width in (BEAM, None) if max(c.count for c in self.classes) <= EXACT else (BEAM,):
            for least_s, way in sorted(options, key=lambda option: option[0]):
                if least_s >= best[0] * (1 - ROUNDING):
                    break
                best = self._fastest_split(way, width, best)
        return Choice(self.pricer, best[1]) if best[1] else None

    def _fastest_split(
        self, way: Way, width: int | None, best: tuple[float, Layout | None]
    ) -> tuple[float, Layout | None]:
        """The faster one of `best` and the fastest split of a way that fits, with `width` splits extended by a zone."""
        layers, stages, chunks = way
        parts = [self._splits(layer, stages) for layer in layers]
        sizes = [size for splits in parts for size in splits.sizes]
        places = [(number, zone.device_class) for number, layer in enumerate(layers) for zone in layer]
        beside = np.array([[place == other for other in places] for place in places], int)
        smallest = np.array([size[0] for size in sizes])
        counts = np.array([self.pricer.classes[name].count for _, name in places])
        spare = counts - beside @ smallest
        rows = np.zeros((len(sizes) + 1, len(self.swaps)), int)  # indices of sizes, and of a set of swapped components
        rows[-1] = np.arange(len(self.swaps))
        for num_known in range(len(sizes) + 1):
            if num_known:
                options = rows[num_known - 1] + 1
                first = np.repeat(np.cumsum(options) - options, options)
                rows = np.repeat(rows, options, axis=1)
                rows[num_known - 1] = np.arange(rows.shape[1]) - first
            taken = np.stack([size[row] - size[0] for size, row in zip(sizes[:num_known], rows)] or [0 * rows[-1]])
            left = spare[:, None] - beside[:, : max(num_known, 1)] @ taken
            for z in range(num_known, len(sizes)):
                rows[z] = np.searchsorted(sizes[z], smallest[z] + left[z], "right") - 1
            seconds, fits = self._price(layers, parts, rows, num_known, chunks)
            kept = np.flatnonzero(fits & (seconds < best[0] * (1 - ROUNDING)))
            if not len(kept):
                return best
            free = (left[num_known:, kept] / counts[num_known:, None]).sum(axis=0)
            kept = kept[most_promising(seconds[kept], free, width)]
            rows = rows[:, kept]
        numbers = iter(int(size[row[0]]) for size, row in zip(sizes, rows))
        sized = tuple(tuple(replace(zone, devices=next(numbers)) for zone in layer) for layer in layers)
        return float(seconds[kept[0]]), Layout(sized, stages, chunks, self.swaps[rows[-1, 0]])

    def _price(
        self, layers: Sequence[Layer], parts: Sequence[Splits], rows: np.ndarray, num_known: int, chunks: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Lower bounds on the seconds of splits of which the first `num_known` zones are known, exact if all are; and
        whether they may fit in memory."""
        terms, first = [], 0
        swapped = {name: swaps[rows[-1]] for name, swaps in self.is_swapped.items()}
        for splits in parts:
            ours = rows[first : first + len(splits.layer)]
            terms.append(splits.at(ours, num_known - first))
            terms[-1] |= self.pricer.swap_terms(splits.layer, terms[-1], swapped)
            if num_known == len(rows) - 1:
                devices = [size[row] for size, row in zip(splits.sizes, ours)]
                terms[-1] |= self.pricer.overlapped_terms(splits.layer, devices, splits.stages)
            first += len(splits.layer)
        seconds = sum(
            self.pricer.layer_seconds(layer, layer_terms, chunks) for layer, layer_terms in zip(layers, terms)
        )
        seconds = np.broadcast_to(seconds + self.dataflow.fixed_s, rows.shape[1:])
        fits = np.isfinite(seconds)
        for c in self.classes:
            fits = fits & (self.pricer.used_bytes(layers, terms, c.name) <= c.memory_bytes)
        self.priced += len(seconds)
        return seconds, fits

    @cached_property
    def _options(self) -> dict[str, list[tuple[float, Way]]]:
        """By mode, all ways with lower bounds on their seconds, those with few layers first."""
        numbers = [*product(self.stages, chunk_grid(self.dataflow, self.pricer.profile))]
        options: dict[str, list[tuple[float, Way]]] = {}
        for cut in sorted(layer_sets(self.dataflow), key=len):
            for layers in product(*map(self.layers, cut)) if len(cut) == 1 or not overlaps(self.dataflow) else ():
                streams = any(map(self.pricer.streams_between, layers))
                here = options.setdefault(Layout(layers).mode, [])
                for stages, chunks in numbers:
                    least_s = sum(self.least(self._splits(layer, stages), chunks) for layer in layers)
                    if least_s < np.inf and (streams or chunks == 1):
                        here.append((least_s + self.dataflow.fixed_s, (layers, stages, chunks)))
        return options

    def _layers(self, nodes: frozenset[int]) -> list[Layer]:
        names = tuple(name for node in sorted(nodes) for name in self.dataflow.order[node])
        layers = arrangements(names, self.classes, self.pricer.runs_on())
        return [layer for layer in layers if has_learner_devices(self.dataflow, layer)]

    def _least(self, splits: Splits, chunks: int) -> float:
        """A lower bound on the seconds of all splits of a layer."""
        if not splits.bounds:
            return np.inf
        terms = {key: term[(-1,) * len(splits.layer)] if term.ndim else term for key, term in splits.bounds[0].items()}
        return float(self.pricer.layer_seconds(splits.layer, terms, chunks))

    def _splits(self, layer: Layer, stages: int) -> Splits:
        """The splits of a layer; without a cycle they do not depend on the stages."""
        cycle = any(self.pricer.asker_for(name) for zone in layer for name in zone.components)
        return self.splits(layer, stages if cycle else 1)

    def _always_fits(self) -> bool:
        """True if all components fit on one device together."""

        def needs(component: Component, on: DeviceClass) -> float:
            if (cost := self.pricer.cost(component.name, on.name)) is None:
                return 0.0
            return max(self.pricer.table(component.name, on.name, 1).bytes.max(), cost.bytes.at(component.items))

        return all(sum(needs(f, c) for f in self.dataflow.components) <= c.memory_bytes for c in self.classes)


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
