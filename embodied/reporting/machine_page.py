"""Where a run's time went, what ran on which devices, and the provenance of the result."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from embodied.core.arrays import gather
from embodied.core.files import reading
from embodied.reporting.html import Html, facts_table, join, tag
from embodied.reporting.runs import Run, noted
from embodied.reporting.svg import Series, figure, legend, line_chart, short
from embodied.reporting.timeline import TimedSpan, innermost, read_trace

TRACE = "trace.json"
MOST_TRACE_BYTES = 10_000_000  # a larger one is left to a trace viewer
MOST_ROWS = 48  # workers or hosts drawn one under the other
BINS = 800  # across a timeline; each shows what took most of its time
SHOWN_ITERATIONS = 2
IDLE = "idle"
# Colours of the names in a timeline; other names share the first eight.
COLORS = {
    "step": 0, "update": 1, "publish": 2, "act": 3, "waiting for actions": 3, "sync": 4, "reset": 5, "serve": 6,
    "collect": 7, "rollout": 8, "load_weights": 9, "save": 10, "evaluate": 11, "offload": 10, "onload": 11,
}  # fmt: skip


def time_spent(run: Run) -> list[Html]:
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
    bar = figure("All iterations, mean sim worker", shares_legend(parts), bar_of(parts, sum(whole)))
    return [tag("div", line_chart("Seconds per iteration", series), bar, class_="charts")]


def timeline_charts(run: Run) -> list[Html]:
    """Every worker's activities, from trace.json: shares of the time, and piece by piece the last iterations in it.
    Adds to the run's problems if that cannot be read."""
    path = run.folder / TRACE
    spans: list[TimedSpan] = []
    note: list[Html] = []
    if path.is_file():
        with noted(run.problems), reading(path):
            spans, note = pieces_of(path, run.problems)
    if not spans:
        return note
    last = max(span.iteration for span in spans)
    first = max(last - SHOWN_ITERATIONS + 1, 1)
    shown = [span for span in spans if first <= span.iteration <= last]
    return [per_worker(spans), worker_rows(shown, f"Iterations {first} to {last}, piece by piece")]


def pieces_of(path: Path, problems: list[str] | None = None) -> tuple[list[TimedSpan], list[Html]]:
    """Every moment of a trace once, or a note instead where it is too large."""
    if path.stat().st_size > MOST_TRACE_BYTES:
        return [], [tag("p", f"{path.name} is too large to be drawn here; open it in a trace viewer.", class_="note")]
    return innermost(read_trace(path, problems)), []


def per_worker(spans: list[TimedSpan]) -> Html:
    """A bar per worker: the shares of the traced time."""
    whole = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    rows = []
    for worker, own in by_worker(spans):
        parts: dict[str, float] = defaultdict(float)
        for span in own:
            if span.name != "wait":
                parts[span.name] += span.end_s - span.start_s
        rows.append(strip(worker, bar_of(dict(parts), whole), own[0].host))
    iterations = len({span.iteration for span in spans})
    names = sorted({span.name for span in spans if span.name != "wait"})
    return figure(f"Share of the time per worker, first {iterations} iterations", shares_legend(names), *rows)


def worker_rows(spans: list[TimedSpan], title: str) -> Html:
    """A row per worker: its activities over time."""
    start, end = min(span.start_s for span in spans), max(span.end_s for span in spans)
    names = sorted({span.name for span in spans if span.name != "wait"})
    rows = [strip(worker, pieces(own, start, end), own[0].host) for worker, own in by_worker(spans)]
    axis = tag("div", tag("span", "0 s"), tag("span", f"{end - start:.3g} s"), class_="ends")
    return figure(title, shares_legend(names), *rows, strip("", axis))


def by_worker(spans: list[TimedSpan]) -> list[tuple[str, list[TimedSpan]]]:
    return list(gather((span.worker, span) for span in spans).items())[:MOST_ROWS]


def pieces(spans: list[TimedSpan], start: float, end: float) -> Html:
    """The row of one worker: neighbouring bins of one name are one rectangle."""
    width = (end - start) / BINS or 1.0
    bins: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        if span.name == "wait":
            continue
        first, last = int((span.start_s - start) / width), int((span.end_s - start) / width)
        for i in range(first, min(last, BINS - 1) + 1):
            left = start + i * width
            bins[i][span.name] += min(span.end_s, left + width) - max(span.start_s, left)
    kinds = [most(bins[i], width) if i in bins else IDLE for i in range(BINS)]
    shapes, at = [], 0
    while at < BINS:
        until = next((i for i in range(at, BINS) if kinds[i] != kinds[at]), BINS)
        if kinds[at] != IDLE:
            title = tag("title", f"{kinds[at]}, {(until - at) * width * 1e3:.3g} ms at {at * width:.4g} s")
            place = {"x": at, "y": 0, "width": until - at, "height": 10}
            shapes.append(tag("rect", title, **place, class_=f"bar {color_of(kinds[at])}"))
        at = until
    shapes += [moved(span, start, width) for span in spans if is_move(span.name)]
    return tag("svg", *shapes, viewBox=f"0 0 {BINS} 10", preserveAspectRatio="none", class_="pieces")


