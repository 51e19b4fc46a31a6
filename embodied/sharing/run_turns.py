"""Decides which run uses which shared device: rules for `Coordinator`, without processes or clocks.

A run owns devices and may borrow others for generation. Waiting gangs are served by tier (initialise, train, values,
generate), then first come, first served. A gang that waits for its run's own devices longer than the run's last
iteration moves up one tier. The rule decides which run generates on a device:

    lend       a run has its own devices whenever it has work for them. A device that will be idle for several times
               the duration of a handover is lent to the run with the most remaining work per device
    remaining  generation follows remaining work, regardless of owners: one worker moves at a time, to the run
               that is furthest below its share, from an idle device or a run above its share (RLix's rule)

`share.jsonl` is the record, one JSON object a line, `at` in seconds since the start:

    {"format": "embodied-share/1", "rule": "lend", "devices": ["cpu:0", "cpu:1"], "started": "2026-11-26T03:00:00"}
    {"at": 0.1, "run": "a", "joins": {"weight": 1.0, "own": ["cpu:0"]}}
    {"at": 0.2, "run": "a", "waits": "update"}           asked for devices; ends with the device line of this phase
    {"at": 0.3, "run": "a", "waits_no_more": "update"}   does without the devices that it asked for
    {"at": 0.3, "device": "cpu:0", "run": "a", "phase": "update"}    holds it from now on; run and phase null: free
    {"at": 0.4, "run": "a", "leaves": "rollout of actor-1"}         a borrower should give way
    {"at": 0.5, "run": "a", "progress": 0.42}            of its batch, in steps of 2%; null: an iteration has ended
    {"at": 0.6, "run": "a", "ends": "finished"}          or stopped, failed, killed
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from embodied.runtime.device_leases import GENERATE, Turns

RECORD = "share.jsonl"
FORMAT = "embodied-share/1"
LEND_FACTOR = 4.0  # a device is lent if it will be idle for this multiple of a handover's duration
FIRST_SWITCH_S = 1.0  # assumed duration of a handover until one is measured
MOVE_FACTOR = 1.5  # a borrower takes a device from another one if it has this multiple of its remaining work


@dataclass
class RunShare:
    """The state of a run that shares devices."""

    weight: float
    own: frozenset[str]
    progress: float = 0.0  # collected part of its batch
    generated_s: float = 0.0  # device-seconds of generation for the current batch
    batch_s: float = 0.0  # the same for the previous batch; 0: unknown
    ended_at: float | None = None  # end of its last iteration
    iteration_s: float = float("inf")  # duration of its last iteration
    idle_since: dict[str, tuple[float, str]] = field(default_factory=dict)  # own device -> (time, last gang)
    idle_s: dict[tuple[str, str], float] = field(default_factory=dict)  # (device, gang) -> its last idle time after it

    @property
    def remaining_s(self) -> float:
        """Device-seconds of generation until its batch is complete; 1 if unknown."""
        return (self.batch_s or 1.0) * max(0.0, 1.0 - self.progress)


@dataclass
class _Gang:
    run: str
    tier: int
    devices: frozenset[str]
    place: int
    state: Literal["", "waits", "holds"] = ""
    since: float = 0.0  # time of the last change of state
    leaves_since: float | None = None
    rests: bool = False  # it has no work


class RunTurns(Turns):
    """The rules for several runs."""

    def __init__(
        self, rule: Literal["lend", "remaining"] = "lend", record: Callable[[dict[str, Any]], None] = lambda line: None
    ) -> None:
        """`record` receives the lines of share.jsonl."""
        super().__init__({}, ())
        self.rule, self._record = rule, record
        self.runs: dict[str, RunShare] = {}
        self.gangs: dict[str, _Gang] = {}
        self.now = 0.0
        # Caches, cleared by every event.
        self.target, self.generates_on, self.wants = cache(self._target), cache(self._generates_on), cache(self._wants)
        self.drain_s, self.wake_s = FIRST_SWITCH_S, 0.0  # durations of the last handover

    # Runs

    def joins(self, run: str, weight: float, own: Collection[str], now: float) -> None:
        self.now, self.runs[run] = now, RunShare(weight, frozenset(own))
        self.record(run=run, joins={"weight": weight, "own": sorted(own)})

    def set_gangs(self, run: str, devices: Mapping[str, Collection[str]], tiers: Mapping[str, int]) -> None:
        self._forget_counts()
        self.gangs = {name: gang for name, gang in self.gangs.items() if gang.run != run}
        self.gangs |= {
            name: _Gang(run, tiers.get(name, 0), frozenset(on), place)
            for place, (name, on) in enumerate(devices.items())
        }

    def remove_run(self, run: str, how: str, now: float) -> None:
        """A run has ended; its devices have no owner any more."""
        self.now = now
        self.set_gangs(run, {}, {})
        del self.runs[run]
        self.record(run=run, ends=how)

    def reports(self, run: str, progress: float | None, now: float) -> None:
        """A run has collected this part of its batch; None: its iteration has ended."""
        self.now, share = now, self.runs[run]
        if progress is None:
            share.batch_s, share.generated_s = share.generated_s or share.batch_s, 0.0
            share.iteration_s = now - share.ended_at if share.ended_at is not None else share.iteration_s
            share.ended_at = now
        share.progress = min(1.0, progress or 0.0)
        self.record(run=run, progress=progress)

    @property
    def switch_s(self) -> float:
        return self.drain_s + self.wake_s

    def note_load_time(self, seconds: float) -> None:
        """A worker that joined on a device took `seconds` to load its weights."""
        self.wake_s = mean(self.wake_s or seconds, seconds)

    # Rules

    def tier(self, gang: str) -> int:
        record = self.gangs[gang]
        if record.rests:
            return GENERATE + 1
        late = record.state == "waits" and self.now - record.since > self.runs[record.run].iteration_s
        return max(0, record.tier - (late and not self.borrows(gang)))

    def borrows(self, gang: str) -> bool:
        """True if the gang generates on devices of other runs."""
        record = self.gangs[gang]
        return self.rule == "lend" and record.tier == GENERATE and not record.devices <= self.runs[record.run].own

    def order(self, waiting: Collection[str]) -> list[str]:
        demands = {run: self.demand(run) for run in {self.gangs[gang].run for gang in waiting}}

        def turn(gang: str) -> tuple:
            record = self.gangs[gang]
            by_demand = self.borrows(gang) or (self.rule == "remaining" and record.tier == GENERATE)
            demand = -demands[record.run] if by_demand else 0.0
            return self.tier(gang), self.borrows(gang), demand, record.since, record.place

        return sorted(waiting, key=turn)

    def gives_way(self, holder: str, waiting: str) -> bool:
        return (self.tier(holder), self.borrows(holder)) > (self.tier(waiting), self.borrows(waiting))

    def may_begin(self, gang: str) -> bool:
        record = self.gangs[gang]
        lent = record.devices - self.runs[record.run].own if self.borrows(gang) else ()
        return all(self.idle_from_now_s(device) >= LEND_FACTOR * self.switch_s for device in lent)

    def idle_from_now_s(self, device: str) -> float:
        """Expected seconds until its owners have work for it. A device that is idle for the first time, or longer than
        last time, is expected to stay idle for as long as it has been."""
        idle_s = float("inf")
        for run in self.runs.values():
            if device in run.own:
                since, after = run.idle_since.get(device, (self.now, ""))
                idle = self.now - since
                before = run.idle_s.get((device, after), 0.0)
                idle_s = min(idle_s, before - idle if before > idle else idle)
        return idle_s

    def moves(self, waiting: Collection[str], held: Mapping[str, str]) -> set[str]:
        able = {device: gang for device, gang in held.items() if self.gangs[gang].tier == GENERATE}
        if any(self.gangs[gang].leaves_since is not None for gang in able.values()):
            return {gang for gang in able.values() if self.gangs[gang].leaves_since is not None}  # one at a time
        for gang in self.order([gang for gang in waiting if self.tier(gang) == GENERATE]):
            donors = {able.get(device, "") for device in self.gangs[gang].devices}
            if len(donors) == 1 and (donor := next(iter(donors))) and self.pays_to_move(gang, donor):
                return donors
        return set()

    def pays_to_move(self, gang: str, donor: str) -> bool:
        """True if moving the devices of generating gang `donor` to `gang` pays."""
        mine, theirs = self.gangs[gang].run, self.gangs[donor].run
        if mine == theirs:
            return False
        if self.rule == "lend":
            both = self.borrows(gang) and self.borrows(donor) and self.may_begin(gang)
            return both and self.demand(mine) >= MOVE_FACTOR * self.demand(theirs, more=0)
        if self._busy_on(theirs) <= 1:
            return False
        excess, lack = -self.gap(theirs), self.gap(mine)
        gain = abs(excess) + abs(lack) - abs(excess - 1) - abs(lack - 1)
        return gain > 0.1 * max(1.0, self.target(mine))

    def demand(self, run: str, more: int = 1) -> float:
        """Remaining work per device with `more` additional devices; with RLix's rule, the relative gap to its share."""
        if self.rule == "remaining":
            return self.gap(run) / max(self.target(run), 1e-9)
        return self.runs[run].remaining_s / max(1, self.generates_on(run) + more)

    def _generating(self, run: str) -> list[_Gang]:
        """The gangs of devices on which it generates."""
        mine = [gang for gang in self.gangs.values() if gang.run == run]
        return [gang for gang in mine if gang.tier == GENERATE and gang.state == "holds"]

    def _generates_on(self, run: str) -> int:
        """The number of devices on which it generates."""
        return len({device for gang in self._generating(run) for device in gang.devices})

    def _busy_on(self, run: str) -> int:
        """The number of devices on which it generates and that it will keep: devices without work are released."""
        kept = [gang for gang in self._generating(run) if not gang.rests and gang.leaves_since is None]
        return len({device for gang in kept for device in gang.devices})

    def _wants(self, run: str) -> bool:
        """True if it generates or waits to generate."""
        gangs = [gang for gang in self.gangs.values() if gang.run == run and gang.tier == GENERATE and not gang.rests]
        return any(gang.state for gang in gangs)

    def _target(self, run: str) -> float:
        """Its target number of devices for generation, in proportion to its remaining work."""
        taken = {
            d for gang in self.gangs.values() if gang.state == "holds" and gang.tier < GENERATE for d in gang.devices
        }
        devices = {d for share in self.runs.values() for d in share.own} - taken
        total = sum(share.remaining_s * share.weight for name, share in self.runs.items() if self.wants(name))
        asker = self.runs[run]
        return len(devices) * asker.remaining_s * asker.weight / total if total else 0.0

    def gap(self, run: str) -> float:
        return self.target(run) - self.generates_on(run)

    # What happens

    def note_request(self, gang: str, now: float) -> None:
        self.now, record = now, self.gangs[gang]
        record.since, record.state = now, "waits"
        self._has_work(record)
        self.record(run=record.run, waits=phase_of(gang))

    def begins(self, gang: str, now: float) -> None:
        self.now, record = now, self.gangs[gang]
        record.since, record.state = now, "holds"
        for device in sorted(record.devices):
            self.record(device=device, run=record.run, phase=phase_of(gang))
        if not record.devices:
            self.record(run=record.run, waits_no_more=phase_of(gang))

    def asked_to_leave(self, gang: str, now: float) -> None:
        if self.gangs[gang].leaves_since is None:
            self.gangs[gang].leaves_since = now
            self.record(run=self.gangs[gang].run, leaves=phase_of(gang))

    def ends(self, gang: str, now: float) -> None:
        self.now, record = now, self.gangs[gang]
        share = self.runs[record.run]
        if record.leaves_since is not None:
            self.drain_s, record.leaves_since = mean(self.drain_s, now - record.leaves_since), None
        if record.state == "holds" and record.tier == GENERATE:
            share.generated_s += (now - record.since) * len(record.devices)
        for device in sorted(record.devices) if record.state == "holds" else ():
            self.record(device=device, run=None, phase=None)
        if record.state == "waits":
            self.record(run=record.run, waits_no_more=phase_of(gang))
        record.state = ""
        self._forget_counts()
        self._has_no_work(gang)

    def set_idle(self, run: str, gangs: Collection[str], now: float) -> None:
        """Marks these gangs of a run as without work in their phase: they give way to all other gangs and are served
        last. The run's other gangs have work."""
        self.now = now
        self._forget_counts()
        for name, record in self.gangs.items():
            if record.run == run and record.rests != (name in gangs):
                record.rests = name in gangs
                if record.rests:
                    self._has_no_work(name)
                elif record.state:
                    self._has_work(record)

    def _has_work(self, gang: _Gang) -> None:
        """Marks the devices of a gang as in use by their run."""
        share = self.runs[gang.run]
        for device in () if gang.rests else gang.devices & share.own:
            if idle := share.idle_since.pop(device, None):
                share.idle_s[device, idle[1]] = self.now - idle[0]

    def _has_no_work(self, gang: str) -> None:
        """Marks a gang as without work. Devices of its run that no other of its gangs needs are idle from now on."""
        record = self.gangs[gang]
        share = self.runs[record.run]
        others = [other for other in self.gangs.values() if other.run == record.run and other.state and not other.rests]
        idle = (record.devices & share.own) - {device for other in others for device in other.devices}
        share.idle_since = dict.fromkeys(idle, (self.now, gang)) | share.idle_since

    def passes(self, now: float) -> None:
        self.now = now

    def record(self, **line: Any) -> None:
        self._forget_counts()
        self._record({"at": round(self.now, 3), **line})

    def _forget_counts(self) -> None:
        for counts in (self.target, self.generates_on, self.wants):
            counts.cache_clear()


def phase_of(gang: str) -> str:
    """The name of a gang within its run: update for a/update."""
    return gang.partition("/")[2]


def mean(before: float, new: float) -> float:
    return (before + new) / 2
