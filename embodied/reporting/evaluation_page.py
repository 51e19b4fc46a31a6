"""One evaluation: rates by task, histograms of its episodes, and videos or transcripts of some episodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodied.core.arrays import gather
from embodied.core.types import EpisodeResult
from embodied.reporting.page import Block, cell, histogram, named_table, percent, relative, short, text
from embodied.reporting.results import sampling
from embodied.reporting.runs import Evaluation, Run, start_of
from embodied.reporting.transcripts import PARTS, TRANSCRIPTS, read_transcripts
from embodied.reporting.transcripts_page import Conversations, can_be_shown, conversations
from embodied.reporting.videos import MOSAIC, VIDEO_NAME

MEASURES = ("success_once", "success_at_end")
FIGURES = (*MEASURES, "episodes", "errors", "return", "length")
MOST_VIDEOS = 4  # of each outcome
MOST_CONVERSATIONS = 100  # of each outcome
OUTCOMES = ("failure", "success", "played", "error")  # in the order their videos are shown


def outcome(episode: EpisodeResult) -> str:
    """One of OUTCOMES; "played" where the env has no success."""
    if episode.error:
        return "error"
    return {True: "success", False: "failure", None: "played"}[episode.success_once]


def per_task_table(evaluation: Evaluation) -> Block:
    """A row per task, per suite, and for all tasks if there are several."""
    rows = evaluation.results["per_task"] | evaluation.results.get("per_suite", {})
    if len(rows) > 1:
        rows["all"] = evaluation.results["overall"]
    at_reset = {task: figures.get("success_at_reset") for task, figures in rows.items()}
    more = {task: {"at reset": rate["count"]} if rate else {} for task, rate in at_reset.items()}
    return named_table("task", [(task, figure_cells(figures) | more[task]) for task, figures in rows.items()])


def evaluations_table(run: Run) -> Block:
    """A row per evaluation of a run. The first row is the policy that the run started from."""
    rows = [(each.name, evaluation_cells(run, each)) for each in run.evaluations]
    if start := start_of(run):
        cells = {**evaluation_cells(run, start), "env steps": "-"}
        cells |= {"version": "-"} if "version" in cells else {}
        rows.insert(0, (f"start: {start.folder.parents[1].name} {start.name}", cells))
    return named_table("evaluation", rows)


def evaluation_cells(run: Run, evaluation: Evaluation) -> dict[str, object]:
    """A table's cells by column: the evaluated policy, the sampling of its answers, and its figures."""
    steps = run.env_steps(evaluation.version)
    of_text = {"version": evaluation.version, "sampling": sampling(evaluation.results) or "-"}
    cells = (of_text if evaluation.of_text else {}) | ({"env steps": f"{steps:,}"} if steps is not None else {})
    return cells | figure_cells(evaluation.results["overall"])


def figure_cells(figures: dict[str, Any]) -> dict[str, object]:
    """A table's cells by column: an evaluation's figures; a language policy also has rates over prompts."""
    answers = figures.get("text")
    if not answers:
        show = {**dict.fromkeys(MEASURES, rate_cell), "return": short, "length": short}
        return {name: show.get(name, str)(figures[name]) for name in FIGURES if figures.get(name) is not None}
    rates = {"success (avg@k)": answers["avg"]} | {f"pass@{k}": rate for k, rate in answers["pass"].items() if k != "1"}
    cells: dict[str, object] = {name: rate_cell(rate) for name, rate in rates.items() if rate}
    cells |= {"answers": cell(f"{figures['episodes']:,}", f"{answers['samples']} to a prompt")}
    cells |= {"errors": figures["errors"], "return": "-" if figures["return"] is None else short(figures["return"])}
    if cut := answers["truncated"]:
        cells |= {"cut off": cell(percent(cut["rate"]), f"{cut['count']:,}")}
    return cells | ({"tokens an answer": short(answers["tokens"])} if answers["tokens"] is not None else {})


def rate_cell(rate: dict[str, Any]) -> Block:
    """`88.5%`, with `[83.3%, 92.2%] 177/200` as the remark."""
    words, *more = describe_rate(rate)
    return cell(words, " ".join(more), value=rate)


def describe_rate(rate: dict[str, Any]) -> list[str]:
    """["88.5%", "[83.3%, 92.2%]", "177/200"]; a mean over prompts has no count."""
    low, high = map(percent, rate["interval"])
    counts = [f"{rate['count']}/{rate['of']}"] if "count" in rate else []
    return [percent(rate["rate"]), f"[{low}, {high}]", *counts]


