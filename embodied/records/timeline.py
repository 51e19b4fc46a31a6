"""The timeline of a run: every timed span of every worker, on one clock.

`trace.json` is in the Chrome trace event format (open it in ui.perfetto.dev): a process per host, a thread per worker,
microseconds since training began. Events are appended line by line as iterations end, so memory stays constant and a
killed run's file is readable. Totals cover the whole run, also after single spans are no longer recorded.

Spans are named after worker methods (play, serve, learn, publish, load_weights). Inside these are step,
reset, act, sync (with other learner ranks), wait, and the moment first backward. The driver's spans are rollout,
update, publish, evaluate and save.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from embodied.runtime import Timers, WorkerGroup
from embodied.runtime.worker import machine

DRIVER = "driver"
PINGS = 5  # of a machine with another clock; the fastest answer gives the most accurate difference
LONGEST_S = 1e10  # of a trace
SMALL = 0.01  # smaller shares are not printed at the end of a run


@dataclass(frozen=True)
class TimedSpan:
    """One timed piece of work; inner spans of a worker lie within outer ones."""

    worker: str  # "sim-0", or "driver"
    host: str
    name: str
    start_s: float  # since training began
    end_s: float
    iteration: int


class Timeline:
    """Collects the spans of a run's groups and the driver's `timers`; `path` gets the spans of the first
    `iterations`."""

    def __init__(self, groups: Sequence[WorkerGroup], timers: Timers, path: Path, iterations: int) -> None:
        self.groups = groups
        self.timers = timers
        self.left = iterations
        self.before = [group.timings().survivors() for group in groups]
        self.writer = None
        if iterations:
            places = [(w, h) for group in groups for w, h in zip(group.workers, group.hosts, strict=True)]
            self.writer = TraceWriter(path, [(DRIVER, DRIVER), *places])
            self.late_s = {worker: late for group in groups for worker, late in clock_differences(group).items()}
            for group in groups:
                group.record(True).survivors()
            timers.record(True)
        self.began = perf_counter()

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *_) -> None:
        """Close the file. The trace of a run that failed is readable, but lacks the last bracket."""
        if self.writer is not None:
            self.writer.file.close()

    def collect(self, iteration: int) -> None:
        """Write the spans since the last call as this iteration's (counted from 1)."""
        if self.writer is None:
            return
        self.left -= 1
        on = self.left > 0
        self._write(DRIVER, self.timers.record(on), iteration, 0.0)
        for group in self.groups:
            for worker, recording in group.record(on).survivors().items():
                if worker in self.late_s:  # else it was added to the run
                    self._write(worker, recording, iteration, self.late_s[worker])
        if not on:
            self._close()

    def end(self) -> str:
        """Finish the file; returns how every group spent the time since the timeline was made."""
        self._close()
        wall = perf_counter() - self.began
        pairs = zip(self.groups, self.before, strict=True)
        return describe(
            {group.role: time_fractions(before, group.timings().survivors(), wall) for group, before in pairs}
        )

    def _close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    def _write(self, worker: str, recording, iteration: int, late_s: float) -> None:
        zero = self.began - late_s
        self.writer.add(worker, [(name, at - zero, seconds) for name, at, seconds in recording.spans], iteration)
        if recording.lost:
            self.writer.note(worker, f"{recording.lost} more pieces were not kept", iteration)


def time_fractions(before: dict[str, dict], after: dict[str, dict], wall_s: float) -> dict[str, float]:
    """A group's use of time between two readings of its workers' totals: shares of its workers' wall-clock time by
    name, the largest first; waiting is part of `idle`, the last. A restarted worker counts from its restart."""
    own_seconds: dict[str, float] = defaultdict(float)
    for worker, new in after.items():
        old = before.get(worker, {})
        if any(name not in new or new[name].count < total.count for name, total in old.items()):
            old = {}
        for name, total in new.items():
            own_seconds[name] += total.own_s - (old[name].own_s if name in old else 0.0)
    whole = wall_s * max(len(after), 1)
    fractions_by_name = {name: seconds / whole for name, seconds in own_seconds.items() if name != "wait"}
    fractions_by_name = dict(sorted(fractions_by_name.items(), key=lambda item: -item[1]))
    return fractions_by_name | {"idle": max(0.0, 1.0 - sum(fractions_by_name.values()))}


def describe(groups: dict[str, dict[str, float]]) -> str:
    """The large shares of each role in words: `sim: step 61%, reset 8%, idle 31%; policy: ...`"""
    large = {
        role: [f"{name} {share:.0%}" for name, share in shares_of_role.items() if share >= SMALL]
        for role, shares_of_role in groups.items()
    }
    return "; ".join(f"{role}: {', '.join(words)}" for role, words in large.items())


def clock_differences(group: WorkerGroup) -> dict[str, float]:
    """The seconds to add to each worker's clock to get the driver's, by worker."""
    here, differences = machine(), {}
    for rank, (worker, (where, _)) in enumerate(zip(group.workers, group.process().wait(), strict=True)):
        differences[worker] = 0.0 if where == here else min(ping(group[rank]) for _ in range(PINGS))[1]
    return differences


def ping(worker: WorkerGroup) -> tuple[float, float]:
    """(seconds of the round trip, the driver's clock minus the worker's)."""
    sent = perf_counter()
    (worker_s,) = worker.clock().wait()
    back = perf_counter()
    return back - sent, (sent + back) / 2 - worker_s


