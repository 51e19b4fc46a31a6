"""Writes a dataset episode by episode: memory holds one episode's numbers, images go straight to the encoders.

Everything is written beside the dataset's place, which it takes in one step when the last episode is in: a dataset is
whole or absent.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.errors import EmbodiedError
from embodied.datasets import lerobot_layout
from embodied.datasets.episode_buffer import ABOUT, NUMBERS, EpisodeBuffer, as_arrays, as_lists
from embodied.datasets.episode_videos import JoinedVideo
from embodied.datasets.feature_stats import Stats, merge, of_values
from embodied.datasets.lerobot_layout import FILES_PER_CHUNK, INDICES, Features, Frame, cameras, complete, place
from embodied.datasets.tables import TableFiles, data_schema, episodes_schema, write_tasks
from embodied.reporting.videos import FOR_DATASETS

DATA_MB, VIDEO_MB = 100, 200  # the size at which the next file begins, as in LeRobot
ENTRIES = 50  # of episodes that are written at once


class DatasetWriter:
    """
    with DatasetWriter("push", fps=20, features=features_of(spec)) as writer:
        writer.add_episode(frames, task="push the cube", success=True)
    """

    def __init__(self, path: Path | str, fps: int, features: Features, data_mb=DATA_MB, video_mb=VIDEO_MB) -> None:
        lerobot_layout.check_pyarrow()
        if int(fps) != fps or fps < 1:
            raise ValueError(f"fps={fps}: LeRobot datasets have a whole number of frames per second")
        self.path, self.fps, self.features = Path(path), int(fps), complete(features)
        if self.path.exists():
            raise EmbodiedError(f"{self.path} is there already; name another folder for the dataset")
        self.num_episodes = self.num_frames = 0
        self._sizes = {"data_files_size_in_mb": data_mb, "video_files_size_in_mb": video_mb}
        self._tasks: dict[str, int] = {}
        self._stats: dict[str, Stats] = {}
        self._entries: list[dict[str, Any]] = []  # of the last episodes
        self._root = self.path.with_name(f".{self.path.name}-{uuid.uuid4().hex}")
        self._root.mkdir(parents=True)
        schema = data_schema(self.features | INDICES)
        self._data = TableFiles(lambda n: self._root / lerobot_layout.DATA.format(**place(n)), schema, data_mb * 2**20)
        schema = episodes_schema(self.features | INDICES)
        self._episodes = TableFiles(
            lambda n: self._root / lerobot_layout.EPISODES.format(**place(n)), schema, data_mb * 2**20
        )
        self._videos = {name: self._joined(name, video_mb * 2**20) for name in cameras(self.features)}

    def add_episode(self, frames: Iterable[Frame], task: str, success: bool | None = None) -> None:
        """Write an episode: for every env step what was seen, what was done and what came of it (`frame_of`)."""
        with EpisodeBuffer(self._root / "draft", self.fps, self.features) as draft:
            for frame in frames:
                draft.add(frame)
            self.add_draft(draft.finish(task, success))

    def add_draft(self, folder: Path) -> None:
        """Take up an episode that was recorded as a `Draft` of the same features; its folder goes."""
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        length, episode = about["length"], self.num_episodes
        with np.load(folder / NUMBERS) as numbers:
            columns = {name: numbers[name] for name in numbers.files}
        indices = self._indices(length, self._tasks.setdefault(about["task"], len(self._tasks)))
        row: dict[str, Any] = {"episode_index": episode, "tasks": [about["task"]], "length": length}
        row["dataset_from_index"], row["dataset_to_index"] = self.num_frames, self.num_frames + length
        row |= located("data", self._data.add({**columns, **indices}))
        for name, video in self._videos.items():
            file, begins_s = video.add(folder / f"{name}{FOR_DATASETS.suffix}", length)
            row |= located(f"videos/{name}", file)
            row[f"videos/{name}/from_timestamp"] = begins_s
            row[f"videos/{name}/to_timestamp"] = begins_s + length / self.fps
        stats = as_arrays(about["stats"])
        stats |= {name: of_values(array[:, None]) for name, array in indices.items()}
        row |= {f"stats/{name}/{key}": array for name, figures in stats.items() for key, array in figures.items()}
        row["success"] = about["success"]
        self._enter(row | located("meta/episodes", self._episodes.file))
        self._stats = {name: merge(self._stats[name], new) if self._stats else new for name, new in stats.items()}
        self.num_episodes, self.num_frames = episode + 1, self.num_frames + length
        shutil.rmtree(folder)

    def close(self) -> Path:
        """Complete the dataset and put it in its place."""
        if not self.num_episodes:
            raise EmbodiedError(f"{self.path}: a dataset needs at least one episode")
        self._write_entries()
        for part in (self._data, self._episodes, *self._videos.values()):
            part.close()
        write_tasks(self._root / lerobot_layout.TASKS, list(self._tasks))
        write_json(self._root / lerobot_layout.STATS, as_lists(self._stats))
        write_json(self._root / lerobot_layout.INFO, self._info())
        if self.path.exists():
            raise EmbodiedError(f"{self.path} has appeared meanwhile; the new dataset is in {self._root}")
        os.rename(self._root, self.path)
        return self.path

    def discard(self) -> None:
        """Leave nothing behind. Harmless after `close`."""
        for table in (self._data, self._episodes):
            table.discard()
        shutil.rmtree(self._root, ignore_errors=True)

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.discard()

    def _enter(self, row: dict[str, Any]) -> None:
        self._entries.append(row)
        if len(self._entries) == ENTRIES:
            self._write_entries()

    def _write_entries(self) -> None:
        if self._entries:
            self._episodes.add({name: [row[name] for row in self._entries] for name in self._entries[0]})
            self._entries.clear()

    def _joined(self, name: str, file_bytes: int) -> JoinedVideo:
        def path(number: int) -> Path:
            return self._root / lerobot_layout.VIDEOS.format(video_key=name, **place(number))

        return JoinedVideo(path, self.fps, file_bytes)

    def _indices(self, length: int, task: int) -> dict[str, np.ndarray]:
        """Where the frames of the next episode belong."""
        steps = np.arange(length)
        return {
            "timestamp": (steps / self.fps).astype(np.float32),
            "frame_index": steps,
            "episode_index": np.full(length, self.num_episodes),
            "index": self.num_frames + steps,
            "task_index": np.full(length, task),
        }

    def _info(self) -> dict[str, Any]:
        return {
            "codebase_version": lerobot_layout.VERSION,
            "robot_type": None,
            "total_episodes": self.num_episodes,
            "total_frames": self.num_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": FILES_PER_CHUNK,
            **self._sizes,
            "fps": self.fps,
            "splits": {"train": f"0:{self.num_episodes}"},
            "data_path": lerobot_layout.DATA,
            "video_path": lerobot_layout.VIDEOS if self._videos else None,
            "features": {name: self._described(name) for name in self.features | INDICES},
        }

    def _described(self, name: str) -> dict[str, Any]:
        feature = (self.features | INDICES)[name]
        if feature["dtype"] != "video":
            return feature
        height, width, _ = feature["shape"]
        pixels = "yuv420p" if height % 2 == width % 2 == 0 else "yuv444p"
        facts = {"height": height, "width": width, "codec": "h264", "pix_fmt": pixels, "is_depth_map": False}
        facts |= {"fps": self.fps, "channels": 3}
        return {**feature, "info": {**{f"video.{key}": fact for key, fact in facts.items()}, "has_audio": False}}


def located(what: str, file: int) -> dict[str, int]:
    """The columns that say in which file a part of an episode is."""
    return {f"{what}/{key}": number for key, number in place(file).items()}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=4, ensure_ascii=False) + "\n", encoding="utf-8")
