"""Replays several runs on the same devices in simulated time. As in real runs, `sharing/run_turns.py` and
`runtime/device_leases.py` decide which run has a device; this module only simulates the runs.

    def batch(iteration):
        return SteadyBatch(lambda devices: 16 / devices, most=8)
    works = [RunWork("a", 14, batch, update_s=lambda devices: 4 / devices, wait_s=6), ...]
    lines = replay(works, own={"a": ["fake:0"], "b": ["fake:1"]})     # lines of share.jsonl

An iteration generates a batch on the devices that the run has at each time, waits without a device, and updates on all
of the run's own devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Protocol

from embodied.runtime.device_leases import GENERATE, TRAIN, Claim, Coordinator
from embodied.runtime.shared_leases import BUCKETS
from embodied.sharing.run_turns import FORMAT, RunTurns

SWITCH_S = (0.1, 0.1)  # seconds to stop on a device, and to load weights on another one
SHARING = ("remaining", "lend")


class GeneratedBatch(Protocol):
    """A batch that is generated on changing devices."""

    def work_on(self, devices: Collection[str]) -> None:
        """Continue on these devices."""

    def pass_time(self, seconds: float) -> None: ...

    def next_s(self) -> float:
        """Seconds until something changes on the same devices."""

    def busy(self) -> set[str]:
        """Devices in use."""

    def has_more(self) -> bool:
        """True if another device would have work."""

    @property
    def progress(self) -> float: ...


class TimedConversations:
    """Conversations, at most `slots` at a time on a device. An interrupted conversation continues later from the same
    token."""

    def __init__(self, seconds: Sequence[float], slots: int) -> None:
        self.waiting, self.slots, self.total = deque(seconds), slots, len(seconds)
        self.active: dict[str, list[float]] = {}  # seconds left, by device

    def work_on(self, devices: Collection[str]) -> None:
        for gone in [device for device in self.active if device not in devices]:
            self.waiting.extendleft(self.active.pop(gone))
        self.active |= {device: [] for device in devices if device not in self.active}
        while self.waiting and (free := [running for running in self.active.values() if len(running) < self.slots]):
            min(free, key=len).append(self.waiting.popleft())

    def pass_time(self, seconds: float) -> None:
        self.active = {
            device: [left - seconds for left in running if left - seconds > 1e-9]
            for device, running in self.active.items()
        }
        self.work_on(self.active)

    def next_s(self) -> float:
        return min((left for running in self.active.values() for left in running), default=inf)

    def busy(self) -> set[str]:
        return {device for device, running in self.active.items() if running}

    def has_more(self) -> bool:
        return bool(self.waiting)

    @property
    def progress(self) -> float:
        return 1 - (len(self.waiting) + sum(map(len, self.active.values()))) / self.total


class SteadyBatch:
    """A batch with known seconds for each number of devices."""

    def __init__(self, seconds: Callable[[int], float], most: int) -> None:
        """More devices than `most` are not faster."""
        self.seconds, self.most, self.progress, self.devices = seconds, most, 0.0, [*()]

    def work_on(self, devices: Collection[str]) -> None:
        self.devices = [*devices]

    def pass_time(self, seconds: float) -> None:
        self.progress = min(1.0, self.progress + seconds / self._whole_s())
        self.progress = 1.0 if self.progress > 1 - 1e-9 else self.progress

    def next_s(self) -> float:
        left = (1 - self.progress) * self._whole_s()
        return left if left < inf else inf

    def busy(self) -> set[str]:
        return set() if self.progress == 1 else {*self.devices[: self.most]}

    def has_more(self) -> bool:
        return self.progress < 1 and len(self.devices) < self.most

    def _whole_s(self) -> float:
        return self.seconds(min(len(self.devices), self.most)) if self.devices else inf


@dataclass(frozen=True)
class RunWork:
    """The work of a run."""

    name: str
    iterations: int
    batch: Callable[[int], GeneratedBatch]  # batch of an iteration
    update_s: Callable[[int], float]  # seconds, by number of devices
    wait_s: float = 0.0
    weight: float = 1.0
    joins_s: float = 0.0
    borrows: bool = True  # generates on devices of other runs
    stays: bool = False  # keeps its own devices until its batch is complete, because its simulators run there


@dataclass
class _Worker:
    """A policy worker of a run on a device, or all policy workers that never move."""

    gang: str
    devices: tuple[str, ...]
    stays: bool = False
    begins_at: float | None = None  # time when its weights are loaded
    stops_at: float | None = None  # time when it releases the device


class _ReplayedRun:
    """A run in progress. Each of its policy workers is a gang of its own."""

    def __init__(self, work: RunWork, own: Sequence[str], replay: _Replay) -> None:
        self.work, self.own, self.replay = work, own, replay
        self.coordinator, self.turns = replay.coordinator, replay.turns
        self.update = f"{work.name}/update"
        alone = [] if work.stays else [*own]
        alone += [device for device in replay.devices if work.borrows and device not in own]
        self.workers = [_Worker(f"{work.name}/policy on {device}", (device,)) for device in alone]
        self.workers += [_Worker(f"{work.name}/rollout", tuple(own), True)] * work.stays
        self.iteration, self.phase, self.until = 0, "", work.joins_s
        self.batch = work.batch(0)
        self.bucket = 0  # of progress
        self.resting: set[str] = set()  # idle gangs

    def act(self, leaving: Collection[str], now: float) -> bool:
        """Take all steps that are possible at this time; True if there was any. `leaving`: gangs that should give
        way."""
        if self.phase == "generate":
            return self._generate(leaving, now)
        if self.phase == "update" and self.until == inf and self.coordinator.granted(self.update):
            self.until = now + self.work.update_s(len(self.own))
        if now < self.until:
            return False
        {"": self._join, "wait": self._ask_to_update, "update": self._end_iteration}[self.phase](now)
        return True

    def next_at(self, now: float) -> float:
        """The time of the run's next own event."""
        moments = [
            self.until,
            *(at for worker in self.workers for at in (worker.begins_at, worker.stops_at) if at is not None),
        ]
        return min([at for at in moments if at > now] + [now + self.batch.next_s()] * (self.phase == "generate"))

    def pass_time(self, seconds: float) -> None:
        if self.phase == "generate":
            self.batch.pass_time(seconds)

    def _join(self, now: float) -> None:
        if self.work.joins_s:
            self.turns.joins(self.work.name, self.work.weight, self.own, now)
        on = {self.update: tuple(self.own)} | {worker.gang: worker.devices for worker in self.workers}
        gangs = {gang: [Claim(f"{gang}: worker", devices)] for gang, devices in on.items()}
        parts = [worker.gang for worker in self.workers if not worker.stays]
        tiers = {gang: TRAIN if gang == self.update else GENERATE for gang in on}
        residents = [claim.worker for claims in gangs.values() for claim in claims]
        self.coordinator.join(self.work.name, gangs, tiers, parts, residents)
        self._begin_batch(now)

    def _begin_batch(self, now: float) -> None:
        self.batch, self.phase, self.until, self.bucket = self.work.batch(self.iteration), "generate", inf, 0
        self.turns.reports(self.work.name, 0.0, now)
        for worker in self.workers:
            self.coordinator.acquire(worker.gang)

    def _generate(self, leaving: Collection[str], now: float) -> bool:
        changed = sum(self._come_or_go(worker, worker.gang in leaving, now) for worker in self.workers)
        working = [w for w in self.workers if w.begins_at is not None and w.begins_at <= now and not w.stops_at]
        self.batch.work_on([device for worker in working for device in worker.devices])
        if (bucket := int(self.batch.progress * BUCKETS + 1e-9)) != self.bucket:
            self.bucket = bucket
            self.turns.reports(self.work.name, bucket / BUCKETS, now)
        if self.batch.progress == 1:
            for worker in self.workers:
                self._give_back(worker)
            self.resting = set()
            self.turns.set_idle(self.work.name, (), now)
            self.phase, self.until = "wait", now + self.work.wait_s
            return True
        self._rest()
        return bool(changed)

    def _come_or_go(self, worker: _Worker, leaves: bool, now: float) -> bool:
        if worker.gang not in self.coordinator.holders.values():
            return False
        if worker.begins_at is None:
            worker.begins_at = now + max(self.replay.waking_s(device, self.work.name) for device in worker.devices)
        elif leaves and worker.stops_at is None:
            worker.stops_at = now + self.replay.drain_s
        elif worker.stops_at is not None and now >= worker.stops_at:
            self._give_back(worker)
            self.coordinator.acquire(worker.gang)
        else:
            return False
        return True

    def _rest(self) -> None:
        """Report the workers without work."""
        resting = set()
        if not self.batch.has_more():
            busy = self.batch.busy()
            resting = {worker.gang for worker in self.workers if not busy.intersection(worker.devices)}
        if resting != self.resting:
            self.resting = resting
            self.turns.set_idle(self.work.name, resting, self.coordinator.now)

    def _give_back(self, worker: _Worker) -> None:
        if worker.gang in self.coordinator.waiting:
            self.coordinator.cancel(worker.gang)
        elif worker.gang in self.coordinator.holders.values():
            self.coordinator.release(worker.gang)
        worker.begins_at = worker.stops_at = None

    def _ask_to_update(self, now: float) -> None:
        self.phase, self.until = "update", inf
        self.coordinator.acquire(self.update)

    def _end_iteration(self, now: float) -> None:
        self.coordinator.release(self.update)
        self.turns.reports(self.work.name, None, now)
        self.iteration += 1
        if self.iteration < self.work.iterations:
            self._begin_batch(now)
            return
        self.phase, self.until = "ended", inf
        self.coordinator.leave(self.work.name)
        self.turns.remove_run(self.work.name, "finished", now)


