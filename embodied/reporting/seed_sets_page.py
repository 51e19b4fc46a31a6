"""Sets of runs that differ only in their seed, and their sections of comparison.html: averages with intervals, the
ranking of settings, and learning curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.arrays import gather
from embodied.records.success_stats import mean_with_interval, over_seeds, standings
from embodied.reporting.page import RATE, Block, Series, cell, lines, named_table, percent, relative, short, table
from embodied.reporting.runs import Evaluation, Run, read_run
from embodied.reporting.sections import FEWEST, MEASURES, curve, evaluation_cells, in_evaluations, success_in_training
from embodied.run.run_group import MISSING, OVER, RunGroup

MOST_LINES = 12  # curves of single runs on a chart with several settings
MOST_BANDS = 4  # settings with drawn intervals
MOST_POINTS = 160  # of a mean curve
FEW = 5  # seeds; with fewer seeds a bootstrap interval is little more than their range
SCORES = (*MEASURES, "return")
AXES = {"env_steps": "env steps", "train_s": "seconds"}
SPEEDS = {
    "steps_per_s": "env steps per second",
    "text/truncated": "answers cut off",
    "text/tokens": "tokens an answer",
    "text/tokens_per_s": "sampled tokens per second",
}
RUNS_NOTE = (
    "The newest evaluation of each run during training, on the same held-out episodes, with 95% Wilson intervals: what "
    "other episodes would change, not what other seeds would."
)
IQM_NOTE = (
    "IQM: the interquartile mean over seeds, their highest and lowest quarter cut off (of fewer than four seeds the "
    "mean). Its 95% interval is a bootstrap's over seeds, stratified by task, as rliable computes them."
)
FEW_NOTE = " Of so few seeds such an interval is little more than their range: take at least {} where it matters."
CURVES_NOTE = (
    "Thick: the mean over seeds with the bootstrap's 95% interval of that mean, as far as all of them have come. Thin: "
    f"each run. Training explores; its rates are over its last 100 episodes, once there are {FEWEST}."
)
DOTS_NOTE = " Dots: evaluations, with 95% Wilson intervals."
ALONE_NOTE = "One run each: the intervals are over its episodes, and another seed may change the order."


@dataclass(frozen=True)
class SeedSet:
    """Runs that differ only in their seed."""

    label: str
    runs: list[Run]
    seeds: list[int | None]  # one for each run; None: unknown
    over: list[bool]  # whether each run is finished
    missing: list[str] = field(default_factory=list)  # runs without a folder, with the reason

    @property
    def done(self) -> list[Run]:
        """The finished and evaluated runs."""
        return [run for run, over in zip(self.runs, self.over) if over and run.last]

    def name(self, place: int) -> str:
        """The label of a run of the set."""
        seed = self.seeds[place]
        return self.runs[place].name if seed is None else f"seed {seed}"


def sets_of(group: RunGroup, beside_others: bool = False) -> list[SeedSet]:
    """A set for each setting of a group, in the order of the command line; `beside_others`: labels also name the
    group."""
    sets = []
    for setting in dict.fromkeys(member.setting for member in group.members):
        members = [member for member in group.members if member.setting == setting]
        states = {member.key: group.state(member) for member in members}
        present = [member for member in members if states[member.key] != MISSING]
        missing = [
            f"seed {one.seed} has not begun{f': {one.problem}' if one.problem else ''}"
            for one in members
            if one not in present
        ]
        runs = [read_run(path) for member in present if (path := group.path(member))]
        over = [states[member.key] in OVER for member in present]
        folder = group.folder.resolve().name
        label = ", ".join(filter(None, [folder, setting])) if beside_others else setting or folder
        sets.append(SeedSet(label, runs, [one.seed for one in present], over, missing))
    return sets


# Averages over seeds


def scores_of(seed_set: SeedSet, name: str) -> list[list[float]] | None:
    """The final figure of every finished run of a set, by task; None if unknown."""
    scores = [task_scores(run.last, name) for run in seed_set.done if run.last]
    same = scores and all(row and row.keys() == scores[0].keys() for row in scores)
    return [list(row.values()) for row in scores] if same else None


def task_scores(evaluation: Evaluation, name: str) -> dict[str, float]:
    """A figure by task; empty if a task lacks it."""
    figures = {task: result[name] for task, result in evaluation.results["per_task"].items()}
    if any(figure is None for figure in figures.values()):
        return {}
    return {task: figure["rate"] if isinstance(figure, dict) else figure for task, figure in figures.items()}


def summary(seed_set: SeedSet, name: str) -> dict[str, Any] | None:
    """IQM, interval and number of seeds; for one run the interval is over its episodes."""
    scores = scores_of(seed_set, name)
    if not scores:
        return None
    interval = over_seeds(scores)
    alone = seed_set.done[0].last.results["overall"][name] if interval["seeds"] == 1 and seed_set.done[0].last else None
    return interval | ({"interval": alone["interval"]} if isinstance(alone, dict) else {})


def ranked_by(sets: Sequence[SeedSet]) -> str | None:
    """The figure by which sets are ranked: success, or the return if the env has no success; None if no run is
    finished."""
    finished = [seed_set for seed_set in sets if seed_set.done]
    return next(
        (name for name in ("success_once", "return") if finished and all(scores_of(o, name) for o in finished)), None
    )


def in_order(sets: Sequence[SeedSet]) -> list[SeedSet]:
    """Sets from best to worst; sets without results come last."""
    name = ranked_by(sets)
    summaries = {seed_set.label: summary(seed_set, name) if name else None for seed_set in sets}
    return sorted(sets, key=lambda seed_set: -summaries[seed_set.label]["iqm"] if summaries[seed_set.label] else np.inf)


def places_of(sets: Sequence[SeedSet]) -> dict[str, str]:
    """The standing of each set, by its label: best, not distinguishable from the best, or behind."""
    name = ranked_by(sets)
    summaries = {seed_set.label: summary(seed_set, name) for seed_set in sets} if name else {}
    return standings({label: (figures["iqm"], figures["interval"]) for label, figures in summaries.items() if figures})


def name_best(sets: Sequence[SeedSet]) -> str:
    """Names the best setting, and the settings that may be equally good."""
    if tasks_differ(sets):
        return "The settings play different tasks, so none of them is the best."
    places = places_of(sets)
    if not places:
        return "No run has come to its end yet."
    if len(places) == 1:
        return ""
    by_place = gather((places.get(seed_set.label, "-"), seed_set.label) for seed_set in in_order(sets))
    near, behind = (by_place.get(place, []) for place in ("not apart", "behind"))
    if not behind:
        sentence = "no setting is apart from the one with the highest figure: their 95% intervals overlap."
    elif "best" in by_place:
        sentence = f"{by_place['best'][0]} is best: its 95% interval lies above all others."
    elif "highest" in by_place:
        highest = by_place["highest"][0]
        sentence = f"{highest} is highest, and not apart from {'; '.join(near)}: their 95% intervals overlap."
    else:
        sentence = f"{'; '.join(near)} are not apart: their 95% intervals overlap."
    after = f" Behind: {'; '.join(behind)}." if near and behind else ""
    return f"By {ranked_by(sets)}, {sentence}{after}"


def tasks_differ(sets: Sequence[SeedSet]) -> bool:
    """True if sets were evaluated on different tasks, so that their figures cannot be ranked."""
    played = {tuple(sorted(run.last.results["per_task"])) for seed_set in sets for run in seed_set.done if run.last}
    return len(played) > 1


def ranking_table(sets: Sequence[SeedSet], colors: dict[str, int]) -> Block:
    """A row per setting, from best to worst, with its standing."""
    places = {} if tasks_differ(sets) else places_of(sets)
    rows = []
    for seed_set in sets if tasks_differ(sets) else in_order(sets):
        total = len(seed_set.runs) + len(seed_set.missing)
        figures = [cell(*figure_words(s, name), value=s) if (s := summary(seed_set, name)) else "-" for name in SCORES]
        cost = [mean_of(seed_set.done, key) for key in ("env_steps", "train_s")]
        seeds = f"{len(seed_set.done)} of {total}" if len(seed_set.done) < total else str(total)
        rows.append(
            [
                cell(seed_set.label, color=colors[seed_set.label]),
                places.get(seed_set.label, "-"),
                seeds,
                *figures,
                *cost,
            ]
        )
    head = ["setting", "", "runs", *(f"{name}, IQM" for name in SCORES), "env steps", "training s"]
    return table(head, rows)


def figure_words(figure: dict[str, Any], name: str) -> tuple[str, str]:
    """("96.7%", "[95.0%, 98.0%]"); the interval may be empty."""
    show = short if name == "return" else percent
    bounds = map(show, figure["interval"] or ())
    return show(figure["iqm"]), f"[{', '.join(bounds)}]" if figure["interval"] else ""


def iqm_note(sets: Sequence[SeedSet]) -> str:
    """Explains the figures over seeds and their intervals."""
    fewest = min(len(seed_set.runs) + len(seed_set.missing) for seed_set in sets)
    return IQM_NOTE + FEW_NOTE.format(FEW) * (fewest < FEW)


def mean_of(runs: Sequence[Run], key: str) -> str:
    values = [run.metrics[-1][key] for run in runs if run.metrics]
    return f"{sum(values) / len(values):,.0f}" if values else "-"


# Curves


def curve_charts(sets: Sequence[SeedSet], colors: dict[str, int]) -> list[Block | None]:
    """Charts of success, return, speed, answers and losses: every run, and the mean of each set with several runs."""

    def chart(key: str, title: str, x: str = "env_steps", **how: Any) -> Block | None:
        series = [curve for seed_set in sets for curve in set_curves(seed_set, sets, key, x, colors)]
        over = f" over {AXES[x]}" if key in SCORES else ""
        return lines(f"{title}{over}", series, y=title, x=AXES[x], **how)

    rates = [("success_once", "env_steps"), ("success_once", "train_s"), ("success_at_end", "env_steps")]
    return [
        *[chart(key, key, x, **RATE) for key, x in rates],
        *[chart("return", "return", x) for x in AXES],
        *[chart(key, title, from_zero=True) for key, title in SPEEDS.items()],
        *[chart(f"train/{name}", name) for name in ("policy_loss", "value_loss", "entropy", "approx_kl")],
    ]


def set_curves(seed_set: SeedSet, sets: Sequence[SeedSet], name: str, x: str, colors: dict[str, int]) -> list[Series]:
    """The lines of one set: its runs, their mean with its interval, and evaluations of single runs."""
    single, alone = len(sets) == 1, len(seed_set.runs) == 1
    set_color = colors[seed_set.label]
    shown = (
        list(enumerate(seed_set.runs)) if single or alone or sum(len(one.runs) for one in sets) <= MOST_LINES else []
    )
    series = []
    for place, run in shown:
        label = label_of(seed_set, place, sets)
        color = 1 + place if single else set_color
        if alone and name in MEASURES and x == "env_steps" and len(sets) <= MOST_BANDS:
            series += success_in_training(run, name, label, color)
        else:
            series.append(replace(curve(run, name, label, color, x), faint=not alone))
        if (single or alone) and x == "env_steps" and name in SCORES:
            series += in_evaluations(run, name, f"{label}, evaluation", color)
    if not alone:
        series += mean_curve(seed_set, name, x, set_color, len(sets) <= MOST_BANDS, "" if single else seed_set.label)
    return series


def mean_curve(seed_set: SeedSet, name: str, x: str, color: int, band: bool, label: str = "") -> list[Series]:
    """The mean over the finished runs (over all runs if fewer than two are finished), at the points that all of them
    have."""
    done = seed_set.done if len(seed_set.done) > 1 else seed_set.runs
    curves = [curve(run, name, "", x=x) for run in done]
    curves = [series for series in curves if len(series.x) > 1]
    if len(curves) < 2:
        return []
    first, last = max(series.x[0] for series in curves), min(series.x[-1] for series in curves)
    at = sorted({point for series in curves for point in series.x if first <= point <= last})
    if len(at) < 2:
        return []
    at = np.array(at) if len(at) <= MOST_POINTS else np.linspace(first, last, MOST_POINTS)
    mean, low, high = mean_with_interval([np.interp(at, series.x, series.y) for series in curves])
    label = f"{label}, mean of {len(curves)}" if label else f"mean of {len(curves)}"
    bounds = (low.tolist(), high.tolist()) if band else ((), ())
    return [Series(label, at.tolist(), mean.tolist(), *bounds, color=color)]


# Every run


@dataclass(frozen=True)
class ComparedRun:
    """A run on the page, with its name and colour there."""

    run: Run
    label: str
    color: int

    def linked(self, beside: Path) -> Block:
        """A cell with the run's colour and name, linked to its report."""
        report = self.run.folder / "report.html"
        return cell(self.label, color=self.color, href=relative(report, beside) if report.is_file() else None)


