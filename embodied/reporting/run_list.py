"""The list of all runs below some folders, as a page: recipe, task, state, success, steps and age of each.

A thousand runs are listed in a second: of a run, run.json is read, the newest results.json, and the ends of the other
files. Runs that have ended are read once. An unreadable run is a row that says why.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from embodied.config.read import read_yaml
from embodied.core.errors import printable
from embodied.core.files import read_object, reading
from embodied.records.results import PARTIAL, RESULTS, check_info
from embodied.reporting.page import DATA, Block, cell, page, percent, relative, section, table, text
from embodied.reporting.run_page import REPORT, what_is_played
from embodied.reporting.runs import IN_TRAINING
from embodied.reporting.sections import figure_cells
from embodied.run.run_folder import was_killed
from embodied.sharing.run_turns import RECORD
from embodied.sweeps.run_group import GROUP

DEEPEST = 4  # folders between a named folder and a run
TAIL_BYTES = 30_000  # of metrics.jsonl; a row is shorter
RUN, WHOLE = "run.json", ("config.yaml", "metrics.jsonl")  # a folder with WHOLE and without RUN is unfinished
MARKS = (RUN, GROUP, RECORD, RESULTS, PARTIAL, *WHOLE)  # files by which a folder is known, the first that it has
HEAD = ("run", "recipe", "task", "state", "success", "env steps", "age")
IN_ENV = re.compile(r"^  (name|task): .+$", re.MULTILINE)
COMPARE = "Compare the ticked runs"
NO_RUNS = "No runs yet in {}. python -m embodied.train recipe=pointmass_ppo makes one."


@dataclass(frozen=True)
class Entry:
    """A row of the list."""

    folder: Path
    state: str
    recipe: str = "-"
    task: str = "-"
    problem: str = ""
    success: object = "-"
    steps: str = "-"
    began: datetime | None = None


@dataclass
class RunList:
    """The runs below these folders."""

    roots: Sequence[Path]
    read: dict[Path, tuple[tuple[int, ...], Entry]] = field(default_factory=dict)  # ended runs, by their files' times

    def page(self, beside: Path) -> Block:
        """The page; its links are relative to the folder `beside`."""
        marked, pages = find_folders(self.roots)
        now = datetime.now(UTC)
        entries = sorted(
            (self.entry(*one) for one in marked), key=lambda one: one.began or now, reverse=True
        )  # newest first
        running = sum(entry.state == "running" for entry in entries)
        where = ", ".join(map(str, self.roots))
        listed = table(HEAD, [row_of(entry, now, beside) for entry in entries], numeric=False) | {"form": COMPARE}
        others = [text("", (str(path), relative(path, beside)), note=False) for path in sorted(pages)]
        return page(
            "Runs - Embodied Loop",
            [section("", listed if entries else text(NO_RUNS.format(where))), section("Other pages", *others)],
            f"{sum(mark in (RUN, *WHOLE) for _, mark in marked)} runs, {running} running \u00b7 {where}",
            heading="Runs",
        )

    def entry(self, folder: Path, mark: str) -> Entry:
        """The entry of a folder known by this file; an ended run is read again only if a file changed."""
        times = tuple(modified(folder / name) for name in (mark, "metrics.jsonl", "eval"))
        if folder in self.read and self.read[folder][0] == times:
            return self.read[folder][1]
        try:
            entry = read_entry(folder, mark)
        except Exception as err:  # whatever is wrong with one run, the others are listed
            entry = Entry(folder, "unreadable", problem=str(err) or type(err).__name__)
        if entry.state != "running":
            self.read[folder] = times, entry
        return entry


def find_folders(roots: Sequence[Path]) -> tuple[list[tuple[Path, str]], list[Path]]:
    """The folders of runs, evaluations, groups and shares, each with the file by which it is known; and the pages of
    benchmarks, plans and comparisons."""
    marked: dict[Path, str] = {}
    pages: dict[Path, None] = {}
    for root in roots:
        for folder, names in walk(root, DEEPEST):
            if mark := next((mark for mark in MARKS if mark in names), None):
                marked[folder] = mark
            for name in names:
                if name.endswith(DATA) and (html := f"{name.removesuffix(DATA)}.html") in names and html != REPORT:
                    pages[folder / html] = None
    return list(marked.items()), list(pages)


def walk(folder: Path, deepest: int) -> Iterator[tuple[Path, set[str]]]:
    """Every folder and the names of its files. Not inside runs and evaluations, hidden folders and links."""
    try:
        with os.scandir(folder) as found:
            entries = [entry for entry in found if not entry.name.startswith(".")]
    except OSError:  # it went away, or may not be read
        return
    inside = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    names = {entry.name for entry in entries}.difference(inside)
    yield folder, names
    if deepest and names.isdisjoint((RUN, RESULTS, PARTIAL, *WHOLE)):
        for name in inside:
            yield from walk(folder / name, deepest - 1)


def modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def read_entry(folder: Path, mark: str) -> Entry:
    """The entry of a folder; raises EmbodiedError if a file cannot be read."""
    if mark in WHOLE:
        return Entry(folder, "incomplete", problem=f"{RUN} is missing: it has just begun, or was not copied whole")
    with reading(folder / mark):
        began = datetime.fromtimestamp((folder / mark).stat().st_mtime, UTC)
        if mark == RECORD:
            return Entry(folder, "shared devices", began=began)
        content = read_object(folder / mark)
        if mark == RESULTS:
            task = what_is_played(content.get("protocol", {}).get("env", {}))
            return Entry(folder, "evaluation", task=task, success=success_of(content), began=began)
        if mark == RUN:
            return read_run_entry(folder, content)
        state = "group" if mark == GROUP else "partial evaluation"
        return Entry(folder, state, str(content.get("name", "-")), began=began)


def read_run_entry(folder: Path, info: dict[str, Any]) -> Entry:
    check_info(info)
    last = last_row(folder / "metrics.jsonl")
    words = map(str, info.get("provenance", {}).get("command", ()))
    recipe = info.get("recipe") or next((word[7:] for word in words if word.startswith("recipe=")), "-")
    success: object = "-"
    if results := newest_results(folder / "eval"):
        success = success_of(read_object(results))
    elif (rate := last.get("success_once")) is not None:
        success = cell(percent(rate), "in training")
    return Entry(
        folder,
        "killed" if was_killed(folder, info) else info.get("state", "-"),
        str(recipe),
        task_of(folder / "config.yaml"),
        info.get("cause", "") if info.get("state") in ("failed", "stopped") else "",
        success,
        f"{last['env_steps']:,}" if "env_steps" in last else "-",
        datetime.fromisoformat(info["started"]).astimezone(UTC) if "started" in info else None,
    )


def last_row(path: Path) -> dict[str, Any]:
    """The last whole row of metrics.jsonl; empty if there is none."""
    if not path.is_file():
        return {}
    with reading(path), path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
        rows = [line for line in file.read().splitlines() if line.startswith(b"{") and line.endswith(b"}")]
        return json.loads(rows[-1]) if rows else {}


def newest_results(folder: Path) -> Path | None:
    """The results of the newest evaluation during training, or of the last by name."""
    names = sorted(path.parent.name for path in folder.glob(f"*/{RESULTS}"))
    names = [name for name in names if IN_TRAINING.fullmatch(name)] or names
    return folder / names[-1] / RESULTS if names else None


def success_of(results: dict[str, Any]) -> object:
    """An evaluation's success with its interval; the return if the env has no success."""
    cells = figure_cells(results["overall"])
    named = {"return": cell(cells["return"], "return")} if "return" in cells else {}
    return next(
        (cells[name] for name in ("success_once", "success (avg@k)") if name in cells), named.get("return", "-")
    )


def task_of(path: Path) -> str:
    """The task in a resolved recipe. Only its lines are parsed, since a whole recipe takes 20 ms."""
    if not path.is_file():
        return "-"
    with reading(path):
        _, _, env = f"\n{path.read_text(encoding='utf-8')}".partition("\nenv:\n")
        env = re.split(r"^\S", env, maxsplit=1, flags=re.MULTILINE)[0]
        return what_is_played(read_yaml("\n".join(line[0].strip() for line in IN_ENV.finditer(env))) or {})


def row_of(entry: Entry, now: datetime, beside: Path) -> list[object]:
    link = f"{relative(entry.folder, beside)}/"
    name = cell(printable(entry.folder.name), href=link, pick=str(entry.folder))
    age = "-" if entry.began is None else age_words((now - entry.began).total_seconds())
    state = cell(entry.state, entry.problem, state=entry.state)
    return [name, entry.recipe, entry.task, state, entry.success, entry.steps, age]


def age_words(seconds: float) -> str:
    for name, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{max(seconds, 0):.0f} s"
