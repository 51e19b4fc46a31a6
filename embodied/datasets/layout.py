"""Names, paths, features and statistics of a dataset in LeRobot's layout 3.0.

A feature is described as in LeRobot: `{"dtype": "float32", "shape": (7,)}`, with dtype "video" for a camera. A frame is
one env step: the observation before it, the action, and its outcome (`next.*`).

Datasets are not trusted. Only files inside the dataset's folder are opened, and templates of paths are filled in by
`fill_template`: `str.format` would also read attributes and obey a width of a gigabyte.

The statistics of images are counted by pixel value and therefore exact; they are in [0, 1] per colour, [3, 1, 1]. Over
several episodes a quantile is the mean of the episodes' quantiles weighted by length, as in LeRobot's own datasets; the
other statistics are exact.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.errors import ConfigError
from embodied.core.files import reading
from embodied.core.types import EnvSpec, Observation

Features = dict[str, dict[str, Any]]
Frame = dict[str, Any]  # feature -> its value at one env step

VERSION = "v3.0"
INFO = "meta/info.json"
STATS = "meta/stats.json"
TASKS = "meta/tasks.parquet"
FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
EPISODES = f"meta/episodes/{FILE}.parquet"
DATA = f"data/{FILE}.parquet"
VIDEOS = f"videos/{{video_key}}/{FILE}.mp4"
FILES_PER_CHUNK = 1000

EXAMPLE = "{'dtype': 'float32', 'shape': (7,)}"  # of a feature
STATE, ACTION, CAMERA = "observation.state", "action", "observation.images."
REWARD, DONE, SUCCESS = "next.reward", "next.done", "next.success"
# The index columns, which the writer fills in
INDICES: Features = {
    "timestamp": {"dtype": "float32", "shape": (1,), "names": None},
    "frame_index": {"dtype": "int64", "shape": (1,), "names": None},
    "episode_index": {"dtype": "int64", "shape": (1,), "names": None},
    "index": {"dtype": "int64", "shape": (1,), "names": None},
    "task_index": {"dtype": "int64", "shape": (1,), "names": None},
}


def features_of(spec: EnvSpec) -> Features:
    """The features of a frame of this env."""
    features: Features = {}
    if spec.state_dim:
        features[STATE] = {"dtype": "float32", "shape": (spec.state_dim,)}
    for camera, size in spec.images.items():
        features[CAMERA + camera] = {"dtype": "video", "shape": tuple(size)}
    features[ACTION] = {"dtype": "int64" if spec.action.discrete else "float32", "shape": (spec.action.dim,)}
    features[REWARD] = {"dtype": "float32", "shape": (1,)}
    features[DONE] = {"dtype": "bool", "shape": (1,)}
    if spec.has_success:
        features[SUCCESS] = {"dtype": "bool", "shape": (1,)}
    return features


def fps_of(spec: EnvSpec) -> int:
    """The env's frames per second, rounded: these datasets need a whole number."""
    return max(1, round(spec.control_hz))


def frame_of(
    obs: Observation, row: int, action: np.ndarray, reward: float, done: bool, success: bool | None = None
) -> Frame:
    """One env step of one row as a frame: its observation, action and outcome."""
    frame: Frame = {ACTION: action, REWARD: reward, DONE: done}
    if "state" in obs:
        frame[STATE] = obs["state"][row]
    frame |= {CAMERA + camera: images[row] for camera, images in obs.get("images", {}).items()}
    return frame if success is None else {**frame, SUCCESS: success}


def complete_features(features: Features) -> Features:
    """These features as info.json describes them, without the index columns."""
    if not isinstance(features, dict) or not features:
        raise ValueError(f"features are {features!r}, not {{NAME: {EXAMPLE}}}")
    if wrong := [name for name in features if not isinstance(name, str) or "/" in name or name in INDICES]:
        raise ValueError(f"features {wrong}: a name is text without '/', and none of {', '.join(INDICES)}")
    return {name: feature_entry(name, feature) for name, feature in features.items()}


