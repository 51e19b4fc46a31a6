"""The sections of a run's page: one evaluation with its rates, histograms, videos and conversations; the curves of
training; the use of time; the processes on each device; and the provenance of the result.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from embodied.core.arrays import gather
from embodied.core.files import reading
from embodied.core.types import EpisodeResult
from embodied.records.success_stats import sampling, sampling_of_set, sets_in, wilson
from embodied.records.timeline import TimedSpan, innermost, read_trace
from embodied.records.transcripts import PARTS, TRANSCRIPTS, read_ends, read_transcripts
from embodied.records.videos import MOSAIC, VIDEO_NAME
from embodied.reporting import page
from embodied.reporting.runs import Evaluation, Run, collecting_problems, start_of

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


def per_task_table(evaluation: Evaluation) -> page.Block:
    """A row per task, per suite, and for all tasks if there are several."""
    rows = evaluation.results["per_task"] | evaluation.results.get("per_suite", {})
    if len(rows) > 1:
        rows["all"] = evaluation.results["overall"]
    at_reset = {task: figures.get("success_at_reset") for task, figures in rows.items()}
    more = {task: {"at reset": rate["count"]} if rate else {} for task, rate in at_reset.items()}
    for task in sets_in(evaluation.results):
        more[task] |= {"sampling": sampling_of_set(evaluation.results, task)}
    return page.named_table("task", [(task, figure_cells(figures) | more[task]) for task, figures in rows.items()])


def evaluations_table(run: Run) -> page.Block:
    """A row per evaluation of a run. The first row is the policy that the run started from."""
    rows = [(evaluation.name, evaluation_cells(run, evaluation)) for evaluation in run.evaluations]
    if start := start_of(run):
        cells = {**evaluation_cells(run, start), "env steps": "-"}
        cells |= {"version": "-"} if "version" in cells else {}
        rows.insert(0, (f"start: {start.folder.parents[1].name} {start.name}", cells))
    return page.named_table("evaluation", rows)


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
        show = {**dict.fromkeys(MEASURES, rate_cell), "return": page.short, "length": page.short}
        return {name: show.get(name, str)(figures[name]) for name in FIGURES if figures.get(name) is not None}
    rates = {"success (avg@k)": answers["avg"]} | {f"pass@{k}": rate for k, rate in answers["pass"].items() if k != "1"}
    cells: dict[str, object] = {name: rate_cell(rate) for name, rate in rates.items() if rate}
    cells |= {"answers": page.cell(f"{figures['episodes']:,}", f"{answers['samples']} to a prompt")}
    cells |= {
        "errors": figures["errors"],
        "return": "-" if figures["return"] is None else page.short(figures["return"]),
    }
    if cut := answers["truncated"]:
        cells |= {"cut off": page.cell(page.percent(cut["rate"]), f"{cut['count']:,}")}
    return cells | ({"tokens an answer": page.short(answers["tokens"])} if answers["tokens"] is not None else {})


def rate_cell(rate: dict[str, Any]) -> page.Block:
    """`88.5%`, with `[83.3%, 92.2%] 177/200` as the remark."""
    words, *more = describe_rate(rate)
    return page.cell(words, " ".join(more), value=rate)


def describe_rate(rate: dict[str, Any]) -> list[str]:
    """["88.5%", "[83.3%, 92.2%]", "177/200"]; a mean over prompts ends with "50 prompts"."""
    low, high = map(page.percent, rate["interval"])
    counts = f"{rate['count']}/{rate['of']}" if "count" in rate else f"{rate['of']} prompts"
    return [page.percent(rate["rate"]), f"[{low}, {high}]", counts]


def histograms(evaluation: Evaluation) -> list[page.Block | None]:
    """Episode length (a language policy's in tokens) and return, by outcome."""
    groups = gather((outcome(episode), episode) for episode in evaluation.episodes if not episode.error)
    groups = {kind: groups[kind] for kind in OUTCOMES if kind in groups}
    returns = {kind: [episode.total_reward for episode in group] for kind, group in groups.items()}
    title, unit, key = "Episode length", "env steps", "length"
    if evaluation.of_text:
        title, unit, key = "Tokens of a conversation's answers", "tokens", "tokens"
    sizes = {kind: [getattr(episode, key) for episode in group] for kind, group in groups.items()}
    return [page.histogram(title, sizes, unit, whole=True), page.histogram("Return", returns, "return")]


def conversation_blocks(evaluation: Evaluation, beside: Path) -> list[page.Block]:
    """The first conversations of each outcome, failures first; eval.videos of them are unfolded."""
    groups = gather((outcome(episode), episode) for episode in evaluation.episodes)
    chosen = [episode for kind in OUTCOMES for episode in groups.get(kind, [])[:MOST_CONVERSATIONS]]
    written = transcripts_of(evaluation, [episode.index for episode in chosen])
    chosen = [episode for episode in chosen if episode.index in written]
    if not chosen:
        return []
    unfolded = evaluation.results.get("protocol", {}).get("eval", {}).get("videos", 0)
    room, shown = page.Conversations(), []
    for place, episode in enumerate(chosen):
        name = f"{episode.task}, {prompt_name(episode)}, episode {episode.index}"
        shown.append(room.show(episode, written[episode.index], outcome(episode), name, place < unfolded))
    file, every = evaluation.folder / TRANSCRIPTS, len(evaluation.episodes)
    missing = f"{len(shown)} of {every} are shown. " if len(shown) < every else ""
    path = file if file.is_file() else evaluation.folder / PARTS
    link = (path.name, page.relative(path, beside))
    return [page.text(f"{missing}All of them, with every log-prob:", link), page.conversations(shown, "outcome")]


def transcripts_of(evaluation: Evaluation, wanted: Sequence[int]) -> dict[int, dict[str, Any]]:
    """These episodes' transcripts, except damaged ones."""
    transcripts = read_transcripts(evaluation.folder, set(wanted))
    return {index: written for index, written in transcripts.items() if page.can_be_shown(written)}


def prompt_name(episode: EpisodeResult) -> str:
    """Names the prompt: `prompt 17`, or `seed 1234` where prompts are drawn."""
    return f"prompt {episode.init_state_id}" if episode.init_state_id >= 0 else f"seed {episode.seed}"


def video_gallery(evaluation: Evaluation, beside: Path) -> page.Block | None:
    """The mosaic of all videos if there is one, and the first MOST_VIDEOS of each outcome, failures first."""
    episodes = {episode.index: episode for episode in evaluation.episodes}
    paths = videos_by_episode(evaluation)
    indices = gather((outcome(episodes[index]), index) for index in sorted(paths.keys() & episodes.keys()))
    chosen = [index for kind in OUTCOMES for index in indices.get(kind, [])[:MOST_VIDEOS]]
    shown = [episode_video(paths[index], episodes[index], beside) for index in chosen]
    if (mosaic := evaluation.folder / "videos" / MOSAIC).is_file():
        words = f"All {len(paths)} videos: green succeeds, red fails"
        shown.insert(0, {"src": page.relative(mosaic, beside), "words": words, "wide": True})
    return videos(shown)


def early_videos(evaluation: Path, beside: Path) -> page.Block | None:
    """Videos of an evaluation that has no results yet; their names say the outcomes."""
    paths = sorted((evaluation / "videos").glob("*.mp4"))
    named = [(path, match) for path in paths if (match := VIDEO_NAME.fullmatch(path.name))]
    return videos(
        [
            {
                "src": page.relative(path, beside),
                "outcome": match["outcome"],
                "words": f"episode {int(match['episode'])}",
            }
            for path, match in named[: len(OUTCOMES) * MOST_VIDEOS]
        ]
    )


def videos(shown: Sequence[page.Block]) -> page.Block | None:
    return {"kind": "videos", "videos": shown} if shown else None


def episode_video(path: Path, episode: EpisodeResult, beside: Path, label: str = "") -> page.Block:
    """The video of an episode, with its outcome."""
    words = (
        f"{episode.task}, episode {episode.index}, {episode.length} steps, return {page.short(episode.total_reward)}"
    )
    return {"src": page.relative(path, beside), "label": label, "outcome": outcome(episode), "words": words}


def videos_by_episode(evaluation: Evaluation) -> dict[int, Path]:
    """The video of every episode that has one, by the episode's index."""
    paths = sorted((evaluation.folder / "videos").glob("*.mp4"))
    return {int(named["episode"]): path for path in paths if (named := VIDEO_NAME.fullmatch(path.name))}


LOSSES = "train/"
AGE = "train/staleness_"  # followed by the age in versions
LOAD = "train/max_violation_"  # followed by the layer of experts
OVER_EPISODES = (*MEASURES, "return", "length")  # means over the last episodes
FEWEST = 10  # smallest number of episodes of a drawn mean
Charts = Sequence[tuple[str, str, Mapping[str, Any]]]


ZERO = {"from_zero": True}
# Charts of a run: (number in metrics.jsonl, title, how it is drawn). Evaluations' figures are drawn beside training's.
OF_ROBOTS: Charts = (
    ("success_once", "success_once", page.RATE),
    ("success_at_end", "success_at_end", page.RATE),
    ("return", "episode return", {}),
    ("length", "episode length", {}),
    ("steps_per_s", "env steps per second", ZERO),
)
OF_TEXT: Charts = (
    ("success_once", "success", page.RATE),
    ("return", "reward of a conversation", {}),
    ("text/truncated", "answers cut off", page.RATE),
    ("text/tokens", "tokens an answer", ZERO),
    ("text/mfu", "MFU of learners", {"unit": "share"} | ZERO),
)
TOKEN_SPEEDS = {
    "text/tokens_per_s": "sampled, rollout and update",
    "engine/tokens_per_s": "engines while they write",
    "text/trainer_tokens_per_s": "learners while they update, prompts too",
}


def result_charts(run: Run) -> list[page.Block | None]:
    """Charts of the results over env steps."""
    of_text = any("text/tokens" in row for row in run.metrics)
    charts = [page.lines(title, in_both(run, key), **how) for key, title, how in (OF_TEXT if of_text else OF_ROBOTS)]
    return [*charts, *text_charts(run)] if of_text else charts


def text_charts(run: Run) -> list[page.Block | None]:
    """Charts of a language policy's speeds, tasks and longest conversations."""
    speeds = [curve(run, key, name, color) for color, (key, name) in enumerate(TOKEN_SPEEDS.items())]
    keys = sorted({key for row in run.metrics for key in row if key.startswith("task/") and key.endswith("/success")})
    by_task = [curve(run, key, key[5:-8], place) for place, key in enumerate(keys[: page.COLORS])]
    return [
        page.lines("tokens per second", speeds, **ZERO),
        page.lines("success by task", by_task, y="success", **page.RATE),
        *tail_charts(read_ends(run.folder), {row["iteration"]: row["env_steps"] for row in run.metrics}),
    ]


def tail_charts(rows: list[dict[str, Any]], env_steps: dict[int, int]) -> list[page.Block | None]:
    """Charts of the lengths of conversations, in the last iteration and over time, and of the unfinished conversations
    during a rollout."""
    rows = [row for row in rows if row["iteration"] in env_steps]
    if not rows:
        return []
    last, steps = rows[-1], [env_steps[row["iteration"]] for row in rows]
    places = {"half": 0.5, "90%": 0.9, "all": 1.0}
    lengths = [
        page.Series(f"{name} have at most", steps, [row["tokens"][quantile(share, row)] for row in rows], color=color)
        for color, (name, share) in enumerate(places.items())
    ]
    chosen = dict.fromkeys(round(number * (len(rows) - 1) / 3) for number in range(4))
    waited = [unfinished(rows[number], color) for color, number in enumerate(chosen)]
    title = f"tokens of a conversation's answers, iteration {last['iteration']}"
    return [
        page.histogram(title, {"played": last["tokens"]}, "tokens", whole=True, y="conversations"),
        page.lines("tokens of a conversation's answers", lengths, y="tokens", from_zero=True),
        page.lines("unfinished conversations", waited, x="seconds of a rollout", **page.RATE),
    ]


def quantile(share: float, row: dict[str, Any]) -> int:
    """The quantile `share` of a sorted list in answers.jsonl."""
    return max(0, math.ceil(share * len(row["tokens"])) - 1)


def unfinished(row: dict[str, Any], color: int) -> page.Series:
    """The share of a rollout's conversations that have not ended, second by second."""
    ends, count = row["ended_s"], len(row["ended_s"])
    left = [1 - number / count for number in range(count + 1)]
    return page.Series(f"iteration {row['iteration']}", [0.0, *ends], left, color=color)


def in_both(run: Run, key: str) -> list[page.Series]:
    """The curves of a figure in training and in the evaluations."""
    training = success_in_training(run, key) if key in MEASURES else [curve(run, key, "training")]
    return [*training, *in_evaluations(run, key.removeprefix("text/"))]


def learning_charts(run: Run) -> list[page.Block | None]:
    """A chart for each number of the learner; constant numbers are listed in words."""
    names = dict.fromkeys(name for row in run.metrics for name in row if name.startswith(LOSSES))
    ages, layers = (numbered_names(names, begin) for begin in (AGE, LOAD))
    names = [name for name in names if name not in (*ages, *layers)]
    curves = {name.removeprefix(LOSSES): curve(run, name, name.removeprefix(LOSSES)) for name in names}
    fixed = {name: series.y[0] for name, series in curves.items() if len(set(series.y)) == 1 and len(series.y) > 1}
    same = ", ".join(f"{name} {page.short(value)}" for name, value in fixed.items())
    return [
        *[page.lines(name, [series]) for name, series in curves.items() if name not in fixed],
        staleness_chart(run, ages) if len(ages) > 1 else None,
        experts_chart(run, layers),
        page.text(f"The same all the time: {same}.") if same else None,
    ]


def numbered_names(names: Iterable[str], begin: str) -> list[str]:
    """The names that consist of `begin` and a number, sorted by number."""
    return sorted((name for name in names if name.startswith(begin) and name[len(begin) :].isdigit()), key=number_of)


def number_of(name: str) -> int:
    return int(name.rpartition("_")[2])


def staleness_chart(run: Run, names: list[str]) -> page.Block | None:
    """A chart of the decisions by their staleness in versions at the update."""
    steps = [row["env_steps"] for row in run.metrics]
    shares = [
        page.Series(f"{number_of(name)} old", steps, [row.get(name, 0.0) for row in run.metrics], color=place)
        for place, name in enumerate(names)
    ]
    return page.lines("decisions by versions of staleness", shares, y="share of decisions", **page.RATE)


def experts_chart(run: Run, names: list[str]) -> page.Block | None:
    """A chart of the load imbalance of experts, for the layers with the largest imbalance at the end."""
    layers = [curve(run, name, f"layer {number_of(name)}") for name in names]
    worst = sorted(sorted(layers, key=lambda layer: -layer.y[-1])[: page.COLORS], key=layers.index)
    worst = [replace(layer, color=place) for place, layer in enumerate(worst)]
    return page.lines("MaxViolation of experts: (max - mean) / mean load", worst, y="MaxViolation", from_zero=True)


def curve(run: Run, key: str, name: str, color: int = 0, x: str = "env_steps") -> page.Series:
    rows = rows_with(run, key)
    return page.Series(name, [row[x] for row in rows], [row[key] for row in rows], color=color)


def rows_with(run: Run, key: str) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl with this number. Means over episodes begin after FEWEST ended episodes, since short,
    successful episodes end first."""
    rows = [row for row in run.metrics if row.get(key) is not None]
    enough = [row for row in rows if row.get("recent_episodes", FEWEST) >= FEWEST]
    return (enough or rows) if key in OVER_EPISODES else rows


def success_in_training(run: Run, measure: str, name: str = "training", color: int = 0) -> list[page.Series]:
    """The success rate over the last episodes, with its 95% interval."""
    rows = rows_with(run, measure)
    rates, episodes = [row[measure] for row in rows], [row.get("recent_episodes", 0) for row in rows]
    bounds = [wilson(round(rate * of), of) for rate, of in zip(rates, episodes)] if all(episodes) else []
    low, high = ([bound[side] for bound in bounds] for side in (0, 1))
    return [page.Series(name, [row["env_steps"] for row in rows], rates, low, high, color=color)] if rows else []


def in_evaluations(run: Run, key: str, name: str = "evaluation", color: int = 1) -> list[page.Series]:
    """A figure of each evaluation during training that has it: a rate with its interval, or a mean."""
    overall = {
        evaluation.version: evaluation.results["overall"] for evaluation in run.evaluations if evaluation.in_training
    }
    points = [(run.env_steps(version), (all_ | all_.get("text", {})).get(key)) for version, all_ in overall.items()]
    points = [(steps, figure) for steps, figure in points if steps is not None and figure is not None]
    if not points:
        return []
    steps, figures = zip(*points)
    if not isinstance(figures[0], dict):
        return [page.Series(name, steps, figures, points=True, color=color)]
    low, high = ([figure["interval"][side] for figure in figures] for side in (0, 1))
    return [page.Series(name, steps, [figure["rate"] for figure in figures], low, high, points=True, color=color)]


TRACE = "trace.json"
MOST_TRACE_BYTES = 10_000_000  # a larger one is left to a trace viewer
MOST_ROWS = 48  # workers or hosts drawn one under the other
SHOWN_ITERATIONS = 2


def time_spent(run: Run) -> list[page.Block | None]:
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
        page.Series("whole iteration", steps, whole, color=7),
        page.Series("rollout", steps, rollout, color=0),
        page.Series("update, after the rollout", steps, rest, color=1),
    ]
    playing = {"step": "step", "reset": "reset", "waiting for actions": "act"}
    parts = {name: sum(row[f"time/{key}_s"] for row in rows) for name, key in playing.items()}
    parts |= {"update": sum(rest), "publish": sum(publish)}
    bars = [
        page.Row(name, {name: [(0.0, max(seconds, 0.0))]}, f"{page.short(seconds)} s")
        for name, seconds in parts.items()
    ]
    return [
        page.lines("Seconds per iteration", series, y="seconds"),
        page.rows_chart("All iterations, mean sim worker", [page.Rows("", bars, sum(whole))], "seconds of training"),
    ]


def timeline_charts(run: Run) -> list[page.Block | None]:
    """Every worker's activities, from trace.json: shares of the time, and a timeline of its last iterations. An
    unreadable trace is added to the run's problems."""
    path = run.folder / TRACE
    spans: list[TimedSpan] = []
    note: list[page.Block] = []
    if path.is_file():
        with collecting_problems(run.problems), reading(path):
            spans, note = pieces_of(path, run.problems)
    if not spans:
        return [*note]
    last = max(span.iteration for span in spans)
    first = max(last - SHOWN_ITERATIONS + 1, 1)
    shown = [span for span in spans if first <= span.iteration <= last]
    return [time_shares(spans), worker_rows(shown, f"Iterations {first} to {last}, piece by piece")]


def pieces_of(path: Path, problems: list[str] | None = None) -> tuple[list[TimedSpan], list[page.Block]]:
    """A trace's innermost spans; for a too large trace a note instead."""
    if path.stat().st_size > MOST_TRACE_BYTES:
        return [], [page.text(f"{path.name} is too large to be drawn here; open it in a trace viewer.")]
    return innermost(read_trace(path, problems)), []


def time_shares(spans: list[TimedSpan]) -> page.Block:
    """A row per worker: the shares of the traced time."""
    whole = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    rows = []
    for worker, host, pieces in worker_pieces(spans):
        bars, end = {}, 0.0
        for name, share in sorted(pieces.items()):
            start, end = end, end + sum(stop - begin for begin, stop in share)
            bars[name] = [(start / (whole or 1.0), end / (whole or 1.0))]
        rows.append(page.Row(worker, bars, host))
    iterations = len({span.iteration for span in spans})
    title = f"Share of the time per worker, first {iterations} iterations"
    return page.rows_chart(title, [page.Rows("", rows, 1.0)], "share of the time", "share")


def worker_rows(spans: list[TimedSpan], title: str) -> page.Block:
    """A row per worker: its activities over time."""
    high = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    rows = [page.Row(worker, pieces, host) for worker, host, pieces in worker_pieces(spans)]
    return page.rows_chart(title, [page.Rows("", rows, high)], "seconds")


def worker_pieces(spans: list[TimedSpan]) -> list[tuple[str, str, dict[str, list[tuple[float, float]]]]]:
    """(worker, host, pieces by activity) of each worker, from the first span on and without waiting."""
    begin = min(span.start_s for span in spans)
    workers = []
    for worker, worker_spans in list(gather((span.worker, span) for span in spans).items())[:MOST_ROWS]:
        pieces: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for span in worker_spans:
            if span.name != "wait":
                pieces[span.name].append((span.start_s - begin, span.end_s - begin))
        workers.append((worker, worker_spans[0].host if worker_spans[0].host != worker else "", dict(pieces)))
    return workers


def placement_chart(plan: dict[str, Any]) -> list[page.Block]:
    """A row per process and a column per device: processes that share a column take turns or share the device."""
    hosts = plan["hosts"]
    columns = list(dict.fromkeys(device for host in hosts for device in devices(host)))
    columns += [f"cpu:{core}" for core in plan.get("idle", ()) if f"cpu:{core}" not in columns]
    columns.sort(key=lambda device: (device.rpartition(":")[0], int(device.rpartition(":")[2])))
    rows = []
    for host in hosts[:MOST_ROWS]:
        places = sorted(columns.index(device) for device in {*devices(host)})
        rows.append(
            page.Row(host["name"], {" + ".join(host["roles"]): [(place + 0.05, place + 0.95) for place in places]})
        )
    why = f"{plan['mode']}{': ' + plan['reason'] if plan.get('reason') else ''}"
    note = f"{why}. {plan['num_envs']} envs. A row is a process, a column a device; a filled cell is one it may use."
    more = len(hosts) - MOST_ROWS
    chart = page.rows_chart("Devices of each process", [page.Rows("", rows, len(columns), columns=columns)], "device")
    return [page.text(note), chart, *([page.text(f"and {more} more processes")] if more > 0 else [])]


CHANGES = {"added": "added", "taken_away": "taken away", "left_out": "left out, since it did not work"}


def worker_changes(changes: Sequence[dict[str, Any]]) -> list[page.Block]:
    """A line for each change of the workers by the user; the chart has the workers that remain."""
    lines = []
    for change in changes:
        kind = next(iter(CHANGES.keys() & change.keys()), "")
        names, on = change.get(kind, ()), ", ".join(change.get("devices", ()))
        verb = "was" if len(names) == 1 else "were"
        lines.append(f"{change.get('at')}: {' and '.join(names)} {verb} {CHANGES.get(kind)}{f' ({on})' if on else ''}.")
    return [page.text(line) for line in lines]


def devices(host: dict[str, Any]) -> list[str]:
    """The device or the cores of a host."""
    return [host["device"]] if host.get("device") else [f"cpu:{core}" for core in host.get("cores", ())]


def provenance_table(run: Run) -> page.Block:
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
    return page.facts_table(facts)
