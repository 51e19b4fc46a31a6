"""What is predicted of a layout: why it is fast, why it beats another one, and why a mode is impossible, in words with
the arithmetic; the placement that can be run (which process holds which roles and devices); and its timeline.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from embodied.placement.dataflow import Dataflow
from embodied.placement.grammar import text_of
from embodied.placement.iteration_cost import BOTH_ALONE, Choice, NodeTurn, Pricer
from embodied.placement.layout import LOOP, Layer, Layout, Zone, named
from embodied.placement.placement_plan import whole_workers, with_drawing
from embodied.placement.profile_planner import Planner
from embodied.placement.schedule_overlap import learned_waves, overlaps, while_both
from embodied.placement.topology import DeviceClass, PlacementError, Topology

GB = 1e9
SMALL = 0.01  # share of an iteration; smaller differences are not mentioned


def phases(pricer: Pricer, layout: Layout) -> dict[str, float]:
    """Seconds of the parts of an iteration. Parts that overlap in time all count."""
    seconds: dict[str, float] = {}
    for layer in layout.layers:
        at = pricer.places(layer)
        for node in pricer.dataflow.order:
            if node[0] in at:
                work = float(pricer.node_seconds(node, at, layout.stages)) * pricer.dataflow.passes
                name = (
                    "rollout" if len(node) > 1 else "update" if pricer.dataflow.is_learner(node[0]) else "+".join(node)
                )
                seconds[name] = seconds.get(name, 0.0) + work
                if pricer.dataflow[node[0]].ahead:
                    seconds["encoding"] = seconds.get("encoding", 0.0) + float(pricer.encoding_seconds(node[0], at))
                swapped = dict.fromkeys(layout.swapped, True)
                swap = sum(pricer.swap_seconds(node, at, swapped, which) for which in ("onload_s", "offload_s"))
                seconds["swap"] = seconds.get("swap", 0.0) + float(swap)
        seconds["weights"] = seconds.get("weights", 0.0) + float(pricer.sync_seconds(at, layout.stages))
    seconds["rest"] = pricer.dataflow.fixed_s
    return seconds


def describe_layout(layout: Layout, pricer: Pricer) -> str:
    """The layout in words, with the number of workers of roles that do not use all devices of their zone."""
    parts = [str(layout)]
    for layer in layout.layers:
        at = pricer.places(layer)
        counts = {name: int(pricer.count(name, at, layout.stages)) for name in at}
        parts += [f"{name} on {count}" for name, count in counts.items() if count < at[name][1]]
        parts += [f"{name} workers of {size} devices" for zone in layer for name in zone.components
                  if (size := pricer.devices_of_worker(name, zone.device_class)) > 1]  # fmt: skip
    if layout.stages > 1:
        parts.append(f"{layout.stages} stages")
    if layout.chunks > 1:
        parts.append(f"streamed in {layout.chunks} parts")
    if layout.swapped:
        parts.append(f"swapping {' and '.join(sorted(layout.swapped))}")
    return ", ".join(parts)


def equal_to_the_fastest(seconds: Mapping[str, float]) -> list[str]:
    """The names of the fastest mode and of modes that are not noticeably slower."""
    ranked = sorted(seconds, key=lambda name: seconds[name])
    return [name for name in ranked if seconds[name] <= (1 + SMALL) * seconds[ranked[0]]]


def join_words(names: Sequence[str]) -> str:
    """a, b and c"""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def why_it_wins(winner: Choice, others: Mapping[str, Choice]) -> list[str]:
    """A line for each other mode: how much slower it is, and in which part of the iteration."""
    winner_phases = phases(winner.pricer, winner.layout)
    lines = []
    for mode, other in sorted(others.items(), key=lambda item: item[1].price.seconds):
        theirs = phases(other.pricer, other.layout)
        seconds = winner.price.seconds
        gains = {name: theirs.get(name, 0.0) - winner_phases.get(name, 0.0) for name in {**winner_phases, **theirs}}
        parts = [
            f"{name} {winner_phases.get(name, 0.0):.3g} s instead of {theirs.get(name, 0.0):.3g} s"
            for name, gain in sorted(gains.items(), key=lambda item: -abs(item[1]))
            if abs(gain) > SMALL * seconds
        ]
        overlap = other.price.seconds - seconds - sum(gains.values())
        if abs(overlap) > SMALL * seconds:
            parts.append(f"{abs(overlap):.3g} s {'more' if overlap > 0 else 'less'} of it at the same time")
        ahead = other.price.seconds / seconds - 1
        what = ", ".join(parts) or "every part takes as long"
        lines.append(f"{ahead:.0%} faster than {mode}: {what}" if ahead > SMALL else f"as fast as {mode}: {what}")
    return lines


def describe_lengths(pricer: Pricer, layout: Layout) -> list[str]:
    """How much longer engines and learners take because of unequal answer lengths; [] if lengths are equal."""
    if (lengths := pricer.dataflow.lengths) is None:
        return []
    lines = []
    for layer in layout.layers:
        at = pricer.places(layer)
        for name in at:
            count, on = int(pricer.count(name, at, layout.stages)), pricer.classes[at[name][0].device_class]
            if (ratios := pricer.dataflow.learner_ratios(on.count)) is not None and pricer.dataflow.is_learner(name):
                lines.append((name, count, ratios[count]))
            elif pricer.asker_for(name) not in (None, name):
                lines.append((name, count, pricer.unequal(name, at, layout.stages)))
    longer = " and ".join(f"{name} on {count} {float(ratio):.2f} times" for name, count, ratio in lines)
    return [f"answers of {lengths.answers[0]:,} to {lengths.answers[-1]:,} tokens take {longer} as long as equal ones"]


def why_not_apart(planner: Planner) -> str:
    """Why learners cannot have devices of their own, with the arithmetic."""
    schedule = f"with pipeline.schedule={planner.dataflow.schedule} learners and other roles need separate devices"
    if (devices := sum(c.count for c in planner.classes)) < 2:
        return f"{schedule}, 2 at least, and there is {devices}"
    runs_on = planner.pricer.runs_on()
    for c in planner.classes:
        if c.count < 2 and runs_on.get("learner") == runs_on.get("policy") == {c.name}:
            return f"{schedule}, and there is {c.count} of {c}"
    return f"{schedule}, with memory for {planner.dataflow.level + 1} batches where it is async"


def why_not(planner: Planner, mode: str) -> str:
    """Why no layout of this mode fits, with the arithmetic."""
    if overlaps(planner.dataflow) and mode in ("collocated", "hybrid"):
        return f"with pipeline.schedule={planner.dataflow.schedule} learners take no turns with other roles on a device"
    devices = sum(c.count for c in planner.classes)
    names = named(planner.dataflow.by_name)
    if mode == "hybrid" and names != LOOP:
        return "it is for simulators apart from policies and learners"
    apart = {"disaggregated": names, "hybrid": ("sim", "policy and learner")}.get(mode, ())
    if devices < len(apart):
        return f"{', '.join(apart)} need {len(apart)} devices of their own, and there are {devices}"
    runs_on = planner.pricer.runs_on()
    for c in planner.classes:
        bound = [roles for roles in apart if all(runs_on[name] == {c.name} for name in roles.split(" and "))]
        if c.count < len(bound):
            return f"{', '.join(bound)} need {len(bound)} of {c} of their own, and there is {c.count}"
    roomy = [replace(c, memory_bytes=float("inf")) for c in planner.classes]
    free = Planner(planner.dataflow, planner.pricer.profile, roomy, planner.stages).modes().get(mode)
    if free is None:
        return "no component's work divides among workers that way; " + envs_hint(planner)
    used = free.price.used_bytes
    over = {c.name: (used[c.name], c.memory_bytes) for c in planner.classes if used[c.name] > c.memory_bytes}
    lack = [f"{needed / GB:.3g} GB on each {name}, which has {has / GB:.3g} GB" for name, (needed, has) in over.items()]
    return f"the fastest, {free.layout}, needs {' and '.join(lack)}" if lack else "its layouts do not fit in memory"


def why_nothing_fits(planner: Planner) -> str:
    """Why there is no layout at all: a line for each mode."""
    if overlaps(planner.dataflow):
        return f"{why_not_apart(planner)}; try pipeline.schedule=sync"
    return "\n".join(f"{mode}: {why_not(planner, mode)}" for mode in ("collocated", "disaggregated", "hybrid"))


def envs_hint(planner: Planner) -> str:
    envs = {c.name: c.items for c in planner.dataflow.components if c.even}
    return ", ".join(f"{name} has {items} envs" for name, items in envs.items()) or "see the profile"


def mean_idle(pricer: Pricer, layout: Layout) -> float:
    """The mean idle share of all devices of the classes in use."""
    timeline, used = timeline_of(pricer, layout), {zone.device_class for zone in layout.zones}
    classes = [c for name, c in pricer.classes.items() if name in used]
    return sum(timeline.idle_share(c.name, c.count) * c.count for c in classes) / sum(c.count for c in classes)


def as_placement(
    pricer: Pricer, layout: Layout, topology: Topology | None = None, draws: bool = False
) -> dict[str, Any]:
    """Returns the placement map of a layout, on this machine if `topology` is None. Roles of a zone share a process
    where possible; a simulator, which may crash, shares one only with policies, and a worker with several devices has
    its own. On several machines this machine gets a learner, which writes the checkpoints. `draws`: sims on cores
    render on GPUs."""
    placement: dict[str, Any] = {}
    dataflow = pricer.dataflow
    askers = [c.name for c in dataflow.components if c.splits]
    several = topology is not None and len(topology.nodes) > 1
    for layer in layout.layers:
        at = pricer.places(layer)
        workers: dict[str, int] = {}
        for zone in sorted(layer, key=lambda zone: several and not any(map(dataflow.is_learner, zone.components))):
            every = devices_of(pricer.classes[zone.device_class], topology)
            devices_of_worker = {name: pricer.devices_of_worker(name, zone.device_class) for name in zone.components}
            first = workers.get(zone.device_class, 0)
            if max(devices_of_worker.values()) > 1:  # from the last ones on, where machines have a multiple
                first = len(every) - zone.devices
            else:
                workers[zone.device_class] = first + zone.devices
            devices = every[first : first + zone.devices]
            counts = {name: int(pricer.count(name, at, layout.stages)) for name in zone.components}
            for roles in hosts_of(
                zone, counts, dataflow, alone={name for name in devices_of_worker if devices_of_worker[name] > 1}
            ):
                size = devices_of_worker[roles[0]]
                devices_of_role = devices if size == 1 else whole_workers(devices, size)
                placement[",".join(roles)] = text_of(devices_of_role[: size * counts[roles[0]]])
    on_cores = draws and all(pricer.classes[layout.zone_of(name).device_class].kind == "cpu" for name in askers)
    return with_drawing(placement, topology) if on_cores and topology else placement


def forecast(choice: Choice, topology: Topology | None = None, draws: bool = False) -> dict[str, Any]:
    """What is predicted of a layout, and how it is run: as in plan.json, bench.json and the runs of a profile."""
    pricer, layout, dataflow = choice.pricer, choice.layout, choice.pricer.dataflow
    return {
        "mode": layout.mode,
        "seconds": choice.price.seconds,
        "env_steps_per_s": dataflow.env_steps / choice.price.seconds,
        "idle": mean_idle(pricer, layout),
        "used_bytes": dict(choice.price.used_bytes),
        "layout": {**asdict(layout), "swapped": sorted(layout.swapped)},
        "in_words": describe_layout(layout, pricer),
        "work": hashlib.sha256(json.dumps(dataflow.to_json()).encode()).hexdigest()[:12],  # of equal runs
        "schedule": dataflow.schedule,
        "async_level": dataflow.level if dataflow.schedule == "async" else 1,
        "placement": as_placement(pricer, layout, topology, draws),
        "stages": layout.stages,
        "granularity": granularity(layout, dataflow),
    }


def granularity(layout: Layout, dataflow: Dataflow) -> int | None:
    """The number of decisions after which sims hand on their data; None: at the end."""
    calls = max((c.calls for c in dataflow.components if c.splits), default=1)
    return None if layout.chunks == 1 else -(-calls // layout.chunks)


def devices_of(on: DeviceClass, topology: Topology | None) -> list[tuple[str, str, int]]:
    """(node, kind, number) of every device of a class, in the order of the nodes; the only node has no name."""
    if topology is None:
        if on.num_nodes > 1 or on.name != on.kind:  # then a device number is ambiguous
            raise PlacementError(f"{on.name} is on several kinds of machines or GPUs; write the map by hand")
        return [("", on.kind, i) for i in range(on.count)]
    devices = []
    for node in topology.nodes:
        name = node.name if len(topology.nodes) > 1 else ""
        if on.kind == "gpu":
            numbers = [gpu.index for gpu in node.gpus if on.name in ("gpu", f"gpu-{gpu.model}")]
        else:
            numbers = list(range(node.cores if on.kind == "cpu" else node.fakes))
        devices += [(name, on.kind, number) for number in numbers]
    return devices


def hosts_of(
    zone: Zone, counts: dict[str, int], dataflow: Dataflow, alone: Set[str] = frozenset()
) -> list[tuple[str, ...]]:
    """The roles of a zone, grouped by the processes they share; roles of `alone` share no process."""
    hosts: list[tuple[str, ...]] = []
    for name in zone.components:
        same = (host for host in hosts if counts[host[0]] == counts[name] and alone.isdisjoint({name, *host}))
        stays = name not in ("sim", "policy")  # sims and policies are replaced when a simulator crashes
        asked = (host for host in same if not (stays and any(dataflow[n].splits for n in host)))
        beside = next(asked, None)
        if beside is None:
            hosts.append((name,))
        else:
            hosts[hosts.index(beside)] = (*beside, name)
    return hosts


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
        terms |= self.pricer.swap_terms(layer, terms, dict.fromkeys(self.layout.swapped, True))
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
                self._add_turns(layer, side, terms, start, float(while_both(ours[0], ours[1], min(ours[0], theirs[0]))))
            return whole, 0.0
        waves, end = learned_waves(rollout, update, terms["waiting",], self.pricer.arrivals(layer, terms))
        self._add_turns(layer, sides[0], terms, start, float(end))
        zone, count = self._place(dataflow.order[sides[1][0].node][0], layer)
        for begin, learned in waves:
            self.add(zone, count, zone.components[0], start + float(begin), start + float(learned))
        self.add(zone, count, zone.components[0], whole - weights_s - float(terms["tail",]), whole - weights_s)
        return whole - weights_s, weights_s

    def _place(self, name: str, layer: Layer) -> tuple[Zone, int]:
        at = self.pricer.places(layer)
        return at[name][0], int(self.pricer.count(name, at, self.layout.stages))

    def _add_turns(
        self, layer: Layer, turns: Sequence[NodeTurn], terms: dict, start: float, lasts: float | None = None
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
        at, asker = self.pricer.places(layer), self.pricer.asker_for(node[0])
        rounds = self.pricer.dataflow[str(asker)].calls * self.pricer.dataflow.passes // self.layout.chunks or 1
        drawn, (bars, period) = min(rounds, MOST_ROUNDS), self.pricer.round(node, at, self.layout.stages)
        scale = (end - begin) / (drawn * period) if period else 0.0
        for number in range(drawn):
            for name, offset, seconds in bars:
                first = begin + (number * period + offset) * scale
                self.add(*self._place(name, layer), name, first, min(end, first + seconds * scale))
