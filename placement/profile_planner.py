"""Finds the fastest layout by the costs of a profile.

A candidate cuts the order of nodes into layers that take turns (cycles stay whole). It puts each layer's components
into zones, each on one class of devices and of any size; devices may stay idle. It chooses the numbers of stages and
chunks, and the components that offload their memory between turns. If learners work during the rollout
(`schedule_overlap.py`), candidates have one layer, in which learners have their own devices. The result equals an
exhaustive search (by test), with these shortcuts:

- an iteration is the sum of its layers, so each layer is searched once; - only sizes that allow one more worker matter,
and one zone of every class takes the remaining devices; - ranges of sizes that cannot beat the best split are dropped
(branch and bound); - memory matters only if the fastest layers do not fit together; then the layers' Pareto fronts are
combined.
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
    """A way to cut the nodes into layers, with stages, chunks, and the label of every layer, which decides the mode.
    `least` is a lower bound on its seconds."""

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
        """The fastest layout; None if none fits."""
        return self._best_of(None)

    def modes(self) -> dict[str, Choice | None]:
        """The fastest layout of every mode; None where none fits."""
        return {mode: self._best_of(mode) for mode in MODES}

    def _all_options(self) -> list[Option]:
        """All options, by ascending lower bound."""
        options = []
        cuts = [cut for cut in layer_sets(self.dataflow) if len(cut) == 1 or not overlaps(self.dataflow)]
        for stages, chunks, cut in product(self.stages, self.chunks, cuts):
            searches = [self.search(nodes, stages, chunks) for nodes in cut]
            for labels in product(*(search.groups for search in searches)):
                way = tuple(zip(searches, labels))
                options.append(Option(self._least(way), stages, chunks, way))
        finite = (option for option in options if np.isfinite(option.least))
        return sorted(finite, key=lambda option: (option.least, len(option.way)))  # if equal, fewer layers first

    def search(self, nodes: frozenset[int], stages: int, chunks: int) -> LayerSearch:
        """Returns the search of a layer. Layers without stages or chunks are searched once."""
        order = self.dataflow.order
        stages = stages if any(len(order[i]) > 1 for i in nodes) else 1
        chunks = chunks if len(nodes) > 1 else 1
        key = nodes, stages, chunks
        if key not in self._searches:
            self._searches[key] = LayerSearch(self.bounds, self.classes, nodes, stages, chunks)
        return self._searches[key]

    def _best_of(self, mode: str | None) -> Choice | None:
        """The fastest layout, or the fastest of a mode."""
        options = [option for option in self._options if mode in (None, option.mode)]
        best: Choice | None = None
        for option in options:
            bound = best.price.seconds if best else np.inf
            if option.least < bound:
                layout = self._together(option.way, option.stages, option.chunks, bound)
                best = layout if layout and layout.price.seconds < bound else best
        return best

    def _least(self, way: tuple) -> float:
        """A lower bound on the seconds of these layers."""
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
        met = combine_fronts([front for front in fronts if front], self.limits) if all(fronts) else None
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
    """Possible numbers of chunks in which data is handed on: divisors of passes if a component streams, of decisions if
    frozen parts compute ahead, and 1 if learners work during the rollout anyway."""
    if overlaps(dataflow):
        return (1,)
    if not any(c.streams for c in dataflow.components):
        encodes = any(
            c.ahead and any(cost.ahead_s for cost in profile.costs[c.name].values()) for c in dataflow.components
        )
        most = max((c.calls for c in dataflow.components if c.splits), default=1)
        return tuple(n for n in (1, 2, 4, 8) if n == 1 or (encodes and n <= most))
    return tuple(n for n in (1, 2, 4, 8, 16) if dataflow.passes % n == 0)


def combine_fronts(fronts: Sequence[Points], limits: np.ndarray) -> list[Points] | None:
    """Chooses one point per layer with the least total seconds, such that each working layer fits beside the bytes that
    other layers keep.

    Worked example, limit 10: layer A keeps 2 and adds 5 at work, layer B keeps 1 and adds 8. Together they keep 3, and
    3 + 8 > 10, so they do not fit.
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