class TraceWriter:
    def __init__(self, path: Path, places: Sequence[tuple[str, str]]) -> None:
        """`places`: (worker, host) of all workers in the trace."""
        self.file = path.open("xb", buffering=0)  # nothing is left to flush when a run ends badly
        hosts = {host: pid for pid, host in enumerate(dict.fromkeys(host for _, host in places))}
        self.ids = {worker: (hosts[host], tid) for tid, (worker, host) in enumerate(places)}
        names = [("process_name", pid, 0, host) for host, pid in hosts.items()]
        names += [("thread_name", *self.ids[worker], worker) for worker, _ in places]
        self.file.write(b"[\n")
        self._lines([{"name": n, "ph": "M", "pid": p, "tid": t, "args": {"name": v}} for n, p, t, v in names], b"")

    def add(self, worker: str, spans: Sequence[tuple[str, float, float]], iteration: int) -> None:
        """Write spans, each (name, start in seconds, duration in seconds)."""
        pid, tid = self.ids[worker]
        common = {"cat": worker.rpartition("-")[0] or worker, "ph": "X", "pid": pid, "tid": tid}
        common["args"] = {"iteration": iteration}
        self._lines(
            [
                {"name": n, **common, "ts": microseconds(start), "dur": microseconds(seconds)}
                for n, start, seconds in spans
            ]
        )

    def note(self, worker: str, text: str, iteration: int) -> None:
        pid, tid = self.ids[worker]
        self._lines([{"name": text, "ph": "M", "pid": pid, "tid": tid, "args": {"iteration": iteration}}])

    def close(self) -> None:
        self.file.write(b"\n]\n")
        self.file.close()

    def _lines(self, events: list[dict], before: bytes = b",\n") -> None:
        if events:
            self.file.write(before + ",\n".join(json.dumps(event, separators=(",", ":")) for event in events).encode())


def microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def read_trace(path: Path, problems: list[str] | None = None) -> list[TimedSpan]:
    """The spans of a trace, by worker and time, outer spans first. Truncated traces and traces saved by a viewer are
    read, too. Foreign events are left out. ValueError without any event. Damaged lines are left out and added to
    `problems`."""
    names: dict[tuple[str, int], str] = {}
    events = 0
    spans: list[TimedSpan] = []
    damaged: list[int] = []
    with path.open(errors="replace") as file:
        for event in (event for number, line in enumerate(file, 1) for event in events_in(line, number, damaged)):
            events += isinstance(event, dict)
            with suppress(LookupError, TypeError, ValueError):
                if event["ph"] == "M" and event["name"] in ("process_name", "thread_name"):
                    key = event["pid"] if event["name"] == "process_name" else event["tid"]
                    names[event["name"], key] = str(event["args"]["name"])
                elif event["ph"] == "X":
                    spans.append(span_of(event, names))
    if not events:
        raise ValueError("it holds no events of a trace")
    if damaged and problems is not None:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        problems.append(f"{path} is damaged: line {damaged[0]}{more} cannot be read; the timeline is drawn without")
    return sorted(spans, key=lambda span: (span.worker, span.start_s, -span.end_s))


def events_in(line: str, number: int, damaged: list[int]) -> list[Any]:
    """The events of a line: one in our files, or all events of a viewer's file. The number of an unreadable line is
    added to `damaged`, except for the brackets around all events and the unfinished end of a killed run's file."""
    try:
        content = json.loads(line.rstrip(",\n"))
    except (ValueError, RecursionError):
        if line.endswith("\n") and line.strip() not in ("[", "]", ""):
            damaged.append(number)
        return []
    if isinstance(content, dict):
        content = content.get("traceEvents", content)
    return content if isinstance(content, list) else [content]


def span_of(event: dict[str, Any], names: dict[tuple[str, int], str]) -> TimedSpan:
    """The span of an event; ValueError, KeyError or TypeError if it is no span."""
    start, seconds, iteration = event["ts"] / 1e6, event["dur"] / 1e6, event["args"]["iteration"]
    if not (abs(start) < LONGEST_S and 0 <= seconds < LONGEST_S and type(iteration) is int and iteration > 0):
        raise ValueError("no moment of a run")
    worker, host = names["thread_name", event["tid"]], names["process_name", event["pid"]]
    return TimedSpan(worker, host, str(event["name"]), start, start + seconds, iteration)


def innermost(spans: Iterable[TimedSpan]) -> list[TimedSpan]:
    """A worker's spans without overlap: an inner span replaces the covered part of the outer span.

    collect 0-10 with step 2-5 inside gives collect 0-2, step 2-5, collect 5-10.
    """
    cut: list[TimedSpan] = []
    stack: list[TimedSpan] = []  # open spans, each with start_s moved to its uncounted part

    def close_until(moment: float) -> None:
        while stack and stack[-1].end_s <= moment:
            done = stack.pop()
            if done.end_s > done.start_s:
                cut.append(done)
            if stack:
                stack[-1] = replace(stack[-1], start_s=max(stack[-1].start_s, done.end_s))

    worker = None
    for span in sorted(spans, key=lambda span: (span.worker, span.start_s, -span.end_s)):
        close_until(float("inf") if span.worker != worker else span.start_s)
        worker = span.worker
        if stack and span.start_s > stack[-1].start_s:
            cut.append(replace(stack[-1], end_s=span.start_s))
        stack.append(span)
    close_until(float("inf"))
    return sorted(cut, key=lambda span: (span.worker, span.start_s))
