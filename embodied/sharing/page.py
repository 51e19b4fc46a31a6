"""The pages of runs that share devices: a table in the terminal, and report.html when all runs have ended.

Reads share.jsonl (written by `sharing/run_turns.py`): the holds of every device, and the waits of every run.

record = ShareRecord()
record.add({"format": "embodied-share/1", "rule": "lend", "devices": ["cpu:0"], "started": "..."})
record.add({"at": 0.0, "run": "a", "joins": {"weight": 1.0, "own": ["cpu:0"]}})
record.add({"at": 0.1, "device": "cpu:0", "run": "a", "phase": "update"})
record.holds_until(2.0)     -> [Hold("cpu:0", "a", "update", 0.1, 2.0)]
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from embodied.core.errors import printable
from embodied.core.files import aligned, reading, show
from embodied.reporting.page import Block, Row, Rows, named_table, page, percent, rows_chart, section, short, tiles
from embodied.sharing.run_turns import FORMAT, RECORD

WHEN = "%Y-%m-%d %H:%M UTC"
HEAD = ("run", "holds", "share", "target", "waits", "batch", "iteration", "steps/s")
SHOW_S = 1.0  # between two tables on a terminal
FIRST_S, REPORT_S = 7.5, 60.0  # in a log: to the first table, and between two at most; the time between two doubles
GANTT_NOTE = (
    "A row is a device, a colour a run. The rows below show when a run asked for devices and had none. "
    "Predictions are of iterations: they begin when a run has built its workers, and end before its last evaluation."
)


# In the terminal


class LiveTable:
    """Prints the table repeatedly; on a terminal in the same place."""

    def __init__(self, record: ShareRecord, stream: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.record, self.stream, self.clock = record, stream or sys.stdout, clock
        self.live, self.lines, self.shown_at = self.stream.isatty(), 0, clock()
        self.wait_s = SHOW_S if self.live else FIRST_S  # until the next table

    def show(self, now_s: float, folders: Mapping[str, Path] = MappingProxyType({})) -> None:
        """`now_s`: seconds since the share began. `folders`: of the runs."""
        if self.clock() - self.shown_at < self.wait_s:
            return
        self.shown_at = self.clock()
        self.wait_s = SHOW_S if self.live else min(2 * self.wait_s, REPORT_S)
        lines = table_lines(self.record, now_s, folders)
        self._write(lines)
        self.lines = len(lines)

    def say(self, text: str) -> None:
        """Print a permanent line above the table."""
        self._write([text])
        self.lines, self.shown_at = 0, self.clock() - SHOW_S if self.live else self.shown_at

    def _write(self, lines: Sequence[str]) -> None:
        """Print lines over the previous table."""
        up = f"\033[{self.lines}A\033[J" if self.live and self.lines else ""
        show(up + "".join(f"{printable(line)}\n" for line in lines), self.stream)


def table_lines(record: ShareRecord, now_s: float, folders: Mapping[str, Path]) -> list[str]:
    """A line per run: its current devices, its share of all devices' time and the target, its total waiting time, and
    the progress of its batch."""
    used, targets = record.device_seconds(), record.targets()
    whole = len(record.devices) * now_s or 1.0
    rows = []
    for run in record.runs.values():
        iteration, speed = last_iteration(folders.get(run.name))
        waited = f"{record.waited_s(run.name):.0f} s{' now' if run.waits_since is not None else ''}"
        batch = "" if run.progress is None else f"{run.progress:.0%}"
        shares = f"{used[run.name] / whole:.0%}", f"{targets[run.name]:.0%}"
        rows.append((run.name, holds_of(record, run), *shares, waited, batch, iteration, speed))
    title = f"{now_s:.0f} s, {len(record.devices)} devices, rule {record.rule}"
    return [title, *aligned(HEAD, rows)]


def holds_of(record: ShareRecord, run: SharingRun) -> str:
    """`cpu:0 cpu:1 update`; or the run's end."""
    if run.how:
        return run.how
    holders: dict[str, list[str]] = defaultdict(list)
    for hold in record.held.values():
        if hold.run == run.name:
            holders[UPDATE if hold.phase == UPDATE else "rollout"].append(hold.device)
    return ", ".join(f"{' '.join(sorted(devices))} {phase}" for phase, devices in holders.items()) or "-"


def last_iteration(folder: Path | None) -> tuple[str, str]:
    """Number and env steps per second of a run's last iteration, from its folder."""
    row: dict[str, Any] = {}
    with suppress(OSError, ValueError, IndexError):
        with ((folder or Path("no folder yet")) / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 20_000))
            row = json.loads(file.read().decode(errors="replace").split("\n")[-2])
    return (str(row["iteration"]), f"{row['steps_per_s']:,.0f}") if row else ("-", "-")


# The page


