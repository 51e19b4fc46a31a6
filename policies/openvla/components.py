"""Components that OpenVLA-OFT stores in files beside its shards, such as action_head--150000_checkpoint.pt.

Upstream writes them with torch.save. They are read with a reader that only makes tensors, and written as safetensors:
`python -m embodied.policies.openvla.components FOLDER` converts a folder's files, with the same names and bytes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from torch import Tensor

from embodied.core.errors import CheckpointError, EmbodiedError
from embodied.policies.lora import DOWN, LAYER, UP, is_adapter, merged_weights, product
from embodied.policies.policy_folder import own_layer, write_tensors
from embodied.runtime.published_weights import read_safetensors, tensor_of

FILE = re.compile(
    r"(action_head|proprio_projector|vision_backbone|noisy_action_projector)--.+_checkpoint\.(pt|safetensors)"
)
FILM_ALPHA = 16  # upstream's largest alpha for the adapters inside a vision_backbone file


def find_components(folder: Path) -> dict[str, Path]:
    """A folder's components by kind; a converted file is preferred to its original."""
    paths: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):  # .pt before .safetensors
        match = FILE.fullmatch(path.name)
        if match is None:
            continue
        kind = match[1]
        if kind in paths and paths[kind].stem != path.stem:
            raise CheckpointError(f"{folder} holds both {paths[kind].name} and {path.name}; keep the one to use")
        paths[kind] = path
    if "noisy_action_projector" in paths:
        raise CheckpointError(f"{folder} is a model with a diffusion head, which is not supported")
    return paths


def read_component(path: Path) -> dict[str, Tensor]:
    """A component's tensors, without the prefix that training on several devices adds."""
    if path.suffix == ".safetensors":
        tensors = {name: tensor_of(blob) for name, blob in read_safetensors(path).items()}
    else:
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as err:  # any error of the reader for a damaged file or a file with code
            more = type(err).__name__ == "UnpicklingError"  # torch would advise to run the file's code
            reason = "it holds other things too, which could run code" if more else str(err).splitlines()[0]
            raise CheckpointError(f"{path} cannot be read as tensors: {reason}") from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{path} holds something else than named tensors")
    return {str(name).removeprefix("module."): tensor for name, tensor in tensors.items()}


def component_weights(kind: str, path: Path) -> dict[str, Tensor]:
    """A component's weights with the names of our networks. Adapters inside a vision backbone are merged."""
    tensors = read_component(path)
    if kind != "vision_backbone":
        return {f"{kind}.{name}": tensor for name, tensor in tensors.items()}
    scale = scale_of(tensors)
    return tensors if scale is None else dict(merged_weights(tensors.items(), lambda *_: scale))


def scale_of(tensors: dict[str, Tensor]) -> float | None:
    """Upstream's scale of the adapters among these tensors; None without adapters."""
    rank = next((len(tensor) for name, tensor in tensors.items() if name.endswith(DOWN)), None)
    return None if rank is None else min(rank, FILM_ALPHA) / rank


def as_stored(path: Path | None, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A component's weights as in its original file, including adapters. Adapters and layers that were not trained keep
    their stored values."""
    stored = read_component(path) if path else {}
    scale = scale_of(stored)
    if scale is None:
        return weights
    before, tensors = dict(merged_weights(stored.items(), lambda *_: scale)), dict(stored)
    for name in stored:
        layer = own_layer(name)
        if is_adapter(name) or torch.equal(before[layer].to(weights[layer].dtype), weights[layer]):
            continue
        tensors[name] = weights[layer]
        if name.endswith(LAYER):
            up, down = (stored[name.removesuffix(LAYER) + end].float() for end in (UP, DOWN))
            exact = weights[layer].float() - scale * product(up, down, weights[layer], name)
            tensors[name] = exact.to(weights[layer].dtype)
    return tensors


def convert(folder: Path) -> list[Path]:
    """Convert every .pt component of a folder to safetensors."""
    written = []
    for path in find_components(folder).values():
        if path.suffix == ".pt":
            write_tensors(path.with_suffix(".safetensors"), read_component(path))
            written.append(path.with_suffix(".safetensors"))
    return written


def main(argv: list[str]) -> int:
    try:
        (folder,) = map(Path, argv)
        print("\n".join(f"written {path}" for path in convert(folder)) or "nothing to convert")
    except (ValueError, OSError):
        print("usage: python -m embodied.policies.openvla.components FOLDER", file=sys.stderr)
        return 2
    except EmbodiedError as err:
        print(err, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
