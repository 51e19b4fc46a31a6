"""Writes a dataset episode by episode: only one episode's numbers are in memory, and images go straight to encoders.

`EpisodeBuffer` records an episode as a folder with its numbers and a bare video per camera. Episodes are recorded in
the processes of sim workers, so no frame is sent, and in any order: `DatasetWriter.add_buffer` appends them. Everything
is written to hidden folders, which get their names at the end, so episodes and datasets are complete or absent.

The videos of many episodes are in few files. Bare streams are concatenated; ffmpeg then only writes the time of every
frame, n / fps, which is exact for any number of frames.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.core.arrays import Observation, host
from embodied.core.errors import EmbodiedError, printable
from embodied.core.files import encode
from embodied.core.options import DATASETS
from embodied.core.types import ChunkResult, EpisodeResult, EpisodeSpec, Recording
from embodied.datasets import layout
from embodied.records.videos import FOR_DATASETS, VideoWriter, ffmpeg

if TYPE_CHECKING:
    from embodied.envs.vector_env import VectorEnv

DATA_MB, VIDEO_MB = 100, 200  # file sizes after which the next file begins, as in LeRobot
ENTRIES = 50  # entries of episodes that are written at once


class DatasetWriter:
    """
    with DatasetWriter("push", fps=20, features=features_of(spec)) as writer:
        writer.add_episode(frames, task="push the cube", success=True)
    """

    def __init__(
        self, path: Path | str, fps: int, features: layout.Features, data_mb=DATA_MB, video_mb=VIDEO_MB
    ) -> None:
        DATASETS.check("a LeRobot dataset, parquet files,")
        if int(fps) != fps or fps < 1:
            raise ValueError(f"fps={fps}: LeRobot datasets have a whole number of frames per second")
        self.path, self.fps, self.features = Path(path), int(fps), layout.complete_features(features)
        if self.path.exists():
            raise EmbodiedError(f"{self.path} exists already; name another folder for the dataset")
        self.num_episodes = self.num_frames = 0
        self._sizes = {"data_files_size_in_mb": data_mb, "video_files_size_in_mb": video_mb}
        self._tasks: dict[str, int] = {}
        self._stats: dict[str, layout.Stats] = {}
        self._entries: list[dict[str, Any]] = []  # unwritten entries of the last episodes
        self._root = self.path.with_name(f".{self.path.name}-{uuid.uuid4().hex}")
        self._root.mkdir(parents=True)
        every, data_bytes, video_bytes = self.features | layout.INDICES, data_mb * 2**20, video_mb * 2**20
        self._data = TableFiles(self._files(layout.DATA), data_schema(every), data_bytes)
        self._episodes = TableFiles(self._files(layout.EPISODES), episodes_schema(every), data_bytes)
        videos = {name: self._files(layout.VIDEOS, video_key=name) for name in layout.cameras(self.features)}
        self._videos = {name: JoinedVideo(path, self.fps, video_bytes) for name, path in videos.items()}

    def add_episode(self, frames: Iterable[layout.Frame], task: str, success: bool | None = None) -> None:
        """Append an episode: a frame (`frame_of`) per env step."""
        with EpisodeBuffer(self._root / "draft", self.fps, self.features) as buffer:
            for frame in frames:
                buffer.add(frame)
            draft = buffer.finish(task, success)
        self.add_buffer(draft)
        shutil.rmtree(draft)

    def add_buffer(self, folder: Path) -> None:
        """Append an episode from the folder of an `EpisodeBuffer` with the same features; the folder stays."""
        metadata = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        length, episode = metadata["length"], self.num_episodes
        with np.load(folder / NUMBERS) as numbers:
            columns = {name: numbers[name] for name in numbers.files}
        task = printable(metadata["task"])
        indices = self._indices(length, self._tasks.setdefault(task, len(self._tasks)))
        row: dict[str, Any] = {"episode_index": episode, "tasks": [task], "length": length}
        row["dataset_from_index"], row["dataset_to_index"] = self.num_frames, self.num_frames + length
        row |= location_columns("data", self._data.add({**columns, **indices}))
        for name, video in self._videos.items():
            file, begins_s = video.add(folder / f"{name}{FOR_DATASETS.suffix}", length)
            row |= location_columns(f"videos/{name}", file)
            row[f"videos/{name}/from_timestamp"] = begins_s
            row[f"videos/{name}/to_timestamp"] = begins_s + length / self.fps
        stats = as_arrays(metadata["stats"])
        stats |= {name: layout.of_values(array[:, None]) for name, array in indices.items()}
        row |= {f"stats/{name}/{key}": array for name, figures in stats.items() for key, array in figures.items()}
        row["success"] = metadata["success"]
        self._entries.append(row | location_columns("meta/episodes", self._episodes.file))
        if len(self._entries) == ENTRIES:
            self._write_entries()
        self._stats = {
            name: layout.merge(self._stats[name], new) if self._stats else new for name, new in stats.items()
        }
        self.num_episodes, self.num_frames = episode + 1, self.num_frames + length

    def close(self) -> Path:
        """Complete the dataset and rename its folder."""
        if not self.num_episodes:
            raise EmbodiedError(f"{self.path}: a dataset needs at least one episode")
        self._write_entries()
        for writer in (self._data, self._episodes, *self._videos.values()):
            writer.close()
        write_tasks(self._root / layout.TASKS, list(self._tasks))
        write_json(self._root / layout.STATS, as_lists(self._stats))
        write_json(self._root / layout.INFO, self._info())
        if self.path.exists():
            raise EmbodiedError(f"{self.path} has appeared meanwhile; the new dataset is in {self._root}")
        os.rename(self._root, self.path)
        return self.path

    def discard(self) -> None:
        """Delete the draft. Harmless after `close`."""
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

    def _write_entries(self) -> None:
        if self._entries:
            self._episodes.add({name: [row[name] for row in self._entries] for name in self._entries[0]})
            self._entries.clear()

    def _files(self, template: str, **fields: str) -> Callable[[int], Path]:
        """The path of the n-th file."""
        return lambda number: self._root / template.format(**fields, **layout.place(number))

    def _indices(self, length: int, task: int) -> dict[str, np.ndarray]:
        """The index columns of the next episode's frames."""
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
            "codebase_version": layout.VERSION,
            "robot_type": None,
            "total_episodes": self.num_episodes,
            "total_frames": self.num_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": layout.FILES_PER_CHUNK,
            **self._sizes,
            "fps": self.fps,
            "splits": {"train": f"0:{self.num_episodes}"},
            "data_path": layout.DATA,
            "video_path": layout.VIDEOS if self._videos else None,
            "features": {name: self._described(name) for name in self.features | layout.INDICES},
        }

    def _described(self, name: str) -> dict[str, Any]:
        feature = (self.features | layout.INDICES)[name]
        if feature["dtype"] != "video":
            return feature
        height, width, _ = feature["shape"]
        pixels = "yuv420p" if height % 2 == width % 2 == 0 else "yuv444p"
        facts = {"height": height, "width": width, "codec": "h264", "pix_fmt": pixels, "is_depth_map": False}
        facts |= {"fps": self.fps, "channels": 3}
        return {**feature, "info": {**{f"video.{key}": fact for key, fact in facts.items()}, "has_audio": False}}


