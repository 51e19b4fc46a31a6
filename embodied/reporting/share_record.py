"""Reads share.jsonl (written by `runtime/run_turns.py`): the holds of every device, and the waits of every run.

record = ShareRecord()
record.add({"format": "embodied-share/1", "rule": "lend", "devices": ["cpu:0"], "started": "..."})
record.add({"at": 0.0, "run": "a", "joins": {"weight": 1.0, "own": ["cpu:0"]}})
record.add({"at": 0.1, "device": "cpu:0", "run": "a", "phase": "update"})
record.holds_until(2.0)     -> [Hold("cpu:0", "a", "update", 0.1, 2.0)]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from embodied.core.files import reading
from embodied.runtime.run_turns import FORMAT, RECORD

UPDATE, BUILDING = "update", "initialise"  # phases of every run
SHARE = "share.json"  # the runs of a share, beside the record
PREDICTED = "predicted.jsonl"  # beside the record: the prediction, in the same format


@dataclass(frozen=True)
class Hold:
    """A time in which a run has a device."""

    device: str
    run: str
    phase: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass
class SharingRun:
    """A run that shares devices."""

    name: str
    weight: float
    own: tuple[str, ...]
    joined_s: float
    ended_s: float | None = None
    trained_s: float | None = None  # end of its last iteration
    how: str = ""  # how it ended
    progress: float | None = None  # of its batch
    asks: set[str] = field(default_factory=set)  # phases that wait for devices
    waits: list[tuple[float, float]] = field(default_factory=list)  # begin and end of each wait without any device
    waits_since: float | None = None


class ShareRecord:
    """The record of a share. It is read line by line, so the same code shows current and ended shares."""

    def __init__(self) -> None:
        self.rule, self.started, self.now_s, self.resumed_s = "", "", 0.0, 0.0
        self.devices: list[str] = []
        self.runs: dict[str, SharingRun] = {}
        self.holds: list[Hold] = []  # ended holds
        self.held: dict[str, Hold] = {}  # current holds, by device

    def add(self, line: Mapping[str, Any]) -> None:
        if "format" in line:
            if line["format"] != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            self._begin(line)
            return
        now = self.now_s = self.resumed_s + float(line["at"])
        if "device" in line:
            self._change_hands(line["device"], line["run"], line["phase"], now)
            return
        if "joins" in line:
            about = line["joins"]
            before = self.runs.get(line["run"])
            run = SharingRun(line["run"], about["weight"], tuple(about["own"]), before.joined_s if before else now)
            self.runs[line["run"]] = replace(run, waits=before.waits if before else [])
        run = self.runs[line["run"]]
        if "waits" in line:
            run.asks.add(line["waits"])
        elif "waits_no_more" in line:
            run.asks.discard(line["waits_no_more"])
        elif "progress" in line:
            run.progress = line["progress"]
            run.trained_s = now if run.progress is None else run.trained_s
        elif "ends" in line:
            run.ended_s, run.how, run.asks = now, line["ends"], set()
        self._note_waiting(run, now)

    def _begin(self, line: Mapping[str, Any]) -> None:
        """Read the first line of a share. The times of a resumed share follow the earlier times."""
        self.holds, self.held, self.resumed_s = self.holds_until(self.now_s), {}, self.now_s
        self.rule, self.devices, self.started = line["rule"], [*line["devices"]], self.started or line["started"]

    def _change_hands(self, device: str, run: str | None, phase: str, now: float) -> None:
        before = self.held.pop(device, None)
        if before is not None and now > before.start_s:
            self.holds.append(replace(before, end_s=now))
        if run is not None:
            self.held[device] = Hold(device, run, phase, now, now)
            self.runs[run].asks.discard(phase)
        for name in {run, before.run if before else None} - {None}:
            self._note_waiting(self.runs[name], now)

    def _note_waiting(self, run: SharingRun, now: float) -> None:
        """Record a wait: the run asks for devices and has none."""
        waits = bool(run.asks) and not any(hold.run == run.name for hold in self.held.values())
        if waits and run.waits_since is None:
            run.waits_since = now
        elif not waits and run.waits_since is not None:
            if now > run.waits_since:
                run.waits.append((run.waits_since, now))
            run.waits_since = None

    # Contents of tables and pages

    def holds_until(self, now: float) -> list[Hold]:
        """All holds so far; open holds end now."""
        return [*self.holds, *(replace(hold, end_s=now) for hold in self.held.values() if now > hold.start_s)]

    def waited_s(self, run: str) -> float:
        one = self.runs[run]
        since = self.now_s - one.waits_since if one.waits_since is not None else 0.0
        return sum(end - start for start, end in one.waits) + since

    def makespan_s(self) -> float:
        """Seconds until the last run ended, or until now."""
        return max((run.ended_s if run.ended_s is not None else self.now_s for run in self.runs.values()), default=0.0)

    def begun_s(self, run: str | None = None) -> float:
        """The time when a run (or the first of all) had built its workers."""
        holds = [hold for hold in self.holds_until(self.now_s) if run in (None, hold.run)]
        built = {hold.run: hold.end_s for hold in sorted(holds, key=lambda h: h.end_s) if hold.phase == BUILDING}
        return min(built.values(), default=min((hold.start_s for hold in holds), default=0.0))

    def trained_s(self, run: str | None = None) -> float:
        """Seconds from then on until the last iteration of the run, or of all, ended."""
        runs = [self.runs[run]] if run else self.runs.values()
        ends = [one.trained_s for one in runs if one.trained_s is not None]
        return max(0.0, max(ends, default=0.0) - self.begun_s(run))

    def device_seconds(self) -> dict[str, float]:
        """Seconds of held devices, by run."""
        seconds = dict.fromkeys(self.runs, 0.0)
        for hold in self.holds_until(self.now_s):
            seconds[hold.run] += hold.seconds
        return seconds

    def utilisation(self) -> float:
        """The share of all devices' time in which a run had them."""
        whole = len(self.devices) * self.makespan_s()
        return sum(self.device_seconds().values()) / whole if whole else 0.0

    def targets(self) -> dict[str, float]:
        """The share of the devices that each run owns. A device of several runs is divided by their weights."""
        shares = dict.fromkeys(self.runs, 0.0)
        for device in self.devices:
            owners = [run for run in self.runs.values() if device in run.own]
            for run in owners:
                shares[run.name] += run.weight / sum(owner.weight for owner in owners) / len(self.devices)
        return shares


def read_share(path: Path) -> ShareRecord:
    """The record in a file, or share.jsonl of a folder. The unfinished last line of a killed parent is left out."""
    path = path / RECORD if path.is_dir() else path
    with reading(path):
        *whole, _ = path.read_text().split("\n")
        return record_of([json.loads(line) for line in whole])


def record_of(lines: Sequence[Mapping[str, Any]]) -> ShareRecord:
    record = ShareRecord()
    for line in lines:
        record.add(line)
    return record
