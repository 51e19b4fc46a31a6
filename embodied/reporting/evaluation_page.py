"""One evaluation: its table by task, how its episodes differ, and videos or transcripts of some of them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodied.core.arrays import gather
from embodied.core.types import EpisodeResult
from embodied.reporting.html import Html, join, relative, table, tag
from embodied.reporting.results import sampling
from embodied.reporting.runs import Evaluation, Run, start_of
from embodied.reporting.svg import histogram, percent, short
from embodied.reporting.transcripts import PARTS, TRANSCRIPTS, read_transcripts
from embodied.reporting.transcripts_page import Conversations, can_be_shown, filters, legend
from embodied.reporting.videos import MOSAIC, VIDEO_NAME

MEASURES = ("success_once", "success_at_end")
FIGURES = (*MEASURES, "episodes", "errors", "return", "length")
MOST_VIDEOS = 4  # of each outcome
MOST_CONVERSATIONS = 100  # of each outcome
VIDEO_BYTES = 3_000_000  # a larger video is linked, not put into the page
PAGE_BYTES = 12_000_000  # of all videos in the page
OUTCOMES = ("failure", "success", "played", "error")  # in the order their videos are shown


def outcome(episode: EpisodeResult) -> str:
    """One of OUTCOMES; "played" where the env has no success."""
    if episode.error:
        return "error"
    return {True: "success", False: "failure", None: "played"}[episode.success_once]


def per_task_table(evaluation: Evaluation) -> Html:
    """A row per task, one per suite, and one for all where there are several."""
    found = evaluation.results["per_task"] | evaluation.results.get("per_suite", {})
    if len(found) > 1:
        found["all"] = evaluation.results["overall"]
    if evaluation.of_text:
        return named_table("task", {task: text_cells(figures) for task, figures in found.items()})
    at_reset = {task: (figures["success_at_reset"] or {}).get("count", "-") for task, figures in found.items()}
    rows = [[task, *figure_cells(figures), at_reset[task]] for task, figures in found.items()]
    return table(["task", *FIGURES, "at reset"], rows)


def evaluations_table(run: Run) -> Html:
    """A row per evaluation of a run, after one of the policy that it started from."""
    start = start_of(run)
    before = f"start: {start.folder.parents[1].name} {start.name}" if start else ""
    if run.last and run.last.of_text:
        rows = {before: answers_of(run, start) | {"version": "-", "env steps": "-"}} if start else {}
        return named_table("evaluation", rows | {one.name: answers_of(run, one) for one in run.evaluations})
    steps = [run.env_steps(one.version) for one in run.evaluations]
    trained = ["-" if known is None else f"{known:,}" for known in steps]
    lines = [[e.name, after, *figure_cells(e.results["overall"])] for e, after in zip(run.evaluations, trained)]
    lines = [[before, "-", *figure_cells(start.results["overall"])], *lines] if start else lines
    return table(["evaluation", "env steps", *FIGURES], lines)


def figure_cells(figures: dict[str, Any], names: Sequence[str] = FIGURES) -> list[object]:
    """A table's cells under these names; a dash for a figure that is not there."""
    show = {**dict.fromkeys(MEASURES, rate_cell), "return": short, "length": short}
    return ["-" if figures.get(name) is None else show.get(name, str)(figures[name]) for name in names]


def named_table(head: str, rows: dict[str, dict[str, object]]) -> Html:
    """A table of rows that need not have the same columns."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    return table([head, *names], [[key, *[row.get(name, "-") for name in names]] for key, row in rows.items()])


def answers_of(run: Run, one: Evaluation) -> dict[str, object]:
    """The figures of an evaluation of a language policy, and its origin."""
    steps = run.env_steps(one.version)
    about = {
        "version": one.version,
        **({"env steps": f"{steps:,}"} if steps is not None else {}),
        "sampling": sampling(one.results) or "-",
    }
    return about | text_cells(one.results["overall"])


def text_cells(figures: dict[str, Any]) -> dict[str, object]:
    """Cells of a language policy's figures by the names of their columns."""
    text = figures.get("text")
    if not text:
        return {"errors": figures["errors"]}
    rates = {"success (avg@k)": text["avg"]} | {f"pass@{k}": rate for k, rate in text["pass"].items() if k != "1"}
    found: dict[str, object] = {name: rate_cell(rate) for name, rate in rates.items() if rate}
    found |= {"answers": join(f"{figures['episodes']:,} ", tag("small", f"{text['samples']} to a prompt"))}
    found |= {"errors": figures["errors"], "return": "-" if figures["return"] is None else short(figures["return"])}
    if cut := text["truncated"]:
        found |= {"cut off": join(percent(cut["rate"]), " ", tag("small", f"{cut['count']:,}"))}
    return found | ({"tokens an answer": short(text["tokens"])} if text["tokens"] is not None else {})


