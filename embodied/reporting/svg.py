"""Charts as inline SVG: lines with bands, points with whiskers, histograms, rows of bars, in the page's colours.

A chart is drawn 440 units wide, about what a phone shows, so that its text keeps its size; wider pages set charts side
by side. Each line carries its numbers: the page's script shows those nearest to the pointer. Rows of bars are drawn
twice as wide, with title and legend inside, so that they can also be files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

import numpy as np

from embodied.reporting.html import ASSETS, Html, tag

WIDTH, HEIGHT = 440, 244
LEFT, RIGHT, TOP, BOTTOM = 62, 10, 8, 40
LONGEST_TITLE = 34  # letters of an axis title that fit beside a chart
MOST_POINTS = 240  # of a line; of more, neighbours are drawn as their mean with a band from lowest to highest
COLORS = 8  # the style names .c0 to .c7
ROW = 16  # height of a row of bars
STYLE = """svg { background: #fff } text { font: 11px sans-serif; fill: #5c6570 } .x { text-anchor: middle }
.y { text-anchor: end } .spans { opacity: 0.85 } .grid { stroke: #dfe3e8 } .axis { stroke: #5c6570 }
.edge { stroke: #1b1f24 }"""


@dataclass(frozen=True)
class Series:
    """One curve. `low` and `high` bound each point: a band behind a line, a whisker on a point."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    points: bool = False  # measured now and then: dots instead of a line
    color: int = 0
    faint: bool = False  # one of many, behind their mean


@dataclass(frozen=True)
class Bars:
    """The part of a row that one colour covers: pieces from start to end, with `words` for the pointer."""

    pieces: Sequence[tuple[float, float]]
    words: str
    color: int
    whisker: tuple[float, float] | None = None


@dataclass(frozen=True)
class Rows:
    """A chart of named rows on an axis from 0 to `high`, with a line across them at `end`."""

    title: str
    rows: Sequence[tuple[str, Sequence[Bars]]]
    high: float
    end: float | None = None


@dataclass(frozen=True)
class Axis:
    """Maps numbers to positions: from `low` at `start` to `high` at `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def line_chart(
    title: str,
    series: Sequence[Series],
    y_range: tuple[float, float] | None = None,
    show: Callable[[float], str] | None = None,
    x_name: str = "env steps",
    from_zero: bool = False,
    y_name: str = "",
) -> Html:
    """A figure with its title, its legend where there is more than one series, and the chart. `y_name`: the title of
    the y axis where it is not that of the figure."""
    show = show or short
    drawn = [thinned(one) for one in map(finite, series) if one.x]
    if not drawn:
        return figure(title, tag("p", "nothing yet", class_="empty"))
    across = x_axis([x for one in drawn for x in one.x])
    up = y_axis([y for one in drawn for ys in (one.y, one.low, one.high) for y in ys], y_range, from_zero)
    shapes = [*grid(across, up, show)]
    for one in drawn:
        shapes += drawn_series(one, across, up, show)
    marks: dict[int, tuple] = {}  # by colour: evaluations of a run that has a line need no entry of their own
    for one in sorted(drawn, key=lambda one: (one.points, one.faint)):
        marks.setdefault(one.color, (one.name, style_of(one.color), "dot" if one.points else ""))
    return figure(title, legend(list(marks.values())), canvas(title, shapes, x_name, y_name or title))


def histogram(
    title: str, groups: dict[str, Sequence[float]], x_name: str, whole: bool = False, y_name: str = "episodes"
) -> Html:
    """Stacked counts: `groups` maps a style class (success, failure, played) to values, integers if `whole`."""
    groups = {kind: [value for value in group if math.isfinite(value)] for kind, group in groups.items() if group}
    values = [value for group in groups.values() for value in group]
    if not values:
        return figure(title, tag("p", "nothing yet", class_="empty"))
    edges = bins(values, whole)
    counts = {kind: np.histogram(group, edges)[0].tolist() for kind, group in groups.items()}
    totals = [sum(column) for column in zip(*counts.values())]
    across = Axis(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    up = Axis(0, max(totals), HEIGHT - BOTTOM, TOP)
    shapes = grid(across, up, short, whole_y=True)
    for i, (left, right) in enumerate(pairwise(edges)):
        base = 0
        for kind, column in counts.items():
            if column[i]:
                top = up.at(base + column[i])
                x, width = across.at(left) + 0.5, max(across.at(right) - across.at(left) - 1, 1)
                bar = {"x": x, "y": top, "width": round(width, 1), "height": round(up.at(base) - top, 1)}
                words = f"{spell(left, right, whole)}: {column[i]} {kind}"
                shapes.append(tag("rect", tag("title", words), class_=f"bar {kind}", **bar))
                base += column[i]
    return figure(
        title, legend([(kind, kind, "") for kind in counts]), canvas(title, shapes, x_name, y_name, read=False)
    )


def row_charts(title: str, charts: Sequence[Rows], colors: dict[str, int], x_name: str) -> Html:
    """Charts of rows, one under the other in one drawing, with the legend `colors`."""
    longest = max((len(name) for chart in charts for name, _ in chart.rows), default=0)
    width, left = 2 * WIDTH, min(16 + 6 * longest, WIDTH)
    shapes, x, y = [], left, TOP
    for name, color in colors.items():
        shapes += [bar([(x, x + 14)], y + 6, color), tag("text", name, x=x + 19, y=y + 10)]
        x += 37 + 7 * len(name)
    for chart in charts:
        across = Axis(0, chart.high, left, width - 2 * RIGHT)
        top, y = y + 36, y + 36 + ROW * len(chart.rows)
        shapes.append(tag("text", chart.title, x=left, y=top - 6))
        for value in ticks(0, chart.high, 10):
            x = across.at(value)
            shapes.append(tag("line", class_="grid", x1=x, x2=x, y1=top, y2=y))
            shapes.append(tag("text", short(value), x=x, y=y + 14, class_="x"))
        shapes.append(tag("line", class_="axis", x1=left, x2=across.end, y1=y, y2=y))
        for middle, (name, row) in zip(range(top + ROW // 2, y, ROW), chart.rows):
            shapes.append(tag("text", name, x=left - 6, y=middle + 4, class_="y"))
            for one in row:
                spots = [(across.at(start), across.at(end)) for start, end in one.pieces]
                shapes.append(bar(spots, middle, one.color, tag("title", one.words)))
                if one.whisker:
                    low, high = map(across.at, one.whisker)
                    shapes.append(tag("line", class_="edge", x1=low, x2=high, y1=middle, y2=middle))
        if chart.end is not None:
            x = across.at(chart.end)
            shapes.append(tag("line", class_="edge", x1=x, x2=x, y1=top - 3, y2=y))
        y += 14
    shapes.append(tag("text", x_name, x=width // 2, y=y + 16, class_="x"))
    return tag("svg", *shapes, viewBox=f"0 0 {width} {y + 24}", role="img", aria_label=title)


def bar(pieces: Sequence[tuple[float, float]], middle: float, color: int, *children: Html) -> Html:
    """All pieces as one path, which takes a dozen bytes for each; none is too thin to be seen."""
    drawn = "".join(f"M{start:g} {middle:g}h{max(end - start, 0.3):.3g}" for start, end in pieces)
    return tag("path", *children, d=drawn, stroke_width=ROW - 4, class_=f"spans c{color % COLORS}")


def as_file(drawing: Html) -> str:
    """The drawing as an SVG file, in the colours of a light page, by name: few editors know variables."""
    colors = re.findall(r"--(c\d): (#\w+)", (ASSETS / "report.css").read_text(encoding="utf-8"))[:COLORS]
    style = tag("style", STYLE, *[f" .{name} {{ stroke: {color} }}" for name, color in colors])
    opening, _, rest = drawing.partition(">")
    return f'{opening} xmlns="http://www.w3.org/2000/svg">{style}{rest}\n'


# Parts of a drawing


def figure(title: str, *parts: object) -> Html:
    return tag("figure", tag("figcaption", title), *parts)


def legend(entries: list[tuple[str, str, str]]) -> Html | None:
    """A legend of entries (name, style class, kind of mark); None where there is only one."""
    if len(entries) < 2:
        return None
    marks = [tag("li", tag("i", class_=f"{style} {mark}".strip()), name) for name, style, mark in entries]
    return tag("ul", *marks, class_="legend")


def swatch(color: int) -> Html:
    """A spot of this colour, before a name in a legend."""
    return tag("i", class_=f"swatch c{color % COLORS}")


def style_of(color: int) -> str:
    """The style classes of a line's colour; lines beyond the last colour take the first again, dashed."""
    return f"c{color % COLORS}{' again' if color >= COLORS else ''}"


def canvas(title: str, shapes: Sequence[Html], x_name: str, y_name: str, read: bool = True) -> Html:
    """The drawing with the titles of its axes; with `read` the pointer shows the numbers of its lines."""
    box, middle = f"0 0 {WIDTH} {HEIGHT}", (HEIGHT - BOTTOM + TOP) / 2
    up = y_name if len(y_name) <= LONGEST_TITLE else f"{y_name[: LONGEST_TITLE - 1]}\u2026"
    titles = [
        tag("text", x_name, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 6, class_="x title"),
        tag("text", up, transform=f"translate(12 {middle:g}) rotate(-90)", class_="x title"),
    ]
    return tag("svg", *shapes, *titles, viewBox=box, role="img", aria_label=title, data_x=x_name if read else None)


def grid(across: Axis, up: Axis, show: Callable[[float], str], whole_y: bool = False) -> list[Html]:
    shapes = []
    for value in ticks(up.low, up.high, 5, whole_y):
        y = up.at(value)
        shapes.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
        shapes.append(tag("text", show(value), x=LEFT - 6, y=y + 4, class_="y"))
    for value in ticks(across.low, across.high, 5):
        shapes.append(tag("text", short(value), x=across.at(value), y=HEIGHT - BOTTOM + 17, class_="x"))
    shapes.append(tag("line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM))
    return shapes


def drawn_series(one: Series, across: Axis, up: Axis, show: Callable[[float], str]) -> list[Html]:
    """Dots with their whiskers, or a line before its band."""
    color = style_of(one.color)
    spots = [(across.at(x), up.at(y)) for x, y in zip(one.x, one.y)]
    shapes = []
    if one.points:
        for (x, _), low, high in zip(spots, one.low, one.high):
            shapes.append(tag("line", x1=x, x2=x, y1=up.at(low), y2=up.at(high), class_=f"whisker {color}"))
        shapes += [tag("circle", cx=x, cy=y, r=3.5, class_=f"dot {color}") for x, y in spots]
        # Invisible: it carries the numbers for the pointer.
        return [*shapes, tag("polyline", points=path(spots), class_=f"unseen {color}", **numbers(one, show))]
    if one.low:
        there = [(across.at(x), up.at(y)) for x, y in zip(one.x, one.high)]
        back = [(across.at(x), up.at(y)) for x, y in zip(one.x, one.low)]
        shapes.append(tag("polygon", points=path([*there, *reversed(back)]), class_=f"band {color}"))
    kind = f"line {color}{' faint' if one.faint else ''}"
    shapes.append(tag("polyline", points=path(spots), class_=kind, **numbers(one, show)))
    if len(spots) == 1:
        shapes.append(tag("circle", cx=spots[0][0], cy=spots[0][1], r=3, class_=f"dot {color}"))
    return shapes


def numbers(one: Series, show: Callable[[float], str]) -> dict[str, str]:
    """The attributes from which the page's script reads this series: x and y of every point."""
    values = [show(y) for y in one.y]
    if one.low:
        values = [f"{text} [{show(low)}, {show(high)}]" for text, low, high in zip(values, one.low, one.high)]
    return {"data_name": one.name, "data_at": "|".join(short(x) for x in one.x), "data_y": "|".join(values)}


def path(spots: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in spots)


def finite(one: Series) -> Series:
    """The series without the points that have no finite number."""
    keep = [i for i, y in enumerate(one.y) if y is not None and math.isfinite(y)]
    values = {name: getattr(one, name) for name in ("x", "y", "low", "high")}
    return replace(one, **{name: [found[i] for i in keep] if found else [] for name, found in values.items()})


def thinned(one: Series) -> Series:
    """The series with at most MOST_POINTS points: the means of neighbours, with a band that spans them."""
    if one.points or len(one.x) <= MOST_POINTS:
        return one
    size = math.ceil(len(one.x) / MOST_POINTS)
    parts = [slice(i, i + size) for i in range(0, len(one.x), size)]
    return replace(
        one,
        x=[one.x[part][-1] for part in parts],
        y=[fmean(one.y[part]) for part in parts],
        low=[min(one.low[part] or one.y[part]) for part in parts],
        high=[max(one.high[part] or one.y[part]) for part in parts],
    )


# Axes and the numbers on them


def x_axis(values: list[float]) -> Axis:
    low, high = min(0.0, min(values)), max(values)
    return Axis(low, high if high > low else low + 1, LEFT, WIDTH - RIGHT)


def y_axis(values: list[float], fixed: tuple[float, float] | None, from_zero: bool) -> Axis:
    low, high = fixed or (min(values), max(values))
    if not fixed:
        pad = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
        low, high = (0.0 if from_zero or 0 <= low < 0.4 * high else low - pad), high + pad
    return Axis(low, high, HEIGHT - BOTTOM, TOP)


def ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from `low` to `high`, about `most` of them."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= raw * 0.999)
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def bins(values: Sequence[float], whole: bool) -> list[float]:
    """Edges of about 20 bins of a round width; of integers, bins of whole numbers around them, five or more."""
    low, high = min(values), max(values)
    if whole:
        spare = max(0, 4 - int(high - low))
        low, high = low - spare // 2, high + spare - spare // 2
        width = max(1, math.ceil((high - low + 1) / 24))
        return [low - 0.5 + i * width for i in range(math.ceil((high - low + 1) / width) + 1)]
    if high == low:
        return [low - 0.5, low + 0.5]
    marks = ticks(low, high, 20)
    step = marks[1] - marks[0]
    first, last = math.floor(low / step), math.ceil(high / step)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def spell(left: float, right: float, whole: bool) -> str:
    if not whole:
        return f"{short(left)} to {short(right)}"
    first, last = math.ceil(left), math.floor(right)
    return str(first) if first == last else f"{first} to {last}"


def short(value: float) -> str:
    """A number as an axis shows it: 1.5M, 20k, 0.25, 3e-4."""
    if value == 0:
        return "0"
    size = abs(value)
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.4g}{name}"
    if size < 1e-3:
        mantissa, _, exponent = f"{value:.3g}".partition("e")
        return f"{mantissa}e{int(exponent)}" if exponent else f"{value:.3g}"
    return f"{value:.4g}"


def percent(value: float) -> str:
    return f"{100 * value:.3g}%"
