"""LoRA: beside a layer a trainable product of two thin matrices, while the layer itself stays as it is.

Adapters are named as peft names them (`x.lora_A.default.weight`), the layers keep their own names. Layers that we
compute ourselves (a convolution of patches, some rows of the words' weights) call `layers.with_adapter`. What is not
trained is shared by all copies of a policy, such as the reference of a KL term.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied.core.errors import CheckpointError, ConfigError
from embodied.policies.policy_folder import own_layer, read_json, write_tensors
from embodied.policies.vla.layers import ADAPTER, with_adapter
from embodied.runtime.tensor_bytes import Blob, read_safetensors, tensor_of

DOWN, UP = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
LAYER = ".base_layer.weight"  # peft's name for the weight of a layer that has an adapter
WORDS = "lm_head"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WRAPPED = "base_model.model."  # how peft's names begin
# They change what is adapted, or how.
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
)


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter; `adapt` makes one of a plain layer, in its place."""

    def forward(self, x: Tensor) -> Tensor:
        return with_adapter(super().forward(x), self, x)


def adapt(layer: nn.Linear | nn.Conv2d, rank: int, scale: float) -> None:
    """Give a layer an adapter, without weights yet."""
    if isinstance(layer, nn.Linear):
        down = nn.Linear(layer.in_features, rank, bias=False)
        up = nn.Linear(rank, layer.out_features, bias=False)
        layer.__class__ = AdaptedLinear  # in place, so that all references see the adapter
    else:
        down = nn.Conv2d(layer.in_channels, rank, layer.kernel_size, bias=False)
        up = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
    layer.lora_A, layer.lora_B = (nn.ModuleDict({ADAPTER: part}) for part in (down, up))
    layer.adapter_scale = scale


def add_lora(
    parts: Mapping[str, nn.Module],
    rank: int,
    scale: float,
    whole: Iterable[nn.Module] = (),
    targets: str | Collection[str] = "linear",
) -> None:
    """Freeze these networks, by name, and give the layers that `targets` chooses an adapter each, whose effect is
    multiplied by `scale`. The layers `whole` are trained themselves. What was frozen altogether gets no adapters."""
    untouched = {id(layer) for layer in whole}
    kept = {id(p) for layer in whole for p in layer.parameters() if p.requires_grad}
    found = 0
    for prefix, part in parts.items():
        layers = {name: layer for name, layer in part.named_modules() if id(layer) not in untouched}
        frozen = not any(p.requires_grad and id(p) not in kept for p in part.parameters())
        chosen = [] if frozen else chosen_layers(layers, targets, prefix)
        part.requires_grad_(False)
        for name in chosen:
            adapt(layers[name], rank, scale)
        for parameter in (p for p in part.parameters() if id(p) in kept):
            parameter.requires_grad_(True)
        found += len(chosen)
    if not found:
        raise ConfigError(f"policy.lora_targets={targets} names no layer of what is trained; try reference or linear")


def chosen_layers(layers: Mapping[str, nn.Module], targets: str | Collection[str], prefix: str) -> list[str]:
    """Names of the layers that get adapters. "linear": linear layers that are trained, but for the words' weights.
    "reference": what peft's all-linear meant when the published recipes were written: whatever is called as a linear
    layer is, used or not."""
    kinds = {name: layer for name, layer in layers.items() if type(layer) in (nn.Linear, nn.Conv2d)}
    if targets == "linear":
        linear = [name for name, layer in kinds.items() if type(layer) is nn.Linear and layer.weight.requires_grad]
        return [name for name in linear if name != WORDS]
    if targets == "reference":
        ends = {last_name(name) for name, layer in kinds.items() if type(layer) is nn.Linear}
        return [name for name in kinds if last_name(name) in ends]
    return [name for name in kinds if any(f".{prefix}.{name}".endswith(f".{end}") for end in targets)]


def last_name(name: str) -> str:
    return name.rpartition(".")[2]


def initial_adapter(name: str, shape: torch.Size, draw: torch.Generator, way: str = "kaiming") -> Tensor:
    """An adapter's initial matrix, without effect: the second one is zero. The first is uniform as peft's default
    (kaiming_uniform with a = sqrt(5)), or normal as the published recipes ask it for ("gaussian")."""
    if name.endswith(UP):
        return torch.zeros(shape)
    if way == "gaussian":
        return torch.empty(shape).normal_(0.0, 1 / shape[0], generator=draw)
    bound = shape[1:].numel() ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=draw)


def is_adapter(name: str) -> bool:
    return name.endswith((DOWN, UP))


def merged(weights: Iterable[tuple[str, Tensor]], scale: float) -> Iterator[tuple[str, Tensor]]:
    """Weights under their layers' own names, each adapter added to its layer; a tensor without adapter is passed on as
    it is."""
    named = dict(weights)
    for name, tensor in named.items():
        if is_adapter(name):
            continue
        layer = own_layer(name).removesuffix(".weight")
        if (down := named.get(layer + DOWN)) is not None:
            up, exact = named[layer + UP], torch.promote_types(tensor.dtype, torch.float32)
            tensor = (tensor.to(exact) + scale * product(up.to(exact), down.to(exact), tensor, name)).to(tensor.dtype)
        yield own_layer(name), tensor