def entries_of(sets: Sequence[SeedSet], colors: dict[str, int]) -> list[ComparedRun]:
    """Every run; the runs of a single set have their own colours."""
    return [
        ComparedRun(run, label_of(seed_set, place, sets), 1 + place if len(sets) == 1 else colors[seed_set.label])
        for seed_set in sets
        for place, run in enumerate(seed_set.runs)
    ]


def runs_table(entries: Sequence[ComparedRun], beside: Path) -> Block:
    """A row per run: its newest evaluation, training time, speed, and end."""
    rows = []
    for entry in entries:
        run = entry.run
        cells = evaluation_cells(run, run.last) if run.last else {}
        if run.metrics:
            steps, seconds = (run.metrics[-1][key] for key in ("env_steps", "train_s"))
            speed = f"{steps / max(seconds, 1e-9):,.0f}"
            cells |= {"env steps": f"{steps:,}", "training s": f"{seconds:,.0f}", "steps/s": speed}
        cells.pop("length", None)
        state = run.info.get("state", "evaluation")
        rows.append((entry.linked(beside), cells | {"state": cell(state, state=state)}))
    return named_table("run", rows)


def made_table(sets: Sequence[SeedSet]) -> Block:
    """Date, commit and machine of each run."""
    rows = []
    for label, run in [
        (label_of(seed_set, place, sets), run) for seed_set in sets for place, run in enumerate(seed_set.runs)
    ]:
        made_by = run.provenance
        began = str(run.info.get("started", "-"))[:16].replace("T", "\u00a0")
        again = len(run.info.get("resumed", []))
        where = f"{made_by.get('host') or ''} {made_by.get('platform') or ''}".strip()
        machine = f"{where}, {made_by.get('cores', '?')} cores"
        resumed = f"{again} time{'s' * (again > 1)}" if again else "-"
        rows.append([label.replace(" ", "\u00a0"), run.name, began, resumed, made_by.get("commit") or "-", machine])
    return table(["run", "folder", "began (UTC)", "resumed", "commit", "machine"], rows, numeric=False)


