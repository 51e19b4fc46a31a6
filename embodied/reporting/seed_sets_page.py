"""Parts of comparison.html about runs that differ in their seed: what they reach on average, how sure that is, which
settings are apart, and their learning curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embodied.reporting.evaluation_page import MEASURES, figure_cells
from embodied.reporting.html import Html, join, relative, table, tag
from embodied.reporting.runs import Evaluation, Run
from embodied.reporting.seed_sets import SeedSet
from embodied.reporting.success_stats import mean_with_interval, over_seeds, standings
from embodied.reporting.svg import COLORS, Series, line_chart, percent, short
from embodied.reporting.training_page import FEWEST, curve, mean_in_evaluations, success_in_evaluations

MOST_LINES = 12  # curves of single runs on a chart that shows several settings
MOST_BANDS = 4  # settings whose intervals are drawn
MOST_POINTS = 160  # of a mean curve
FEW = 5  # seeds; of fewer a bootstrap's interval is little more than their range
SCORES = (*MEASURES, "return")
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


def scores_of(one: SeedSet, name: str) -> list[list[float]] | None:
    """The final figure of every run of a set that came to its end, by task; None where it is not known."""
    found = [task_scores(run.last, name) for run in one.done if run.last]
    same = found and all(row and row.keys() == found[0].keys() for row in found)
    return [list(row.values()) for row in found] if same else None


def task_scores(evaluation: Evaluation, name: str) -> dict[str, float]:
    """A figure by task; empty where one has none."""
    figures = {task: one[name] for task, one in evaluation.results["per_task"].items()}
    if any(figure is None for figure in figures.values()):
        return {}
    return {task: figure["rate"] if isinstance(figure, dict) else figure for task, figure in figures.items()}


def summary(one: SeedSet, name: str) -> dict[str, Any] | None:
    """IQM, interval and number of seeds; of one run the interval over its episodes."""
    scores = scores_of(one, name)
    if not scores:
        return None
    found = over_seeds(scores)
    alone = one.done[0].last.results["overall"][name] if found["seeds"] == 1 and one.done[0].last else None
    return found | ({"interval": alone["interval"]} if isinstance(alone, dict) else {})


def ranked_by(sets: Sequence[SeedSet]) -> str | None:
    """The figure that says which set is best: success, or the return of an env without; None where nothing is over."""
    there = [one for one in sets if one.done]
    return next((name for name in ("success_once", "return") if there and all(scores_of(o, name) for o in there)), None)


def in_order(sets: Sequence[SeedSet]) -> list[SeedSet]:
    """The best first; those of which nothing is known come last."""
    name = ranked_by(sets)
    found = {one.label: summary(one, name) if name else None for one in sets}
    return sorted(sets, key=lambda one: -found[one.label]["iqm"] if found[one.label] else np.inf)


def places_of(sets: Sequence[SeedSet]) -> dict[str, str]:
    """The standing of each set, by its label: best, not apart from the best, or behind."""
    name = ranked_by(sets)
    found = {one.label: summary(one, name) for one in sets} if name else {}
    return standings({label: (one["iqm"], one["interval"]) for label, one in found.items() if one})


def verdict(sets: Sequence[SeedSet]) -> str:
    """Names the best setting, and the others that may also be."""
    if tasks_differ(sets):
        return "The settings play different tasks, so none of them is the best."
    places = places_of(sets)
    if not places:
        return "No run has come to its end yet."
    if len(places) == 1:
        return ""
    by_place: dict[str, list[str]] = {}
    for one in in_order(sets):
        by_place.setdefault(places.get(one.label, "-"), []).append(one.label)
    near, behind = (by_place.get(place, []) for place in ("not apart", "behind"))
    if not behind:
        said = "no setting is apart from the one with the highest figure: their 95% intervals overlap."
    elif "best" in by_place:
        said = f"{by_place['best'][0]} is best: its 95% interval lies above all others."
    elif "highest" in by_place:
        said = (
            f"{by_place['highest'][0]} is highest, and not apart from {'; '.join(near)}: their 95% intervals overlap."
        )
    else:
        said = f"{'; '.join(near)} are not apart: their 95% intervals overlap."
    after = f" Behind: {'; '.join(behind)}." if near and behind else ""
    return f"By {ranked_by(sets)}, {said}{after}"


def tasks_differ(sets: Sequence[SeedSet]) -> bool:
    """True if they were evaluated on other tasks, so that their figures cannot be ordered."""
    played = {tuple(sorted(run.last.results["per_task"])) for one in sets for run in one.done if run.last}
    return len(played) > 1


def ranking_table(sets: Sequence[SeedSet], colors: dict[str, int]) -> Html:
    """A row per setting, the best first, and where it stands."""
    places = {} if tasks_differ(sets) else places_of(sets)
    rows = []
    for one in sets if tasks_differ(sets) else in_order(sets):
        total = len(one.runs) + len(one.missing)
        figures = [iqm_cell(summary(one, name), name) for name in SCORES]
        cost = [mean_of(one.done, key) for key in ("env_steps", "train_s")]
        seeds = f"{len(one.done)} of {total}" if len(one.done) < total else str(total)
        label = join(tag("i", class_=f"swatch c{colors[one.label] % COLORS}"), one.label)
        place = places.get(one.label, "-")
        rows.append([label, tag("b", place) if place in ("best", "highest") else place, seeds, *figures, *cost])
    head = ["setting", "", "runs", *(f"{name}, IQM" for name in SCORES), "env steps", "training s"]
    return table(head, rows)


def iqm_cell(found: dict[str, Any] | None, name: str) -> object:
    """`96.7% [95.0%, 98.0%]`"""
    if not found:
        return "-"
    show = short if name == "return" else percent
    interval = found["interval"]
    return join(
        show(found["iqm"]), " ", tag("small", f"[{show(interval[0])}, {show(interval[1])}]") if interval else ""
    )


def iqm_note(sets: Sequence[SeedSet]) -> str:
    """Explains the figures over seeds and their intervals."""
    fewest = min(len(one.runs) + len(one.missing) for one in sets)
    return IQM_NOTE + FEW_NOTE.format(FEW) * (fewest < FEW)


def mean_of(runs: Sequence[Run], key: str) -> str:
    values = [run.metrics[-1][key] for run in runs if run.metrics]
    return f"{sum(values) / len(values):,.0f}" if values else "-"


def tiles(one: SeedSet) -> Html:
    """The figures of one set of seeds."""
    found = [("runs at their end", f"{len(one.done)} of {len(one.runs) + len(one.missing)}", "with an evaluation")]
    for name in SCORES:
        if known := summary(one, name):
            show, interval = short if name == "return" else percent, known["interval"]
            said = f"[{show(interval[0])}, {show(interval[1])}]" if interval else "one seed: no interval"
            found.append((f"{name}, IQM", show(known["iqm"]), f"{said}, {known['seeds']} seeds"))
    for key, words in (("env_steps", "env steps"), ("train_s", "seconds of training")):
        found.append((words, mean_of(one.done, key), "mean over runs"))
    return tag("ul", *[tag("li", tag("span", a), tag("b", b), tag("span", c)) for a, b, c in found], class_="tiles")


# Curves


def curves(sets: Sequence[SeedSet], colors: dict[str, int]) -> Html:
    """Success and return over env steps and over seconds, every run and the mean of each set."""
    rates = [
        name for name in MEASURES if any(run.metrics and run.metrics[-1].get(name) is not None for run in all_of(sets))
    ]
    charts = []
    for name in rates:
        for x, x_name in (("env_steps", "env steps"), ("train_s", "seconds"))[: 2 if name == MEASURES[0] else 1]:
            series = [one for found in sets for one in set_curves(found, sets, name, x, colors)]
            charts.append(line_chart(f"{name} over {x_name}", series, (0.0, 1.0), percent, x_name))
    for x, x_name in (("env_steps", "env steps"), ("train_s", "seconds")):
        series = [one for found in sets for one in set_curves(found, sets, "return", x, colors)]
        charts.append(line_chart(f"return over {x_name}", series, x_name=x_name))
    speed = [one for found in sets for one in set_curves(found, sets, "steps_per_s", "env_steps", colors)]
    charts.append(line_chart("env steps per second", speed, from_zero=True))
    return tag("div", *charts, class_="charts")


def all_of(sets: Sequence[SeedSet]) -> list[Run]:
    return [run for one in sets for run in one.runs]


def set_curves(one: SeedSet, sets: Sequence[SeedSet], name: str, x: str, colors: dict[str, int]) -> list[Series]:
    """The lines of one set: its runs, their mean with its interval, and where it is alone their evaluations."""
    single = len(sets) == 1
    own = colors[one.label]
    shown = list(enumerate(one.runs)) if single or len(all_of(sets)) <= MOST_LINES else []
    series = []
    for place, run in shown:
        label = label_of(one, place, sets)
        color = 1 + place if single else own
        found = curve(run, name, label, color, x)
        series.append(Series(label, found.x, found.y, color=color, faint=len(one.runs) > 1))
        if single and x == "env_steps" and name in MEASURES:
            series += success_in_evaluations(run, name, f"{label}, evaluation", color)
        elif single and x == "env_steps" and name == "return":
            series.append(mean_in_evaluations(run, name, f"{label}, evaluation", color))
    if len(one.runs) > 1:
        series += mean_curve(one, name, x, own, len(sets) <= MOST_BANDS, "" if single else one.label)
    elif not shown and one.runs:
        series.append(curve(one.runs[0], name, one.label, own, x))
    return [found for found in series if len(found.x)]


def mean_curve(one: SeedSet, name: str, x: str, color: int, band: bool, label: str = "") -> list[Series]:
    """The mean over the runs that have come to their end, or over all while fewer than two have, where all have
    numbers."""
    done = one.done if len(one.done) > 1 else one.runs
    found = [curve(run, name, "", x=x) for run in done]
    found = [each for each in found if len(each.x) > 1]
    if len(found) < 2:
        return []
    first, last = max(each.x[0] for each in found), min(each.x[-1] for each in found)
    at = sorted({point for each in found for point in each.x if first <= point <= last})
    if len(at) < 2:
        return []
    at = np.array(at) if len(at) <= MOST_POINTS else np.linspace(first, last, MOST_POINTS)
    mean, low, high = mean_with_interval([np.interp(at, each.x, each.y) for each in found])
    label = f"{label}, mean of {len(found)}" if label else f"mean of {len(found)}"
    bounds = (low.tolist(), high.tolist()) if band else ((), ())
    return [Series(label, at.tolist(), mean.tolist(), *bounds, color=color)]


# Every run


def runs_table(sets: Sequence[SeedSet], beside: Path, colors: dict[str, int]) -> Html:
    """A row per run: its final evaluation, what it cost, and what made it."""
    rows = []
    for one in sets:
        for place, run in enumerate(one.runs):
            figures = run.last.results["overall"] if run.last else {}
            color = 1 + place if len(sets) == 1 else colors[one.label]
            link = report_link(run, label_of(one, place, sets), beside)
            name = join(tag("i", class_=f"swatch c{color % COLORS}"), link)
            cost = [f"{run.metrics[-1][key]:,.0f}" if run.metrics else "-" for key in ("env_steps", "train_s")]
            state = run.info.get("state", "evaluation")
            rows.append([name, *figure_cells(figures, SCORES), *cost, tag("span", state, class_=f"state {state}")])
    return table(["run", *SCORES, "env steps", "training s", "state"], rows)


def report_link(run: Run, label: str, beside: Path) -> Html | str:
    """A run's name, which leads to its report."""
    report = run.folder / "report.html"
    return tag("a", label, href=relative(report, beside)) if report.is_file() else label


