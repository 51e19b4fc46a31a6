"""Finds the fastest layout, by what a profile measured.

The candidates are every way to share devices or to have them apart, every split, every way to swap memory: cut the
order of nodes into layers that take turns (cycles stay whole), put each layer's components into zones of their own,
each zone on one class of devices and of any size, idle devices allowed; any number of stages and chunks of the grids;
any set of components that leave the device memory between turns. Where learners work while the others collect
(`schedule_overlap.py`), all candidates have one layer, in which they have devices of their own. The result equals
trying them all (a test does), and is found without:

- an iteration is the sum of its layers, so each layer is searched once, whatever the others do;
- only sizes with room for one worker more matter, and one zone of every class takes the devices that others leave;
- where splits are many, a few of them are tried first, and sizes that cannot beat the best so far are dropped before
  other zones are looked at;
- memory matters only where the fastest layers do not fit together: then the layers' (time, memory) fronts meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from embodied.placement.dataflow import Dataflow
from embodied.placement.iteration_cost import Price, Pricer
from embodied.placement.layer_search import MARGIN, Bounds, LayerSearch, Points, unbeaten_indices
from embodied.placement.layout import DeviceClass, Layout, Zone, layer_sets
from embodied.placement.profile import Profile
from embodied.placement.schedule_overlap import overlaps

MODES = ("collocated", "hybrid", "disaggregated", "custom")
STAGES = (1, 2, 4)


@dataclass(frozen=True)
class Choice:
    layout: Layout
    price: Price


@dataclass(frozen=True, eq=False)
class Option:
    """A way to cut the order of nodes into layers, with stages and chunks, and the label of every layer, which decides
    the mode: at least so many seconds, however placed."""

    least: float
    stages: int
    chunks: int
    way: tuple[tuple[LayerSearch, tuple], ...]

    @cached_property
    def mode(self) -> str:
        return Layout(tuple(search.groups[label][0] for search, label in self.way)).mode


class Planner:
    def __init__(
        self, dataflow: Dataflow, profile: Profile, classes: Sequence[DeviceClass], stages: Sequence[int] = STAGES
    ) -> None:
        self.dataflow = dataflow
        self.classes = tuple(c for c in classes if c.count)
        self.pricer = Pricer(dataflow, profile, self.classes)
        self.bounds = Bounds(self.pricer)
        self.limits = np.array([c.memory_bytes for c in self.classes], float)
        self.stages = stages if any(len(node) > 1 for node in dataflow.order) else (1,)
        self.chunks = chunk_grid(dataflow, profile)
        self._searches: dict[tuple, LayerSearch] = {}
        self._options = self._all_options()

    def best(self) -> Choice | None:
        """The fastest layout of all; None if none fits."""
        return self._best_of(None)

    def modes(self) -> dict[str, Choice | None]:
        """The fastest layout of every mode; None where none fits."""
        return {mode: self._best_of(mode) for mode in MODES}

    def _all_options(self) -> list[Option]:
        """Every option; what could take least comes first."""
        found = []
        cuts = [cut for cut in layer_sets(self.dataflow) if len(cut) == 1 or not overlaps(self.dataflow)]
        for stages, chunks, cut in product(self.stages, self.chunks, cuts):
            searches = [self.search(nodes, stages, chunks) for nodes in cut]
            for labels in product(*(search.groups for search in searches)):
                way = tuple(zip(searches, labels))
                found.append(Option(self._least(way), stages, chunks, way))
        finite = (option for option in found if np.isfinite(option.least))
        return sorted(finite, key=lambda option: (option.least, len(option.way)))  # of equals the one with fewer turns

    def search(self, nodes: frozenset[int], stages: int, chunks: int) -> LayerSearch:
        """Layers that no number of stages or chunks concerns are searched once for all of them."""
        order = self.dataflow.order
        stages = stages if any(len(order[i]) > 1 for i in nodes) else 1
        chunks = chunks if len(nodes) > 1 else 1
        key = nodes, stages, chunks
        if key not in self._searches:
            self._searches[key] = LayerSearch(self.bounds, self.classes, nodes, stages, chunks)
        return self._searches[key]

    def _best_of(self, mode: str | None) -> Choice | None:
        """The fastest of all layouts, or of those of a mode; what could take least is tried first."""
        options = [option for option in self._options if mode in (None, option.mode)]
        best: Choice | None = None
        for option in options:
            bound = best.price.seconds if best else np.inf
            if option.least < bound:
                found = self._together(option.way, option.stages, option.chunks, bound)
                best = found if found and found.price.seconds < bound else best
        return best

    def _least(self, way: tuple) -> float:
        """Seconds that these layers take at least."""
        return sum(search.least_of(label) for search, label in way) + self.dataflow.fixed_s

    def _together(self, way: tuple, stages: int, chunks: int, bound: float) -> Choice | None:
        """The fastest splits of these layers that fit beside each other; None if they take `bound` seconds or more."""
        fastest = []
        for search, label in way:
            spare = bound * MARGIN - self._least(way) + search.least_of(label)
            fastest.append(search.fastest(label, spare))
            if fastest[-1] is None:
                return None
        choice = self._choice(fastest, stages, chunks)
        if choice.price.fits:
            return choice
        spare = bound * MARGIN - self.dataflow.fixed_s - sum(float(points.seconds[0]) for points in fastest)
        fronts = [search.front(label, spare + points.seconds[0]) for (search, label), points in zip(way, fastest)]
        met = meet([front for front in fronts if front], self.limits) if all(fronts) else None
        return self._choice(met, stages, chunks) if met else None

    def _choice(self, layers: Sequence[Points], stages: int, chunks: int) -> Choice:
        ways = [points.ways[points.which[0]] for points in layers]
        zones = [
            tuple(Zone(z.components, z.device_class, int(d)) for z, d in zip(way.layer, points.devices[:, 0]))
            for way, points in zip(ways, layers)
        ]
        swapped = frozenset[str]().union(*(way.swapped for way in ways))
        layout = Layout(tuple(zones), stages, chunks, swapped)
        return Choice(layout, self.pricer.price(layout))


def chunk_grid(dataflow: Dataflow, profile: Profile) -> tuple[int, ...]:
    """Numbers of parts in which data can be handed on: whole passes, where a component begins before its input is
    whole; decisions of a cycle, where frozen parts compute ahead. Where learners work meanwhile, on an earlier batch or
    on groups, there is nothing to cut."""
    if overlaps(dataflow):
        return (1,)
    if not any(c.streams for c in dataflow.components):
        encodes = any(
            c.ahead and any(cost.ahead_s for cost in profile.costs[c.name].values()) for c in dataflow.components
        )
        most = max((c.calls for c in dataflow.components if c.splits), default=1)
        return tuple(n for n in (1, 2, 4, 8) if n == 1 or (encodes and n <= most))
    return tuple(n for n in (1, 2, 4, 8, 16) if dataflow.passes % n == 0)


def meet(fronts: Sequence[Points], limits: np.ndarray) -> list[Points] | None:
    """One point of every layer, least seconds in total, so that each layer at work fits beside what the others leave.

    Worked example, limit 10: layer A leaves 2 and takes 5 more at work, layer B leaves 1 and takes 8 more. Together
    they leave 3, and 3 + 8 > 10: they do not fit.
    """
    seconds, memory, picks = fronts[0].seconds, fronts[0].memory, np.arange(len(fronts[0]))[None]
    for front in fronts[1:]:
        a, b = (i.ravel() for i in np.meshgrid(np.arange(len(seconds)), np.arange(len(front)), indexing="ij"))
        idle, extra = np.split(memory, 2)
        more_idle, more_extra = np.split(front.memory, 2)
        idle, extra = idle[:, a] + more_idle[:, b], np.maximum(extra[:, a], more_extra[:, b])
        fits = (idle + extra <= limits[:, None]).all(axis=0)
        seconds = (seconds[a] + front.seconds[b])[fits]
        memory = np.concatenate([idle, extra])[:, fits]
        picks = np.concatenate([picks[:, a], b[None]])[:, fits]
        kept = np.fromiter(unbeaten_indices(seconds, memory), int)
        seconds, memory, picks = seconds[kept], memory[:, kept], picks[:, kept]
    if not len(seconds):
        return None
    best = seconds.argmin()
    return [front.take(np.array([pick])) for front, pick in zip(fronts, picks[:, best])]
