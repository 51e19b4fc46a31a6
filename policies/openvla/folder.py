"""The published layout on disk: config.json, statistics, tokenizer, image processor and weights.

Reading first checks that all files exist; writing reproduces the same keys and bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from embodied.core.errors import CheckpointError
from embodied.policies.openvla.components import component_weights, find_components
from embodied.policies.openvla.settings import OpenVLASettings, settings_of
from embodied.policies.policy_folder import (
    CONFIG,
    OURS,
    TOKENIZER_FILES,
    copy_files,
    read_blobs,
    read_json,
    write_shards,
    write_tensors,
)
from embodied.policies.vla.lora import ADAPTER_CONFIG
from embodied.policies.vla.statistics import RANGES
from embodied.runtime.published_weights import Blob, blob_of

OFT = "openvla_oft"
STATISTICS = "dataset_statistics.json"
PREPROCESSOR = "preprocessor_config.json"
# Files beside the weights that are copied unchanged
COMPANIONS = ("generation_config.json", PREPROCESSOR, STATISTICS, *TOKENIZER_FILES)


@dataclass(frozen=True)
class PublishedOpenVLA:
    """A published folder, without its weights."""

    path: Path
    settings: OpenVLASettings
    norm_stats: dict[str, Any]
    preprocessor: dict[str, Any]
    components: dict[str, Path] = field(default_factory=dict)  # files beside the shards, by kind
    oft: dict[str, Any] = field(default_factory=dict)  # our settings of head, proprio and film


def read_published(path: Path | str) -> PublishedOpenVLA:
    path = Path(path)
    if not (path / CONFIG).is_file():
        more = ""
        if (path / ADAPTER_CONFIG).is_file():
            more = f"; it holds adapters: policy.lora_path={path}, with the model they are for as policy.pretrained"
        if (path / "lora_adapter" / ADAPTER_CONFIG).is_file():  # finetune.py without merging writes this
            more = "; it holds adapters that are not merged: upstream's merge_lora_weights_and_save.py writes the rest"
        raise CheckpointError(f"{path} is not an OpenVLA folder: {CONFIG} is missing{more}")
    config = {key: value for key, value in read_json(path / CONFIG).items() if key not in OURS}
    if "llm_backbone_id" not in config and "v01" in path.resolve().name:  # upstream distinguishes versions by this
        config["llm_backbone_id"] = "vicuna-v15-7b"
    settings = settings_of(config, str(path / CONFIG))
    stats = config.get("norm_stats") or {}
    if not isinstance(stats, dict):
        raise CheckpointError(f"{path / CONFIG} is damaged: norm_stats names no data sets")
    if (path / STATISTICS).is_file():
        stats = stats | read_json(path / STATISTICS)
    if not stats:
        raise CheckpointError(
            f"{path} has no action statistics, without which its actions have no units: norm_stats in {CONFIG}, "
            f"or {STATISTICS}, is missing; copy the latter from the training run"
        )
    numbers = read_json(path / PREPROCESSOR) if (path / PREPROCESSOR).is_file() else {}
    return PublishedOpenVLA(path, settings, stats, numbers, find_components(path), config.get(OFT, {}))


def read_stored(published: PublishedOpenVLA, kinds: tuple[str, ...]) -> dict[str, Blob]:
    """All weights of a folder and of these components, with the names of our networks. Ranges are left out: they are in
    config.json."""
    stored = {name: blob for name, blob in read_blobs(published.path).items() if not name.startswith(RANGES)}
    for kind in published.components.keys() & set(kinds):
        own = component_weights(kind, published.components[kind])
        for name in own:
            stored.pop(unwrapped(name), None)
        stored |= {name: blob_of(tensor) for name, tensor in own.items()}
    return stored


def unwrapped(name: str) -> str:
    """The name of a tower's weight without a FiLM wrapper."""
    return name.replace(".block.", ".")


def write_published(
    path: Path,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    components: dict[str, dict[str, Tensor]],
    source: PublishedOpenVLA | None,
    shard_bytes: int,
) -> None:
    """Write weights in shards of at most `shard_bytes`, components in separate files, and the other files of
    `source`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    if source:
        copy_files(source.path, path, COMPANIONS)
    write_shards(path, weights, shard_bytes)
    for kind, tensors in components.items():
        known = source.components.get(kind) if source else None
        write_tensors(path / f"{known.stem if known else f'{kind}--0_checkpoint'}.safetensors", tensors)
