"""results.json and episodes.csv of one evaluation. The same episodes give the same bytes, however they were ordered."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.files import read_object, reading
from embodied.core.types import EpisodeResult
from embodied.run.checkpoints import replace_text

RESULTS = "results.json"
EPISODES = "episodes.csv"
COLUMNS = tuple(field.name for field in dataclasses.fields(EpisodeResult))
PARSERS = {
    "int": int,
    "float": float,
    "str": str,
    "bool | None": {"": None, "true": True, "false": False}.__getitem__,
}


def write_results(folder: Path, results: dict[str, Any], episodes: Iterable[EpisodeResult]) -> None:
    """Write both files, each whole or not at all."""
    write_episodes(folder, episodes)
    replace_text(folder / RESULTS, json.dumps(results, indent=2, allow_nan=False) + "\n")


def write_episodes(folder: Path, episodes: Iterable[EpisodeResult]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / EPISODES, episodes_csv(episodes))


def read_results(folder: Path) -> tuple[dict[str, Any], list[EpisodeResult]]:
    """What `write_results` wrote."""
    from embodied.reporting.result_types import Results, check

    results = read_object(folder / RESULTS)
    with reading(folder / RESULTS):
        check(results, Results)
    with reading(folder / EPISODES):
        return results, read_episodes(folder)


def read_episodes(folder: Path) -> list[EpisodeResult]:
    with open(folder / EPISODES, encoding="utf-8", newline="") as file:
        return [episode(row) for row in csv.DictReader(file)]


def episodes_csv(episodes: Iterable[EpisodeResult]) -> str:
    """One line per episode by index; empty stands for "this env has no success"."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for result in sorted(episodes, key=lambda result: result.index):
        writer.writerow(cell(getattr(result, name)) for name in COLUMNS)
    return text.getvalue()


def cell(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, (bool, np.bool_)) else str(value)


def episode(row: dict[str, str]) -> EpisodeResult:
    return EpisodeResult(
        **{field.name: PARSERS[field.type](row[field.name]) for field in dataclasses.fields(EpisodeResult)}
    )