def share_page(folder: Path) -> Block:
    """The page of the runs in this folder, with their prediction if it exists."""
    record = read_share(folder)
    predicted = read_share(folder / PREDICTED) if (folder / PREDICTED).is_file() else None
    names = ", ".join(record.runs)
    ended = [run for run in record.runs.values() if run.how not in ("", "finished")]
    charts = {"measured": (record, 0.0)}
    charts |= {"predicted": (predicted, record.begun_s())} if predicted else {}
    return page(
        f"{names} - shared devices",
        [
            section("", figures(record, predicted)),
            section("Who had which device", gantt(charts), note=GANTT_NOTE),
            section("Runs", runs_table(record, predicted)),
        ],
        words_of(record),
        [f"{run.name} {run.how} after {short(run.ended_s or 0)} s" for run in ended],
        heading=f"{names} on {len(record.devices)} devices",
    )


def words_of(record: ShareRecord) -> str:
    begun = f" \u00b7 {datetime.fromisoformat(record.started):{WHEN}}" if record.started else ""
    return f"rule {record.rule}: {', '.join(record.devices)}{begun}"


def figures(record: ShareRecord, predicted: ShareRecord | None) -> Block | None:
    makespan, trained = record.makespan_s(), record.trained_s()
    expected = predicted.trained_s() if predicted else 0.0
    beside = f"predicted {short(expected)} s ({expected / trained - 1:+.1%})" if expected and trained else ""
    longest = max(record.runs, key=record.waited_s, default="")
    switches = sum(hold.run != before.run for hold, before in changes(record))
    return tiles(
        [
            ("makespan", f"{short(makespan)} s", "with starts and evaluations"),
            ("iterations of all", f"{short(trained)} s", beside),
            ("utilisation", percent(record.utilisation()), "of the devices' time in the hands of a run"),
            ("longest wait", f"{short(record.waited_s(longest) if longest else 0)} s", longest),
            ("changes of hands", str(switches), "from one run to another"),
        ]
    )


def changes(record: ShareRecord) -> list[tuple]:
    """Each hold with the previous hold of the same device."""
    by_device: dict[str, list] = defaultdict(list)
    for hold in sorted(record.holds, key=lambda hold: hold.start_s):
        by_device[hold.device].append(hold)
    return [(hold, before) for holds in by_device.values() for before, hold in pairwise(holds)]


def runs_table(record: ShareRecord, predicted: ShareRecord | None) -> Block:
    used, targets = record.device_seconds(), record.targets()
    whole = len(record.devices) * record.makespan_s() or 1.0
    rows = []
    for name, run in record.runs.items():
        holds = [hold for hold in record.holds_until(record.now_s) if hold.run == name]
        updates = sum(hold.seconds for hold in holds if hold.phase == UPDATE)
        lent = sum(hold.seconds for hold in holds if hold.device not in run.own)
        end = run.ended_s if run.ended_s is not None else record.now_s
        row = {"owns": len(run.own), "end": f"{short(end)} s", "waited": f"{short(record.waited_s(name))} s"}
        row |= {"share of the devices": percent(used[name] / whole), "target": percent(targets[name])}
        row |= {"updates": percent(updates / (used[name] or 1)), "borrowed": percent(lent / (used[name] or 1))}
        if predicted:
            trained, expected = record.trained_s(name), predicted.trained_s(name) if name in predicted.runs else 0.0
            error = f"{expected / trained - 1:+.1%}" if expected and trained else "-"
            row |= {"iterations": f"{short(trained)} s", "predicted": f"{short(expected)} s" if expected else "-"}
            row |= {"error": error}
        rows.append((name, row))
    return named_table("run", rows)


def gantt(records: Mapping[str, tuple[ShareRecord, float]]) -> Block:
    """A chart for each record on a common time axis: a row per device, and a row per run with its waits."""
    longest = max(begins + record.makespan_s() for record, begins in records.values()) or 1.0
    runs = [*dict.fromkeys(name for record, _ in records.values() for name in record.runs)]
    charts = []
    for title, (record, begins) in records.items():
        bars: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        for hold in record.holds_until(record.now_s):
            name = f"{hold.run} {UPDATE}" if hold.phase == UPDATE else hold.run
            bars[hold.device][name].append((begins + hold.start_s, begins + hold.end_s))
        rows = [Row(device, bars[device]) for device in record.devices]
        for name, run in record.runs.items():
            if run.waits:
                rows.append(Row(name, {name: [(begins + start, begins + end) for start, end in run.waits]}, "waits"))
        end = record.makespan_s()
        charts.append(Rows(f"{title}; {short(end)} s", rows, longest, begins + end))
    names = [f"{name}{suffix}" for name in runs for suffix in ("", f" {UPDATE}")]
    return rows_chart("which run had which device", charts, "seconds", names=names)


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
        line = self.runs[run]
        since = self.now_s - line.waits_since if line.waits_since is not None else 0.0
        return sum(end - start for start, end in line.waits) + since

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
        ends = [member.trained_s for member in runs if member.trained_s is not None]
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
