"""The cost of a layout: seconds of an iteration and bytes on the fullest device, in closed form.

Numbers of devices are arrays, so that the planner prices thousands of splits at once; `price` prices one layout. The
event simulation (`event_replay.py`) must agree.

A cycle (sim and policy) is limited by its busiest station or by a stage that waits for its own answer: period =
max(busiest station, round trip). n decisions take n - 1 periods and one round trip. In a layer a node begins when its
input (with chunks: its first chunk) is complete and its zone is free. Frozen parts compute ahead, chunk by chunk. If
learners work during the rollout, each side takes its own turns (`schedule_overlap.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from embodied.placement import schedule_overlap
from embodied.placement.dataflow import Dataflow, Edge, asker_of, engine_ratios
from embodied.placement.layout import DeviceClass, Layer, Layout, Zone
from embodied.placement.profile import Array, Cost, Profile, Table, make_table, max_of


@dataclass(frozen=True)
class LayerPrice:
    """Arrays over splits. `active` and `idle` are bytes on the fullest device of each class, while this layer works and
    while another layer works."""

    seconds: Array
    active: Mapping[str, Array]
    idle: Mapping[str, Array]


@dataclass(frozen=True)
class Price:
    seconds: float  # of an iteration
    layers: tuple[LayerPrice, ...]
    used_bytes: Mapping[str, float]  # per class, on the fullest device
    fits: bool


@dataclass(frozen=True)
class NodeTurn:
    """A node of the dataflow in a layer: its components by zone, and the nodes on other devices that it waits for,
    chunk by chunk if it streams, else until they end. Nodes on its own devices end before these are free."""

    node: int
    parts: tuple[tuple[int, tuple[str, ...]], ...]  # (index of the zone, components)
    waits: tuple[int, ...]
    streams: bool


class Pricer:
    """`costs[component, class]` in `profile`, on devices of `classes`."""

    def __init__(self, dataflow: Dataflow, profile: Profile, classes: Sequence[DeviceClass]) -> None:
        self.dataflow = dataflow
        self.profile = profile
        self.classes = {c.name: c for c in classes}
        self.asker = {node: asker_of(dataflow, node) for node in dataflow.order}
        self.table = cache(self._table)
        self.turns = cache(self._turns_of)

    def cost(self, component: str, device_class: str) -> Cost | None:
        return self.profile.cost(component, self.classes[device_class])

    def runs_on(self) -> dict[str, set[str]]:
        names = [c.name for c in self.dataflow.components]
        return {name: {c for c in self.classes if self.cost(name, c) is not None} for name in names}

    def workers(self, component: str, device_class: str, stages: int) -> np.ndarray:
        """The component's number of workers on 0, 1, 2, ... devices: the fastest number that fits in memory."""
        return self.table(component, device_class, stages).workers

    def slowed_by_more(self, components: Sequence[str]) -> bool:
        """True if more devices can cost time: weights are copied to one more receiver, or the work itself gets
        slower."""
        return self.receives(components) or self.work_slowed_by_more(components)

    def receives(self, components: Sequence[str]) -> bool:
        """True if some of these components receive new weights."""
        return any(edge.next_iteration and edge.target in components for edge in self.dataflow.edges)

    def work_slowed_by_more(self, components: Iterable[str]) -> bool:
        """True if more devices can make work slower: busy neighbours slow each other down, and learners exchange
        gradients after the last group, which no rollout hides."""
        if self.dataflow.schedule == "periodic" and any(map(self.dataflow.is_learner, components)):
            return True
        slowed = self.profile.costs if schedule_overlap.overlaps(self.dataflow) else components
        alone = min(cost.alone for name in slowed for cost in self.profile.costs[name].values())
        return self.dataflow.lengths is not None or alone < 1

    def useful_answerers(self, name: str, most: int, stages: int) -> np.ndarray:
        """bool [most + 1]: whether the k-th device still helps a component that answers in a cycle."""
        count = np.arange(most + 1)
        asker = self.dataflow[self.asker_for(name)]
        return (count > 0) & (count <= asker.items * stages)  # which of these helps depends on the number of askers

    def asker_for(self, component: str) -> str | None:
        """The component that sends requests in this component's cycle; None outside of cycles."""
        return self.asker[next(node for node in self.dataflow.order if component in node)]

    def can_swap(self, component: str) -> bool:
        costs = [self.cost(component, name) for name in self.classes]
        return any(cost is not None and cost.offload_s is not None for cost in costs)

    # Seconds of a layout

    def price(self, layout: Layout) -> Price:
        layers = []
        for layer in layout.layers:
            devices = [np.array(zone.devices) for zone in layer]
            layers.append(self.layer(layer, devices, layout.stages, layout.chunks, layout.swapped))
        used = {name: used_bytes(layers, name) for name in self.classes}
        seconds = sum(float(layer.seconds) for layer in layers) + self.dataflow.fixed_s
        fits = all(used[name] <= c.memory_bytes for name, c in self.classes.items())
        return Price(seconds, tuple(layers), used, fits and np.isfinite(seconds))

    def layer(
        self, layer: Layer, devices: Sequence[Array], stages: int, chunks: int, swapped: frozenset[str] = frozenset()
    ) -> LayerPrice:
        """Seconds are infinite where a zone is too small for a worker."""
        at = {name: (zone, count) for zone, count in zip(layer, devices) for name in zone.components}
        active, idle = {}, {}
        for zone in layer:
            peak, rest = zone_bytes(self, zone, at, stages, swapped)
            name = zone.device_class
            active[name] = np.maximum(active.get(name, 0.0), peak)
            idle[name] = np.maximum(idle.get(name, 0.0), rest)
        return LayerPrice(self.seconds(layer, devices, stages, chunks, swapped), active, idle)

    def seconds(
        self, layer: Layer, devices: Sequence[Array], stages: int, chunks: int, swapped: frozenset[str] = frozenset()
    ) -> Array:
        at = {name: (zone, count) for zone, count in zip(layer, devices) for name in zone.components}
        if schedule_overlap.overlaps(self.dataflow):
            return schedule_overlap.overlapped(self, layer, at, stages, swapped)
        return self.work_seconds(layer, at, stages, chunks, swapped) + self.sync_seconds(at, stages)

    def work_seconds(
        self, layer: Layer, at: Mapping, stages: int, chunks: int, swapped: frozenset[str] = frozenset()
    ) -> Array:
        """Seconds without the weight sync."""
        order = self.dataflow.order
        work = {turn.node: self.node_seconds(order[turn.node], at, stages) for turn in self.turns(layer)}
        return self.time_shared_s(layer, work, chunks, at, swapped)

    def time_shared_s(
        self,
        layer: Layer,
        work: Mapping[int, Array],
        chunks: int,
        at: Mapping | None = None,
        swapped=frozenset(),
        turns: Sequence[NodeTurn] | None = None,
    ) -> Array:
        """Seconds of nodes that run in order, chunk by chunk, each when its zone is free; `work` has the seconds of a
        pass. `turns`: the nodes of one side, which does not wait for the other side."""
        free: list[Array] = [0.0] * len(layer)
        ready: dict[int, list[Array]] = {}
        passes = self.dataflow.passes / chunks
        for turn in self.turns(layer) if turns is None else turns:
            node = self.dataflow.order[turn.node]
            each = work[turn.node] * passes
            time = max_of(*(free[z] for z, _ in turn.parts))
            if swapped:
                time = time + self.swap_seconds(node, at, swapped, "onload_s")
            if at and self.dataflow[node[0]].ahead:
                time = self._after_encoding(turn, self.encoding_seconds(node[0], at), time, ready, chunks)
            ready[turn.node] = []
            if not turn.streams:
                time = max_of(time, *(ready[source][-1] for source in turn.waits if source in ready))
            for chunk in range(chunks):
                if turn.streams:
                    time = max_of(time, *(ready[source][chunk] for source in turn.waits if source in ready))
                time = time + each
                ready[turn.node].append(time)
            if swapped:
                time = time + self.swap_seconds(node, at, swapped, "offload_s")
            for z, _ in turn.parts:
                free[z] = time
        return max_of(*free)

    def _after_encoding(self, turn: NodeTurn, seconds: Array, time: Array, ready: Mapping, chunks: int) -> Array:
        """The time at which frozen parts have computed all input; input from other devices is computed chunk by
        chunk."""
        for chunk in range(chunks):
            arrived = (ready[source][chunk] for source in turn.waits if source in ready)
            time = max_of(time, *arrived) + seconds / chunks
        return time

    def encoding_seconds(self, name: str, at: Mapping) -> Array:
        items = -(-self.dataflow[name].ahead // np.maximum(self.count(name, at, 1), 1))
        return self.cost(name, at[name][0].device_class).ahead_s * items

    def _turns_of(self, layer: Layer) -> tuple[NodeTurn, ...]:
        place = {name: z for z, zone in enumerate(layer) for name in zone.components}
        turns = []
        for i, node in enumerate(self.dataflow.order):
            if node[0] in place:
                places = sorted({place[name] for name in node})
                parts = tuple((z, tuple(name for name in node if place[name] == z)) for z in places)
                sources = [(j, self.dataflow.order[j]) for j in self.dataflow.sources[i]]
                here = [(j, names) for j, names in sources if names[0] in place]
                waits = tuple(j for j, names in here if all(place[name] not in places for name in names))
                turns.append(NodeTurn(i, parts, waits, all(self.dataflow[name].streams for name in node)))
        return tuple(turns)

    def swap_seconds(self, node: Sequence[str], at: Mapping, swapped: frozenset[str], which: str) -> float:
        """Seconds to load memory: zones load in parallel, components of one zone one after the other."""
        spent: dict[Zone, float] = {}
        for name in node:
            if name in swapped:
                zone = at[name][0]
                spent[zone] = spent.get(zone, 0.0) + (getattr(self.cost(name, zone.device_class), which) or 0.0)
        return max(spent.values(), default=0.0)

    def least_turns(self, layer: Layer, work: Mapping[int, Array], chunks: int) -> Array:
        """A lower bound on the seconds of a layer in which a pass of each node takes at least `work`."""
        if not schedule_overlap.overlaps(self.dataflow):
            return self.time_shared_s(layer, work, chunks)
        return max_of(*(self.time_shared_s(layer, work, 1, turns=side) for side in schedule_overlap.sides(self, layer)))

    # Seconds of a node of the dataflow

    def node_seconds(self, node: tuple[str, ...], at: Mapping, stages: int, beside: bool = False) -> Array:
        """Seconds of one pass of a cycle or component; `beside`: while the other side works."""
        if len(node) > 1:
            return self._cycle(node, at, stages, beside)
        zone, devices = at[node[0]]
        slowed = self.slowed(node, at, stages, beside)[node[0]]
        return self.table(node[0], zone.device_class, stages).seconds[devices] * slowed

    def slowed(self, node: tuple[str, ...], at: Mapping, stages: int, beside: bool = False) -> dict[str, Array]:
        """For each component of a node, its duration relative to a node with all devices busy. Only the node's busy
        devices work (with one stage, one zone after the other), and with `beside` also the other side's devices."""
        costs = {name: self.cost(name, at[name][0].device_class) for name in node}
        if all(cost.alone == 1 for cost in costs.values()):
            return dict.fromkeys(node, 1.0)
        busy = self.at_work(node, at, stages)
        if beside:
            learns = any(map(self.dataflow.is_learner, node))
            for i, other in enumerate(self.dataflow.order):
                if other[0] in at and schedule_overlap.is_learner_node(self.dataflow, i) != learns:
                    for name, more in self.at_work(other, at, stages).items():
                        busy[name] = busy.get(name, 0) + more
        factors = {}
        for name, cost in costs.items():
            on = self.classes[at[name][0].device_class]
            others = (busy[on.name] - 1) / max(on.count - 1, 1)
            factors[name] = cost.alone + (1 - cost.alone) * np.clip(others, 0, 1)
        return factors

    def at_work(self, node: tuple[str, ...], at: Mapping, stages: int) -> dict[str, Array]:
        """Returns how many devices of each class a node keeps busy at a time."""
        busy: dict[str, dict[Zone, Array]] = {}
        for name in node:
            zone = at[name][0]
            zones = busy.setdefault(zone.device_class, {})
            zones[zone] = max_of(zones.get(zone, 0), self.count(name, at, stages))
        return {name: sum(zones.values()) if stages > 1 else max_of(*zones.values()) for name, zones in busy.items()}

    def _cycle(self, node: tuple[str, ...], at: Mapping, stages: int, beside: bool) -> Array:
        asker = self.asker[node]
        home = at[asker][0]
        stations: dict[Zone, list[Array]] = {}  # zone -> one request, until its first answer, all of a round
        last: Array = 0.0
        fixed: dict[Zone, float] = {}
        slowed = self.slowed(node, at, stages, beside)
        for name in node:
            zone = at[name][0]
            one, first, whole, final = self.station(name, asker, at, stages, slowed[name])
            before = stations.get(zone, [0.0, 0.0, 0.0])
            stations[zone] = [before[0] + one, before[1] + first, before[2] + whole]
            last = last + final * (stages if zone is home else 1)
            fixed[zone] = fixed.get(zone, 0.0) + self.cost(name, zone.device_class).fixed_s
        delay = self.delay(node, asker, at, stages)
        trip = sum(one for one, _, _ in stations.values()) + delay
        busiest = max_of(*(whole for _, _, whole in stations.values()))
        first = sum(first for _, first, _ in stations.values()) + delay
        last = last + (delay if len(stations) > 1 else 0.0)
        with np.errstate(invalid="ignore"):  # no worker fits: infinite
            first = first + max_of(*(whole - early for _, early, whole in stations.values()))
            spent = (self.dataflow[asker].calls - 1) * max_of(busiest, trip) + first + last + max(fixed.values())
        return np.where(np.isnan(spent), np.inf, spent)

    def station(
        self, name: str, asker: str, at: Mapping, stages: int, slowed: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Returns seconds of one request, until the first stage of every asker has its answer, of all requests of a
        round, and of the request after the last decision."""
        (zone, devices), (home, home_devices) = at[name], at[asker]
        asking = self.table(asker, home.device_class, stages)
        if name == asker:
            seconds = asking.seconds[devices] * slowed
            return seconds, seconds, seconds * stages, 0.0
        component, cost = self.dataflow[name], self.cost(name, zone.device_class)
        ratio = slowed * component.calls / self.dataflow[asker].calls * self.unequal(name, at, stages)
        parts = asking.workers[home_devices] * stages
        if zone is home:
            size = component.items / np.maximum(parts, 1)
            seconds = cost.seconds.at(size) * ratio
            return seconds, seconds, seconds * stages, cost.last_s.at(size) * slowed
        workers = np.maximum(np.minimum(devices, parts), 1)
        each, waiting, together = self.merging(name, asker, at, stages)
        seconds = np.where(devices > 0, cost.seconds.at(together * each) * ratio, np.inf)
        full, rest = np.divmod(waiting, together)
        stage = full * seconds + np.where(rest > 0, cost.seconds.at(rest * each) * ratio, 0.0)
        alone = (together == 1) & (self.cuts(name, asker, at, stages) == 1)
        requests = np.where(alone, -(-parts // workers), stages)
        first = np.where(together == 1, seconds * -(-requests // stages), stage)
        whole = np.where(together == 1, seconds, stage) * requests
        return seconds, first, whole, cost.last_s.at(together * each) * slowed

    def unequal(self, name: str, at: Mapping, stages: int) -> Array:
        """The factor by which unequal lengths of answers prolong the work of a component's workers."""
        if (lengths := self.dataflow.lengths) is None:
            return 1.0
        engines = np.maximum(self.count(name, at, stages), 1)
        return engine_ratios(lengths, self.dataflow[name].items, self.classes[at[name][0].device_class].count)[engines]

    def merging(self, name: str, asker: str, at: Mapping, stages: int) -> tuple[Array, Array, Array]:
        """For a component that answers, returns the items of a request, the number of requests that wait for a worker,
        and how many it answers in one call. A stage's request goes to one worker, or is divided among the workers of
        its asker (`cuts`)."""
        (zone, devices), (home, home_devices) = at[name], at[asker]
        asking = np.maximum(self.table(asker, home.device_class, stages).workers[home_devices], 1)
        each = self.dataflow[name].items / (asking * stages)
        cuts = self.cuts(name, asker, at, stages)
        each = np.where(cuts > 1, np.ceil(each / cuts), each)
        waiting = 1 if zone is home else -(-asking // np.clip(devices, 1, asking))
        return each, waiting, np.clip(self.dataflow[name].merges // each, 1, waiting)

    def cuts(self, name: str, asker: str, at: Mapping, stages: int) -> Array:
        """The number of workers that a request is divided among. If requests are merged and there are more workers than
        askers, each asker has workers of its own."""
        (zone, devices), (home, home_devices) = at[name], at[asker]
        if zone is home or self.dataflow[name].merges == 1:
            return np.ones_like(devices)
        asking = np.maximum(self.table(asker, home.device_class, stages).workers[home_devices], 1)
        return np.maximum(devices // asking, 1)

    def delay(self, node: tuple[str, ...], asker: str, at: Mapping, stages: int) -> Array:
        """Seconds to send a stage's data around the cycle, if it leaves the process."""
        parts = self.table(asker, at[asker][0].device_class, stages).workers[at[asker][1]] * stages
        crossing = [
            e
            for e in self.dataflow.edges
            if e.source in node and e.target in node and at[e.source][0] is not at[e.target][0]
        ]
        return sum((self.profile.link.seconds(e.bytes / np.maximum(parts, 1)) for e in crossing), 0.0)

    def count(self, name: str, at: Mapping, stages: int) -> Array:
        """The number of workers of a component."""
        zone, devices = at[name]
        asker = self.asker_for(name)
        if asker in (None, name):
            return self.table(name, zone.device_class, stages).workers[devices]
        home, home_devices = at[asker]
        asking = self.table(asker, home.device_class, stages).workers[home_devices]
        if zone is home:
            return asking
        return devices if self.dataflow[name].merges > 1 else np.minimum(devices, asking * stages)

    def sync_seconds(self, at: Mapping, stages: int) -> Array:
        """Seconds of the weight sync; 0 if every receiver shares a process with its source."""
        spent: Array = 0.0
        for edge in self.dataflow.edges:
            if edge.next_iteration and edge.target in at:
                copied = self.profile.sync.copy_s.at(self.count(edge.target, at, stages))
                shared = self.shares_weights(edge, at, stages)
                spent = spent + np.where(shared, self.profile.sync.shared_s, copied)
        return spent

    def least_sync_seconds(self, least: Mapping, most: Mapping, stages: int) -> Array:
        """A lower bound on the seconds of the weight sync if every zone has `least` to `most` devices."""
        spent: Array = 0.0
        for edge in self.dataflow.edges:
            if edge.next_iteration and edge.target in least:
                receivers = self.count(edge.target, least, stages)
                on = self.classes[least[edge.target][0].device_class]
                copied = self.profile.sync.copy_s.at(np.arange(on.count + 1))
                seconds = np.minimum.accumulate(copied[::-1])[::-1][receivers]
                if np.any(shared := self.may_share_weights(edge, least, stages)):
                    shared = shared & (self.count(edge.source, most, stages) >= receivers)
                    seconds = np.where(shared, np.minimum(seconds, self.profile.sync.shared_s), seconds)
                spent = spent + seconds
        return spent

    def shares_weights(self, edge: Edge, at: Mapping, stages: int) -> Array:
        """True if receivers of weights share the processes of their source: equally many workers in one zone."""
        possible = self.may_share_weights(edge, at, stages)
        if not np.any(possible):
            return False
        return possible & (self.count(edge.target, at, stages) == self.count(edge.source, at, stages))

    def may_share_weights(self, edge: Edge, at: Mapping, stages: int) -> Array:
        """True if receivers of weights can share processes with their source: in one zone, which the role that sends
        them requests is not in. Several learners with shards share nothing."""
        zone = at[edge.target][0]
        if edge.source not in zone.components or self.asker_for(edge.target) in zone.components:
            return False
        return (self.count(edge.source, at, stages) == 1) | (self.cost(edge.source, zone.device_class).split_bytes == 0)

    def _table(self, name: str, device_class: str, stages: int) -> Table:
        component, cost = self.dataflow[name], self.cost(name, device_class)
        on, learns = self.classes[device_class], self.dataflow.is_learner(name)
        groups = self.dataflow.groups if learns and self.dataflow.schedule == "periodic" else 1
        kept_items = schedule_overlap.held_items(self.dataflow) if learns else 0
        unequal = self.dataflow.learner_ratios(on.count) if learns else None
        return make_table(component, cost, on, stages if component.splits else 1, groups, kept_items, unequal)


# Memory


def zone_bytes(pricer: Pricer, zone: Zone, at: Mapping, stages: int, swapped: frozenset[str]) -> tuple[Array, Array]:
    """Returns the bytes on a device of the zone at its fullest moment, and while another layer works."""
    full = {name: bytes_of(pricer, name, at, stages) for name in zone.components}
    kept = {name: pricer.cost(name, zone.device_class).kept_bytes for name in zone.components}
    rest = {name: kept[name] if name in swapped else full[name] for name in full}
    for edge in pricer.dataflow.edges:
        if edge.next_iteration and edge.target in full and edge.source in full:
            shared = pricer.shares_weights(edge, at, stages)
            once = np.where(shared, pricer.cost(edge.target, zone.device_class).weight_bytes, 0.0)
            full[edge.source] = full[edge.source] - once
            rest[edge.source] = rest[edge.source] - (0.0 if edge.source in swapped else once)
            rest[edge.target] = np.maximum(rest[edge.target], once)
    idle = sum(rest.values())
    groups = [[n for n in node if n in full] for node in pricer.dataflow.order]
    peaks = [idle + sum(full[n] - rest[n] for n in group) for group in groups if group]
    return max_of(*peaks), idle


def bytes_of(pricer: Pricer, name: str, at: Mapping, stages: int) -> Array:
    zone, devices = at[name]
    cost = pricer.cost(name, zone.device_class)
    asker = pricer.asker_for(name)
    if asker in (None, name):
        return pricer.table(name, zone.device_class, stages).bytes[devices]
    each, _, together = pricer.merging(name, asker, at, stages)
    return cost.bytes.at(np.ceil(together * each))


def used_bytes(layers: Sequence[LayerPrice], device_class: str) -> float:
    """Bytes on the fullest device: of the working layer, and kept by other layers."""
    rest = sum(float(layer.idle.get(device_class, 0.0)) for layer in layers)
    return max(
        rest + float(layer.active.get(device_class, 0.0)) - float(layer.idle.get(device_class, 0.0)) for layer in layers
    )
