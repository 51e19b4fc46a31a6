"""The published layout on disk: config.json, statistics, tokeniser, image numbers, and weights in one file or shards.

Reading checks that everything is there before a weight is touched; writing gives the same keys and bytes back.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from embodied.errors import CheckpointError
from embodied.policies.folder import CONFIG, WEIGHTS
from embodied.policies.openvla.settings import Settings, settings_of
from embodied.policies.openvla.text import TOKENIZER
from embodied.runtime.blobs import Blob, blob_of, read_safetensors, spec_of, write_safetensors

INDEX = "model.safetensors.index.json"
STATISTICS = "dataset_statistics.json"
PREPROCESSOR = "preprocessor_config.json"
COMPANIONS = (
    "generation_config.json",
    PREPROCESSOR,
    "special_tokens_map.json",
    STATISTICS,
    "added_tokens.json",
    TOKENIZER,
    "tokenizer.model",
    "tokenizer_config.json",
)  # files beside the weights that travel along unchanged


@dataclass(frozen=True)
class Published:
    """A folder whose description was read."""

    path: Path
    settings: Settings
    norm_stats: dict[str, Any]
    preprocessor: dict[str, Any]


def read_published(path: Path | str) -> Published:
    path = Path(path)
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path} is not an OpenVLA folder: {CONFIG} is missing")
    config = _json(path / CONFIG)
    settings = settings_of(config, str(path / CONFIG))
    stats = dict(config.get("norm_stats") or {})
    if (path / STATISTICS).is_file():
        stats |= _json(path / STATISTICS)
    if not stats:
        raise CheckpointError(
            f"{path} has no action statistics, without which its actions have no units: norm_stats in {CONFIG}, "
            f"or {STATISTICS}, is missing; copy the latter from where the model was trained"
        )
    numbers = _json(path / PREPROCESSOR) if (path / PREPROCESSOR).is_file() else {}
    return Published(path, settings, stats, numbers)


def read_shards(path: Path) -> dict[str, Blob]:
    """All weights of a folder, whole or in shards; bytes are read when they are used."""
    if not (path / INDEX).is_file():
        if not (path / WEIGHTS).is_file():
            raise CheckpointError(f"{path} has no weights: neither {WEIGHTS} nor {INDEX}")
        return read_safetensors(path / WEIGHTS)
    where = _json(path / INDEX).get("weight_map")
    if not isinstance(where, dict):
        raise CheckpointError(f"{path / INDEX} is damaged: it has no weight_map")
    files = sorted(set(where.values()))
    if odd := [name for name in files if Path(name).name != name or not (path / name).is_file()]:
        raise CheckpointError(f"{path} is incomplete: {', '.join(odd[:4])} of {INDEX} missing")
    blobs: dict[str, Blob] = {}
    for name in files:
        blobs |= read_safetensors(path / name)
    if lost := sorted(where.keys() - blobs.keys()):
        raise CheckpointError(f"{path}: no shard holds {', '.join(lost[:4])}")
    return blobs


def write_published(
    path: Path, config: dict[str, Any], weights: dict[str, Tensor], source: Path | None, shard_bytes: int
) -> None:
    """Weights in shards of at most `shard_bytes` (a larger tensor gets one of its own), beside them the files of
    `source`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    copy_companions(source, path)
    shards = list(_shards(weights, shard_bytes))
    if len(shards) == 1:
        _write(path / WEIGHTS, shards[0])
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(path / name, shard)
        index |= dict.fromkeys(shard, name)
    total = sum(spec_of(tensor).size_bytes for tensor in weights.values())
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    (path / INDEX).write_text(json.dumps(content, indent=2) + "\n")


def copy_companions(source: Path | None, path: Path) -> None:
    if source is None or source.resolve() == path.resolve():
        return
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, path / name)


def _shards(weights: dict[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        more = spec_of(tensor).size_bytes
        if shard and size + more > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += more
    yield shard


def _write(path: Path, shard: dict[str, Tensor]) -> None:
    specs = {name: spec_of(tensor) for name, tensor in shard.items()}
    write_safetensors(path, specs, ((name, blob_of(tensor)) for name, tensor in shard.items()))


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as err:
        raise CheckpointError(f"{path} is damaged: {err}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it holds no object")
    return content