def location_columns(what: str, file: int) -> dict[str, int]:
    """The columns of an entry with the file of a part of an episode."""
    return {f"{what}/{key}": number for key, number in layout.place(file).items()}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(json.dumps(value, indent=4, ensure_ascii=False) + "\n"))


# Parquet files: the frames, an entry per episode, the tasks

GROUP = 2000  # rows per group; each group's description stays in memory until the file is complete


class TableFiles:
    """Writes rows to one parquet file after the other; rows added together stay in one file."""

    def __init__(self, path: Callable[[int], Path], schema, file_bytes: int) -> None:
        """`path(n)` names the n-th file; a new one begins after `file_bytes`."""
        self.path, self.schema, self.file_bytes = path, schema, file_bytes
        self.file = 0  # number of the current file
        self._writer = None
        self._bytes = 0  # size of the current file
        self._waiting: list[Any] = []  # unwritten tables

    def add(self, columns: dict[str, Any]) -> int:
        """Append these rows; returns the number of their file."""
        import pyarrow as pa

        file, arrays = self.file, [as_column(columns[field.name], field.type) for field in self.schema]
        table = pa.Table.from_arrays(arrays, schema=self.schema)
        self._waiting.append(table)
        self._bytes += table.nbytes
        if self._bytes >= self.file_bytes:
            self.close()
            self.file += 1
        elif sum(map(len, self._waiting)) >= GROUP:
            self._write()
        return file

    def close(self) -> None:
        """Complete the file that is open."""
        self._write()
        if self._writer is not None:
            self._writer.close()
            self._writer, self._bytes = None, 0

    def discard(self) -> None:
        """Forget the unwritten rows."""
        self._waiting.clear()
        self.close()

    def _write(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self._waiting:
            return
        if self._writer is None:
            self.path(self.file).parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self.path(self.file), self.schema)
        self._writer.write_table(pa.concat_tables(self._waiting), row_group_size=GROUP)
        self._waiting.clear()


