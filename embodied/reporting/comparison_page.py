"""One page for several runs: their figures side by side, curves over each other, differences on the same episodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from embodied.config.cli import read_yaml
from embodied.reporting.evaluation_page import CLIPS, Clips, filmed, measure_cell, outcome
from embodied.reporting.html import Html, join, page, relative, section, table, tag
from embodied.reporting.runs import Run
from embodied.reporting.success_stats import compare
from embodied.reporting.svg import COLORS, Series, line_chart, percent, short
from embodied.reporting.training_page import (
    MEASURES,
    curve,
    mean_in_evaluations,
    success_in_evaluations,
    success_in_training,
)

SAME = ("env", "eval", "name", "backend", "max_episode_steps")  # of a protocol; another one means other conditions
IRRELEVANT = {("env", "num_envs"), ("eval", "num_envs"), ("eval", "videos")}  # change no episode


@dataclass(frozen=True)
class Entry:
    """A run on the page."""

    run: Run
    label: str
    color: int


def comparison(runs: list[Run], beside: Path) -> str:
    """The page as text; links are relative to the folder `beside`."""
    entries = [Entry(run, label, i) for i, (run, label) in enumerate(zip(runs, labels(runs), strict=True))]
    parts = [
        tag(
            "header", tag("h1", f"{len(runs)} runs compared"), *[problem(text) for run in runs for text in run.problems]
        ),
        section("Figures", figures_table(entries, beside)),
    ]
    if any(run.metrics for run in runs):
        parts.append(section("Curves", tag("div", *overlaid(entries), class_="charts"), note=CURVES_NOTE))
    parts.append(section("On the same episodes", *differences(entries), note=DIFFERENCES_NOTE))
    if clips := clips_of_same_episodes(entries, beside):
        parts.append(section("The same episodes, filmed", *clips))
    parts.append(section("What differs", *what_differs(entries)))
    return page(f"{', '.join(entry.label for entry in entries)} - comparison", *parts)


CURVES_NOTE = "Lines: the last episodes of training, which explores. Dots: evaluations. With 95% Wilson intervals."
MOST_BANDS = 3  # runs whose training curves show their intervals
DIFFERENCES_NOTE = (
    "The newest evaluation of every run against that of the first, on the episodes that both played: rate minus the "
    "first's rate, with Newcombe's 95% interval for paired rates. An interval that holds 0 shows no difference."
)


def problem(text: str) -> Html:
    return tag("p", text, class_="problem")


def labels(runs: list[Run]) -> list[str]:
    """Folder names, with as much of the path as tells them apart."""
    parts = [run.folder.resolve().parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-length:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(one)} ({i})" for i, one in enumerate(parts, 1)]


def swatch(entry: Entry) -> Html:
    return tag("i", class_=f"swatch c{entry.color % COLORS}")


def figures_table(entries: list[Entry], beside: Path) -> Html:
    rows = []
    for entry in entries:
        run, overall = entry.run, entry.run.last.results["overall"] if entry.run.last else {}
        last = run.metrics[-1] if run.metrics else {}
        report = run.folder / "report.html"
        name = tag("a", entry.label, href=relative(report, beside)) if report.is_file() else entry.label
        rows.append(
            [
                join(swatch(entry), name),
                *[measure_cell(overall.get(measure)) for measure in MEASURES],
                "-" if overall.get("return") is None else short(overall["return"]),
                overall.get("episodes", "-"),
                f"{last['env_steps']:,}" if last else "-",
                f"{last['train_s']:,.0f}" if last else "-",
                f"{last['env_steps'] / max(last['train_s'], 1e-9):,.0f}" if last else "-",
                run.info.get("state", "evaluation"),
            ]
        )
    head = ["run", *MEASURES, "return", "episodes", "env steps", "training s", "steps/s", "state"]
    return table(head, rows)


def overlaid(entries: list[Entry]) -> list[Html]:
    charts = []
    for measure in MEASURES:
        series = [*training_rates(entries, measure), *evaluation_points(entries, measure)]
        if series:
            charts.append(line_chart(measure, series, (0.0, 1.0), percent))
    charts.append(
        line_chart(
            "success_once by training time", lines(entries, "success_once", "train_s"), (0.0, 1.0), percent, "seconds"
        )
    )
    charts.append(line_chart("episode return", [*lines(entries, "return"), *return_points(entries)]))
    charts.append(line_chart("env steps per second", lines(entries, "steps_per_s"), from_zero=True))
    for name in ("train/policy_loss", "train/value_loss", "train/entropy", "train/approx_kl"):
        charts.append(line_chart(name.removeprefix("train/"), lines(entries, name)))
    return charts


def lines(entries: list[Entry], key: str, x: str = "env_steps") -> list[Series]:
    found = [curve(entry.run, key, entry.label, entry.color, x) for entry in entries]
    return [one for one in found if one.x]


def training_rates(entries: list[Entry], measure: str) -> list[Series]:
    """With their intervals while there are few."""
    if len(entries) > MOST_BANDS:
        return lines(entries, measure)
    rates = [success_in_training(entry.run, measure, entry.label, entry.color) for entry in entries]
    return [one for found in rates for one in found]


def evaluation_points(entries: list[Entry], measure: str) -> Iterator[Series]:
    for entry in entries:
        yield from success_in_evaluations(entry.run, measure, f"{entry.label}, evaluation", entry.color)


def return_points(entries: list[Entry]) -> list[Series]:
    found = [mean_in_evaluations(entry.run, "return", f"{entry.label}, evaluation", entry.color) for entry in entries]
    return [one for one in found if one.x]


def differences(entries: list[Entry]) -> list[Html]:
    """A row per run: how much better or worse than the first."""
    first, *others = entries
    if first.run.last is None:
        return [tag("p", f"{first.label} has no evaluation.", class_="note")]
    rows, notes = [], []
    for entry in others:
        if entry.run.last is None:
            notes.append(f"{entry.label} has no evaluation.")
            continue
        told = compare(first.run.last.episodes, entry.run.last.episodes)
        if not told["episodes"]:
            notes.append(f"{entry.label} and {first.label} played no episode in common: no paired difference.")
            continue
        if unlike := other_conditions(first.run, entry.run):
            notes.append(f"{entry.label} was evaluated under other conditions than {first.label}: {', '.join(unlike)}.")
        cells = [difference_cell(told[measure], percentage_points) for measure in MEASURES]
        rows.append(
            [join(swatch(entry), entry.label), told["episodes"], *cells, difference_cell(told["return"], short)]
        )
    head = [f"against {first.label}", "episodes", *MEASURES, "return"]
    return [*([table(head, rows)] if rows else []), *[tag("p", note, class_="note") for note in notes]]


def difference_cell(difference: dict[str, Any] | None, show) -> object:
    if difference is None:
        return "-"
    low, high = difference["interval"]
    interval = tag("small", f"[{signed(low, show)}, {signed(high, show)}]")
    if "only_first" not in difference:
        return join(signed(difference["difference"], show), " ", interval)
    counts = tag("small", f"only this one {difference['only_second']}, only the first {difference['only_first']}")
    return join(signed(difference["difference"], show), " ", interval, " ", counts)


def signed(value: float, show) -> str:
    return f"{'+' if value > 0 else ''}{show(value)}"


def percentage_points(value: float) -> str:
    return f"{100 * value:.1f} pp"


def other_conditions(first: Run, second: Run) -> list[str]:
    """What of the protocols differs, but for what changes no episode."""
    ours, theirs = (flat(pick(run.last.results.get("protocol", {}))) for run in (first, second))
    return [".".join(key) for key in sorted(ours.keys() | theirs.keys()) if ours.get(key) != theirs.get(key)]


def pick(protocol: dict[str, Any]) -> dict[str, Any]:
    return {key: protocol[key] for key in SAME if key in protocol}


def flat(tree: dict[str, Any], above: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Nested keys as paths."""
    found: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        path = (*above, str(key))
        if isinstance(value, dict):
            found |= flat(value, path)
        elif path not in IRRELEVANT or above == ():
            found[path] = value
    return found


