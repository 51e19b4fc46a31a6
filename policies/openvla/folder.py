"""The published layout on disk: config.json, statistics, tokeniser, image numbers and weights.

Reading checks that everything is there before a weight is touched; writing gives the same keys and bytes back.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from embodied.errors import CheckpointError
from embodied.policies.folder import CONFIG, read_json
from embodied.policies.openvla.settings import Settings, settings_of
from embodied.policies.openvla.text import TOKENIZER
from embodied.policies.vla.shards import write_shards

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
    config = read_json(path / CONFIG)
    settings = settings_of(config, str(path / CONFIG))
    stats = dict(config.get("norm_stats") or {})
    if (path / STATISTICS).is_file():
        stats |= read_json(path / STATISTICS)
    if not stats:
        raise CheckpointError(
            f"{path} has no action statistics, without which its actions have no units: norm_stats in {CONFIG}, "
            f"or {STATISTICS}, is missing; copy the latter from where the model was trained"
        )
    numbers = read_json(path / PREPROCESSOR) if (path / PREPROCESSOR).is_file() else {}
    return Published(path, settings, stats, numbers)


def write_published(
    path: Path, config: dict[str, Any], weights: dict[str, Tensor], source: Path | None, shard_bytes: int
) -> None:
    """Weights in shards of at most `shard_bytes`, beside them the files of `source`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    copy_companions(source, path)
    write_shards(path, weights, shard_bytes)


def copy_companions(source: Path | None, path: Path) -> None:
    if source is None or source.resolve() == path.resolve():
        return
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, path / name)