def made_table(sets: Sequence[SeedSet]) -> Html:
    """Date, commit and machine of each run."""
    rows = []
    for label, run in [(label_of(one, place, sets), run) for one in sets for place, run in enumerate(one.runs)]:
        made_by = run.provenance
        began = str(run.info.get("started", "-"))[:16].replace("T", "\u00a0")
        again = len(run.info.get("resumed", []))
        machine = (
            f"{made_by.get('host') or ''} {made_by.get('platform') or ''}, {made_by.get('cores', '?')} cores".strip()
        )
        resumed = f"{again} time{'s' * (again > 1)}" if again else "-"
        rows.append([label.replace(" ", "\u00a0"), run.name, began, resumed, made_by.get("commit") or "-", machine])
    return table(["run", "folder", "began (UTC)", "resumed", "commit", "machine"], rows, numeric=False)


def in_words(sets: Sequence[SeedSet]) -> list[str]:
    """A line per setting for the console, the best first: its success, or the return of an env without."""
    name = ranked_by(sets)
    known = [(one, found) for one in in_order(sets) if name and (found := summary(one, name))]
    show = short if name == "return" else percent
    return [
        f"{one.label}: {name} {show(found['iqm'])}"
        + (f" [{show(found['interval'][0])}, {show(found['interval'][1])}]" if found["interval"] else "")
        + (f", IQM of {found['seeds']} seeds" if found["seeds"] > 1 else ", one seed")
        for one, found in known
    ]


def label_of(one: SeedSet, place: int, sets: Sequence[SeedSet]) -> str:
    """The label of a run on the page."""
    if len(sets) == 1:
        return one.name(place)
    return one.label if one.seeds[place] is None else f"{one.label}, {one.name(place)}"


def problems(sets: Sequence[SeedSet]) -> list[str]:
    """The runs that did not end well, by name."""
    found = []
    for one in sets:
        prefix = f"{one.label}, " if len(sets) > 1 else ""
        for place, run in enumerate(one.runs):
            name, state, cause = label_of(one, place, sets), run.info.get("state"), run.info.get("cause")
            if state in ("failed", "killed") or (state == "stopped" and cause):
                found.append(f"{name} {state}: {cause or 'it does not say why'}")
            found += [f"{name}: {problem}" for problem in run.problems]
        found += [f"{prefix}{line}" for line in one.missing]
    return found


def commits(runs: Sequence[Run]) -> list[str]:
    """The commits of the code, each once, those that resumed a run among them."""
    found: list[str] = []
    for run in runs:
        made = [run.provenance, *(one.get("provenance", {}) for one in run.info.get("resumed", []))]
        found += [str(one["commit"]) for one in made if one.get("commit")]
    return list(dict.fromkeys(found))
