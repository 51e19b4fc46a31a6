"""The use of a run's time, the processes on each device, and the provenance of the result."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from embodied.core.arrays import gather
from embodied.core.files import reading
from embodied.reporting.page import Block, Row, Rows, Series, facts_table, lines, rows_chart, short, text
from embodied.reporting.runs import Run, noted
from embodied.reporting.timeline import TimedSpan, innermost, read_trace

TRACE = "trace.json"
MOST_TRACE_BYTES = 10_000_000  # a larger one is left to a trace viewer
MOST_ROWS = 48  # workers or hosts drawn one under the other
SHOWN_ITERATIONS = 2


def time_spent(run: Run) -> list[Block | None]:
    """The time of the whole run: seconds per iteration, and how the mean sim worker spent them."""
    rows = [row for row in run.metrics if row.get("time/rollout_s") is not None]
    if not rows:
        return []
    before = [0.0, *[row["train_s"] for row in rows]]
    whole = [max(row["train_s"] - earlier, 0.0) for row, earlier in zip(rows, before)]
    rollout = [row["time/rollout_s"] for row in rows]
    publish = [row["time/publish_s"] for row in rows]
    rest = [all_s - a - b for all_s, a, b in zip(whole, rollout, publish)]
    steps = [row["env_steps"] for row in rows]
    series = [
        Series("whole iteration", steps, whole, color=7),
        Series("rollout", steps, rollout, color=0),
        Series("update, after the rollout", steps, rest, color=1),
    ]
    playing = {"step": "step", "reset": "reset", "waiting for actions": "act"}
    parts = {name: sum(row[f"time/{key}_s"] for row in rows) for name, key in playing.items()}
    parts |= {"update": sum(rest), "publish": sum(publish)}
    bars = [Row(name, {name: [(0.0, max(seconds, 0.0))]}, f"{short(seconds)} s") for name, seconds in parts.items()]
    return [
        lines("Seconds per iteration", series, y="seconds"),
        rows_chart("All iterations, mean sim worker", [Rows("", bars, sum(whole))], "seconds of training"),
    ]


def timeline_charts(run: Run) -> list[Block | None]:
    """Every worker's activities, from trace.json: shares of the time, and a timeline of its last iterations. An
    unreadable trace is added to the run's problems."""
    path = run.folder / TRACE
    spans: list[TimedSpan] = []
    note: list[Block] = []
    if path.is_file():
        with noted(run.problems), reading(path):
            spans, note = pieces_of(path, run.problems)
    if not spans:
        return [*note]
    last = max(span.iteration for span in spans)
    first = max(last - SHOWN_ITERATIONS + 1, 1)
    shown = [span for span in spans if first <= span.iteration <= last]
    return [time_shares(spans), worker_rows(shown, f"Iterations {first} to {last}, piece by piece")]


def pieces_of(path: Path, problems: list[str] | None = None) -> tuple[list[TimedSpan], list[Block]]:
    """A trace's innermost spans; for a too large trace a note instead."""
    if path.stat().st_size > MOST_TRACE_BYTES:
        return [], [text(f"{path.name} is too large to be drawn here; open it in a trace viewer.")]
    return innermost(read_trace(path, problems)), []


def time_shares(spans: list[TimedSpan]) -> Block:
    """A row per worker: the shares of the traced time."""
    whole = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    rows = []
    for worker, host, pieces in worker_pieces(spans):
        bars, end = {}, 0.0
        for name, own in sorted(pieces.items()):
            start, end = end, end + sum(stop - begin for begin, stop in own)
            bars[name] = [(start / (whole or 1.0), end / (whole or 1.0))]
        rows.append(Row(worker, bars, host))
    iterations = len({span.iteration for span in spans})
    title = f"Share of the time per worker, first {iterations} iterations"
    return rows_chart(title, [Rows("", rows, 1.0)], "share of the time", "share")


def worker_rows(spans: list[TimedSpan], title: str) -> Block:
    """A row per worker: its activities over time."""
    high = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    rows = [Row(worker, pieces, host) for worker, host, pieces in worker_pieces(spans)]
    return rows_chart(title, [Rows("", rows, high)], "seconds")


def worker_pieces(spans: list[TimedSpan]) -> list[tuple[str, str, dict[str, list[tuple[float, float]]]]]:
    """(worker, host, pieces by activity) of each worker, from the first span on and without waiting."""
    begin = min(span.start_s for span in spans)
    workers = []
    for worker, own in list(gather((span.worker, span) for span in spans).items())[:MOST_ROWS]:
        pieces: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for span in own:
            if span.name != "wait":
                pieces[span.name].append((span.start_s - begin, span.end_s - begin))
        workers.append((worker, own[0].host if own[0].host != worker else "", dict(pieces)))
    return workers


def is_move(name: str) -> bool:
    """True if a span is an offload or onload of memory."""
    return name.startswith(("offload ", "onload "))


def placement_chart(plan: dict[str, Any]) -> list[Block]:
    """A row per process and a column per device: processes that share a column take turns or share the device."""
    hosts = plan["hosts"]
    columns = list(dict.fromkeys(device for host in hosts for device in devices(host)))
    columns += [f"cpu:{core}" for core in plan.get("idle", ()) if f"cpu:{core}" not in columns]
    columns.sort(key=lambda device: (device.rpartition(":")[0], int(device.rpartition(":")[2])))
    rows = []
    for host in hosts[:MOST_ROWS]:
        places = sorted(columns.index(device) for device in {*devices(host)})
        rows.append(Row(host["name"], {" + ".join(host["roles"]): [(place + 0.05, place + 0.95) for place in places]}))
    why = f"{plan['mode']}{': ' + plan['reason'] if plan.get('reason') else ''}"
    note = f"{why}. {plan['num_envs']} envs. A row is a process, a column a device; a filled cell is one it may use."
    more = len(hosts) - MOST_ROWS
    chart = rows_chart("Devices of each process", [Rows("", rows, len(columns), columns=columns)], "device")
    return [text(note), chart, *([text(f"and {more} more processes")] if more > 0 else [])]


def devices(host: dict[str, Any]) -> list[str]:
    """The device or the cores of a host."""
    return [host["device"]] if host.get("device") else [f"cpu:{core}" for core in host.get("cores", ())]


def provenance_table(run: Run) -> Block:
    """The command, commit, packages and machine that produced the result."""
    made_by = run.provenance
    packages = ", ".join(f"{name} {version}" for name, version in made_by.get("packages", {}).items())
    facts = {
        "folder": str(Path(run.folder).resolve()),
        "command": " ".join(map(str, made_by.get("command", []))),
        "commit": made_by.get("commit"),
        "packages": packages,
        "Python": made_by.get("python"),
        "machine": f"{made_by.get('platform', '')}, {made_by.get('cores', '?')} cores",
        "resumed": ", ".join(str(resume.get("at")) for resume in run.info.get("resumed", [])),
    }
    return facts_table(facts)
