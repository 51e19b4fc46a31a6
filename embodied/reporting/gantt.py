"""Draws a predicted iteration: a row per device, a colour per component. A PNG, also for inside an HTML page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

from embodied.placement.simulate import Schedule
from embodied.reporting.html import Html, tag

COLOURS = {"sim": "#4477aa", "policy": "#ee8866", "learner": "#44aa77"}
MORE = ("#aa4477", "#bbbb33", "#66ccee", "#999999")
MOST_ROWS = 24  # devices drawn; more would not be told apart
MOST_SPANS = 4000  # bars drawn in a row; neighbours are joined beyond


def draw(schedules: dict[str, Schedule]) -> bytes:
    """One chart under the other, on one time axis, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = {name: shown_devices(schedule) for name, schedule in schedules.items()}
    height = sum(0.22 * len(devices) + 0.75 for devices in rows.values()) + 0.4
    figure = Figure(figsize=(10, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(schedules), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(schedule.seconds for schedule in schedules.values())
    for axis, (name, schedule) in zip(axes, schedules.items(), strict=True):
        draw_one(axis, schedule, rows[name])
        axis.set_title(name, loc="left", fontsize=9)
        axis.set_xlim(0, longest)
    axes[-1].set_xlabel("seconds of an iteration")
    found = dict.fromkeys(span.component for schedule in schedules.values() for span in schedule.spans)
    handles = [axes[0].barh(0, 0, color=colour(name, list(found)), label=name) for name in found]
    axes[0].legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(found), fontsize=8, frameon=False
    )
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120)
    return out.getvalue()


def draw_one(axis, schedule: Schedule, devices: Sequence[str]) -> None:
    components = list(dict.fromkeys(span.component for span in schedule.spans))
    for row, device in enumerate(devices):
        for name in components:
            bars = [(s.start_s, s.end_s) for s in schedule.spans if s.device == device and s.component == name]
            joined = join_near(bars, schedule.seconds / MOST_SPANS)
            axis.broken_barh([(a, b - a) for a, b in joined], (row - 0.4, 0.8), color=colour(name, components))
    axis.set_yticks(range(len(devices)), devices, fontsize=7)
    axis.invert_yaxis()
    axis.axvline(schedule.seconds, color="black", linewidth=0.8)


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


def colour(component: str, known: list[str]) -> str:
    others = [name for name in known if name not in COLOURS]
    return COLOURS.get(component) or MORE[others.index(component) % len(MORE)]


def image(png: bytes, alt: str) -> Html:
    """The PNG inside a page; `alt` describes it in words."""
    return tag("img", src=f"data:image/png;base64,{base64.b64encode(png).decode()}", alt=alt, style="max-width:100%")