def as_column(values: Any, kind) -> Any:
    """Values of all rows as a column of this type; arrays are converted as a whole."""
    import pyarrow as pa

    if isinstance(values, np.ndarray):
        flat = pa.array(np.ascontiguousarray(values).ravel())
        if pa.types.is_fixed_size_list(kind):
            return pa.FixedSizeListArray.from_arrays(flat.cast(kind.value_type), kind.list_size)
        return flat.cast(kind)
    return pa.array([value.tolist() if isinstance(value, np.ndarray) else value for value in values], kind)


def column_type(feature: dict[str, Any]):
    import pyarrow as pa

    number = pa.from_numpy_dtype(np.dtype(feature["dtype"]))
    (size,) = feature["shape"]
    return number if size == 1 else pa.list_(number, size)


def data_schema(features: layout.Features):
    """The schema of data files: a row is a frame; videos are files of their own."""
    import pyarrow as pa

    videos = layout.cameras(features)
    return pa.schema([(name, column_type(feature)) for name, feature in features.items() if name not in videos])


def episodes_schema(features: layout.Features):
    """The schema of meta/episodes: a row is an episode, with the place of its frames and their statistics."""
    import pyarrow as pa

    whole, time, number = pa.int64(), pa.float64(), pa.float64()
    fields = {"episode_index": whole, "tasks": pa.list_(pa.string()), "length": whole}
    fields |= {"dataset_from_index": whole, "dataset_to_index": whole}
    videos = layout.cameras(features)
    for file_kind in ("data", "meta/episodes", *(f"videos/{name}" for name in videos)):
        fields |= {f"{file_kind}/chunk_index": whole, f"{file_kind}/file_index": whole}
    for name in videos:
        fields |= {f"videos/{name}/from_timestamp": time, f"videos/{name}/to_timestamp": time}
    for name in features:
        figures = pa.list_(pa.list_(pa.list_(number))) if name in videos else pa.list_(number)
        fields |= {f"stats/{name}/{figure}": figures for figure in ("min", "max", "mean", "std", *layout.QUANTILES)}
        fields[f"stats/{name}/count"] = pa.list_(whole)
    return pa.schema(fields | {"success": pa.bool_()})