class _Replay:
    def __init__(self, devices: Sequence[str], rule: str, switch_s: tuple[float, float]) -> None:
        self.devices, (self.drain_s, self.wake_s) = devices, switch_s
        self.lines: list[dict[str, Any]] = []
        self.turns = RunTurns(rule, self.lines.append)
        self.turns.drain_s, self.turns.wake_s = switch_s
        self.coordinator = Coordinator(dict.fromkeys(devices, inf), {}, turns=self.turns)
        self.before: dict[str, str] = {}  # device -> the run that generated on it last

    def waking_s(self, device: str, run: str) -> float:
        """Seconds until a policy worker that has got a device can generate."""
        before, self.before[device] = self.before.get(device, run), run
        return 0.0 if before == run else self.wake_s

    def play(self, works: Sequence[RunWork], own: Mapping[str, Sequence[str]], tick_s: float) -> list[dict[str, Any]]:
        runs = [_ReplayedRun(work, own[work.name], self) for work in works]
        now = 0.0
        for run in runs:  # all runs join before the first request
            if not run.work.joins_s:
                self.turns.joins(run.work.name, run.work.weight, run.own, now)
        while True:
            self.coordinator.pass_time(now)
            leaving = self.coordinator.leaving()
            while sum(run.act(leaving, now) for run in runs):
                self.coordinator.pass_time(now)
                leaving = self.coordinator.leaving()
            if all(run.phase == "ended" for run in runs):
                return self.lines
            until = min([run.next_at(now) for run in runs])
            waits = bool(self.coordinator.waiting)
            assert until < inf or waits, "the runs wait for nothing"
            until = min(until, now + tick_s) if waits else until
            for run in runs:
                run.pass_time(until - now)
            now = until