def is_move(name: str) -> bool:
    """True if a span is memory that leaves a device or comes back."""
    return name.startswith(("offload ", "onload "))


def moved(span: TimedSpan, start: float, width: float) -> Html:
    """A memory move, drawn on top and never too thin to be seen."""
    at, wide = (span.start_s - start) / width, max((span.end_s - span.start_s) / width, 3)
    title = tag("title", f"{span.name}, {1e3 * (span.end_s - span.start_s):.3g} ms at {span.start_s - start:.4g} s")
    place = {"x": f"{at:.1f}", "y": 0, "width": f"{wide:.1f}", "height": 10}
    return tag("rect", title, **place, class_=f"bar {color_of(span.name)}")


def most(busy: dict[str, float], width: float) -> str:
    """The activity with the largest part of a bin; the rest may be idle."""
    name = max(busy, key=busy.__getitem__)
    return name if busy[name] >= width - sum(busy.values()) else IDLE


def bar_of(parts: dict[str, float], whole: float) -> Html:
    """A bar of shares side by side; the rest stays empty."""
    cells = []
    for name, seconds in parts.items():
        share = max(seconds, 0.0) / whole if whole > 0 else 0.0
        cells.append(tag("i", title=f"{name} {share:.1%}", class_=color_of(name), style=f"width:{100 * share:.2f}%"))
    return tag("div", *cells, class_="shares")


def shares_legend(parts: Iterable[str] | dict[str, float]) -> Html | None:
    """A legend of names with their colours, and with seconds where they are known."""
    seconds = parts if isinstance(parts, dict) else {}
    words = {name: f"{name} {short(seconds[name])} s" if name in seconds else name for name in parts}
    return legend([(words[name], color_of(name), "") for name in parts])


def color_of(name: str) -> str:
    return f"c{COLORS.get(name.split(' ')[0] if is_move(name) else name, sum(map(ord, name)) % 8)}"


def strip(label: str, drawing: Html, note: str = "") -> Html:
    """A named row; on a narrow screen the name stands above the drawing."""
    small = tag("small", note) if note and note != label else None
    return tag("div", tag("span", label, " ", small), drawing, class_="strip")


def placement_chart(plan: dict[str, Any]) -> list[Html]:
    """A row per process and a column per device: processes that share a column take turns or share the device."""
    hosts = plan["hosts"]
    columns = list(dict.fromkeys(device for host in hosts for device in devices(host)))
    columns += [f"cpu:{core}" for core in plan.get("idle", ()) if f"cpu:{core}" not in columns]
    columns.sort(key=lambda device: (device.rpartition(":")[0], int(device.rpartition(":")[2])))
    roles = list(dict.fromkeys(role for host in hosts for role in host["roles"]))
    rows = []
    for host in hosts[:MOST_ROWS]:
        own = set(devices(host))
        colors = " ".join(f"c{roles.index(role) % 8}" for role in host["roles"][:1])
        mine = {column: tag("i", title=f"{host['name']}: {column}", class_=colors) for column in own}
        cells = [mine.get(column) or tag("i", title=column) for column in columns]
        chips = [tag("b", role, class_=f"chip c{roles.index(role) % 8}") for role in host["roles"]]
        label = join(tag("span", host["name"]), " ", *chips)
        rows.append(tag("div", tag("span", label), tag("div", *cells, class_="cells"), class_="strip"))
    named = columns if len(columns) <= 16 else [columns[0], columns[-1]]
    names = tag("div", *[tag("span", column.removeprefix("cpu:")) for column in named], class_="ends")
    why = f"{plan['mode']}{': ' + plan['reason'] if plan.get('reason') else ''}"
    note = f"{why}. {plan['num_envs']} envs. A row is a process, a column a device; a filled cell is one it may use."
    left_out = len(hosts) - MOST_ROWS
    more = tag("p", f"and {left_out} more processes", class_="note") if left_out > 0 else None
    return [tag("p", note, class_="note"), tag("div", *rows, strip("", names), more, class_="card placement")]


def devices(host: dict[str, Any]) -> list[str]:
    """The device or the cores of a host."""
    return [host["device"]] if host.get("device") else [f"cpu:{core}" for core in host.get("cores", ())]


def provenance_table(run: Run) -> Html:
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
        "resumed": ", ".join(str(one.get("at")) for one in run.info.get("resumed", [])),
    }
    return facts_table(facts)