def write_tasks(path: Path, tasks: list[str]) -> None:
    """Write the instructions by number; pandas reads the texts as the index."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    index = "__index_level_0__"
    kinds = {"task_index": ("int64", "int64", "task_index"), index: ("unicode", "object", None)}
    columns = [
        {"name": name, "field_name": field, "pandas_type": kind, "numpy_type": numpy_type, "metadata": None}
        for field, (kind, numpy_type, name) in kinds.items()
    ]
    note = {"index_columns": [index], "column_indexes": [], "columns": columns}
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), index: pa.array(tasks, pa.string())})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(note)}), path)


NUMBERS, ABOUT = "numbers.npz", "episode.json"


class EpisodeBuffer:
    """Records an episode: `add` frames, then `finish` or `discard`."""

    def __init__(self, folder: Path, fps: int, features: layout.Features) -> None:
        """`folder` appears when the episode is finished."""
        self.folder = Path(folder)
        self.features = layout.complete_features(features)
        self._place = self.folder.with_name(f".{self.folder.name}-{os.getpid()}")
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir(parents=True)
        self._columns: dict[str, list[np.ndarray]] = {name: [] for name in self.features}
        self._videos = {name: VideoWriter(self._place, fps, FOR_DATASETS) for name in layout.cameras(self.features)}
        self._pixels = {name: layout.PixelCounts() for name in self._videos}
        for name in self._videos:
            del self._columns[name]

    def add(self, frame: layout.Frame) -> None:
        """Append an env step: a value for every feature."""
        if not isinstance(frame, dict):
            raise ValueError(f"a frame is a {type(frame).__name__}, not a dict of {', '.join(self.features)}")
        if missing := [name for name in self.features if name not in frame]:
            raise ValueError(f"a frame lacks {missing}; it has {[*frame]}")
        if unknown := [name for name in frame if name not in self.features]:
            raise ValueError(f"a frame has {unknown}; the dataset's features are {[*self.features]}")
        values = {name: as_described(name, frame[name], feature) for name, feature in self.features.items()}
        for name, column in self._columns.items():
            column.append(values[name])
        for name, video in self._videos.items():
            video.add(values[name])
            self._pixels[name].add(values[name])

    def finish(self, task: str, success: bool | None = None) -> Path:
        """Complete the folder and return it; `task` is the instruction."""
        if not isinstance(task, str) or not isinstance(success, bool | np.bool_ | None):
            raise ValueError(f"task={task!r} and success={success!r}: should be a text, and True, False or None")
        if not self.length:
            raise ValueError(f"{self.folder.name}: an episode needs at least one frame")
        for name, video in self._videos.items():
            video.finish(name + FOR_DATASETS.suffix)
        arrays = {name: np.stack(column) for name, column in self._columns.items()}
        stats = {name: layout.of_values(array) for name, array in arrays.items()}
        stats |= {name: pixels.stats() for name, pixels in self._pixels.items()}
        np.savez(self._place / NUMBERS, **arrays)
        success = None if success is None else bool(success)
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
            self.open[row] = EpisodeBuffer(
                self.folder / buffer_name(episode.index), layout.fps_of(spec), layout.features_of(spec)
            )
            self.words[row] = episode.task if instructions is None else instructions[row]

    def record_decision(self, obs: Observation, actions: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
        self.seen, self.actions = [obs], actions

    def on_frame(self, active: np.ndarray) -> None:
        if self.open and len(self.seen) < self.actions.shape[1]:
            self.seen.append(self.env.observe())

    def record_result(self, result: ChunkResult) -> None:
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
                buffer.add(layout.frame_of(self.seen[c], row, action, reward, bool(done[row, c]), success))

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
    try:
        given = np.asarray(value)
        with np.errstate(invalid="ignore", over="ignore"):
            array = np.array(given, np.dtype(feature["dtype"])).reshape(-1)  # a copy: the env may use its array again
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is {str(value)[:80]!r}, not {feature['dtype']} {list(feature['shape'])}") from None
    if array.dtype.kind != "f" and (array != given.reshape(-1)).any():
        raise ValueError(f"{name} is {given.dtype} {given.tolist()}, which {feature['dtype']} cannot hold")
    if array.shape != feature["shape"]:
        raise ValueError(f"{name} has {array.size} numbers, not {feature['shape'][0]}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{name} is not finite: {array}")
    return array


def as_lists(stats: dict[str, layout.Stats]) -> dict[str, dict[str, list]]:
    return {name: {figure: array.tolist() for figure, array in figures.items()} for name, figures in stats.items()}


def as_arrays(stats: dict[str, dict[str, list]]) -> dict[str, layout.Stats]:
    return {name: {figure: np.array(values) for figure, values in figures.items()} for name, figures in stats.items()}


class JoinedVideo:
    """The frames of one camera, in one mp4 file after the other."""

    def __init__(self, path: Callable[[int], Path], fps: int, file_bytes: int) -> None:
        """`path(n)` names the n-th file; a new one begins after `file_bytes`."""
        self.path, self.fps, self.file_bytes = path, fps, file_bytes
        self.file = 0
        self.num_frames = 0  # in the open file

    @property
    def _stream(self) -> Path:
        return self.path(self.file).with_suffix(".h264")

    def add(self, stream: Path, num_frames: int) -> tuple[int, float]:
        """Append an episode; returns the number of its file and its begin time there."""
        if self.num_frames and self._stream.stat().st_size + stream.stat().st_size > self.file_bytes:
            self.close()
            self.file += 1
        begins_s = self.num_frames / self.fps
        self._stream.parent.mkdir(parents=True, exist_ok=True)
        with self._stream.open("ab") as out, stream.open("rb") as source:
            shutil.copyfileobj(source, out)
        self.num_frames += num_frames
        return self.file, begins_s

    def close(self) -> None:
        """Complete the open file."""
        if self.num_frames:
            source = ["-f", "h264", "-framerate", str(self.fps), "-i", str(self._stream)]
            frame = f"1/({self.fps}*TB)"  # in units of the file's clock; without it times are rounded to microseconds
            times = f"setts=ts=round(N*{frame}):duration=round({frame})"
            wrap = ["-c", "copy", "-bsf:v", times, "-movflags", "+faststart"]
            ffmpeg(["-y", *source, *wrap, str(self.path(self.file))])
            self._stream.unlink()
            self.num_frames = 0


def read_frames(path: Path, begins_s: float, num_frames: int, fps: float, size: tuple[int, ...]) -> np.ndarray:
    """The frames of a video from this time on, uint8 [num_frames, H, W, 3]."""
    before = max(begins_s - 0.5 / fps, 0.0)  # frames have the times n / fps, rounded: half a frame before is safe
    seek = ["-ss", f"{before:.6f}"] if before else []
    height, width, colours = size
    header = f"P6\n{width} {height}\n255\n".encode()  # each frame contains its size
    frame = len(header) + height * width * colours
    wanted = num_frames * frame
    most = ["-frames:v", str(num_frames), "-fs", str(wanted + 1)]  # even if the file claims more frames
    raw = ["-fps_mode", "passthrough", "-f", "image2pipe", "-c:v", "ppm", "-pix_fmt", "rgb24", "-"]
    try:
        data = ffmpeg([*seek, "-f", "mp4", "-i", str(path), "-map", "0:v:0", *most, *raw])
    except EmbodiedError as err:
        raise EmbodiedError(f"{path} cannot be read: {err}; {layout.AGAIN}") from None
    whole = sum(data.startswith(header, at) for at in range(0, len(data), frame))
    if whole != num_frames or len(data) != wanted:
        raise EmbodiedError(
            f"{path} has {whole} of the {num_frames} frames of {list(size)} from {begins_s:g} s on; {layout.AGAIN}"
        )
    return np.frombuffer(data, np.uint8).reshape(num_frames, frame)[:, len(header) :].reshape(num_frames, *size)
