"""Adapters as peft saves them, made in training a published model.

Their rank, scale and targets are the folder's; what peft can do and we do not is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from embodied.core.errors import CheckpointError, ConfigError
from embodied.policies.folder import own_layer, read_json
from embodied.policies.vla.layers import ADAPTER
from embodied.runtime.tensor_bytes import Blob, read_safetensors, tensor_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WRAPPED = "base_model.model."  # how peft's names begin
UNKNOWN = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "megatron_config",
)  # they change what is adapted, or how


def as_adapted(config: Any, folder: Path) -> Any:
    """A policy's options with what the folder of adapters says."""
    if config.pretrained is None:
        raise ConfigError("policy.lora_path holds adapters for a published model; give policy.pretrained=FOLDER too")
    found = read_config(folder)
    rank, alpha, targets = found.get("r"), found.get("lora_alpha"), found.get("target_modules")
    told = f"{folder / CONFIG} is damaged:"
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or alpha <= 0:
        raise CheckpointError(f"{told} its rank r is {rank!r} and its lora_alpha {alpha!r}")
    if isinstance(targets, str) or found.get("layers_to_transform") or found.get("exclude_modules"):
        targets = sorted({layer for layer, _ in map(split, weights_in(folder)) if layer})  # by a pattern of peft's
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
        raise CheckpointError(f"{told} target_modules is {targets!r}, not the names of layers; save it with peft again")
    scale = alpha / (rank**0.5 if found.get("use_rslora") else rank)
    for key, asked, usual, there in (
        ("lora_rank", config.lora_rank, None, rank),
        ("lora_scale", config.lora_scale, 1.0, scale),
    ):
        if asked not in (usual, there):
            raise ConfigError(f"policy.{key}={asked:g}, but the adapters in {folder} have {there:g}; leave it out")
    names = tuple(sorted(targets)) if config.lora_targets == "linear" else config.lora_targets
    more = {"lora_path": None, "lora_rank": rank, "lora_scale": scale, "lora_targets": names}
    return config.model_copy(update=more)


def read_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"policy.lora_path={folder} holds no adapters: {CONFIG} is missing")
    found = read_json(folder / CONFIG)
    odd = [key for key in UNKNOWN if found.get(key)]
    odd += [key for key, usual in {"peft_type": "LORA", "bias": "none"}.items() if found.get(key, usual) != usual]
    if odd:
        raise CheckpointError(
            f"{folder / CONFIG} asks for {odd[0]}={found[odd[0]]!r}, which is not supported; "
            "merge the adapters with peft (merge_and_unload) and give policy.pretrained the merged model"
        )
    return found


def read_adapters(folder: Path, wanted: set[str], stored: dict[str, Blob]) -> dict[str, Blob]:
    """Adapters by our names, which must be `wanted`; `stored` are the weights of the model that they are for."""
    found, more = {}, {}
    for name, blob in weights_in(folder).items():
        layer, end = split(name)
        if layer:
            found[f"{layer}.{end.replace('.', f'.{ADAPTER}.')}"] = blob
        else:
            more[name.removeprefix(WRAPPED)] = blob
    if odd := sorted(found.keys() ^ wanted):
        where = "the policy has no such adapter" if odd[0] in found else "the folder lacks it"
        raise CheckpointError(f"{folder} does not fit this policy: {odd[0].replace(f'.{ADAPTER}.', '.')}: {where}")
    for name, blob in more.items():  # peft saves words' weights beside their adapters, as they were
        there = stored.get(own_layer(name))
        if there is None or not alike(blob, there):
            raise CheckpointError(f"{folder} changes {own_layer(name)}, which is no adapter; merge it with peft")
    return found


def weights_in(folder: Path) -> dict[str, Blob]:
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder} has no {WEIGHTS}; other formats run code when they are read: save it again")
    return read_safetensors(folder / WEIGHTS)


def split(name: str) -> tuple[str, str]:
    """The layer that an adapter's tensor is of, and what of it; no layer where it is no adapter's."""
    layer, found, part = name.removeprefix(WRAPPED).partition(".lora_")
    return (layer, f"lora_{part}") if found and part in ("A.weight", "B.weight") else ("", "")


def alike(blob: Blob, other: Blob) -> bool:
    one, two = tensor_of(blob), tensor_of(other)
    return one.shape == two.shape and torch.equal(one, two.to(one.dtype))
