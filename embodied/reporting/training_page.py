"""The training curves of a run, from metrics.jsonl and the evaluations during training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from embodied.reporting.evaluation_page import MEASURES
from embodied.reporting.html import Html, tag
from embodied.reporting.runs import Run
from embodied.reporting.success_stats import wilson
from embodied.reporting.svg import Series, line_chart, percent, short

LOSSES = "train/"
AGE = "train/staleness_"  # and how many versions old
OVER_EPISODES = (*MEASURES, "return", "length")  # means over the last episodes
FEWEST = 10  # episodes whose mean is drawn


def result_charts(run: Run) -> list[Html]:
    """Charts of success, return, episode length and throughput over env steps."""
    charts = []
    spoken = any("text/tokens" in row for row in run.metrics)
    for measure in MEASURES[:1] if spoken else MEASURES:
        series = [*success_in_training(run, measure), *success_in_evaluations(run, measure)]
        if any(one.x for one in series):
            charts.append(line_chart("success" if spoken else measure, series, (0.0, 1.0), percent))
    if spoken:
        return [*charts, *text_charts(run)]
    for name in ("return", "length"):
        series = [curve(run, name, "training"), mean_in_evaluations(run, name)]
        charts.append(line_chart(f"episode {name}", [one for one in series if one.x]))
    charts.append(line_chart("env steps per second", [curve(run, "steps_per_s", "rollout and update")], from_zero=True))
    return charts


def text_charts(run: Run) -> list[Html]:
    """Charts of a language policy's rewards and answers."""
    rewards = [curve(run, "return", "training"), mean_in_evaluations(run, "return")]
    truncated = [curve(run, "text/truncated", "training"), text_in_evaluations(run, "truncated")]
    tokens = [curve(run, "text/tokens", "training"), text_in_evaluations(run, "tokens")]
    speed = [curve(run, "text/tokens_per_s", "rollout and update")]
    return [
        line_chart("reward of a conversation", [one for one in rewards if one.x]),
        line_chart("answers cut off", [one for one in truncated if one.x], (0.0, 1.0), percent),
        line_chart("tokens an answer", [one for one in tokens if one.x], from_zero=True),
        line_chart("sampled tokens per second", speed, from_zero=True),
    ]


def text_in_evaluations(run: Run, key: str) -> Series:
    """A figure of the answers in each evaluation during training."""
    found = [(steps, overall["text"][key]) for steps, overall in evaluated(run) if overall.get("text", {}).get(key)]
    values = [value["rate"] if isinstance(value, dict) else value for _, value in found]
    return Series("evaluation", [steps for steps, _ in found], values, points=True, color=1)


def learning_charts(run: Run) -> list[Html]:
    """A chart for each number of the learner; those that never changed are listed in words."""
    names = dict.fromkeys(name for row in run.metrics for name in row if name.startswith(LOSSES))
    ages = sorted((name for name in names if name.startswith(AGE) and name[len(AGE) :].isdigit()), key=age_of)
    names = [name for name in names if name not in ages]
    curves = {name: curve(run, name, name.removeprefix(LOSSES)) for name in names}
    fixed = {name: one.y[0] for name, one in curves.items() if len(set(one.y)) == 1 and len(one.y) > 1}
    drawn = [line_chart(name.removeprefix(LOSSES), [one]) for name, one in curves.items() if name not in fixed]
    same = ", ".join(f"{name.removeprefix(LOSSES)} {short(value)}" for name, value in fixed.items())
    if len(ages) > 1:
        drawn.append(staleness_chart(run, ages))
    return [
        tag("div", *drawn, class_="charts"),
        *([tag("p", f"The same all the time: {same}.", class_="note")] if same else []),
    ]


def age_of(name: str) -> int:
    return int(name.removeprefix(AGE))


def staleness_chart(run: Run, names: list[str]) -> Html:
    """Share of the decisions that were so many versions old when they were learned from."""
    steps = [row["env_steps"] for row in run.metrics]
    shares = [Series(f"{age_of(name)} old", steps, [row.get(name, 0.0) for row in run.metrics]) for name in names]
    shares = [replace(one, color=place) for place, one in enumerate(shares)]
    return line_chart("decisions by versions of staleness", shares, (0.0, 1.0), percent)


def curve(run: Run, key: str, name: str, color: int = 0, x: str = "env_steps") -> Series:
    rows = rows_with(run, key)
    return Series(name, [row[x] for row in rows], [row[key] for row in rows], color=color)


def rows_with(run: Run, key: str) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that have this number. Means over episodes begin where FEWEST episodes have ended, if
    ever: those that end first are the short ones, which succeed."""
    rows = [row for row in run.metrics if row.get(key) is not None]
    enough = [row for row in rows if row.get("recent_episodes", FEWEST) >= FEWEST]
    return (enough or rows) if key in OVER_EPISODES else rows


def success_in_training(run: Run, measure: str, name: str = "training", color: int = 0) -> list[Series]:
    """The success rate over the last episodes, with its 95% interval."""
    rows = rows_with(run, measure)
    bounds = [interval(row[measure], row.get("recent_episodes", 0)) for row in rows]
    known = all(bounds)
    low, high = ([bound[side] for bound in bounds] if known else () for side in (0, 1))
    steps, rates = [row["env_steps"] for row in rows], [row[measure] for row in rows]
    return [Series(name, steps, rates, low, high, color=color)] if rows else []


def interval(rate: float, episodes: int) -> tuple[float, float] | None:
    return wilson(round(rate * episodes), episodes) if episodes else None


def success_in_evaluations(run: Run, measure: str, name: str = "evaluation", color: int = 1) -> list[Series]:
    found = [(steps, overall[measure]) for steps, overall in evaluated(run) if overall[measure]]
    if not found:
        return []
    steps, measures = zip(*found)
    low, high = ([one["interval"][side] for one in measures] for side in (0, 1))
    return [Series(name, steps, [one["rate"] for one in measures], low, high, points=True, color=color)]


def mean_in_evaluations(run: Run, key: str, name: str = "evaluation", color: int = 1) -> Series:
    found = [(steps, overall[key]) for steps, overall in evaluated(run) if overall[key] is not None]
    return Series(name, [steps for steps, _ in found], [mean for _, mean in found], points=True, color=color)


def evaluated(run: Run) -> list[tuple[int, dict[str, Any]]]:
    """(env steps, figures) of each evaluation during training."""
    pairs = [(run.env_steps(one.version), one.results["overall"]) for one in run.evaluations if one.in_training]
    return [(steps, overall) for steps, overall in pairs if steps is not None]