def histograms(evaluation: Evaluation) -> list[Block | None]:
    """Episode length (a language policy's in tokens) and return, by outcome."""
    groups = gather((outcome(episode), episode) for episode in evaluation.episodes if not episode.error)
    groups = {kind: groups[kind] for kind in OUTCOMES if kind in groups}
    returns = {kind: [episode.total_reward for episode in group] for kind, group in groups.items()}
    title, unit, key = "Episode length", "env steps", "length"
    if evaluation.of_text:
        title, unit, key = "Tokens of a conversation's answers", "tokens", "tokens"
    sizes = {kind: [getattr(episode, key) for episode in group] for kind, group in groups.items()}
    return [histogram(title, sizes, unit, whole=True), histogram("Return", returns, "return")]


def conversation_blocks(evaluation: Evaluation, beside: Path) -> list[Block]:
    """The first conversations of each outcome, failures first; eval.videos of them are unfolded."""
    groups = gather((outcome(episode), episode) for episode in evaluation.episodes)
    chosen = [episode for kind in OUTCOMES for episode in groups.get(kind, [])[:MOST_CONVERSATIONS]]
    written = transcripts_of(evaluation, [episode.index for episode in chosen])
    chosen = [episode for episode in chosen if episode.index in written]
    if not chosen:
        return []
    unfolded = evaluation.results.get("protocol", {}).get("eval", {}).get("videos", 0)
    room, shown = Conversations(), []
    for place, episode in enumerate(chosen):
        name = f"{episode.task}, {prompt_name(episode)}, episode {episode.index}"
        shown.append(room.show(episode, written[episode.index], outcome(episode), name, place < unfolded))
    file, every = evaluation.folder / TRANSCRIPTS, len(evaluation.episodes)
    missing = f"{len(shown)} of {every} are shown. " if len(shown) < every else ""
    path = file if file.is_file() else evaluation.folder / PARTS
    link = (path.name, relative(path, beside))
    return [text(f"{missing}All of them, with every log-prob:", link), conversations(shown, "outcome")]


def transcripts_of(evaluation: Evaluation, wanted: Sequence[int]) -> dict[int, dict[str, Any]]:
    """These episodes' transcripts, except damaged ones."""
    transcripts = read_transcripts(evaluation.folder, set(wanted))
    return {index: written for index, written in transcripts.items() if can_be_shown(written)}


def prompt_name(episode: EpisodeResult) -> str:
    """Names the prompt: `prompt 17`, or `seed 1234` where prompts are drawn."""
    return f"prompt {episode.init_state_id}" if episode.init_state_id >= 0 else f"seed {episode.seed}"


def video_gallery(evaluation: Evaluation, beside: Path) -> Block | None:
    """The mosaic of all videos if there is one, and the first MOST_VIDEOS of each outcome, failures first."""
    episodes = {episode.index: episode for episode in evaluation.episodes}
    paths = videos_by_episode(evaluation)
    indices = gather((outcome(episodes[index]), index) for index in sorted(paths.keys() & episodes.keys()))
    chosen = [index for kind in OUTCOMES for index in indices.get(kind, [])[:MOST_VIDEOS]]
    shown = [episode_video(paths[index], episodes[index], beside) for index in chosen]
    if (mosaic := evaluation.folder / "videos" / MOSAIC).is_file():
        words = f"All {len(paths)} videos: green succeeds, red fails"
        shown.insert(0, {"src": relative(mosaic, beside), "words": words, "wide": True})
    return videos(shown)


def videos(shown: Sequence[Block]) -> Block | None:
    return {"kind": "videos", "videos": shown} if shown else None


def episode_video(path: Path, episode: EpisodeResult, beside: Path, label: str = "") -> Block:
    """The video of an episode, with its outcome."""
    words = f"{episode.task}, episode {episode.index}, {episode.length} steps, return {short(episode.total_reward)}"
    return {"src": relative(path, beside), "label": label, "outcome": outcome(episode), "words": words}


def videos_by_episode(evaluation: Evaluation) -> dict[int, Path]:
    """The video of every episode that has one, by the episode's index."""
    paths = sorted((evaluation.folder / "videos").glob("*.mp4"))
    return {int(named["episode"]): path for path in paths if (named := VIDEO_NAME.fullmatch(path.name))}
