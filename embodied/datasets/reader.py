"""Reads a dataset in LeRobot's layout 3.0, 2.1 or 2.0, of any origin, episode by episode.

    for episode in read_dataset("push"):
        episode.obs["state"], episode.obs["images"]["front"], episode.actions    # [T, ...]

Images are only decoded for the requested episode, and not at all with `images=False`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.files import as_path, read_object, reading
from embodied.core.options import DATASETS
from embodied.core.types import Observation
from embodied.datasets import layout
from embodied.datasets.writer import as_arrays, read_frames

OLDER_EPISODES, OLDER_TASKS = "meta/episodes.jsonl", "meta/tasks.jsonl"  # layouts 2.0 and 2.1


@dataclass(frozen=True)
class DatasetEpisode:
    """An episode of T env steps. `obs` are the observations before each action: "state" [T, D], "images" {camera: uint8
    [T, H, W, 3]}, "instruction" T times the task.
    """

    index: int
    task: str
    success: bool | None  # None if unknown
    obs: Observation
    actions: np.ndarray  # [T, A], or int [T, 1]
    columns: dict[str, np.ndarray]  # all other features, such as "next.reward" [T]

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def rewards(self) -> np.ndarray | None:
        return self.columns.get(layout.REWARD)

    @property
    def done(self) -> np.ndarray | None:
        return self.columns.get(layout.DONE)


class Dataset:
    """A sequence of episodes on disk."""

    def __init__(self, path: Path, info: dict[str, Any], images: bool, theirs: dict[str, str]) -> None:
        self.path, self.images = path, images
        self.theirs = theirs  # the dataset's names of some of our features
        self.info, self.fps = info, info["fps"]
        self.features: layout.Features = {
            name: {**feature, "shape": layout.image_shape(feature)}
            for name, feature in layout.renamed(info["features"], theirs).items()
        }
        older, stats = layout.is_older(info), layout.path_inside(path, layout.STATS)
        self.stats = {} if older and not stats.exists() else read_stats(stats)
        self.tasks_file = layout.path_inside(path, OLDER_TASKS if older else layout.TASKS)
        self.tasks = read_older_tasks(path) if older else read_tasks(self.tasks_file)
        self.entries = read_older_entries(path, info) if older else read_entries(path)
        layout.check_entries(path, self.entries, info)
        self._begins: dict[tuple[int, int], int] = {}  # the first frame of every data file
        for entry in self.entries:
            file, first = data_file(entry), entry["dataset_from_index"]
            self._begins[file] = min(self._begins.get(file, first), first)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[DatasetEpisode]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> DatasetEpisode:
        entry = self.entries[number]
        columns = self._columns(entry)
        number = int(columns["task_index"][0])
        if number not in self.tasks:
            raise EmbodiedError(f"{self.tasks_file} has no task {number}, although episodes have it; {layout.AGAIN}")
        task = self.tasks[number]
        obs: Observation = {"instruction": [task] * entry["length"]}
        if layout.STATE in columns:
            obs["state"] = as_vectors(columns.pop(layout.STATE))
        if self.images and (images := self._images(entry, columns)):
            obs["images"] = images
        success = entry.get("success")
        if success is None and layout.SUCCESS in columns:
            success = bool(columns[layout.SUCCESS].any())
        numbers = {name: array for name, array in columns.items() if array.dtype != object}
        return DatasetEpisode(
            entry["episode_index"], task, success, obs, as_vectors(numbers.pop(layout.ACTION)), numbers
        )

    def check_whole(self, count: int | None = None) -> None:
        """Raise ConfigError if a file of the first `count` episodes is missing or cut short."""
        for entry in self.entries[:count] if self.images else ():
            for path in self._video_paths(entry).values():
                with reading(path, ConfigError, layout.AGAIN):
                    path.stat()
        for file in dict.fromkeys(map(data_file, self.entries[:count])):
            layout.check_table(self._file("data_path", file))

    def _columns(self, entry: dict[str, Any]) -> dict[str, np.ndarray]:
        """The rows of an episode, by feature."""
        import pyarrow.parquet as pq

        file = data_file(entry)
        path = self._file("data_path", file)
        first = entry["dataset_from_index"] - self._begins[file]
        with reading(path, advice=layout.AGAIN):
            table = rows_of(pq.ParquetFile(path), first, entry["length"])
            columns = layout.renamed({name: as_array(table[name]) for name in table.column_names}, self.theirs)
            if len(table) != entry["length"] or not (columns["episode_index"] == entry["episode_index"]).all():
                wanted = f"rows {first} to {first + entry['length']}"
                raise ValueError(f"{wanted} do not match episode {entry['episode_index']}")
            self._check(columns, entry["length"])
        return columns

    def _file(self, key: str, place: tuple[int, int], **more: str) -> Path:
        """The file of this template of info.json, for a chunk and file number."""
        fields = layout.place_fields(self.info, *place) | more
        return layout.path_inside(self.path, layout.fill_template(self.path, key, self.info[key], fields))

    def _check(self, columns: dict[str, np.ndarray], length: int) -> None:
        """Raise ValueError for invalid rows."""
        if columns["task_index"].dtype.kind not in "iu":
            raise ValueError("task_index is not a number")
        for name in (layout.ACTION, *([layout.STATE] if layout.STATE in self.features else [])):
            values, shape = as_vectors(columns[name]), self.features[name]["shape"]
            if values.dtype.kind not in "fiub" or values.shape[1:] != shape:
                actual = f"{values.dtype} {list(values.shape[1:])}"
                raise ValueError(f"{name} is {actual}, {layout.INFO} says {list(shape)}")
            if not np.isfinite(values).all():
                raise ValueError(f"{name} holds NaN or infinity in frame {int(np.argmin(np.isfinite(values).all(1)))}")
        if "frame_index" in columns and not np.array_equal(columns["frame_index"], np.arange(length)):
            raise ValueError(f"frame_index does not count from 0 to {length - 1}")

    def _images(self, entry: dict[str, Any], columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Images by camera, decoded from the videos or from compressed images in the table."""
        images = {}
        for name, feature in self.features.items():
            if feature["dtype"] == "image":
                with reading(self.path / layout.INFO, advice=f"the images of {name} are others; {layout.AGAIN}"):
                    images[camera_of(name)] = decoded(columns[name], feature["shape"])
        for name, path in self._video_paths(entry).items():
            begins_s = entry[f"videos/{self.theirs.get(name, name)}/from_timestamp"]
            shape = self.features[name]["shape"]
            images[camera_of(name)] = read_frames(path, begins_s, entry["length"], self.fps, shape)
        return images

    def _video_paths(self, entry: dict[str, Any]) -> dict[str, Path]:
        """The videos of an episode, by feature."""
        paths = {}
        for name in (name for name, feature in self.features.items() if feature["dtype"] == "video"):
            key = self.theirs.get(name, name)
            chunk, file = (entry[f"videos/{key}/{number}"] for number in layout.PLACES["v3."])
            paths[name] = self._file("video_path", (chunk, file), video_key=key)
        return paths


