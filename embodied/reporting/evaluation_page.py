"""One evaluation: its table by task, how its episodes differ, and videos of some of them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodied.core.types import EpisodeResult
from embodied.reporting.html import Html, join, relative, table, tag
from embodied.reporting.runs import Evaluation, Run
from embodied.reporting.svg import histogram, percent, short
from embodied.reporting.videos import MOSAIC, VIDEO_NAME

MEASURES = ("success_once", "success_at_end")
FIGURES = (*MEASURES, "episodes", "errors", "return", "length")
MOST_VIDEOS = 4  # of each outcome
VIDEO_BYTES = 3_000_000  # a larger video is linked, not put into the page
PAGE_BYTES = 12_000_000  # of all videos in the page
OUTCOMES = ("failure", "success", "played", "error")  # in the order their videos are shown


def outcome(episode: EpisodeResult) -> str:
    """One of OUTCOMES; "played" where the env has no success."""
    if episode.error:
        return "error"
    return {True: "success", False: "failure", None: "played"}[episode.success_once]


def per_task_table(evaluation: Evaluation) -> Html:
    """A row per task, and one for all where there are several."""
    found = dict(evaluation.results["per_task"])
    if len(found) > 1:
        found["all"] = evaluation.results["overall"]
    rows = []
    for task, figures in found.items():
        at_reset = figures["success_at_reset"]
        rows.append([task, *figure_cells(figures), at_reset["count"] if at_reset else "-"])
    return table(["task", *FIGURES, "at reset"], rows)


def evaluations_table(run: Run) -> Html:
    """A row per evaluation of a run."""
    rows = []
    for one in run.evaluations:
        steps = run.env_steps(one.version)
        rows.append([one.name, f"{steps:,}" if steps is not None else "-", *figure_cells(one.results["overall"])])
    return table(["evaluation", "env steps", *FIGURES], rows)


def figure_cells(figures: dict[str, Any], names: Sequence[str] = FIGURES) -> list[object]:
    """A table's cells under these names; a dash for a figure that is not there."""
    show = {**dict.fromkeys(MEASURES, measure_cell), "return": short, "length": short}
    return ["-" if figures.get(name) is None else show.get(name, str)(figures[name]) for name in names]


def measure_cell(measure: dict[str, Any]) -> Html:
    """`88.5% [83.3%, 92.2%] 177/200`"""
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


def video_gallery(evaluation: Evaluation, beside: Path) -> Html | None:
    """The mosaic of all videos if there is one, and the first MOST_VIDEOS of each outcome, failures first."""
    episodes = {episode.index: episode for episode in evaluation.episodes}
    found: dict[str, list[int]] = {}
    paths = videos_by_episode(evaluation)
    for index in sorted(paths.keys() & episodes.keys()):
        found.setdefault(outcome(episodes[index]), []).append(index)
    chosen = [index for kind in OUTCOMES for index in found.get(kind, [])[:MOST_VIDEOS]]
    room, shown = PageVideos(beside), []
    if (mosaic := evaluation.folder / "videos" / MOSAIC).is_file():
        shown.append(room.show(mosaic, f"All {len(paths)} videos: green succeeds, red fails", class_="mosaic"))
    shown += [room.show_episode(paths[i], episodes[i]) for i in chosen]
    return tag("div", *shown, class_="videos") if shown else None


def videos_by_episode(evaluation: Evaluation) -> dict[int, Path]:
    """The video of every episode that has one, by the episode's index."""
    paths = sorted((evaluation.folder / "videos").glob("*.mp4"))
    return {int(named["episode"]): path for path in paths if (named := VIDEO_NAME.fullmatch(path.name))}


class PageVideos:
    """Puts videos into a page while they are small and there is room, and links the others."""

    def __init__(self, beside: Path) -> None:
        self.beside = beside
        self.left = PAGE_BYTES

    def show_episode(self, path: Path, episode: EpisodeResult, label: str = "") -> Html:
        """The video of an episode, with its outcome."""
        kind = outcome(episode)
        words = f"{episode.task}, episode {episode.index}, {episode.length} steps, return {short(episode.total_reward)}"
        return self.show(
            path, f"{label}: " if label else None, tag("span", kind, class_=f"outcome {kind}"), f" {words}"
        )

    def show(self, path: Path, *words: object, **how: Any) -> Html:
        """A video and its caption. One inside the page is loaded at once; of a linked one only its metadata."""
        size, link = path.stat().st_size, relative(path, self.beside)
        source, preload = link, "metadata"
        if size <= min(VIDEO_BYTES, self.left):
            self.left -= size
            source = "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()
            preload = "auto"
        video = tag("video", src=source, controls=True, loop=True, muted=True, playsinline=True, preload=preload)
        return tag("figure", video, tag("figcaption", *words, " ", tag("a", "file", href=link)), **how)
