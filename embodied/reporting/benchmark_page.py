"""Predicted next to measured: the table of a benchmark on the console, as JSON and as a page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from embodied.core.files import aligned
from embodied.placement.reasons import equal_to_the_fastest, join_words
from embodied.reporting.page import (
    Block,
    Columns,
    Row,
    Rows,
    bullets,
    facts_table,
    grid,
    page,
    rows_chart,
    section,
    table,
    text,
    write_page,
)
from embodied.reporting.sections import is_move, pieces_of, worker_rows
from embodied.system.machine import under_load

COLUMNS: Columns = (  # titles and keys name the kind of device
    ("steps/s", "env_steps_per_s", "{:.0f}".format),
    ("per {device}", "env_steps_per_s_and_{device}", "{:.0f}".format),
    ("rollout s", "rollout_s", "{:.3f}".format),
    ("update s", "update_s", "{:.3f}".format),
    ("weights s", "publish_s", "{:.3f}".format),
    ("idle", "idle", "{:.0%}".format),
    ("MB", "peak_bytes", lambda num_bytes: f"{num_bytes / 1e6:.0f}"),
    ("backward s", "first_backward_s", "{:.3f}".format),
    ("predicted s", "predicted_s", "{:.3f}".format),
    ("measured s", "measured_s", "{:.3f}".format),
    ("error", "error", "{:+.0%}".format),
    ("spread", "spread", "{:.0%}".format),
)


def row_of(result: Any, mode: str) -> dict[str, float | None]:
    """Medians over the rounds of a mode."""
    rounds, expected, typical = result.rounds[mode], result.expected[mode], result.typical(mode)
    seconds = [r.seconds for r in rounds]
    steps = median(r.env_steps / r.seconds for r in rounds)
    low, high = np.percentile(seconds, [25, 75])
    return {
        "env_steps_per_s": steps,
        f"env_steps_per_s_and_{unit(result)[0].lower()}": steps / unit(result)[1],
        **{key: getattr(typical, key) for key in ("rollout_s", "update_s", "publish_s", "first_backward_s")},
        "idle": result.idle[mode],
        "peak_bytes": result.peak_bytes[mode],
        "predicted_s": expected["seconds"],
        "measured_s": typical.seconds,
        "error": expected["seconds"] / typical.seconds - 1,
        "spread": float((high - low) / typical.seconds) if len(seconds) > 1 else None,
    }


def unit(result: Any) -> tuple[str, int]:
    """The kind and number of devices by which throughput is divided: GPUs if any were used, else cores."""
    gpus = sum(count for kind, count in result.devices.items() if kind.startswith("gpu"))
    return ("GPU", gpus) if gpus else ("core", result.devices["cpu"])


def shown_table(result: Any) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the table."""
    device = unit(result)[0]
    columns = [(title.format(device=device), key.format(device=device.lower()), text) for title, key, text in COLUMNS]
    return grid("mode", columns, rows_of(result))


def rows_of(result: Any) -> dict[str, dict[str, float | None]]:
    rows = {mode: row_of(result, mode) for mode in result.rounds}
    return dict(sorted(rows.items(), key=lambda item: item[1]["measured_s"]))


# In words


def describe(result: Any) -> list[str]:
    """The table, and its conclusions."""
    lines = ["", f"{result.task}, {result.num_envs} envs, {result.where}; medians of {num_rounds(result)} rounds"]
    lines += aligned(*shown_table(result))
    lines += [f"{mode:<13}  {layout_of(result, mode)}" for mode in rows_of(result)]
    lines += [f"{mode:<13}  not run: {reason}" for mode, reason in result.refused.items()]
    return [*lines, *conclusions(result)]


def layout_of(result: Any, mode: str) -> str:
    """The roles on each device, and the share of time in which each role's workers were busy."""
    busy = ", ".join(f"{role} {share:.0%}" for role, share in result.typical(mode).busy.items())
    return f"{result.expected[mode]['in_words']}; at work: {busy}"


