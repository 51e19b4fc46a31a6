"""Writing weights to one safetensors file, or to shards with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from embodied.policies.policy_folder import INDEX, WEIGHTS
from embodied.runtime.tensor_bytes import blob_of, spec_of, write_safetensors


def write_shards(path: Path, weights: dict[str, Tensor], shard_bytes: int) -> None:
    """Write weights in shards of at most so many bytes (a larger tensor gets its own), or whole where one is enough."""
    shards = list(_shards(weights, shard_bytes))
    if len(shards) == 1:
        write_tensors(path / WEIGHTS, shards[0])
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(path / name, shard)
        index |= dict.fromkeys(shard, name)
    total = sum(spec_of(tensor).size_bytes for tensor in weights.values())
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    (path / INDEX).write_text(json.dumps(content, indent=2) + "\n")


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


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
    write_safetensors(path, specs, ((name, blob_of(tensor)) for name, tensor in tensors.items()))
