"""The training curves of a run, from metrics.jsonl and the evaluations during training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from embodied.reporting.evaluation_page import MEASURES
from embodied.reporting.page import COLORS, RATE, Block, Series, histogram, lines, short, text
from embodied.reporting.runs import Run
from embodied.reporting.success_stats import wilson
from embodied.reporting.transcripts import read_ends

LOSSES = "train/"
AGE = "train/staleness_"  # followed by the age in versions
LOAD = "train/max_violation_"  # followed by the layer of experts
OVER_EPISODES = (*MEASURES, "return", "length")  # means over the last episodes
FEWEST = 10  # smallest number of episodes of a drawn mean


def result_charts(run: Run) -> list[Block | None]:
    """Charts of success, return, episode length and throughput over env steps."""
    of_text = any("text/tokens" in row for row in run.metrics)
    measures = {"success_once": "success"} if of_text else {name: name for name in MEASURES}
    rates = [
        lines(title, [*success_in_training(run, name), *in_evaluations(run, name)], **RATE)
        for name, title in measures.items()
    ]
    if of_text:
        return [*rates, *text_charts(run)]
    means = [lines(f"episode {name}", in_both(run, name)) for name in ("return", "length")]
    return [
        *rates,
        *means,
        lines("env steps per second", [curve(run, "steps_per_s", "rollout and update")], from_zero=True),
    ]


def text_charts(run: Run) -> list[Block | None]:
    """Charts of a language policy's rewards and answers."""
    speeds = {"text/tokens_per_s": "sampled, rollout and update", "engine/tokens_per_s": "engines while they write"}
    speeds["text/trainer_tokens_per_s"] = "learners while they update, prompts too"
    speed = [curve(run, key, name, color) for color, (key, name) in enumerate(speeds.items())]
    keys = sorted({key for row in run.metrics for key in row if key.startswith("task/") and key.endswith("/success")})
    by_task = [curve(run, key, key[5:-8], place) for place, key in enumerate(keys[:COLORS])]
    return [
        lines("reward of a conversation", in_both(run, "return")),
        lines("answers cut off", in_both(run, "text/truncated"), **RATE),
        lines("tokens an answer", in_both(run, "text/tokens"), from_zero=True),
        lines("tokens per second", speed, from_zero=True),
        lines("success by task", by_task, y="success", **RATE),
        lines("MFU of learners", [curve(run, "text/mfu", "MFU")], unit="share", from_zero=True),
        *tail_charts(read_ends(run.folder), {row["iteration"]: row["env_steps"] for row in run.metrics}),
    ]


def tail_charts(rows: list[dict[str, Any]], env_steps: dict[int, int]) -> list[Block | None]:
    """Charts of the lengths of conversations, in the last iteration and over time, and of the unfinished conversations
    during a rollout."""
    rows = [row for row in rows if row["iteration"] in env_steps]
    if not rows:
        return []
    last, steps = rows[-1], [env_steps[row["iteration"]] for row in rows]
    places = {"half": 0.5, "90%": 0.9, "all": 1.0}
    lengths = [
        Series(f"{name} have at most", steps, [row["tokens"][at(share, row)] for row in rows], color=color)
        for color, (name, share) in enumerate(places.items())
    ]
    chosen = dict.fromkeys(round(number * (len(rows) - 1) / 3) for number in range(4))
    waited = [unfinished(rows[number], color) for color, number in enumerate(chosen)]
    title = f"tokens of a conversation's answers, iteration {last['iteration']}"
    return [
        histogram(title, {"played": last["tokens"]}, "tokens", whole=True, y="conversations"),
        lines("tokens of a conversation's answers", lengths, y="tokens", from_zero=True),
        lines("unfinished conversations", waited, x="seconds of a rollout", **RATE),
    ]


def at(share: float, row: dict[str, Any]) -> int:
    """The quantile `share` of a sorted list of `ends_line`."""
    return max(0, math.ceil(share * len(row["tokens"])) - 1)


def unfinished(row: dict[str, Any], color: int) -> Series:
    """The share of a rollout's conversations that have not ended, second by second."""
    ends, count = row["ended_s"], len(row["ended_s"])
    left = [1 - number / count for number in range(count + 1)]
    return Series(f"iteration {row['iteration']}", [0.0, *ends], left, color=color)