def feature_entry(name: str, feature: dict[str, Any]) -> dict[str, Any]:
    try:
        dtype, shape = feature["dtype"], tuple(int(size) for size in feature["shape"])
        dtype = dtype if dtype == "video" else np.dtype(dtype).name
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"feature {name} is {feature!r}, not like {EXAMPLE}, or of dtype 'video'") from None
    if dtype == "video":
        if len(shape) != 3 or shape[2] != 3:
            raise ValueError(f"feature {name} has shape {list(shape)}; a video's is [height, width, 3]")
        return {"dtype": dtype, "shape": shape, "names": ["height", "width", "channels"]}
    if len(shape) != 1 or shape[0] < 1 or np.dtype(dtype).kind not in "fiub":
        raise ValueError(f"feature {name} is {dtype} {list(shape)}; it must be a vector of numbers or a video")
    return {"dtype": dtype, "shape": shape, "names": feature.get("names")}


def cameras(features: Features) -> list[str]:
    """Names of the features that are stored as videos."""
    return [name for name, feature in features.items() if feature["dtype"] == "video"]


def place(number: int) -> dict[str, int]:
    """Chunk and file number of the n-th file."""
    chunk, file = divmod(number, FILES_PER_CHUNK)
    return {"chunk_index": chunk, "file_index": file}


def renamed(mapping: dict[str, Any], theirs: dict[str, str]) -> dict[str, Any]:
    """The mapping under our names of features; `theirs`: the dataset's names of some features."""
    ours = {other: name for name, other in theirs.items()}
    return {ours.get(name, name): value for name, value in mapping.items() if name in ours or name not in theirs}


def image_shape(feature: dict[str, Any]) -> tuple[int, ...]:
    """The shape of a feature; an image described as [3, H, W] has [H, W, 3]."""
    shape = tuple(feature["shape"])
    channels_first = feature["dtype"] in ("video", "image") and len(shape) == 3 and shape[0] == 3 != shape[2]
    return (*shape[1:], 3) if channels_first else shape


AGAIN = "download it, or collect it, again"
PLACEHOLDER = re.compile(r"\{(\w+)(?::0(\d)d)?\}")  # {chunk_index:03d}
# By version, the names of a chunk and of a file in it
PLACES = {"v3.": ("chunk_index", "file_index"), "v2.": ("episode_chunk", "episode_index")}
OLDER = ("v2.0", "v2.1")
NUMBERS = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
MAGIC = b"PAR1"  # a parquet file's last bytes
LARGEST = 2**40  # of counts and indices; no dataset has a trillion frames


def check_info(path: Path, info: dict[str, Any], theirs: dict[str, str]) -> None:
    """Raise ConfigError for an impossible info.json.

    `path`: the dataset's folder; `theirs`: its names of our features.
    """
    file = path / INFO
    version = str(info.get("codebase_version") or "")
    if not version.startswith("v3.") and version not in OLDER:
        raise ConfigError(
            f"{path} has LeRobot's layout {version or None}, this reads {VERSION}, v2.1 and v2.0; LeRobot converts "
            "older ones: python -m lerobot.datasets.v21.convert_dataset_v20_to_v21"
        )
    fps, features = info.get("fps"), info.get("features")
    if type(fps) not in (int, float) or not 0 < fps < 1e6:
        raise ConfigError(f"{file}: fps is {fps!r}, not a number of frames per second; {AGAIN}")
    if not isinstance(features, dict) or not all(map(is_feature, features.values())):
        raise ConfigError(f"{file}: features should say dtype and shape of each; {AGAIN}")
    if lost := [name for name in theirs.values() if name not in features]:
        raise ConfigError(f"{path} has no feature {lost[0]!r}; it has {', '.join(features)}")
    features = renamed(features, theirs)
    if ACTION not in features:
        more = "sft.names={action: NAME} says which it is"
        raise ConfigError(f"{path} has no feature {ACTION!r}; it has {', '.join(features)}; {more}")
    for name in (ACTION, STATE):
        if name in features and features[name]["dtype"] not in NUMBERS:
            raise ConfigError(f"{file}: {name} is of {features[name]['dtype']!r}; a policy learns from numbers")
    if is_older(info) and not (is_count(info.get("chunks_size")) and info["chunks_size"]):
        raise ConfigError(f"{file}: chunks_size is {info.get('chunks_size')!r}, not a number of episodes; {AGAIN}")
    for key in ("data_path", *(["video_path"] if cameras(info["features"]) else [])):
        fill_template(
            path, key, info.get(key), place_fields(info, 0, 0) | ({"video_key": "0"} if key == "video_path" else {})
        )