def rate_cell(rate: dict[str, Any]) -> Html:
    """`88.5% [83.3%, 92.2%] 177/200`"""
    value, *rest = describe_rate(rate)
    return join(value, " ", tag("small", *[join(tag("span", words), " ") for words in rest]))


def describe_rate(rate: dict[str, Any]) -> list[str]:
    """["88.5%", "[83.3%, 92.2%]", "177/200"]; of a mean over prompts, which counts nothing, the first two."""
    low, high = map(percent, rate["interval"])
    counts = [f"{rate['count']}/{rate['of']}"] if "count" in rate else []
    return [percent(rate["rate"]), f"[{low}, {high}]", *counts]


def histograms(evaluation: Evaluation) -> list[Html]:
    """Episode length (a language policy's in tokens) and return, by outcome."""
    played = [episode for episode in evaluation.episodes if not episode.error]
    groups = {kind: [one for one in played if outcome(one) == kind] for kind in OUTCOMES}
    returns = {kind: [one.total_reward for one in group] for kind, group in groups.items()}
    title, unit, key = "Episode length", "env steps", "length"
    if evaluation.of_text:
        title, unit, key = "Tokens of a conversation's answers", "tokens", "tokens"
    sizes = {kind: [getattr(one, key) for one in group] for kind, group in groups.items()}
    return [histogram(title, sizes, unit, whole=True), histogram("Return", returns, "return")]


def conversations(evaluation: Evaluation, beside: Path) -> list[Html]:
    """The first conversations of each outcome, failures first; as many as eval.videos says are unfolded."""
    by_outcome = {kind: [one for one in evaluation.episodes if outcome(one) == kind] for kind in OUTCOMES}
    chosen = [one for kind in OUTCOMES for one in by_outcome[kind][:MOST_CONVERSATIONS]]
    written = transcripts_of(evaluation, [one.index for one in chosen])
    chosen = [one for one in chosen if one.index in written]
    if not chosen:
        return []
    unfolded = evaluation.results.get("protocol", {}).get("eval", {}).get("videos", 0)
    room, shown = Conversations(), []
    for place, one in enumerate(chosen):
        name = f"{one.task}, {prompt_name(one)}, episode {one.index}"
        shown.append(room.show(one, written[one.index], outcome(one), name, place < unfolded))
    counts = {"any": len(chosen)} | {kind: sum(outcome(one) == kind for one in chosen) for kind in OUTCOMES}
    counts["cut-off"] = sum(bool(one.truncated) for one in chosen)
    words = {"any": "all", "cut-off": "cut off"}
    kinds = [(kind, f"{words.get(kind, kind)} {count}") for kind, count in counts.items() if count]
    file = evaluation.folder / TRANSCRIPTS
    missing = f"{len(shown)} of {len(evaluation.episodes)} are shown. " if len(shown) < len(evaluation.episodes) else ""
    link = tag("a", TRANSCRIPTS, href=relative(file, beside)) if file.is_file() else f"{PARTS}/"
    return [
        tag("p", missing, "All of them, with every log-prob: ", link, ".", class_="note"),
        legend(),
        tag("div", *filters(kinds), *shown, class_="conversations"),
    ]


def transcripts_of(evaluation: Evaluation, wanted: Sequence[int]) -> dict[int, dict[str, Any]]:
    """The transcripts of these episodes that can be shown."""
    found = read_transcripts(evaluation.folder, set(wanted))
    return {index: written for index, written in found.items() if can_be_shown(written)}


def prompt_name(episode: EpisodeResult) -> str:
    """Names the prompt: `prompt 17`, or `seed 1234` where prompts are drawn."""
    return f"prompt {episode.init_state_id}" if episode.init_state_id >= 0 else f"seed {episode.seed}"


def video_gallery(evaluation: Evaluation, beside: Path) -> Html | None:
    """The mosaic of all videos if there is one, and the first MOST_VIDEOS of each outcome, failures first."""
    episodes = {episode.index: episode for episode in evaluation.episodes}
    paths = videos_by_episode(evaluation)
    found = gather((outcome(episodes[index]), index) for index in sorted(paths.keys() & episodes.keys()))
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
    """Embeds small videos in a page while there is room, and links the rest."""

    def __init__(self, beside: Path) -> None:
        self.beside = beside
        self.left = PAGE_BYTES

    def show_episode(self, path: Path, episode: EpisodeResult, label: str = "") -> Html:
        """The video of an episode, with its outcome."""
        kind = outcome(episode)
        shown = join(f"{label}: " if label else None, tag("span", kind, class_=f"outcome {kind}"))
        words = f"{episode.task}, episode {episode.index}, {episode.length} steps, return {short(episode.total_reward)}"
        return self.show(path, shown, f" {words}")

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
