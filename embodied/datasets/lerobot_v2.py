"""LeRobot's layouts 2.0 and 2.1, in which every episode has files of its own and is described by a line of JSON.

Their lines are made the entries that layout 3.0 would have, so that whoever reads episodes sees one kind of dataset.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embodied.core.errors import ConfigError
from embodied.core.files import reading
from embodied.datasets.validation import AGAIN, films_of, inside, is_count

EPISODES, TASKS = "meta/episodes.jsonl", "meta/tasks.jsonl"


def read_older_tasks(path: Path) -> dict[int, str]:
    """What the robot was told, by task_index. `path` is the dataset's folder."""
    tasks: dict[int, str] = {}
    for number, line in lines(path, TASKS):
        index, text = line.get("task_index"), line.get("task")
        if not is_count(index) or not isinstance(text, str) or index in tasks:
            raise ConfigError(f"{path / TASKS}: line {number} gives no text to a task_index of its own; {AGAIN}")
        tasks[index] = text
    return tasks


def read_older_entries(path: Path, info: dict[str, Any]) -> list[dict[str, Any]]:
    entries = [entry_of(line, info) for _, line in lines(path, EPISODES)]
    return sorted(entries, key=lambda entry: entry["episode_index"] if is_count(entry["episode_index"]) else -1)


def entry_of(line: dict[str, Any], info: dict[str, Any]) -> dict[str, Any]:
    """An episode is all of its file, which is its own number in a chunk."""
    episode, length = line.get("episode_index"), line.get("length")
    chunk = episode // info["chunks_size"] if is_count(episode) else None
    found = {"episode_index": episode, "length": length, "tasks": line.get("tasks")}
    found |= {"dataset_from_index": 0, "dataset_to_index": length, "success": None}
    films = [f"videos/{name}" for name in films_of(info)]
    for part in ("data", *films):
        found |= {f"{part}/chunk_index": chunk, f"{part}/file_index": episode}
    return found | {f"{film}/from_timestamp": 0.0 for film in films}


def lines(path: Path, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The mappings of a file, a line each, numbered from 1."""
    file = inside(path, name)
    with reading(file, ConfigError, AGAIN), file.open(encoding="utf-8") as content:
        for number, line in enumerate(content, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except ValueError as err:
                raise ValueError(f"line {number} is no JSON ({err})") from None
            if not isinstance(found, dict):
                raise ValueError(f"line {number} holds no mapping")
            yield number, found