def read_dataset(path: Path | str, images: bool = True, names: Mapping[str, str] | None = None) -> Dataset:
    """Open the dataset in this folder; `names`: its names of "action", "state" or a camera, if they are not
    LeRobot's."""
    DATASETS.check("a LeRobot dataset, parquet files,")
    path = as_path(path)
    if not (path / layout.INFO).is_file():
        raise ConfigError(f"{path} is no LeRobot dataset: there is no {layout.INFO} in it")
    info = read_object(layout.path_inside(path, layout.INFO), ConfigError, layout.AGAIN)
    ours = {"action": layout.ACTION, "state": layout.STATE}
    theirs = {ours.get(name, layout.CAMERA + name): other for name, other in (names or {}).items()}
    layout.check_info(path, info, theirs)
    return Dataset(path, info, images, theirs)


def read_stats(path: Path) -> dict[str, layout.Stats]:
    """The statistics of every feature, from stats.json."""
    stats = read_object(path, ConfigError, layout.AGAIN)
    with reading(path, ConfigError, layout.AGAIN):
        arrays = as_arrays(stats)
        for name, values in ((name, values) for name, figures in arrays.items() for values in figures.values()):
            if values.dtype.kind not in "fiub" or not np.isfinite(values).all():
                raise ValueError(f"the figures of {name} are not finite numbers")
    return arrays


def read_tasks(path: Path) -> dict[int, str]:
    """The instructions by task_index."""
    import pyarrow.parquet as pq

    with reading(path, ConfigError, layout.AGAIN):
        table = pq.read_table(path).to_pydict()
        (texts,) = [column for name, column in table.items() if name != "task_index"]
        tasks = dict(zip(table["task_index"], texts, strict=True))
        if len(tasks) != len(texts) or not all(type(n) is int and isinstance(text, str) for n, text in tasks.items()):
            raise ValueError("it should say one text for every task_index")
    return tasks