def conclusions(result: Any) -> list[str]:
    """The conclusions: modes that are predicted equal, whether the measured order is the predicted one, the mode of
    placement=auto compared with the fastest, and the gain of other schedules."""
    measured = list(rows_of(result))
    expected = [mode for mode in result.expected if mode in result.rounds]
    others = [mode for mode in expected if result.expected[mode].get("schedule", "sync") != "sync"]
    modes = [mode for mode in measured if mode not in others]
    lines = []
    if len(modes) > 1:
        seconds = {mode: result.expected[mode]["seconds"] for mode in expected if mode in modes}
        equal = equal_to_the_fastest(seconds)
        equals = f"{join_words(equal)} are predicted equal; " if len(equal) > 1 else ""
        ordered = len(equal) < len(modes) and in_predicted_order(modes, seconds)
        order = "the order of modes is the predicted one; " if ordered else ""
        auto = next(iter(seconds))
        beside = next(mode for mode in modes if mode != auto) if modes[0] == auto else modes[0]
        taken = f"placement=auto takes {auto}{', one of them' if equals else ''}"
        compared = compare_with_fastest(result, auto, beside)
        lines.append(f"{equals}{order}{taken}{compared}: {speed_up_in_words(result, auto, beside)}")
    if modes:
        lines += [f"pipeline.schedule={one}: {speed_up_in_words(result, one, modes[0])}" for one in others]
    return lines


def in_predicted_order(measured: Sequence[str], seconds: dict[str, float]) -> bool:
    """True if no mode was faster than a mode predicted to be faster; modes predicted equal may be in any order."""
    return not any(
        seconds[slow] > seconds[quick]
        and slow not in equal_to_the_fastest({quick: seconds[quick], slow: seconds[slow]})
        for place, slow in enumerate(measured)
        for quick in measured[place + 1 :]
    )


def compare_with_fastest(result: Any, one: str, fastest_other: str) -> str:
    """Compares this mode with the fastest other mode; no winner is named if the intervals overlap."""
    low, _, high = paired_ratio(result.rounds[one], result.rounds[fastest_other])
    return ", the fastest here" if low > 1 else ", not the fastest here" if high < 1 else ", not apart from the fastest"


def speed_up_in_words(result: Any, one: str, other: str) -> str:
    """The speed-up of one mode over another, with its interval, in words."""
    low, middle, high = paired_ratio(result.rounds[one], result.rounds[other])
    known = f"95% interval {low:.2f} to {high:.2f}, {num_rounds(result)} paired rounds"
    several = num_rounds(result) > 1
    return f"{middle:.2f} times as fast as {other} ({known if several else 'one round, which has no interval'})"


def paired_ratio(ours: Sequence[Any], others: Sequence[Any]) -> tuple[float, float, float]:
    """The ratio of two modes' median throughputs, as in the table, with its 95% bootstrap interval over paired rounds.
    A single round has no interval."""
    mine, theirs = (np.array([r.env_steps / r.seconds for r in rounds]) for rounds in (ours, others))
    middle = float(np.median(mine) / np.median(theirs))
    if len(mine) == 1:
        return 0.0, middle, math.inf
    picks = np.random.default_rng(0).integers(0, len(mine), (2000, len(mine)))
    ratios = np.median(mine[picks], axis=1) / np.median(theirs[picks], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), middle, float(high)


def num_rounds(result: Any) -> int:
    return len(next(iter(result.rounds.values())))


# The page


def write_report(results: Sequence[Any], header: dict[str, Any], folder: Path) -> None:
    tables = [{**asdict(result), "table": rows_of(result), "verdict": conclusions(result)} for result in results]
    (folder / "bench.json").write_text(json.dumps({"about": header, "results": tables}, indent=1, default=str) + "\n")
    write_page(folder / "bench.html", benchmark_page(results, header))


def benchmark_page(results: Sequence[Any], header: dict[str, Any]) -> Block:
    parts = [section("Measured", measurement(results, header), chart(results))]
    for result in results:
        plans = [f"{mode}: {layout_of(result, mode)}" for mode in result.expected]
        refused = [f"{mode} was not run: {reason}" for mode, reason in result.refused.items()]
        traced = [part for mode, path in result.traces.items() for part in timeline(mode, Path(path))]
        blocks = [
            table(*shown_table(result)),
            *[text(line, note=False) for line in conclusions(result)],
            bullets([*plans, *refused]),
            *traced,
        ]
        parts.append(section(f"{result.task}, {result.num_envs} envs, {result.where}", *blocks))
    return page(f"Placements of {header['recipe']}", parts, problems=warnings(results, header))


