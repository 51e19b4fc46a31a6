"""LoRA: beside a layer a trainable product of two thin matrices, while the layer itself stays as it is.

peft puts the layers in. What surprises: it renames a layer's own weights, `x.weight` becomes `x.base_layer.weight`;
`published_name` undoes that. Layers that we compute ourselves (a convolution of patches, some rows of the words'
weights) call `layers.with_adapter`. What is not trained is shared by everyone who copies the policy, the reference of a
KL term for one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied.core.errors import CheckpointError, ConfigError
from embodied.policies.base import Policy
from embodied.policies.vla.layers import ADAPTER
from embodied.policies.vla.shards import write_tensors

DOWN, UP = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
LAYER = ".base_layer.weight"  # of a layer that has an adapter
WORDS = "lm_head"


def add_lora(
    parts: Mapping[str, nn.Module],
    rank: int,
    scale: float,
    whole: Iterable[nn.Module] = (),
    targets: str | Collection[str] = "linear",
) -> None:
    """Freeze these networks, by name, and give the layers that `targets` chooses an adapter each, whose effect is
    multiplied by `scale`. The layers `whole` are trained themselves. What was frozen altogether gets no adapters."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError:
        raise ConfigError(
            "policy.lora_rank needs the package peft, which is not installed; "
            "python -m pip install 'embodied-loop[vla]'"
        ) from None
    untouched = {id(layer) for layer in whole}
    kept = {id(p) for layer in whole for p in layer.parameters() if p.requires_grad}
    found = 0
    for prefix, part in parts.items():
        layers = {name: layer for name, layer in part.named_modules() if id(layer) not in untouched}
        frozen = not any(p.requires_grad and id(p) not in kept for p in part.parameters())
        chosen = [] if frozen else chosen_layers(layers, targets, prefix)
        part.requires_grad_(False)
        if chosen:
            config = LoraConfig(r=rank, lora_alpha=scale * rank, target_modules=chosen, init_lora_weights=False)
            inject_adapter_in_model(config, part, adapter_name=ADAPTER)
        for parameter in (p for p in part.parameters() if id(p) in kept):
            parameter.requires_grad_(True)
        found += len(chosen)
    if not found:
        raise ConfigError(f"policy.lora_targets={targets} names no layer of what is trained; try reference or linear")


def chosen_layers(layers: Mapping[str, nn.Module], targets: str | Collection[str], prefix: str) -> list[str]:
    """Which of them get adapters. "linear": linear layers that are trained, but for the words' weights. "reference":
    what peft's all-linear meant when the published recipes were written: whatever is called as a linear layer is, used
    or not."""
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
    """Without effect: the second matrix is zero. The first is uniform as peft's default (kaiming_uniform with
    a = sqrt(5)), or normal as the published recipes ask it for ("gaussian")."""
    if name.endswith(UP):
        return torch.zeros(shape)
    if way == "gaussian":
        return torch.empty(shape).normal_(0.0, 1 / shape[0], generator=draw)
    bound = shape[1:].numel() ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=draw)


def is_adapter(name: str) -> bool:
    return name.endswith((DOWN, UP))


def published_name(name: str) -> str:
    return name.replace(".base_layer.", ".")


def merged(weights: Iterable[tuple[str, Tensor]], scale: float) -> Iterator[tuple[str, Tensor]]:
    """Published names, each adapter added to its layer; a tensor without adapter is handed on as it is."""
    own = dict(weights)
    for name, tensor in own.items():
        if is_adapter(name):
            continue
        down = own.get(name.removesuffix(LAYER) + DOWN)
        if name.endswith(LAYER) and down is not None:
            up = own[name.removesuffix(LAYER) + UP]
            exact = torch.promote_types(tensor.dtype, torch.float32)
            tensor = (tensor.to(exact) + scale * product(up.to(exact), down.to(exact), tensor, name)).to(tensor.dtype)
        yield published_name(name), tensor


def product(up: Tensor, down: Tensor, weight: Tensor, name: str) -> Tensor:
    """What an adapter adds to a layer's weight, before its scale; of a convolution, too."""
    if up.ndim < 2 or down.ndim < 2 or (up.shape[0], down[0].numel()) != (weight.shape[0], weight[0].numel()):
        sizes = [list(tensor.shape) for tensor in (up, down, weight)]
        raise CheckpointError(f"the adapter {sizes[0]} x {sizes[1]} does not fit its layer {name} of {sizes[2]}")
    if up[0].numel() != down.shape[0]:
        raise CheckpointError(f"the parts of the adapter of {name} are of rank {up[0].numel()} and {down.shape[0]}")
    return (up.flatten(1) @ down.flatten(1)).view_as(weight)


def misfit(names: list[str]) -> str:
    """What is wrong with a folder whose weights have these names more or less than they should."""
    adapters = "; it holds adapters: set policy.lora_rank as it was" if any(map(is_adapter, names)) else ""
    return f"its weights do not fit its config.json: {', '.join(names[:4])}{adapters}"


class AdaptedPolicy(Policy):
    """A policy that LoRA may train: begun from a folder, it is saved as what is trained and the name of that folder."""

    origin: Path | None = None  # the folder

    def stored_names(self) -> dict[str, str]:
        """Our names of the weights in that folder -> the names they have there."""
        raise NotImplementedError

    def left_out(self) -> dict[str, str]:
        """The same of the weights that a saved policy does not hold."""
        if not (self.origin and self.config.lora_rank):
            return {}
        files = self.stored_names()
        frozen = {name: published_name(name) for name, p in self.named_parameters() if not p.requires_grad}
        there = {name: files.get(name, files.get(other)) for name, other in frozen.items()}
        return {name: file for name, file in there.items() if file}

    def saved(self) -> set[str]:
        return super().saved() - self.left_out().keys()

    def description(self) -> dict[str, Any]:
        names, ours = self.left_out(), super().description()
        ours["policy"] |= {"compile": False}  # how it acts here, not what it is
        return ours | ({"base": str(self.origin.resolve()), "base_names": names} if names else {})

    def published_weights(self) -> dict[str, Tensor]:
        """With adapters merged."""
        return dict(merged(self.state_dict().items(), self.config.lora_scale))

    def save_adapters(self, folder: Path | str) -> None:
        """As peft reads them."""
        config = self.config
        save_adapters(Path(folder), self.state_dict().items(), config.lora_rank, config.lora_scale, str(self.origin))


def save_adapters(folder: Path, weights: Iterable[tuple[str, Tensor]], rank: int, scale: float, base: str) -> None:
    """As peft saves them: adapter_config.json and adapter_model.safetensors."""
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
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": tensor for name, tensor in found.items()}
    write_tensors(folder / "adapter_model.safetensors", tensors)
