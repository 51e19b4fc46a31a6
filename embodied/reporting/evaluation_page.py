"""One evaluation: its table by task, how its episodes differ, and clips of some of them."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from embodied.core.types import EpisodeResult
from embodied.reporting.html import Html, join, relative, table, tag
from embodied.reporting.runs import Evaluation
from embodied.reporting.svg import histogram, percent, short
from embodied.reporting.video_mosaic import MOSAIC

CLIPS = 4  # of each outcome
CLIP_BYTES = 3_000_000  # a larger clip is linked, not put into the page
PAGE_BYTES = 12_000_000  # of all clips in the page
VIDEO = re.compile(r"episode-(\d+)_")
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
    return join(rate, " ", tag("small", *[join(tag("span", word), " ") for word in rest.rsplit(" ", 1)]))


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


def clips(evaluation: Evaluation, beside: Path) -> Html | None:
    """All films in one where there is such a film, and the first CLIPS of each outcome, failures first."""
    episodes = {episode.index: episode for episode in evaluation.episodes}
    found: dict[str, list[int]] = {}
    films = filmed(evaluation)
    for index in sorted(films.keys() & episodes.keys()):
        found.setdefault(outcome(episodes[index]), []).append(index)
    chosen = [index for kind in OUTCOMES for index in found.get(kind, [])[:CLIPS]]
    room, shown = Clips(beside), []
    if (mosaic := evaluation.folder / "videos" / MOSAIC).is_file():
        shown.append(room.film(mosaic, f"All {len(films)} films: green succeeds, red fails", class_="mosaic"))
    shown += [room.show(films[i], episodes[i]) for i in chosen]
    return tag("div", *shown, class_="clips") if shown else None


def filmed(evaluation: Evaluation) -> dict[int, Path]:
    """The film of every episode that has one, by the episode's index."""
    paths = sorted((evaluation.folder / "videos").glob("*.mp4"))
    return {int(named[1]): path for path in paths if (named := VIDEO.match(path.name))}


class Clips:
    """Puts films into the page while they are small and there is room, and links the others."""

    def __init__(self, beside: Path) -> None:
        self.beside = beside
        self.left = PAGE_BYTES

    def show(self, path: Path, episode: EpisodeResult, label: str = "") -> Html:
        kind = outcome(episode)
        told = f"{episode.task}, episode {episode.index}, {episode.length} steps, return {short(episode.total_reward)}"
        return self.film(path, f"{label}: " if label else None, tag("span", kind, class_=f"outcome {kind}"), f" {told}")

    def film(self, path: Path, *words: object, **how: Any) -> Html:
        """A clip and what it shows. One inside the page is drawn before it is played; another asks for little."""
        size, link = path.stat().st_size, relative(path, self.beside)
        source, preload = link, "metadata"
        if size <= min(CLIP_BYTES, self.left):
            self.left -= size
            source = "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()
            preload = "auto"
        video = tag("video", src=source, controls=True, loop=True, muted=True, playsinline=True, preload=preload)
        return tag("figure", video, tag("figcaption", *words, " ", tag("a", "file", href=link)), **how)