def measurement(results: Sequence[Any], header: dict[str, Any]) -> Block:
    """Date, machine, code, load and profiles of this measurement."""
    machine = [header.get("host"), header.get("processor"), results[0].where if results else "", header.get("platform")]
    facts = {
        "recipe": header["recipe"],
        "date": header.get("date", ""),
        "commit": header.get("commit"),
        "machine": ", ".join(str(text) for text in machine if text),
        "load": load_in_words(header.get("load", {})),
        "command": " ".join(map(str, header.get("command", []))),
    }
    for result in results:
        name = f"profile of {result.task}, {result.num_envs} envs" if len(results) > 1 else "profile"
        facts[name] = profile_in_words(result.profile)
    return facts_table(facts)


def load_in_words(load: dict[str, Any]) -> str:
    """The cores that other programs kept busy before and during the measurement, and the load averages."""
    return "; ".join(
        f"{when}: other programs kept {cores_in_words(value.get('others'))} busy, load average {value.get('average')}"
        for when, value in load.items()
    )


def cores_in_words(others: float | None) -> str:
    return "an unknown number of cores" if others is None else f"{others:.2f} cores"


def profile_in_words(profile: dict[str, Any]) -> str:
    busy = profile.get("busy") or {}
    load = ", ".join(f"{cores_in_words(busy[when])} {when}" for when in ("before", "during") if when in busy)
    parts = [
        f"measured {profile['date']}" if "date" in profile else "",
        f"of commit {profile['commit']}" if profile.get("commit") else "",
        f"on {profile['name']}" if "name" in profile else "",
        f"other programs kept busy {load}" if load else "load unknown",
    ]
    return ", ".join(filter(None, parts))


def warnings(results: Sequence[Any], header: dict[str, Any]) -> list[str]:
    """Warns of measurements that were taken under load."""
    cores, lines = header.get("cores", 1), []
    load = {when: value.get("others") for when, value in header.get("load", {}).items()}
    if busy := under_load(load, cores):
        lines.append(f"this benchmark was measured under load: {busy}. Measure again when the machine is quiet.")
    for result in results:
        if busy := under_load(result.profile.get("busy") or {}, cores):
            lines.append(
                f"the profile that predicts {result.task}, {result.num_envs} envs was measured under load: {busy}. "
                "What it predicts may be off: profile=new measures it again."
            )
    return lines


def timeline(mode: str, path: Path) -> list[Block]:
    """The timeline of one iteration of a mode, and its memory moves."""
    spans, note = pieces_of(path)
    if not spans:
        return note
    begin = min(span.start_s for span in spans)
    moves = [
        [f"{span.start_s - begin:.3f} s", span.worker, span.name, f"{1e3 * (span.end_s - span.start_s):.2f} ms"]
        for span in sorted(spans, key=lambda span: span.start_s)
        if is_move(span.name)
    ]
    moved = table(["at", "worker", "memory", "took"], moves, numeric=False)
    drawn = worker_rows(spans, f"{mode}: one iteration, piece by piece")
    return [drawn, moved if moves else text(f"{mode}: no memory moved.", note=False)]


def chart(results: Sequence[Any]) -> Block:
    """Bars of env steps per second, predicted above measured, whiskers over the middle half of the rounds."""
    charts = []
    for result in results:
        rows, speeds = [], []
        for mode in rows_of(result):
            expected = result.expected[mode]["env_steps_per_s"]
            low, middle, high = np.percentile([r.env_steps / r.seconds for r in result.rounds[mode]], [25, 50, 75])
            measured = Row("", {"measured": [(0, middle)]}, whisker=(low, high))
            rows += [Row(mode, {"predicted": [(0, expected)]}), measured, Row("", {})]
            speeds += [expected, high]
        charts.append(Rows(f"{result.task}, {result.num_envs} envs", rows[:-1], max(speeds)))
    return rows_chart("predicted and measured throughput", charts, "env steps/s")
