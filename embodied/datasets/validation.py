"""Checks of a dataset's own description, and safe paths to its files.

Datasets are not trusted. Only files inside the dataset's folder are opened, and templates of paths are filled in by
`fill`: `str.format` would also read attributes and obey a width of a gigabyte.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from embodied.core.errors import ConfigError
from embodied.core.files import reading
from embodied.datasets.lerobot_layout import ACTION, INFO, STATE, VERSION, cameras, renamed

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
        fill(path, key, info.get(key), place_fields(info, 0, 0) | ({"video_key": "0"} if key == "video_path" else {}))


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


def fill(path: Path, key: str, template: Any, fields: dict[str, Any]) -> str:
    """The path from a template of info.json and these fields."""
    problem = f"{path / INFO}: {key} is {str(template)[:80]!r}"
    if not isinstance(template, str) or len(template) > 1000:
        raise ConfigError(f"{problem}, not a path; {AGAIN}")
    rest = PLACEHOLDER.sub("", template)
    unknown = {match[0] for match in PLACEHOLDER.findall(template)} - fields.keys()
    if unknown or "{" in rest or "}" in rest:
        known = ", ".join(f"{{{name}}}" for name in sorted(fields))
        raise ConfigError(f"{problem}; only {known} are filled in, numbers also as {{NAME:03d}}")
    return PLACEHOLDER.sub(lambda match: str(fields[match[1]]).zfill(int(match[2] or 0)), template)


def inside(root: Path, relative: str | Path) -> Path:
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
    for part in ("data", *(f"videos/{name}" for name in videos)):
        counts += [f"{part}/chunk_index", f"{part}/file_index"]
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
