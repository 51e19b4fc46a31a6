"""Simulates a layout with the costs of a profile, event by event: the schedule of every worker and the idle time of
devices.

The closed form of `iteration_cost.py` has one time per zone. Here every worker has its own time, requests wait in
queues, and a sim worker goes through its stages in order. Both results must agree; this one also provides the timeline.
It is too slow for a search: a layout of 8 GPUs takes 0.01 s, one of 4,096 GPUs minutes, while the closed form prices
millions of layouts per second.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from typing import NamedTuple

from embodied.placement.dataflow import group_times
from embodied.placement.iteration_cost import NodeTurn, Pricer
from embodied.placement.layout import Layer, Layout, Zone
from embodied.placement.schedule_overlap import (
    engine_of,
    is_learner_node,
    learner_of,
    num_waves,
    overlaps,
    sides,
    tail_seconds,
    waves_of,
    while_both,
)


@dataclass(frozen=True)
class DeviceSpan:
    device: str  # gpu:3
    component: str
    start_s: float
    end_s: float


@dataclass
class Schedule:
    seconds: float = 0.0
    busy_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by device
    spans: list[DeviceSpan] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)

    def show(self, devices: Iterable[str], what: str, start_s: float, end_s: float) -> None:
        """Add an interval in which devices wait for `what`."""
        if end_s > start_s:
            self.spans += [DeviceSpan(device, what, start_s, end_s) for device in devices]

    def add(self, device: str, component: str, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            self.busy_s[device] += end_s - start_s
            self.spans.append(DeviceSpan(device, component, start_s, end_s))


def simulate(pricer: Pricer, layout: Layout) -> Schedule:
    """One iteration of this layout, from the first request to the new weights."""
    return LayoutReplay(pricer, layout).run()


class LayoutReplay:
    def __init__(self, pricer: Pricer, layout: Layout) -> None:
        self.pricer, self.layout = pricer, layout
        self.dataflow = pricer.dataflow
        self.schedule = Schedule()
        self.beside = (inf, inf)  # start and end of the other side's work, if learners work while sims collect
        self.played: dict[tuple[int, int], float] = {}  # (asker, decisions) -> when all of its stages have made them
        self.names: dict[Zone, list[str]] = {}
        used: dict[str, list[str]] = {name: [] for name in pricer.classes}
        for layer in layout.layers:
            workers: dict[str, int] = defaultdict(int)
            for zone in layer:
                first = workers[zone.device_class]
                workers[zone.device_class] += zone.devices
                self.names[zone] = [f"{zone.device_class}:{first + i}" for i in range(zone.devices)]
            for name, number in workers.items():
                used[name] += [f"{name}:{i}" for i in range(len(used[name]), number)]
        self.schedule.devices = [device for devices in used.values() for device in devices]

    def run(self) -> Schedule:
        now, syncs = 0.0, []
        for layer in self.layout.layers:
            at = {name: (zone, zone.devices) for zone in layer for name in zone.components}
            turns = self.pricer.turns(layer)
            now = self._overlapped(layer, at, now) if overlaps(self.dataflow) else self._play(turns, layer, at, now)
            targets = {e.target for e in self.dataflow.edges if e.next_iteration and e.target in at}
            devices = [device for name in sorted(targets) for device in self.names[at[name][0]]]
            if self.dataflow.schedule != "async":  # async sends weights while a batch is collected
                syncs.append((devices, float(self.pricer.sync_seconds(at, self.layout.stages))))
        for devices, seconds in syncs:
            self.schedule.show(devices, "weights", now, now + seconds)
            now += seconds
        self.schedule.seconds = now + self.dataflow.fixed_s
        return self.schedule

    # Learners beside sims and policies

    def _overlapped(self, layer: Layer, at: dict, start: float) -> float:
        """Learners work on separate devices while sims and policies collect."""
        collecting, learning = sides(self.pricer, layer)
        if self.dataflow.schedule == "async":
            update_s = self._tried(learning, layer, at, start)[0]
            self.beside = (start, start + update_s)
            end = self._play(collecting, layer, at, start)
            self.beside = (start, end)
            end = max(end, self._play(learning, layer, at, start))
            weights_s = float(self.pricer.sync_seconds(at, self.layout.stages))
            alone_s = [self._tried(side, layer, at, start, alone=True)[0] for side in (collecting, learning)]
            return max(end, start + weights_s, start + (sum(alone_s) + weights_s) / (self.dataflow.level + 1))
        _, arrivals = self._tried(collecting, layer, at, start)
        self.beside = (min(arrivals), inf)
        end = self._play(collecting, layer, at, start)
        self.beside = (start, end)
        return self._learn_groups(learner_of(self.dataflow), at, start, self._arrivals(at, start, end))

    def _tried(
        self, side: Sequence[NodeTurn], layer: Layer, at: dict, start: float, alone: bool = False
    ) -> tuple[float, list[float]]:
        """Seconds of one side and the arrival times of groups, without recording a timeline. Learners are priced with
        the other side at work, unless `alone`; the other side is priced without learners."""
        kept, self.schedule = self.schedule, Schedule()
        self.beside = (start, inf) if is_learner_node(self.dataflow, side[0].node) and not alone else (inf, inf)
        end = self._play(side, layer, at, start)
        self.schedule = kept
        return end - start, self._arrivals(at, start, end) if self.dataflow.schedule == "periodic" else []

    def _arrivals(self, at: dict, start: float, end: float) -> list[float]:
        """The times at which groups are finished, for a rollout from `start` to `end`."""
        if engine := engine_of(self.dataflow):
            engines = int(self.pricer.count(engine, at, self.layout.stages))
            groups = self.dataflow.groups, self.dataflow.group_size
            return [start + share * (end - start) for share in group_times(self.dataflow.lengths, *groups, engines)]
        asker = next(c for c in self.dataflow.components if c.splits)
        waves = num_waves(self.dataflow, asker.items)
        if waves == 1:
            return [end] * self.dataflow.groups
        groups = waves_of(self.dataflow, asker.items, int(self.pricer.count(asker.name, at, self.layout.stages)))
        played = [
            max(self.played[sim, max(1, round(asker.calls * wave / waves))] for sim, wave in group.items())
            for group in groups
        ]
        late = end - max(played)  # costs once per rollout are spread over its waves
        return sorted(played_s + late * max(group.values()) / waves for played_s, group in zip(played, groups))

    def _learn_groups(self, name: str, at: dict, start: float, arrivals: list[float]) -> float:
        """Learn from groups in order of arrival; then add the costs that occur once per update."""
        whole = self._node_seconds(name, at)
        tails = [float(tail_seconds(self.pricer, at, self.layout.stages, beside)) for beside in (True, False)]
        each = [(seconds - tail) / len(arrivals) for seconds, tail in zip(whole, tails)]
        now = start + self._swap((name,), at, "onload_s")
        self._show_swap([at[name][0]], start, now)
        for arrived_s in arrivals:
            now = self._show_work(name, at, max(now, arrived_s), *each)
        now = self._show_work(name, at, now, *tails)
        gone = now + self._swap((name,), at, "offload_s")
        self._show_swap([at[name][0]], now, gone)
        return gone

    def lasts(self, begin: float, both: float, alone: float) -> float:
        """The duration of work that begins at `begin`: `both` while the other side works, `alone` otherwise."""
        since, until = self.beside
        return alone if begin < since else float(while_both(both, alone, until - begin))

    # One thing after the other

    def _play(self, turns: Sequence[NodeTurn], layer: Layer, at: dict, start: float) -> float:
        """Run nodes in order, chunk by chunk, each when its zone is free."""
        free = dict.fromkeys(layer, start)
        ready: dict[int, list[float]] = {}
        chunks = self.layout.chunks
        passes, cut = divmod(self.dataflow.passes, chunks)  # chunks of whole passes, or parts of all of them
        for turn in turns:
            node = self.dataflow.order[turn.node]
            zones = [layer[z] for z, _ in turn.parts]
            begin = max(free[zone] for zone in zones)
            now = begin + self._swap(node, at, "onload_s")
            self._show_swap(zones, begin, now)
            arrived = [[ready[source][chunk] for source in turn.waits if source in ready] for chunk in range(chunks)]
            if self.dataflow[node[0]].ahead:
                now = self._encode(node[0], at, now, arrived)
            ready[turn.node] = []
            for chunk in range(1 if cut else chunks):
                now = max([now, *arrived[chunk if turn.streams else -1]])
                begin = now
                for _ in range(self.dataflow.passes if cut else passes):
                    now = self._pass(node, at, now)
                ready[turn.node].append(now)
            if cut:
                ready[turn.node] = [begin + (now - begin) * (c + 1) / chunks for c in range(chunks)]
            gone = now + self._swap(node, at, "offload_s")
            self._show_swap(zones, now, gone)
            free.update(dict.fromkeys(zones, gone))
        return max(free.values())

    def _encode(self, name: str, at: dict, now: float, ready: list[list[float]]) -> float:
        """The time at which frozen parts have encoded the arrived chunks."""
        each = float(self.pricer.encoding_seconds(name, at)) / len(ready)
        for times in ready:
            begin = max([now, *times])
            now = begin + each
            for device in self.names[at[name][0]][: int(self.pricer.count(name, at, 1))]:
                self.schedule.add(device, name, begin, now)
        return now

    def _show_swap(self, zones: Iterable[Zone], start: float, end: float) -> None:
        for zone in zones:
            self.schedule.show(self.names[zone], "moving memory", start, end)

    def _swap(self, node: Iterable[str], at: dict, which: str) -> float:
        return self.pricer.swap_seconds(tuple(node), at, self.layout.swapped, which)

    def _pass(self, node: tuple[str, ...], at: dict, start: float) -> float:
        if len(node) > 1:
            return Cycle(self, node, at, start).run()
        return self._show_work(node[0], at, start, *self._node_seconds(node[0], at))

    def _node_seconds(self, name: str, at: dict) -> list[float]:
        """Seconds of a pass while the other side works, and alone."""
        return [float(self.pricer.node_seconds((name,), at, self.layout.stages, beside)) for beside in (True, False)]

    def _show_work(self, name: str, at: dict, start: float, both: float, alone: float) -> float:
        """Record a component's work on all of its devices; returns the end time."""
        end = start + self.lasts(start, both, alone)
        workers = int(self.pricer.count(name, at, self.layout.stages))
        for device in self.names[at[name][0]][:workers]:
            self.schedule.add(device, name, start, end)
        return end


