"""An episode in recording: a folder with its numbers and a bare video per camera, which appears when it is complete.

Images go to the encoders frame by frame, so none stays in memory. Episodes are recorded in the processes of sim
workers, so no frame is sent, and in any order: `DatasetWriter.add_buffer` appends them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embodied.core.arrays import Observation, host
from embodied.core.types import ChunkResult, EpisodeResult, EpisodeSpec, Recording
from embodied.datasets.feature_stats import PixelCounts, Stats, of_values
from embodied.datasets.lerobot_layout import Features, Frame, cameras, complete, features_of, fps_of, frame_of
from embodied.reporting.videos import FOR_DATASETS, VideoWriter

if TYPE_CHECKING:
    from embodied.envs.vector_env import VectorEnv

NUMBERS, ABOUT = "numbers.npz", "episode.json"


class EpisodeBuffer:
    """Records an episode: `add` frames, then `finish` or `discard`."""

    def __init__(self, folder: Path, fps: int, features: Features) -> None:
        """`folder` appears when the episode is finished."""
        self.folder = Path(folder)
        self.features = complete(features)
        self._place = self.folder.with_name(f".{self.folder.name}-{os.getpid()}")
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir(parents=True)
        self._columns: dict[str, list[np.ndarray]] = {name: [] for name in self.features}
        self._videos = {name: VideoWriter(self._place, fps, FOR_DATASETS) for name in cameras(self.features)}
        self._pixels = {name: PixelCounts() for name in self._videos}
        for name in self._videos:
            del self._columns[name]

    def add(self, frame: Frame) -> None:
        """Append an env step: a value for every feature."""
        if odd := frame.keys() ^ self.features.keys():
            missing, unknown = sorted(odd & self.features.keys()), sorted(odd & frame.keys())
            raise ValueError(f"a frame lacks {missing} and has {unknown}, which is not among the dataset's features")
        values = {name: as_described(name, frame[name], feature) for name, feature in self.features.items()}
        for name, column in self._columns.items():
            column.append(values[name])
        for name, video in self._videos.items():
            video.add(values[name])
            self._pixels[name].add(values[name])

    def finish(self, task: str, success: bool | None = None) -> Path:
        """Complete the folder and return it; `task` is the instruction."""
        if not self.length:
            raise ValueError(f"{self.folder.name}: an episode needs at least one frame")
        for name, video in self._videos.items():
            video.finish(name + FOR_DATASETS.suffix)
        arrays = {name: np.stack(column) for name, column in self._columns.items()}
        stats = {name: of_values(array) for name, array in arrays.items()}
        stats |= {name: pixels.stats() for name, pixels in self._pixels.items()}
        np.savez(self._place / NUMBERS, **arrays)
        metadata = {"task": task, "success": success, "length": self.length, "stats": as_lists(stats)}
        (self._place / ABOUT).write_text(json.dumps(metadata), encoding="utf-8")
        shutil.rmtree(self.folder, ignore_errors=True)
        self._place.rename(self.folder)
        return self.folder

    @property
    def length(self) -> int:
        """Frames so far."""
        lengths = [len(column) for column in self._columns.values()] + [v.num_frames for v in self._videos.values()]
        return lengths[0]

    def discard(self) -> None:
        """Delete the draft. Harmless after `finish`."""
        for video in self._videos.values():
            video.discard()
        shutil.rmtree(self._place, ignore_errors=True)

    def __enter__(self) -> EpisodeBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


class EpisodeRecorder:
    """Open buffers by env row, which get every env step and the observation before it; none if the recording has no
    folder for them. Inside a chunk of actions every step is observed, too, only for the record."""

    def __init__(self, env: VectorEnv, recording: Recording, warn: Callable[[str], object]) -> None:
        self.env, self.folder = env, recording.buffers
        self.open: dict[int, EpisodeBuffer] = {}
        self.words: dict[int, str] = {}
        self.seen: list[Observation] = []  # before each env step of the current decision
        self.actions: np.ndarray | None = None

    def __enter__(self) -> EpisodeRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        for buffer in self.open.values():
            buffer.discard()

    def begin(self, rows: np.ndarray, specs: list[EpisodeSpec], instructions: np.ndarray | None) -> None:
        if self.folder is None:
            return
        spec = self.env.env_spec
        for row, episode in zip(rows.tolist(), specs, strict=True):
            self.open[row] = EpisodeBuffer(self.folder / buffer_name(episode.index), fps_of(spec), features_of(spec))
            self.words[row] = episode.task if instructions is None else instructions[row]

    def decided(self, obs: Observation, actions: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
        self.seen, self.actions = [obs], actions

    def on_frame(self, active: np.ndarray) -> None:
        if self.open and len(self.seen) < self.actions.shape[1]:
            self.seen.append(self.env.observe())

    def played(self, result: ChunkResult) -> None:
        if not self.open:
            return
        discrete = self.env.env_spec.action.discrete
        actions = host(self.actions)
        actions = actions if discrete else np.clip(actions, -1.0, 1.0)  # as executed
        done, rewards = result.terminated | result.truncated, host(result.rewards)
        for row, buffer in self.open.items():
            for c in np.flatnonzero(result.mask[row]):
                success = None if result.success is None else bool(result.success[row, c])
                action, reward = actions[row, c], rewards[row, c]
                buffer.add(frame_of(self.seen[c], row, action, reward, bool(done[row, c]), success))

    def finish(self, rows: np.ndarray, outcomes: list[EpisodeResult]) -> None:
        for row, outcome in zip(rows.tolist(), outcomes, strict=True):
            if buffer := self.open.pop(row, None):
                buffer.finish(self.words[row], outcome.success_once)


def buffer_name(index: int) -> str:
    """Name of the folder of the episode with this index."""
    return f"episode-{index:06d}"


def as_described(name: str, value: object, feature: dict) -> np.ndarray:
    """The value as an array of its feature's type and shape; raises ValueError if it does not fit."""
    if feature["dtype"] == "video":
        array = np.asarray(value)
        if array.shape != feature["shape"] or array.dtype != np.uint8:
            raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, not uint8 {list(feature['shape'])}")
        return array
    array = np.array(value, np.dtype(feature["dtype"])).reshape(-1)  # a copy: the env may use its array again
    if array.shape != feature["shape"]:
        raise ValueError(f"{name} has {array.size} numbers, not {feature['shape'][0]}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{name} is not finite: {array}")
    return array


def as_lists(stats: dict[str, Stats]) -> dict[str, dict[str, list]]:
    return {name: {figure: array.tolist() for figure, array in figures.items()} for name, figures in stats.items()}


def as_arrays(stats: dict[str, dict[str, list]]) -> dict[str, Stats]:
    return {name: {figure: np.array(values) for figure, values in figures.items()} for name, figures in stats.items()}
