"""Reads a dataset in LeRobot's layout 3.0, ours or another's, episode by episode.

    for episode in read_dataset("push"):
        episode.obs["state"], episode.obs["images"]["front"], episode.actions    # [T, ...]

Images are decoded only for the episode that is asked for, and not at all with `images=False`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodied.data import Observation
from embodied.datasets import layout
from embodied.datasets.draft import as_arrays
from embodied.datasets.joined import read_frames
from embodied.datasets.layout import ACTION, CAMERA, DONE, REWARD, STATE, SUCCESS
from embodied.errors import ConfigError, EmbodiedError


@dataclass(frozen=True)
class RecordedEpisode:
    """T env steps. `obs` is what was seen before each action, as policies are shown it: "state" [T, D], "images"
    {camera: uint8 [T, H, W, 3]}, "instruction" T times the task."""

    index: int
    task: str
    success: bool | None  # None: nobody has said
    obs: Observation
    actions: np.ndarray  # [T, A], or int [T, 1]
    columns: dict[str, np.ndarray]  # all others by feature, such as "next.reward" [T]

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def rewards(self) -> np.ndarray | None:
        return self.columns.get(REWARD)

    @property
    def done(self) -> np.ndarray | None:
        return self.columns.get(DONE)


class Dataset:
    """A sequence of episodes on disk."""

    def __init__(self, path: Path, info: dict[str, Any], images: bool) -> None:
        self.path, self.images = path, images
        self.info, self.fps = info, info["fps"]
        self.features: layout.Features = {
            name: {**feature, "shape": tuple(feature["shape"])} for name, feature in info["features"].items()
        }
        self.stats = as_arrays(json.loads((path / layout.STATS).read_text(encoding="utf-8")))
        self.tasks = read_tasks(path / layout.TASKS)
        self.entries = read_entries(path)
        self._begins: dict[tuple[int, int], int] = {}  # the first frame of every data file
        for entry in self.entries:
            file, first = data_file(entry), entry["dataset_from_index"]
            self._begins[file] = min(self._begins.get(file, first), first)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[RecordedEpisode]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> RecordedEpisode:
        entry = self.entries[number]
        columns = self._columns(entry)
        task = self.tasks[int(columns["task_index"][0])]
        obs: Observation = {"instruction": [task] * entry["length"]}
        if STATE in columns:
            obs["state"] = as_vectors(columns.pop(STATE))
        if self.images and (images := self._images(entry, columns)):
            obs["images"] = images
        success = entry.get("success")
        if success is None and SUCCESS in columns:
            success = bool(columns[SUCCESS].any())
        numbers = {name: array for name, array in columns.items() if array.dtype != object}
        return RecordedEpisode(entry["episode_index"], task, success, obs, as_vectors(numbers.pop(ACTION)), numbers)

    def _columns(self, entry: dict[str, Any]) -> dict[str, np.ndarray]:
        """The rows of an episode, by feature."""
        import pyarrow.parquet as pq

        file = data_file(entry)
        chunk, number = file
        path = self.path / self.info["data_path"].format(chunk_index=chunk, file_index=number)
        first = entry["dataset_from_index"] - self._begins[file]
        table = rows_of(pq.ParquetFile(path), first, entry["length"])
        columns = {name: as_array(table[name]) for name in table.column_names}
        if len(table) != entry["length"] or not (columns["episode_index"] == entry["episode_index"]).all():
            raise EmbodiedError(f"{path}: rows {first} to {first + entry['length']} are not episode {number}")
        return columns

    def _images(self, entry: dict[str, Any], columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """By camera. Videos are decoded, pictures that are kept in the table as well."""
        images = {}
        for name, feature in self.features.items():
            if feature["dtype"] == "image":
                images[camera_of(name)] = np.stack([picture(cell["bytes"]) for cell in columns[name]])
            if feature["dtype"] == "video":
                chunk, file = entry[f"videos/{name}/chunk_index"], entry[f"videos/{name}/file_index"]
                where = self.info["video_path"].format(video_key=name, chunk_index=chunk, file_index=file)
                begins_s = entry[f"videos/{name}/from_timestamp"]
                frames = read_frames(self.path / where, begins_s, entry["length"], self.fps, feature["shape"])
                images[camera_of(name)] = frames
        return images


def read_dataset(path: Path | str, images: bool = True) -> Dataset:
    """The dataset in this folder."""
    layout.check_pyarrow()
    path = Path(path).expanduser()
    try:
        info = json.loads((path / layout.INFO).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is no LeRobot dataset: there is no {layout.INFO} in it") from None
    if not str(info.get("codebase_version", "")).startswith("v3."):
        raise ConfigError(
            f"{path} has LeRobot's layout {info.get('codebase_version')}, this reads {layout.VERSION}; "
            "LeRobot converts: python -m lerobot.datasets.v30.convert_dataset_v21_to_v30"
        )
    if ACTION not in info["features"]:
        raise ConfigError(f"{path} has no feature {ACTION!r}; it has {', '.join(info['features'])}")
    return Dataset(path, info, images)


def read_tasks(path: Path) -> list[str]:
    """What the robot was told, by task_index."""
    import pyarrow.parquet as pq

    table = pq.read_table(path).to_pydict()
    (texts,) = [column for name, column in table.items() if name != "task_index"]
    return [text for _, text in sorted(zip(table["task_index"], texts, strict=True))]


def read_entries(path: Path) -> list[dict[str, Any]]:
    """What is said of every episode, without its statistics."""
    import pyarrow.parquet as pq

    entries = []
    for file in sorted((path / "meta" / "episodes").glob("*/*.parquet")):
        names = [name for name in pq.read_schema(file).names if not name.startswith("stats/")]
        entries += pq.read_table(file, columns=names).to_pylist()
    return sorted(entries, key=lambda entry: entry["episode_index"])


def data_file(entry: dict[str, Any]) -> tuple[int, int]:
    return entry["data/chunk_index"], entry["data/file_index"]


def rows_of(file, first: int, length: int):
    """A part of a parquet file; only the groups of rows it lies in are read."""
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    ends = np.cumsum(sizes)
    begins = ends - sizes
    groups = np.flatnonzero((ends > first) & (begins < first + length))
    return file.read_row_groups(groups.tolist()).slice(first - int(begins[groups[0]]), length)


def as_array(column) -> np.ndarray:
    """A column of numbers or of lists of them; an array of objects for anything else."""
    import pyarrow as pa

    column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0)
    if pa.types.is_fixed_size_list(column.type) or pa.types.is_list(column.type):
        flat = column.flatten()
        if not (pa.types.is_list(flat.type) or pa.types.is_struct(flat.type)) and len(column):
            return flat.to_numpy(zero_copy_only=False).reshape(len(column), -1)
    return column.to_numpy(zero_copy_only=False)


def as_vectors(column: np.ndarray) -> np.ndarray:
    """[T, D], of single numbers too."""
    return column.reshape(len(column), -1)


def camera_of(feature: str) -> str:
    return feature.removeprefix(CAMERA).removeprefix("observation.")


def picture(data: bytes) -> np.ndarray:
    """A compressed picture as uint8 [H, W, 3]."""
    import imageio.v3 as imageio

    return imageio.imread(io.BytesIO(data))[..., :3]