def read_entries(path: Path) -> list[dict[str, Any]]:
    """The entry of every episode, without its statistics."""
    import pyarrow.parquet as pq

    entries = []
    for file in sorted((path / "meta" / "episodes").glob("*/*.parquet")):
        with reading(layout.path_inside(path, file.relative_to(path)), ConfigError, layout.AGAIN):
            names = [name for name in pq.read_schema(file).names if not name.startswith("stats/")]
            entries += sorted(pq.read_table(file, columns=names).to_pylist(), key=lambda entry: entry["episode_index"])
    return sorted(entries, key=lambda entry: entry["episode_index"])


def data_file(entry: dict[str, Any]) -> tuple[int, int]:
    return entry["data/chunk_index"], entry["data/file_index"]


def rows_of(file, first: int, length: int):
    """Rows of a parquet file; only row groups with these rows are read."""
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    ends = np.cumsum(sizes)
    begins = ends - sizes
    groups = np.flatnonzero((ends > first) & (begins < first + length))
    if first < 0 or not len(groups):
        raise ValueError(f"it has no rows {first} to {first + length}")
    return file.read_row_groups(groups.tolist()).slice(first - int(begins[groups[0]]), length)


def as_array(column) -> np.ndarray:
    """A column of numbers, or of lists of numbers, as an array; other columns as an array of objects."""
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
    """The column as [T, D], with D=1 for single numbers."""
    return column.reshape(len(column), -1)


def camera_of(feature: str) -> str:
    return feature.removeprefix(layout.CAMERA).removeprefix("observation.")


def decoded(cells: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Compressed images as uint8 [T, H, W, 3]."""
    import imageio.v3 as imageio

    images = np.stack([imageio.imread(io.BytesIO(cell["bytes"]))[..., :3] for cell in cells])
    if images.shape[1:] != shape:
        raise ValueError(f"images are {list(images.shape[1:])}, not {list(shape)}")
    return images


# Layouts 2.0 and 2.1: every episode has separate files and a line of JSON. The lines become entries as in layout 3.0.


def read_older_tasks(path: Path) -> dict[int, str]:
    """The instructions by task_index. `path` is the dataset's folder."""
    tasks: dict[int, str] = {}
    for number, line in lines(path, OLDER_TASKS):
        index, text = line.get("task_index"), line.get("task")
        if not layout.is_count(index) or not isinstance(text, str) or index in tasks:
            raise ConfigError(
                f"{path / OLDER_TASKS}: line {number} gives no text to a task_index of its own; {layout.AGAIN}"
            )
        tasks[index] = text
    return tasks


def read_older_entries(path: Path, info: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of all episodes, in order. `path` is the dataset's folder."""
    entries = [entry_of(line, info) for _, line in lines(path, OLDER_EPISODES)]
    return sorted(entries, key=lambda entry: entry["episode_index"] if layout.is_count(entry["episode_index"]) else -1)


def entry_of(line: dict[str, Any], info: dict[str, Any]) -> dict[str, Any]:
    """A line as an entry of layout 3.0: the episode fills its file, whose number is the episode's."""
    episode, length = line.get("episode_index"), line.get("length")
    chunk = episode // info["chunks_size"] if layout.is_count(episode) else None
    entry = {"episode_index": episode, "length": length, "tasks": line.get("tasks")}
    entry |= {"dataset_from_index": 0, "dataset_to_index": length, "success": None}
    videos = [f"videos/{name}" for name in layout.cameras(info["features"])]
    for file_kind in ("data", *videos):
        entry |= {f"{file_kind}/chunk_index": chunk, f"{file_kind}/file_index": episode}
    return entry | {f"{video}/from_timestamp": 0.0 for video in videos}


def lines(path: Path, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, mapping) of a file with a JSON object per line."""
    file = layout.path_inside(path, name)
    with reading(file, ConfigError, layout.AGAIN), file.open(encoding="utf-8") as content:
        for number, line in enumerate(content, 1):
            if not line.strip():
                continue
            try:
                mapping = json.loads(line)
            except ValueError as err:
                raise ValueError(f"line {number} is no JSON ({err})") from None
            if not isinstance(mapping, dict):
                raise ValueError(f"line {number} holds no mapping")
            yield number, mapping