def in_both(run: Run, key: str) -> list[Series]:
    """A chart of a figure in training and in the evaluations."""
    return [curve(run, key, "training"), *in_evaluations(run, key.removeprefix("text/"))]


def learning_charts(run: Run) -> list[Block | None]:
    """A chart for each number of the learner; constant numbers are listed in words."""
    names = dict.fromkeys(name for row in run.metrics for name in row if name.startswith(LOSSES))
    ages, layers = (numbered(names, begin) for begin in (AGE, LOAD))
    names = [name for name in names if name not in (*ages, *layers)]
    curves = {name.removeprefix(LOSSES): curve(run, name, name.removeprefix(LOSSES)) for name in names}
    fixed = {name: each.y[0] for name, each in curves.items() if len(set(each.y)) == 1 and len(each.y) > 1}
    same = ", ".join(f"{name} {short(value)}" for name, value in fixed.items())
    return [
        *[lines(name, [each]) for name, each in curves.items() if name not in fixed],
        staleness_chart(run, ages) if len(ages) > 1 else None,
        experts_chart(run, layers),
        text(f"The same all the time: {same}.") if same else None,
    ]


def numbered(names: Iterable[str], begin: str) -> list[str]:
    """The names that consist of `begin` and a number, sorted by number."""
    return sorted((name for name in names if name.startswith(begin) and name[len(begin) :].isdigit()), key=number_of)


def number_of(name: str) -> int:
    return int(name.rpartition("_")[2])


def staleness_chart(run: Run, names: list[str]) -> Block | None:
    """A chart of the decisions by their staleness in versions at the update."""
    steps = [row["env_steps"] for row in run.metrics]
    shares = [
        Series(f"{number_of(name)} old", steps, [row.get(name, 0.0) for row in run.metrics], color=place)
        for place, name in enumerate(names)
    ]
    return lines("decisions by versions of staleness", shares, y="share of decisions", **RATE)


def experts_chart(run: Run, names: list[str]) -> Block | None:
    """A chart of the load imbalance of experts, for the layers with the largest imbalance at the end."""
    layers = [curve(run, name, f"layer {number_of(name)}") for name in names]
    worst = sorted(sorted(layers, key=lambda layer: -layer.y[-1])[:COLORS], key=layers.index)
    worst = [replace(layer, color=place) for place, layer in enumerate(worst)]
    return lines("MaxViolation of experts: (max - mean) / mean load", worst, y="MaxViolation", from_zero=True)


def curve(run: Run, key: str, name: str, color: int = 0, x: str = "env_steps") -> Series:
    rows = rows_with(run, key)
    return Series(name, [row[x] for row in rows], [row[key] for row in rows], color=color)


def rows_with(run: Run, key: str) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl with this number. Means over episodes begin after FEWEST ended episodes, since short,
    successful episodes end first."""
    rows = [row for row in run.metrics if row.get(key) is not None]
    enough = [row for row in rows if row.get("recent_episodes", FEWEST) >= FEWEST]
    return (enough or rows) if key in OVER_EPISODES else rows


def success_in_training(run: Run, measure: str, name: str = "training", color: int = 0) -> list[Series]:
    """The success rate over the last episodes, with its 95% interval."""
    rows = rows_with(run, measure)
    rates, episodes = [row[measure] for row in rows], [row.get("recent_episodes", 0) for row in rows]
    bounds = [wilson(round(rate * of), of) for rate, of in zip(rates, episodes)] if all(episodes) else []
    low, high = ([bound[side] for bound in bounds] for side in (0, 1))
    return [Series(name, [row["env_steps"] for row in rows], rates, low, high, color=color)] if rows else []


def in_evaluations(run: Run, key: str, name: str = "evaluation", color: int = 1) -> list[Series]:
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
        return [Series(name, steps, figures, points=True, color=color)]
    low, high = ([figure["interval"][side] for figure in figures] for side in (0, 1))
    return [Series(name, steps, [figure["rate"] for figure in figures], low, high, points=True, color=color)]