def clips_of_same_episodes(entries: list[Entry], beside: Path) -> list[Html]:
    """Episodes that every run filmed, those first in which the outcomes differ."""
    films = [filmed(entry.run.last) if entry.run.last else {} for entry in entries]
    shared = sorted(set.intersection(*[set(one) for one in films]))
    played = [{episode.index: episode for episode in entry.run.last.episodes} for entry in entries if entry.run.last]
    seen = [index for index in shared if all(index in one for one in played)]
    same = [index for index in seen if len({(one[index].task, one[index].seed) for one in played}) == 1]
    same.sort(key=lambda index: (len({outcome(one[index]) for one in played}) == 1, index))
    room, rows = Clips(beside), []
    for index in same[:CLIPS]:
        cells = [room.show(films[i][index], played[i][index], entry.label) for i, entry in enumerate(entries)]
        rows.append(tag("div", *cells, class_="clips"))
    return [tag("div", *rows, class_="pairs")] if rows else []


def what_differs(entries: list[Entry]) -> list[Html]:
    """Keys of the recipe and facts of the machine that are not the same everywhere."""
    facts = [settings(entry.run) for entry in entries]
    keys = dict.fromkeys(chain.from_iterable(facts))
    rows = [
        [key, *[str(one.get(key, "-")) for one in facts]]
        for key in keys
        if len({str(one.get(key)) for one in facts}) > 1
    ]
    if not rows:
        return [tag("p", "Nothing in recipe, code, packages or machine.", class_="note")]
    return [table(["", *[join(swatch(entry), entry.label) for entry in entries]], rows, numeric=False)]


def settings(run: Run) -> dict[str, Any]:
    found = {".".join(key): value for key, value in flat(read_yaml(run.config) or {}).items() if key != ("run", "dir")}
    made_by = run.info.get("provenance") or (run.last.results.get("provenance", {}) if run.last else {})
    for key in ("commit", "python", "platform", "cores"):
        found[key] = made_by.get(key)
    return found | {f"package {name}": version for name, version in made_by.get("packages", {}).items()}
