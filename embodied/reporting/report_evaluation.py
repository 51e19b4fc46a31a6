"""One evaluation: its table by task, how its episodes differ, and clips of some of them."""

from __future__ import annotations

import base64
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from embodied.data import EpisodeResult
from embodied.reporting.html import Html, join, table, tag
from embodied.reporting.runs import Evaluation
from embodied.reporting.svg import histogram, percent, short

CLIPS = 4  # of each outcome
CLIP_BYTES = 3_000_000  # a larger clip is linked, not put into the page
PAGE_BYTES = 12_000_000  # of all clips in the page
VIDEO = re.compile(r"episode-(\d+)_([a-z]+)_")
OUTCOMES = ("failure", "success", "played", "error")  # in the order clips are shown


def outcome(episode: EpisodeResult) -> str:
    if episode.error:
        return "error"
    return {True: "success", False: "failure", None: "played"}[episode.success_once]


def per_task_table(evaluation: Evaluation) -> Html:
    overall, tasks = evaluation.results["overall"], evaluation.results["per_task"]
    rows = [task_row(task, figures) for task, figures in tasks.items()]
    if len(rows) > 1:
        rows.append(task_row("all", overall))
    head = ["task", "success_once", "success_at_end", "episodes", "errors", "at reset", "return", "length"]
    return table(head, rows)


def task_row(task: str, figures: dict[str, Any]) -> list[object]:
    measures = [figures[name] for name in ("success_once", "success_at_end")]
    at_reset = figures["success_at_reset"]
    return [
        task,
        *[measure_cell(measure) for measure in measures],
        figures["episodes"],
        figures["errors"],
        at_reset["count"] if at_reset else "-",
        *["-" if figures[name] is None else short(figures[name]) for name in ("return", "length")],
    ]


def measure_cell(measure: dict[str, Any] | None) -> object:
    if not measure:
        return "-"
    rate, rest = describe_measure(measure)
    return join(rate, " ", tag("small", rest))


def describe_measure(measure: dict[str, Any]) -> tuple[str, str]:
    """("88.5%", "[83.3%, 92.2%] 177/200")"""
    low, high = map(percent, measure["interval"])
    return percent(measure["rate"]), f"[{low}, {high}] {measure['count']}/{measure['of']}"


def histograms(evaluation: Evaluation) -> list[Html]:
    """Episode length and return, by outcome."""
    played = [episode for episode in evaluation.episodes if not episode.error]
    groups = {kind: [one for one in played if outcome(one) == kind] for kind in OUTCOMES}
    lengths = {kind: [one.length for one in group] for kind, group in groups.items()}
    returns = {kind: [one.total_reward for one in group] for kind, group in groups.items()}
    return [
        histogram("Episode length", lengths, "env steps", whole=True),
        histogram("Return", returns, "return"),
    ]


@dataclass(frozen=True)
class Clip:
    path: Path
    kind: str
    told: str


def clips(evaluation: Evaluation, beside: Path) -> Html | None:
    """Some failures and successes to look at; inside the page while they are small."""
    chosen = choose(evaluation)
    if not chosen:
        return None
    left, figures = PAGE_BYTES, []
    for clip in chosen:
        size = clip.path.stat().st_size
        inside = size <= min(CLIP_BYTES, left)
        left -= size if inside else 0
        link = quote(os.path.relpath(clip.path, beside))
        source = embed(clip.path) if inside else link
        video = tag("video", src=source, controls=True, loop=True, muted=True, playsinline=True, preload="metadata")
        words = [
            tag("span", clip.kind, class_=f"outcome {clip.kind}"),
            " ",
            clip.told,
            " ",
            tag("a", "file", href=link),
        ]
        figures.append(tag("figure", video, tag("figcaption", *words)))
    return tag("div", *figures, class_="clips")


def choose(evaluation: Evaluation) -> list[Clip]:
    """The first CLIPS of each outcome, failures first."""
    episodes = {episode.index: episode for episode in evaluation.episodes}
    found: dict[str, list[Clip]] = {}
    for path in sorted((evaluation.folder / "videos").glob("*.mp4")):
        named = VIDEO.match(path.name)
        kind = named[2] if named else "other"
        found.setdefault(kind, []).append(Clip(path, kind, about(episodes.get(int(named[1])) if named else None, path)))
    order = [kind for kind in (*OUTCOMES, *found) if kind in found]
    return [clip for kind in dict.fromkeys(order) for clip in found[kind][:CLIPS]]


def about(episode: EpisodeResult | None, path: Path) -> str:
    if episode is None:
        return path.name
    return f"{episode.task}, episode {episode.index}, {episode.length} steps, return {short(episode.total_reward)}"


def embed(path: Path) -> str:
    return "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()