def product(up: Tensor, down: Tensor, weight: Tensor, name: str) -> Tensor:
    """The matrix that an adapter adds to a layer's weight, before its scale; for convolutions, too."""
    if up.ndim < 2 or down.ndim < 2 or (up.shape[0], down[0].numel()) != (weight.shape[0], weight[0].numel()):
        sizes = [list(tensor.shape) for tensor in (up, down, weight)]
        raise CheckpointError(f"the adapter {sizes[0]} x {sizes[1]} does not fit its layer {name} of {sizes[2]}")
    if up[0].numel() != down.shape[0]:
        raise CheckpointError(f"the parts of the adapter of {name} are of rank {up[0].numel()} and {down.shape[0]}")
    return (up.flatten(1) @ down.flatten(1)).view_as(weight)


def save_adapters(folder: Path, weights: Iterable[tuple[str, Tensor]], rank: int, scale: float, base: str) -> None:
    """Write adapters as peft does: adapter_config.json and adapter_model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {name: tensor for name, tensor in weights if is_adapter(name)}
    layers = sorted({name.removesuffix(DOWN) for name in found if name.endswith(DOWN)})
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": layers,
        "base_model_name_or_path": base,
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    tensors = {f"{WRAPPED}{name.replace(f'.{ADAPTER}.', '.')}": tensor for name, tensor in found.items()}
    write_tensors(folder / ADAPTER_WEIGHTS, tensors)


# Adapters of others, as peft saves them. Rank, scale and targets are the folder's; what peft can do and we do not is
# refused by name.


def as_adapted(config: Any, folder: Path) -> Any:
    """A policy's options with what the folder of adapters says."""
    if config.pretrained is None:
        raise ConfigError("policy.lora_path holds adapters for a published model; give policy.pretrained=FOLDER too")
    found = read_config(folder)
    rank, alpha, targets = found.get("r"), found.get("lora_alpha"), found.get("target_modules")
    damaged = f"{folder / ADAPTER_CONFIG} is damaged:"
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or alpha <= 0:
        raise CheckpointError(f"{damaged} its rank r is {rank!r} and its lora_alpha {alpha!r}")
    if isinstance(targets, str) or found.get("layers_to_transform") or found.get("exclude_modules"):
        names = map(own_name, weights_in(folder))  # chosen by a pattern of peft's
        targets = sorted({name.removesuffix(DOWN) for name in names if name.endswith(DOWN)})
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
        raise CheckpointError(
            f"{damaged} target_modules is {targets!r}, not the names of layers; save it with peft again"
        )
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
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"policy.lora_path={folder} holds no adapters: {ADAPTER_CONFIG} is missing")
    found = read_json(folder / ADAPTER_CONFIG)
    odd = [key for key in UNKNOWN if found.get(key)]
    odd += [key for key, usual in {"peft_type": "LORA", "bias": "none"}.items() if found.get(key, usual) != usual]
    if odd:
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG} asks for {odd[0]}={found[odd[0]]!r}, which is not supported; "
            "merge the adapters with peft (merge_and_unload) and give policy.pretrained the merged model"
        )
    return found


def read_adapters(folder: Path, wanted: set[str], stored: dict[str, Blob]) -> dict[str, Blob]:
    """Adapters by our names, which must be `wanted`; `stored` are the weights of the model that they are for."""
    named = {own_name(name): blob for name, blob in weights_in(folder).items()}
    found = {name: named.pop(name) for name in [*named] if is_adapter(name)}
    if odd := sorted(found.keys() ^ wanted):
        where = "the policy has no such adapter" if odd[0] in found else "the folder lacks it"
        raise CheckpointError(f"{folder} does not fit this policy: {odd[0].replace(f'.{ADAPTER}.', '.')}: {where}")
    for name, blob in named.items():  # peft saves words' weights beside their adapters, as they were
        there, tensor = stored.get(own_layer(name)), tensor_of(blob)
        if there is None or not torch.equal(tensor, tensor_of(there).to(tensor.dtype)):
            raise CheckpointError(f"{folder} changes {own_layer(name)}, which is not an adapter; merge it with peft")
    return found


def weights_in(folder: Path) -> dict[str, Blob]:
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(
            f"{folder} has no {ADAPTER_WEIGHTS}; other formats run code when they are read: save it again"
        )
    return read_safetensors(folder / ADAPTER_WEIGHTS)


def own_name(saved: str) -> str:
    """Our name of a weight, of that in peft's files, which leave out which adapter it is of."""
    return re.sub(r"\.(lora_[AB])\.weight$", rf".\1.{ADAPTER}.weight", saved.removeprefix(WRAPPED))
