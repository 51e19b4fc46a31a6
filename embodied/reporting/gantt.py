"""Draws a predicted iteration: a row per device, a colour per component."""

from __future__ import annotations

from collections import defaultdict

from embodied.placement.event_replay import Schedule
from embodied.reporting.html import Html
from embodied.reporting.svg import Bars, Rows, row_charts, short

FIRST = ("sim", "policy", "learner")  # of the same colours in every drawing
MOST_ROWS = 24  # devices drawn; more would not be told apart
MOST_SPANS = 2000  # bars drawn in a row; neighbours are joined beyond


def draw(schedules: dict[str, Schedule]) -> Html:
    """One chart under the other, on one time axis."""
    found = dict.fromkeys(span.component for schedule in schedules.values() for span in schedule.spans)
    colors = {name: i for i, name in enumerate(dict.fromkeys([*FIRST, *found])) if name in found}
    longest = max(schedule.seconds for schedule in schedules.values()) or 1.0
    near = longest / MOST_SPANS
    charts = []
    for title, schedule in schedules.items():
        bars: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
        for span in schedule.spans:
            bars[span.device][span.component].append((span.start_s, span.end_s))
        rows = []
        for device in shown_devices(schedule):
            own = bars[device].items()
            rows.append(
                (device, [Bars(join_near(spans, near), f"{device}: {name}", colors[name]) for name, spans in own])
            )
        charts.append(Rows(f"{title}; {short(schedule.seconds)} s", rows, longest, schedule.seconds))
    return row_charts("what every device does", charts, colors, "seconds of an iteration")


def join_near(bars: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Bars that are nearer to each other than `gap` become one."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(bars):
        if joined and start - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def shown_devices(schedule: Schedule) -> list[str]:
    """All, or the first and last of each kind of use: a whole cluster shows what its kinds of devices do."""
    used = [device for device in schedule.devices if device in schedule.busy_s]
    if len(used) <= MOST_ROWS:
        return used
    kinds: dict[tuple, list[str]] = {}
    for device in used:
        does = tuple(dict.fromkeys(s.component for s in schedule.spans if s.device == device))
        kinds.setdefault((device.rpartition(":")[0], does), []).append(device)
    each = max(2, MOST_ROWS // len(kinds))
    return [device for devices in kinds.values() for device in [*devices[: each - 1], devices[-1]]]