def is_older(info: dict[str, Any]) -> bool:
    """True if the layout is 2.0 or 2.1, with separate files for every episode."""
    return info["codebase_version"] in OLDER


def place_fields(info: dict[str, Any], chunk: int, file: int) -> dict[str, int]:
    """The allowed fields of a template of paths, with their values."""
    return dict(zip(PLACES[info["codebase_version"][:3]], (chunk, file), strict=True))


def is_feature(feature: Any) -> bool:
    """True if info.json describes a feature with a dtype and a shape."""
    if not isinstance(feature, dict) or not isinstance(feature.get("dtype"), str):
        return False
    shape = feature.get("shape")
    return isinstance(shape, list) and all(is_count(size) and size > 0 for size in shape)


def is_count(value: Any) -> bool:
    """True if this is a non-negative integer of a plausible size."""
    return type(value) is int and 0 <= value <= LARGEST


def fill_template(path: Path, key: str, template: Any, fields: dict[str, Any]) -> str:
    """The path from a template of info.json and these fields."""
    problem = f"{path / INFO}: {key} is {str(template)[:80]!r}"
    if not isinstance(template, str) or len(template) > 1000:
        raise ConfigError(f"{problem}, not a path; {AGAIN}")
    rest = PLACEHOLDER.sub("", template)
    unknown = {match[0] for match in PLACEHOLDER.findall(template)} - fields.keys()
    if unknown or "{" in rest or "}" in rest:
        field_names = ", ".join(f"{{{name}}}" for name in sorted(fields))
        raise ConfigError(f"{problem}; only {field_names} are filled in, numbers also as {{NAME:03d}}")
    return PLACEHOLDER.sub(lambda match: str(fields[match[1]]).zfill(int(match[2] or 0)), template)


def path_inside(root: Path, relative: str | Path) -> Path:
    """The path of a dataset's file; raises ConfigError if it is outside (by .., an absolute path or a link).

    The hub's cache keeps files beside its snapshots; those are accepted.
    """
    path, home = root / relative, root.resolve()
    homes = [home, *([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])]
    try:
        resolved = path.resolve()
    except (OSError, RuntimeError, ValueError) as err:
        raise ConfigError(f"{path} cannot be a file's name: {err}") from None
    if not any(resolved.is_relative_to(home) for home in homes):
        raise ConfigError(f"{path} leaves the dataset's folder (it is {resolved}); put its files into {root}")
    return path


def check_table(path: Path) -> None:
    """Raise ConfigError for a truncated parquet file, for example an interrupted copy."""
    with reading(path, ConfigError, AGAIN), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - len(MAGIC)))
        if file.read() != MAGIC:
            raise ValueError("it is not a whole parquet file")


def check_entries(path: Path, entries: list[dict[str, Any]], info: dict[str, Any]) -> None:
    """Raise ConfigError for entries of meta/episodes that contradict each other. `path` is the dataset's folder."""
    folder = path / "meta" / ("episodes.jsonl" if is_older(info) else "episodes")
    if not entries:
        raise ConfigError(f"{folder} has no episodes; {AGAIN}")
    for entry in entries:
        check_entry(folder, entry, cameras(info["features"]))
    numbers = [entry["episode_index"] for entry in entries]  # in order
    if twice := [number for number, following in pairwise(numbers) if number == following]:
        raise ConfigError(f"{folder} describes episode {twice[0]} twice; {AGAIN}")
    for key, count in {"total_episodes": len(entries), "total_frames": sum(one["length"] for one in entries)}.items():
        if info.get(key, count) != count:
            raise ConfigError(
                f"{folder} describes {count:,}, {INFO} says {key}={info[key]!r}: files are missing; {AGAIN}"
            )


