"""Names, paths and features of a dataset in LeRobot's layout 3.0.

A feature is described as in LeRobot: `{"dtype": "float32", "shape": (7,)}`, with dtype "video" for a camera. A frame is
one env step: the observation before it, the action, and its outcome (`next.*`).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np

from embodied.core.errors import ConfigError
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


def complete(features: Features) -> Features:
    """These features as info.json describes them, without the index columns."""
    if wrong := [name for name in features if "/" in name or name in INDICES]:
        raise ValueError(f"features {wrong}: a name has no '/' and is none of {', '.join(INDICES)}")
    return {name: described(name, feature) for name, feature in features.items()}


def described(name: str, feature: dict[str, Any]) -> dict[str, Any]:
    dtype, shape = feature["dtype"], tuple(int(size) for size in feature["shape"])
    if dtype == "video":
        if len(shape) != 3 or shape[2] != 3:
            raise ValueError(f"feature {name} has shape {list(shape)}; a video's is [height, width, 3]")
        return {"dtype": dtype, "shape": shape, "names": ["height", "width", "channels"]}
    if len(shape) != 1 or np.dtype(dtype).kind not in "fiub":
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


def check_pyarrow() -> None:
    """Raise ConfigError if pyarrow is not installed."""
    if find_spec("pyarrow") is None:
        raise ConfigError("LeRobot datasets are parquet files; to use them: pip install 'embodied-loop[datasets]'")
