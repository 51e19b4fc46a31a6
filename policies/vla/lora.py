"""LoRA: beside every linear layer a trainable product of two thin matrices, while the layer itself stays as it is.

peft puts the layers in. What surprises: it renames a layer's own weights, `x.weight` becomes `x.base_layer.weight`;
`published_name` undoes that. What is not trained is shared by everyone who copies the policy, the reference of a KL
term for one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from embodied.errors import ConfigError
from embodied.policies.folder import ADAPTER_END
from embodied.policies.vla.shards import write_tensors

ADAPTER = "default"
DOWN, UP = ADAPTER_END, ADAPTER_END.replace("lora_A", "lora_B")


def add_lora(parts: Iterable[nn.Module], rank: int, scale: float, whole: Iterable[nn.Module] = ()) -> None:
    """Freeze these networks, and give the linear layers that were to be trained an adapter each, whose effect is
    multiplied by `scale`. The layers `whole` are trained themselves."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError:
        raise ConfigError(
            "policy.lora_rank needs the package peft, which is not installed; "
            "python -m pip install 'embodied-loop[vla]'"
        ) from None
    untouched = {id(layer) for layer in whole}
    for part in parts:
        layers = [name for name, layer in part.named_modules() if adaptable(layer) and id(layer) not in untouched]
        kept = [p for layer in part.modules() if id(layer) in untouched for p in layer.parameters() if p.requires_grad]
        part.requires_grad_(False)
        config = LoraConfig(r=rank, lora_alpha=scale * rank, target_modules=layers, init_lora_weights=False)
        inject_adapter_in_model(config, part, adapter_name=ADAPTER)
        for parameter in kept:
            parameter.requires_grad_(True)


def adaptable(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and layer.weight.requires_grad


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
        down = own.get(name.removesuffix(".base_layer.weight") + DOWN)
        if name.endswith(".base_layer.weight") and down is not None:
            up = own[name.removesuffix(".base_layer.weight") + UP]
            exact = torch.promote_types(tensor.dtype, torch.float32)
            tensor = (tensor.to(exact) + scale * (up.to(exact) @ down.to(exact))).to(tensor.dtype)
        yield published_name(name), tensor


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