def replay(
    works: Sequence[RunWork],
    own: Mapping[str, Sequence[str]],
    rule: str = "lend",
    switch_s: tuple[float, float] = SWITCH_S,
    tick_s: float = 0.05,
) -> list[dict[str, Any]]:
    """The events, as lines of share.jsonl. `own`: the devices of each run. `rule`: lend or remaining; or split, each
    run on its own devices only; or serial, one run after the other on all devices. `switch_s`: seconds to stop on a
    device, and to load weights on one. The coordinator looks at the clock every `tick_s` while somebody waits."""
    devices = [*dict.fromkeys(device for mine in own.values() for device in mine)]
    lines: list[dict[str, Any]] = []
    if rule in SHARING:
        lines = _Replay(devices, rule, switch_s).play(works, own, tick_s)
    begins = 0.0
    for work in () if rule in SHARING else works:
        mine = devices if rule == "serial" else own[work.name]
        alone = replace(work, joins_s=max(begins, work.joins_s))
        lines += _Replay(mine, "lend", switch_s).play([alone], {work.name: mine}, tick_s)
        begins = lines[-1]["at"] if rule == "serial" else 0.0
    header = {"format": FORMAT, "rule": rule, "devices": devices, "started": ""}
    return [header, *sorted(lines, key=lambda line: line["at"])]


def ends(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The end of each run."""
    return {line["run"]: line["at"] for line in lines if "ends" in line}