def in_words(sets: Sequence[SeedSet]) -> list[str]:
    """A line per setting for the console, from best to worst: its success, or the return if the env has no success."""
    name, lines = ranked_by(sets), []
    for seed_set in in_order(sets) if name else ():
        if figure := summary(seed_set, name):
            seeds = f"IQM of {figure['seeds']} seeds" if figure["seeds"] > 1 else "one seed"
            lines.append(f"{seed_set.label}: {name} {' '.join(filter(None, figure_words(figure, name)))}, {seeds}")
    return lines


def label_of(seed_set: SeedSet, place: int, sets: Sequence[SeedSet]) -> str:
    """The label of a run on the page."""
    if len(sets) == 1:
        return seed_set.name(place)
    return seed_set.label if seed_set.seeds[place] is None else f"{seed_set.label}, {seed_set.name(place)}"


def unread_files(shown: Sequence[Run | SeedSet]) -> int:
    """The number of files of these runs that could not be read."""
    return sum(len(run.problems) for one in shown for run in (one.runs if isinstance(one, SeedSet) else [one]))


def problems(sets: Sequence[SeedSet]) -> list[str]:
    """A line for each failed or stopped run, unreadable file and missing run."""
    lines = []
    for seed_set in sets:
        prefix = f"{seed_set.label}, " if len(sets) > 1 else ""
        for place, run in enumerate(seed_set.runs):
            name, state, cause = label_of(seed_set, place, sets), run.info.get("state"), run.info.get("cause")
            if state in ("failed", "killed") or (state == "stopped" and cause):
                lines.append(f"{name} {state}: {cause or 'it does not say why'}")
            lines += [f"{name}: {problem}" for problem in run.problems]
        lines += [f"{prefix}{line}" for line in seed_set.missing]
    return lines


def commits(runs: Sequence[Run]) -> list[str]:
    """The distinct commits of the code that started or resumed the runs."""
    hashes: list[str] = []
    for run in runs:
        made = [run.provenance, *(session.get("provenance", {}) for session in run.info.get("resumed", []))]
        hashes += [str(session["commit"]) for session in made if session.get("commit")]
    return list(dict.fromkeys(hashes))
