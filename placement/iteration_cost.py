"""The cost of a layout: seconds of an iteration and bytes on the fullest device, in closed form.

The seconds and bytes of a layer are a rising function (`layer_seconds`, `used_bytes`) of a few terms, such as the
seconds of a pass of a node, and each term depends on the sizes of one or two zones. So the planner prices thousands of
splits at once, and the least value of each term over a range of sizes gives a lower bound on the price of that range.

A cycle (sim and policy) is limited by its busiest station or by a stage that waits for its own answer: period =
max(busiest station, round trip). n decisions take n - 1 periods and one round trip. In a layer a node begins when its
input (with chunks: its first chunk) is complete and its zone is free. Frozen parts compute ahead, chunk by chunk. If
learners work during the rollout, each side takes its own turns (`schedule_overlap.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from embodied.placement import schedule_overlap
from embodied.placement.dataflow import Dataflow, Edge, asker_of, engine_ratios
from embodied.placement.layout import Layer, Layout, Zone
from embodied.placement.profile import Array, Cost, Profile, Table, make_table, max_of
from embodied.placement.topology import DeviceClass

Note = Callable[["NodeTurn", str, Array, Array], object]  # a step of a node, from start to end
BOTH_ALONE = ("both", "alone")
Terms = dict[tuple, Array]
"""The terms of a layer's price: ("alone", node) and ("both", node), seconds of a pass without and with the other side
at work; ("ahead", node); ("onload", node) and ("offload", node); ("full", component), ("rest", component) and ("freed",
component), bytes while it works, while others work, and offloaded; ("active", zone) and ("idle", zone), bytes while
this layer works and while another layer works; ("weights",); and ("tail",) and ("waiting",), of
`schedule_overlap.py`."""


@dataclass(frozen=True)
class Price:
    seconds: float  # of an iteration
    layers: tuple[float, ...]  # seconds of each
    used_bytes: Mapping[str, float]  # per class, on the fullest device
    fits: bool


@dataclass(frozen=True)
class NodeTurn:
    """A node of the dataflow in a layer: its zones, and the nodes on other devices that it waits for, chunk by chunk if
    it streams, else until they end. Nodes on its own devices end before these are free."""

    node: int
    zones: tuple[int, ...]  # their indices
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
        self.by_units = cache(self._by_units)

    def cost(self, component: str, device_class: str) -> Cost | None:
        return self.profile.cost(component, self.classes[device_class])

    def runs_on(self) -> dict[str, set[str]]:
        names = [c.name for c in self.dataflow.components]
        return {name: {c for c in self.classes if self.cost(name, c) is not None} for name in names}

    def asker_for(self, component: str) -> str | None:
        """The component that sends requests in this component's cycle; None outside of cycles."""
        return self.asker[next(node for node in self.dataflow.order if component in node)]

    def can_swap(self, component: str) -> bool:
        costs = [self.cost(component, name) for name in self.classes]
        return any(cost is not None and cost.offload_s is not None for cost in costs)

    def streams_between(self, layer: Layer) -> bool:
        """True if a node uses partial input of nodes on other devices."""
        order = self.dataflow.order
        return any(t.waits and (t.streams or self.dataflow[order[t.node][0]].ahead) for t in self.turns(layer))

    def places(self, layer: Layer, devices: Sequence[Array] | None = None) -> dict[str, tuple[Zone, Array]]:
        """The zone of every component, and the number of workers for which it has devices; `devices` of the zones,
        where these are undecided."""
        counts = [zone.devices for zone in layer] if devices is None else devices
        return {
            name: (zone, self._num_places(name, zone.device_class, count))
            for zone, count in zip(layer, counts)
            for name in zone.components
        }

    def _num_places(self, name: str, device_class: str, devices: Array) -> Array:
        if (devices_of_worker := self.devices_of_worker(name, device_class)) == 1:
            return devices
        on = self.classes[device_class]
        return np.minimum(devices // devices_of_worker, on.count // on.num_nodes // devices_of_worker * on.num_nodes)

    def devices_of_worker(self, name: str, device_class: str) -> int:
        return 1 if self.classes[device_class].kind == "cpu" else self.dataflow[name].devices

    # Seconds of a layout

    def price(self, layout: Layout) -> Price:
        """Seconds are infinite where a zone is too small for a worker."""
        terms, seconds = [], []
        for layer in layout.layers:
            devices = [np.array(zone.devices) for zone in layer]
            terms.append(
                self.terms(layer, devices, layout.stages) | self.overlapped_terms(layer, devices, layout.stages)
            )
            terms[-1] |= self.swap_terms(layer, terms[-1], dict.fromkeys(layout.swapped, True))
            seconds.append(float(self.layer_seconds(layer, terms[-1], layout.chunks)))
        used = {name: float(self.used_bytes(layout.layers, terms, name)) for name in self.classes}
        fits = all(used[name] <= c.memory_bytes for name, c in self.classes.items())
        whole = sum(seconds) + self.dataflow.fixed_s
        return Price(whole, tuple(seconds), used, bool(fits and np.isfinite(whole)))

    def terms(self, layer: Layer, devices: Sequence[Array], stages: int) -> Terms:
        """The terms that depend neither on swaps nor on the other side's devices."""
        at = self.places(layer, devices)
        terms: Terms = {("weights",): self.sync_seconds(at, stages)}
        for zone in layer:
            terms |= self._byte_terms(zone, at, stages)
        for turn in self.turns(layer):
            node = self.dataflow.order[turn.node]
            terms["alone", turn.node] = self.node_seconds(node, at, stages)
            if self.dataflow[node[0]].ahead:
                terms["ahead", turn.node] = self.encoding_seconds(node[0], at)
        periodic, by_units = self.dataflow.schedule == "periodic", self.by_units(layer)
        if periodic or (by_units and self.dataflow.groups):
            terms["waiting",] = schedule_overlap.waiting_groups(self, at, stages, by_units)
        if periodic:
            terms["tail",] = tail = schedule_overlap.tail_seconds(self, at, stages)
            self._without_tail(terms, "alone", tail)
        return terms

    def overlapped_terms(self, layer: Layer, devices: Sequence[Array], stages: int) -> Terms:
        """The terms of nodes while the other side works, too."""
        if not schedule_overlap.overlaps(self.dataflow):
            return {}
        at, order = self.places(layer, devices), self.dataflow.order
        terms: Terms = {("both", t.node): self.node_seconds(order[t.node], at, stages, True) for t in self.turns(layer)}
        if self.dataflow.schedule == "periodic":
            self._without_tail(terms, "both", schedule_overlap.tail_seconds(self, at, stages, True))
        return terms

    def _without_tail(self, terms: Terms, which: str, tail: Array) -> None:
        """Subtract from an update what comes after its last group."""
        name = schedule_overlap.learner_of(self.dataflow)
        key = which, next(i for i, node in enumerate(self.dataflow.order) if name in node)
        terms[key] = np.maximum(terms[key] - tail, 0.0)

    def _byte_terms(self, zone: Zone, at: Mapping, stages: int) -> Terms:
        terms: Terms = {}
        for name in zone.components:
            terms["full", name] = terms["rest", name] = self.bytes_of(name, at, stages)
            terms["freed", name] = self.cost(name, zone.device_class).kept_bytes
        for edge in self.dataflow.edges:
            if edge.next_iteration and {edge.source, edge.target} <= {*zone.components}:
                weights = self.cost(edge.target, zone.device_class).weight_bytes
                shared = np.where(self.shares_weights(edge, at, stages), weights, 0.0)
                for which in ("full", "rest"):
                    terms[which, edge.source] = terms[which, edge.source] - shared
                for which in ("rest", "freed"):
                    terms[which, edge.target] = np.maximum(terms[which, edge.target], shared)
        return terms

    def swap_terms(self, layer: Layer, terms: Terms, swapped: Mapping[str, Array]) -> Terms:
        """The terms that depend on which components offload their memory between turns."""
        added: Terms = {}
        at = self.places(layer)
        for turn in self.turns(layer) if swapped else ():
            for which in ("onload", "offload"):
                added[which, turn.node] = self.swap_seconds(self.dataflow.order[turn.node], at, swapped, f"{which}_s")
        for i, zone in enumerate(layer):
            rest = {n: np.where(swapped.get(n, False), terms["freed", n], terms["rest", n]) for n in zone.components}
            nodes = [[name for name in node if name in rest] for node in self.dataflow.order]
            added["idle", i] = idle = sum(rest.values())
            added["active", i] = max_of(
                *(idle + sum(terms["full", n] - rest[n] for n in node) for node in nodes if node)
            )
        return added

    def layer_seconds(self, layer: Layer, terms: Terms, chunks: int) -> Array:
        """Seconds of a layer and of its weight sync; never falls if a term rises."""
        if not schedule_overlap.overlaps(self.dataflow):
            return self.turn_seconds(layer, self.turns(layer), terms, chunks) + terms["weights",]
        rollout, update = (
            [self.turn_seconds(layer, side, terms, 1, which) for which in BOTH_ALONE] for side in self.sides(layer)
        )
        return schedule_overlap.overlapped(self.dataflow, rollout, update, terms, self.arrivals(layer, terms))

    def sides(self, layer: Layer) -> tuple[list[NodeTurn], list[NodeTurn]]:
        """The nodes of the rollout, and those of the update."""
        sides: tuple[list[NodeTurn], list[NodeTurn]] = ([], [])
        for turn in self.turns(layer):
            sides[schedule_overlap.is_learner_node(self.dataflow, turn.node)].append(turn)
        return sides

    def arrivals(self, layer: Layer, terms: Terms) -> list[list[Array]] | None:
        """The seconds at which each wave of groups has passed the components between sims and learners, while both
        sides work and alone; None if groups reach periodic learners at the end of a wave, or learners wait for all."""
        if self.dataflow.schedule != "periodic" or not self.by_units(layer):
            return None
        nodes = (self._play(layer, self.sides(layer)[0], terms, 1, which)[1].values() for which in BOTH_ALONE)
        return [[max_of(*times) for times in zip(*of_nodes, strict=True)] for of_nodes in nodes]

    def turn_seconds(
        self,
        layer: Layer,
        turns: Sequence[NodeTurn],
        terms: Terms,
        chunks: int,
        which: str = "alone",
        note: Note | None = None,
    ) -> Array:
        """Seconds of nodes that run in order, chunk by chunk, each when its zone is free. `note` is called for every
        step of a node: moving memory, or work."""
        return max_of(*self._play(layer, turns, terms, chunks, which, note)[0])

    def _play(
        self,
        layer: Layer,
        turns: Sequence[NodeTurn],
        terms: Terms,
        chunks: int,
        which: str = "alone",
        note: Note | None = None,
    ) -> tuple[list[Array], dict[int, list[Array]]]:
        """Returns when each zone is free, and when each node has ended each chunk. If components take groups as they
        come, the chunks are the waves of groups, and these components work for a wave's share of the groups."""
        free: list[Array] = [0.0] * len(layer)
        ready: dict[int, list[Array]] = {}
        in_waves = self.by_units(layer) and ("waiting",) in terms
        if in_waves:
            left = [1.0, *np.moveaxis(terms["waiting",], -1, 0)]
            chunks = len(left) - 1
        passes = self.dataflow.passes / chunks
        for turn in turns:
            key, steps = (which if (which, turn.node) in terms else "alone", turn.node), []
            begin = max_of(*(free[z] for z in turn.zones))
            time = begin + terms.get(("onload", turn.node), 0.0)
            steps.append(("memory", begin, time))
            inputs = [[ready[source][chunk] for source in turn.waits if source in ready] for chunk in range(chunks)]
            if ("ahead", turn.node) in terms:  # frozen parts encode input from other devices chunk by chunk
                for arrived in inputs:
                    begin = max_of(time, *arrived)
                    time = begin + terms["ahead", turn.node] / chunks
                    steps.append(("work", begin, time))
            ready[turn.node] = []
            for chunk, arrived in enumerate(inputs if turn.streams else inputs[-1:] * chunks):
                begin = max_of(time, *arrived)
                waves = in_waves and turn.streams and turn.waits
                time = begin + terms[key] * (left[chunk] - left[chunk + 1] if waves else passes)
                ready[turn.node].append(time)
                steps.append(("work", begin, time))
            begin, time = time, time + terms.get(("offload", turn.node), 0.0)
            steps.append(("memory", begin, time))
            for z in turn.zones:
                free[z] = time
            for step in steps if note else ():
                note(turn, *step)
        return free, ready

    def used_bytes(self, layers: Sequence[Layer], terms: Sequence[Terms], device_class: str) -> Array:
        """Bytes on the fullest device of a class: of the working layer, and kept by other layers."""

        def of(layer: Layer, terms: Terms, which: str) -> Array:
            return max_of(0.0, *(terms[which, i] for i, zone in enumerate(layer) if zone.device_class == device_class))

        idle = [of(layer, layer_terms, "idle") for layer, layer_terms in zip(layers, terms)]
        active = [of(layer, layer_terms, "active") for layer, layer_terms in zip(layers, terms)]
        return max_of(*(sum(idle[:i]) + here + sum(idle[i + 1 :]) for i, here in enumerate(active)))

    def encoding_seconds(self, name: str, at: Mapping) -> Array:
        items = -(-self.dataflow[name].ahead // np.maximum(self.count(name, at, 1), 1))
        return self.cost(name, at[name][0].device_class).ahead_s * items

    def _turns_of(self, layer: Layer) -> tuple[NodeTurn, ...]:
        place = {name: z for z, zone in enumerate(layer) for name in zone.components}
        turns, by_units = [], self.by_units(layer)
        for i, node in enumerate(self.dataflow.order):
            if node[0] in place:
                zones = tuple(sorted({place[name] for name in node}))
                sources = [j for j in sorted(self.dataflow.sources[i]) if self.dataflow.order[j][0] in place]
                waits = tuple(j for j in sources if all(place[name] not in zones for name in self.dataflow.order[j]))
                streams = all(self.dataflow[n].streams or (by_units and self.dataflow[n].units) for n in node)
                turns.append(NodeTurn(i, zones, waits, streams))
        return tuple(turns)

    def _by_units(self, layer: Layer) -> bool:
        """True if all components between sims and learners take units, and share no device with sims, policies or
        learners."""
        between = {node[0] for node in self.dataflow.order if len(node) == 1 and not self.dataflow.is_learner(node[0])}
        placed = {name for zone in layer for name in zone.components}
        return (
            bool(between)
            and all(self.dataflow[name].units for name in between)
            and len(placed) == len(self.dataflow.components)
            and all(between.isdisjoint(zone.components) or between.issuperset(zone.components) for zone in layer)
        )

    def swap_seconds(self, node: Sequence[str], at: Mapping, swapped: Mapping[str, Array], which: str) -> Array:
        """Seconds to move memory: zones move theirs in parallel, components of one zone one after the other."""
        spent: dict[Zone, Array] = {}
        for name in node:
            zone = at[name][0]
            seconds = getattr(self.cost(name, zone.device_class), which) or 0.0
            spent[zone] = spent.get(zone, 0.0) + np.where(swapped.get(name, False), seconds, 0.0)
        return max_of(*spent.values())

    def bytes_of(self, name: str, at: Mapping, stages: int) -> Array:
        """Bytes of a component on each of its devices while it works."""
        zone, devices = at[name]
        cost, asker = self.cost(name, zone.device_class), self.asker_for(name)
        if asker in (None, name):
            return self.table(name, zone.device_class, stages).bytes[devices]
        items, _, together = self.merging(name, asker, at, stages)
        return cost.bytes.at(np.ceil(together * items))

    # Seconds of a node of the dataflow

    def node_seconds(self, node: tuple[str, ...], at: Mapping, stages: int, beside: bool = False) -> Array:
        """Seconds of one pass of a cycle or component; `beside`: while the other side works."""
        if len(node) > 1:
            return self._cycle(node, at, stages, beside)
        zone, devices = at[node[0]]
        slowed = self.slowdowns(node, at, stages, beside)[node[0]]
        return self.table(node[0], zone.device_class, stages).seconds[devices] * slowed

    def slowdowns(self, node: tuple[str, ...], at: Mapping, stages: int, beside: bool = False) -> dict[str, Array]:
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
            working = self.count(name, at, stages) * self.devices_of_worker(name, zone.device_class)
            zones[zone] = max_of(zones.get(zone, 0), working)
        return {name: sum(zones.values()) if stages > 1 else max_of(*zones.values()) for name, zones in busy.items()}

    def _cycle(self, node: tuple[str, ...], at: Mapping, stages: int, beside: bool) -> Array:
        asker = self.asker[node]
        home = at[asker][0]
        stations: dict[Zone, list[Array]] = {}  # zone -> one request, until its first answer, all of a round
        last: Array = 0.0
        fixed: dict[Zone, float] = {}
        slowed = self.slowdowns(node, at, stages, beside)
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

    def round(self, node: tuple[str, ...], at: Mapping, stages: int) -> tuple[list[tuple[str, float, float]], float]:
        """The components of a cycle, each with start and seconds of its work in a round, and the seconds of a round."""
        asker, slowed = self.asker[node], self.slowdowns(node, at, stages)
        begin, free, bars = 0.0, {at[name][0]: 0.0 for name in node}, []
        for name in (*(name for name in node if name != asker), asker):  # policies answer, then sims simulate
            unit, _, whole, _ = (float(seconds) for seconds in self.station(name, asker, at, stages, slowed[name]))
            start = max(begin, free[at[name][0]])
            bars.append((name, start, whole))
            begin, free[at[name][0]] = begin + unit, start + whole
        return bars, max(
            begin + float(self.delay(node, asker, at, stages)),
            *(whole for _, _, whole in bars),
            *(sum(whole for name, _, whole in bars if at[name][0] is zone) for zone in free),
        )

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
        items, waiting, together = self.merging(name, asker, at, stages)
        seconds = np.where(devices > 0, cost.seconds.at(together * items) * ratio, np.inf)
        full, rest = np.divmod(waiting, together)
        stage = full * seconds + np.where(rest > 0, cost.seconds.at(rest * items) * ratio, 0.0)
        alone = (together == 1) & (self.parts_of_request(name, asker, at, stages) == 1)
        requests = np.where(alone, np.maximum(-(-parts // workers), 1), stages)  # without askers infinite anyway
        first = np.where(together == 1, seconds * -(-requests // stages), stage)
        whole = np.where(together == 1, seconds, stage) * requests
        return seconds, first, whole, cost.last_s.at(together * items) * slowed

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
        items_of_asker = self.dataflow[name].items / (asking * stages)
        cuts = self.parts_of_request(name, asker, at, stages)
        items_of_asker = np.where(cuts > 1, np.ceil(items_of_asker / cuts), items_of_asker)
        waiting = 1 if zone is home else -(-asking // np.clip(devices, 1, asking))
        return items_of_asker, waiting, np.clip(self.dataflow[name].merges // items_of_asker, 1, waiting)

    def parts_of_request(self, name: str, asker: str, at: Mapping, stages: int) -> Array:
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

    def shares_weights(self, edge: Edge, at: Mapping, stages: int) -> Array:
        """True if receivers of weights share the processes of their source: equally many workers in one zone, which the
        role that sends them requests is not in. Several learners with shards share nothing, nor do workers with several
        devices."""
        zone = at[edge.target][0]
        if edge.source not in zone.components or self.asker_for(edge.target) in zone.components:
            return False
        if self.devices_of_worker(edge.target, zone.device_class) > 1:
            return False
        sources = self.count(edge.source, at, stages)
        shards = self.cost(edge.source, zone.device_class).split_bytes > 0
        return (sources == self.count(edge.target, at, stages)) & ((sources == 1) | (not shards))

    def _table(self, name: str, device_class: str, stages: int) -> Table:
        component, cost = self.dataflow[name], self.cost(name, device_class)
        on, learns = self.classes[device_class], self.dataflow.is_learner(name)
        groups = self.dataflow.groups if learns and self.dataflow.schedule == "periodic" else 1
        kept_items = schedule_overlap.held_items(self.dataflow) if learns else 0
        unequal = self.dataflow.learner_ratios(on.count) if learns else None
        return make_table(component, cost, on, stages if component.splits else 1, groups, kept_items, unequal)


@dataclass(frozen=True)
class Choice:
    """A layout, and the pricer of its dataflow."""

    pricer: Pricer
    layout: Layout

    @cached_property
    def price(self) -> Price:
        return self.pricer.price(self.layout)
