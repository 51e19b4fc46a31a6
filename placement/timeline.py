"""The timeline of an iteration: what every device does, and when, by the closed form of `iteration_cost.py`.

All workers of a component do the same at the same time, so a span covers a range of devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from embodied.placement.iteration_cost import BOTH_ALONE, NodeTurn, Pricer, zones_at
from embodied.placement.layout import Layer, Layout, Zone
from embodied.placement.schedule_overlap import learned_waves, overlaps, while_both

MOST_ROUNDS = 200  # of sims and policies in a drawing; of more rounds several are drawn as one


@dataclass(frozen=True)
class Span:
    device_class: str
    devices: range  # numbers in the class
    what: str  # a component, or what the devices wait for
    start_s: float
    end_s: float
    works: bool = True


@dataclass
class Timeline:
    seconds: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def idle_share(self, device_class: str, count: int) -> float:
        """The share of time in which these devices do not work; 1 means always idle."""
        spans = [span for span in self.spans if span.works and span.device_class == device_class]
        return 1 - sum(len(span.devices) * (span.end_s - span.start_s) for span in spans) / (self.seconds * count)

    def rows(self) -> dict[str, list[Span]]:
        """The spans of each range of devices that do the same (gpu:0-5), every range of working devices once."""
        rows: dict[str, list[Span]] = {}
        for device_class in dict.fromkeys(span.device_class for span in self.spans):
            spans = [span for span in self.spans if span.device_class == device_class]
            borders = sorted({border for span in spans for border in (span.devices.start, span.devices.stop)})
            for first, end in pairwise(borders):
                here = [span for span in spans if first in span.devices]
                if any(span.works for span in here):
                    rows[f"{device_class}:{first}{f'-{end - 1}' if end - first > 1 else ''}"] = here
        return rows


def timeline_of(pricer: Pricer, layout: Layout) -> Timeline:
    """One iteration of this layout, from the first request to the new weights."""
    drawing, now, syncs = Drawing(pricer, layout), 0.0, []
    for layer in layout.layers:
        now, weights_s = drawing.add_layer(layer, now)
        syncs.append((layer, weights_s))
    for layer, weights_s in syncs:
        targets = {edge.target for edge in pricer.dataflow.edges if edge.next_iteration}
        for zone in layer:
            if weights_s and targets & {*zone.components}:
                drawing.add(zone, zone.devices, "weights", now, now + weights_s, works=False)
        now += weights_s
    drawing.timeline.seconds = now + pricer.dataflow.fixed_s
    return drawing.timeline


class Drawing:
    def __init__(self, pricer: Pricer, layout: Layout) -> None:
        self.pricer, self.layout, self.timeline = pricer, layout, Timeline()
        self.first: dict[Zone, int] = {}  # number of a zone's first device
        for layer in layout.layers:
            used: dict[str, int] = {}
            for zone in layer:
                self.first[zone] = used.get(zone.device_class, 0)
                used[zone.device_class] = self.first[zone] + zone.devices

    def add(self, zone: Zone, count: int, what: str, start_s: float, end_s: float, works: bool = True) -> None:
        if end_s > start_s and count:
            devices = range(self.first[zone], self.first[zone] + count)
            self.timeline.spans.append(Span(zone.device_class, devices, what, start_s, end_s, works))

    def add_layer(self, layer: Layer, start: float) -> tuple[float, float]:
        """Adds what a layer does; returns its end, and the seconds of the weight sync afterwards."""
        dataflow, sizes = self.pricer.dataflow, [zone.devices for zone in layer]
        terms = self.pricer.terms(layer, sizes, self.layout.stages) | self.pricer.overlapped_terms(
            layer, sizes, self.layout.stages
        )
        terms |= self.pricer.swap_terms(layer, sizes, self.layout.stages, self.layout.swapped)
        turns, weights_s = self.pricer.turns(layer), float(terms["weights",])
        if not overlaps(dataflow):
            return self._add_turns(layer, turns, terms, start), weights_s
        sides = self.pricer.sides(layer)
        rollout, update = (
            [float(self.pricer.turn_seconds(layer, side, terms, 1, which)) for which in BOTH_ALONE] for side in sides
        )
        whole = start + float(self.pricer.layer_seconds(layer, terms, 1))
        if dataflow.schedule == "async":
            for side, ours, theirs in ((sides[0], rollout, update), (sides[1], update, rollout)):
                self._add_turns(layer, side, terms, start, float(while_both(*ours, min(ours[0], theirs[0]))))
            return whole, 0.0
        waves, end = learned_waves(rollout, update, terms["waiting",], self.pricer.arrivals(layer, terms))
        self._add_turns(layer, sides[0], terms, start, float(end))
        zone, count = self._place(dataflow.order[sides[1][0].node][0], layer)
        for begin, learned in waves:
            self.add(zone, count, zone.components[0], start + float(begin), start + float(learned))
        self.add(zone, count, zone.components[0], whole - weights_s - float(terms["tail",]), whole - weights_s)
        return whole - weights_s, weights_s

    def _place(self, name: str, layer: Layer) -> tuple[Zone, int]:
        at = zones_at(layer, [zone.devices for zone in layer])
        return at[name][0], int(self.pricer.count(name, at, self.layout.stages))

    def _add_turns(
        self, layer: Layer, turns: Sequence[NodeTurn], terms: Mapping, start: float, lasts: float | None = None
    ) -> float:
        """Adds these nodes, one after the other, stretched to `lasts` seconds; returns the end."""
        steps: list[tuple[NodeTurn, str, float, float]] = []
        whole = float(
            self.pricer.turn_seconds(layer, turns, terms, self.layout.chunks, note=lambda *step: steps.append(step))
        )
        stretch = 1.0 if lasts is None or not whole else lasts / whole
        for turn, what, begin, end in steps:
            begin, end = start + stretch * float(begin), start + stretch * float(end)
            if what == "memory":
                for z in turn.zones:
                    self.add(layer[z], layer[z].devices, "moving memory", begin, end, works=False)
            else:
                self._add_work(layer, self.pricer.dataflow.order[turn.node], begin, end)
        return start + stretch * whole

    def _add_work(self, layer: Layer, node: tuple[str, ...], begin: float, end: float) -> None:
        """Adds a component's work, or the rounds of a cycle."""
        if len(node) == 1:
            self.add(*self._place(node[0], layer), node[0], begin, end)
            return
        at, asker = zones_at(layer, [zone.devices for zone in layer]), self.pricer.asker_for(node[0])
        rounds = self.pricer.dataflow[asker].calls * self.pricer.dataflow.passes // self.layout.chunks or 1
        drawn, (bars, period) = min(rounds, MOST_ROUNDS), self.pricer.round(node, at, self.layout.stages)
        scale = (end - begin) / (drawn * period) if period else 0.0
        for number in range(drawn):
            for name, offset, seconds in bars:
                first = begin + (number * period + offset) * scale
                self.add(*self._place(name, layer), name, first, min(end, first + seconds * scale))