# Requests and answers of sims and policies, event by event


class SimulatedRequest(NamedTuple):
    asker: int
    stage: int
    number: int  # decisions made before; after the last decision only a value is requested


class Cycle:
    """One pass of sims that send requests and policies that answer them. A stage's request goes through the answering
    components in order; each worker serves its requests one after the other."""

    def __init__(self, replay: LayoutReplay, node: tuple[str, ...], at: dict, start: float) -> None:
        self.replay, self.at, self.start = replay, at, start
        pricer, self.stages = replay.pricer, replay.layout.stages
        self.asker = pricer.asker_for(node[0])
        self.zone = at[self.asker][0]
        self.num = int(pricer.count(self.asker, at, self.stages))
        self.calls = pricer.dataflow[self.asker].calls
        self.others = [name for name in node if name != self.asker]
        self.station: dict[str, list[tuple[float, float]]] = {}  # (while the other side works, alone)
        slowed = [pricer.slowed(node, at, self.stages, beside) for beside in (True, False)]
        for name in node:
            stations = (pricer.station(name, self.asker, at, self.stages, each[name]) for each in slowed)
            self.station[name] = [(float(both), float(alone)) for both, alone in zip(*stations)]
        self.workers = {name: int(pricer.count(name, at, self.stages)) for name in self.others}
        merging = {name: pricer.merging(name, self.asker, at, self.stages) for name in self.others}
        self.cuts = {name: int(pricer.cuts(name, self.asker, at, self.stages)) for name in self.others}
        self.together = {name: int(together) for name, (_, _, together) in merging.items()}
        self.delay = float(pricer.delay(node, self.asker, at, self.stages))
        fixed: dict[Zone, float] = defaultdict(float)  # of components that take turns
        for name in node:
            fixed[at[name][0]] += pricer.cost(name, at[name][0].device_class).fixed_s
        self.fixed = max(fixed.values())
        self.free: dict[str, float] = defaultdict(lambda: start)
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.ticket = count()
        self.turn = [0] * self.num  # number of stages that each asker has simulated
        self.answered: list[set[int]] = [set() for _ in range(self.num)]  # stages whose answer has arrived
        self.waiting: dict[tuple[str, int, int, int, int], list[SimulatedRequest]] = defaultdict(
            list
        )  # to be answered in one call
        self.end = start

    def run(self) -> float:
        for asker in range(self.num):
            for stage in range(self.stages):
                self.at_time(self.start, partial(self.ask, SimulatedRequest(asker, stage, 0), 0))
        while self.events:
            now, _, happen = heapq.heappop(self.events)
            happen(now)
        return self.end + self.fixed

    def at_time(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when, next(self.ticket), happen))

    def work(self, device: str, component: str, ready: float, which: int) -> float:
        """Record work on a device that does one task at a time; returns the end time. `which`: index into the station's
        seconds."""
        begin = max(ready, self.free[device])
        seconds = self.replay.lasts(begin, *self.station[component][which])
        self.free[device] = begin + seconds
        self.replay.schedule.add(device, component, begin, begin + seconds)
        return begin + seconds

    def ask(self, request: SimulatedRequest, hop: int, now: float) -> None:
        """A request arrives at the component `hop` steps further in the cycle."""
        if hop == len(self.others):
            self.at_time(now + self.delay, partial(self.answer, request))
            return
        name = self.others[hop]
        zone = self.at[name][0]
        which = 3 if request.number == self.calls else 0
        if zone == self.zone:
            self.pass_on([request], hop, self.work(self.device(zone, request.asker), name, now, which))
            return
        if self.cuts[name] > 1:  # each of the asker's own workers answers a part
            first = request.asker * self.workers[name] // self.num
            devices = [self.device(zone, first + place) for place in range(self.cuts[name])]
            self.pass_on([request], hop, max(self.work(device, name, now, which) for device in devices))
            return
        worker = self.worker_of(name, request.asker, request.stage)
        askers = [asker for asker in range(self.num) if self.worker_of(name, asker, request.stage) == worker]
        call, most = askers.index(request.asker) // self.together[name], self.together[name]
        group = self.waiting[name, worker, request.stage, request.number, call]
        group.append(request)
        if len(group) == min(most, len(askers) - call * most):
            self.pass_on(group, hop, self.work(self.device(zone, worker), name, now, which))

    def worker_of(self, name: str, asker: int, stage: int) -> int:
        return (asker * self.stages + stage) * self.workers[name] // (self.num * self.stages)

    def pass_on(self, requests: list[SimulatedRequest], hop: int, when: float) -> None:
        for request in requests:
            self.at_time(when, partial(self.ask, request, hop + 1))

    def answer(self, request: SimulatedRequest, now: float) -> None:
        self.end = max(self.end, now)
        self.answered[request.asker].add(request.stage)
        self.simulate(request.asker, now)

    def simulate(self, asker: int, now: float) -> None:
        """Simulate the next stage, whose answer has arrived."""
        number, stage = divmod(self.turn[asker], self.stages)
        if number == self.calls or stage not in self.answered[asker]:
            return
        self.answered[asker].remove(stage)
        self.turn[asker] += 1
        end = self.work(self.device(self.zone, asker), self.asker, now, 0)
        self.replay.played[asker, number + 1] = end
        self.at_time(end, partial(self.ask, SimulatedRequest(asker, stage, number + 1), 0))
        self.at_time(end, partial(self.simulate, asker))

    def device(self, zone: Zone, worker: int) -> str:
        return self.replay.names[zone][worker]