def check_entry(folder: Path, entry: dict[str, Any], videos: list[str]) -> None:
    """Raise ConfigError for an impossible entry."""
    counts = ["episode_index", "length", "dataset_from_index", "dataset_to_index"]
    for file_kind in ("data", *(f"videos/{name}" for name in videos)):
        counts += [f"{file_kind}/chunk_index", f"{file_kind}/file_index"]
    entry_name = f"{folder}: the entry of episode {entry.get('episode_index')}"
    for key in counts:
        if not is_count(entry.get(key)):
            raise ConfigError(f"{entry_name} has {key}={entry.get(key)!r}, not a count; {AGAIN}")
    if entry["length"] < 1 or entry["dataset_to_index"] - entry["dataset_from_index"] != entry["length"]:
        first, last = entry["dataset_from_index"], entry["dataset_to_index"]
        raise ConfigError(f"{entry_name} has {entry['length']} frames from {first} to {last}; {AGAIN}")
    for name in videos:
        begins = entry.get(f"videos/{name}/from_timestamp")
        if type(begins) not in (int, float) or not math.isfinite(begins) or begins < 0:
            raise ConfigError(f"{entry_name} has videos/{name}/from_timestamp={begins!r}, not a time; {AGAIN}")
    if not isinstance(entry.get("success"), bool | None):
        raise ConfigError(f"{entry_name} has success={entry['success']!r}, not true or false; {AGAIN}")


QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
PIXELS = 128  # largest number of counted rows and columns of an image
Stats = dict[str, np.ndarray]


def of_values(values: np.ndarray) -> Stats:
    """The figures of values [T, D]: each [D], and "count" [1]."""
    values = values.astype(np.float64)
    stats = {
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "mean": values.mean(axis=0),
        "std": values.std(axis=0),
        "count": np.array([len(values)]),
    }
    return stats | dict(zip(QUANTILES, np.quantile(values, list(QUANTILES.values()), axis=0), strict=True))


class PixelCounts:
    """Counts how often each value of each colour occurs in the frames of an episode."""

    def __init__(self) -> None:
        self.num_frames = 0
        self.counts = np.zeros((3, 256), np.int64)

    def add(self, frame: np.ndarray) -> None:
        step = [-(-size // PIXELS) for size in frame.shape[:2]]
        few = frame[:: step[0], :: step[1]]
        for colour in range(3):
            self.counts[colour] += np.bincount(few[..., colour].ravel(), minlength=256)
        self.num_frames += 1

    def stats(self) -> Stats:
        values = np.arange(256) / 255
        shares = self.counts / self.counts.sum(axis=1, keepdims=True)
        mean = shares @ values
        cumulated = np.cumsum(shares, axis=1)

        def quantile(q: float) -> np.ndarray:
            return values[np.minimum((cumulated < q - 1e-12).sum(axis=1), 255)]

        figures = {
            "min": np.array([values[np.flatnonzero(row)[0]] for row in self.counts]),
            "max": np.array([values[np.flatnonzero(row)[-1]] for row in self.counts]),
            "mean": mean,
            "std": np.sqrt(np.maximum(shares @ values**2 - mean**2, 0.0)),
            **{name: quantile(q) for name, q in QUANTILES.items()},
        }
        return {name: array.reshape(3, 1, 1) for name, array in figures.items()} | {
            "count": np.array([self.num_frames])
        }


def merge(stats: Stats, other: Stats) -> Stats:
    """The figures of two sets of frames together."""
    n, m = stats["count"][0], other["count"][0]
    share = m / (n + m)
    mean = stats["mean"] + (other["mean"] - stats["mean"]) * share
    spread = (stats["std"] ** 2 + (stats["mean"] - mean) ** 2) * (1 - share)
    spread = spread + (other["std"] ** 2 + (other["mean"] - mean) ** 2) * share
    return {
        "min": np.minimum(stats["min"], other["min"]),
        "max": np.maximum(stats["max"], other["max"]),
        "mean": mean,
        "std": np.sqrt(spread),
        "count": np.array([n + m]),
        **{name: stats[name] * (1 - share) + other[name] * share for name in QUANTILES},
    }
