"""LoRA by peft: a layer plus a trainable product of two thin matrices, while the layer itself is frozen.

peft injects the adapters in place and computes them (DoRA and ranks by layer, too). This module adds: layers named as
in peft 0.11 ("reference"), for published recipes; initial weights from the run's own generator; and merging tensor by
tensor, since engines and shards never hold a whole model. peft renames an adapted layer's own weight to
`x.base_layer.weight`; our policies still call it `x.weight`. Frozen weights are shared by all copies of a policy, such
as the reference of a KL term. peft is imported only for adapters: it takes 4 s of a CPU and 150 MiB, mostly for
transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embodied.core.errors import CheckpointError, ConfigError, nearest
from embodied.core.files import reading
from embodied.policies.config import ADAPTERS, LORA_FIELDS, LoraOptions
from embodied.policies.policy_folder import own_layer, read_json, write_tensors
from embodied.runtime.published_weights import Blob, read_safetensors, tensor_of

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER = "default"  # peft's name of a layer's adapter
DOWN, UP = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
MAGNITUDE = f".lora_magnitude_vector.{ADAPTER}.weight"  # DoRA's magnitude of each row of a layer's weight
LAYER = ".base_layer.weight"  # peft's name of the weight of an adapted layer
WORDS = "lm_head"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WRAPPED = "base_model.model."  # prefix of peft's names
UNKNOWN = (  # unsupported options of peft, which change the adapted layers or the adapters
    "use_qalora",
    "lora_bias",
    "fan_in_fan_out",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "megatron_config",
)
Scaling = Callable[[str, int], float]  # an adapter's scale, by its layer's name and rank


def add_lora(parts: Mapping[str, nn.Module], config: LoraOptions, whole: Iterable[nn.Module] = ()) -> None:
    """Freeze these networks, by name, and add an adapter to each layer of `policy.lora_targets`. Layers in `whole` and
    modules_to_save are trained in full. A network that was frozen before gets no adapters."""
    ADAPTERS.check("policy.lora_rank")
    from peft import inject_adapter_in_model

    whole = [*whole]
    kept = {id(p) for layer in whole for p in layer.parameters() if p.requires_grad}
    saved = [layer for prefix, module in parts.items() for layer in saved_layers(module, config, prefix)]
    untouched = {id(layer) for layer in [*whole, *(module for layer in saved for module in layer.modules())]}
    names: list[str] = []
    for prefix, module in parts.items():
        layers = {name: layer for name, layer in module.named_modules() if id(layer) not in untouched}
        frozen = not any(p.requires_grad and id(p) not in kept for p in module.parameters())
        chosen = [] if frozen else chosen_layers(layers, config.lora_targets, prefix)
        module.requires_grad_(False)
        if chosen:
            inject_adapter_in_model(peft_config(config, chosen, prefix), module, adapter_name=ADAPTER)
        for parameter in (p for p in module.parameters() if id(p) in kept):
            parameter.requires_grad_(True)
        names += [f"{prefix}.{name}" for name in chosen]
    for layer in saved:
        layer.requires_grad_(True)
    if whole_names(config) and not saved:
        raise ConfigError(
            f"policy.lora_config: modules_to_save={list(whole_names(config))} names no module; leave it out"
        )
    if not names:
        targets = f"policy.lora_targets={config.lora_targets}"
        raise ConfigError(f"{targets} names no trained layer; try reference or linear")
    check_patterns(config, names)


def check_patterns(config: LoraOptions, layers: Collection[str]) -> None:
    """Refuse a pattern of rank_pattern or alpha_pattern that matches none of these adapted layers."""
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in config.lora_config.get(key, ()):
            if not any(of_layer({pattern: True}, layer, False) for layer in layers):
                ends = dict.fromkeys([*map(last_name, layers), *(layer.lstrip(".") for layer in layers)])
                hint = nearest(pattern, ends, 0.6, count=3) or "; leave it out"
                raise ConfigError(f"policy.lora_config: {key}: {pattern!r} fits no layer that has an adapter{hint}")


def chosen_layers(layers: Mapping[str, nn.Module], targets: str | Collection[str], prefix: str = "") -> list[str]:
    """Names of the layers that get adapters. "linear": trained linear layers except lm_head. "reference": peft's
    all-linear at the time of the published recipes, which includes unused layers."""
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


def saved_layers(module: nn.Module, config: LoraOptions, prefix: str = "") -> list[nn.Module]:
    """The modules of modules_to_save, which are trained and saved in full."""
    ends, named = whole_names(config), ((f".{prefix}.{name}", layer) for name, layer in module.named_modules())
    return [layer for name, layer in named if any(name.endswith(f".{end}") for end in ends)]


def peft_config(config: LoraOptions, layers: Collection[str], prefix: str = "") -> LoraConfig:
    """peft's config of the adapters of these layers in the network `prefix`."""
    from peft import LoraConfig

    extra = config.lora_config
    patterns = {
        key: {name: value for name in layers if (value := of_layer(extra.get(key), f"{prefix}.{name}", None))}
        for key in ("rank_pattern", "alpha_pattern")
    }
    described = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_scale * config.lora_rank,
        init_lora_weights=False,
        use_dora=extra.get("use_dora", False),
        use_rslora=extra.get("use_rslora", False),
        **patterns,
    )
    described.target_modules = sorted(layers)
    return described


def of_layer(patterns: Mapping[str, Any] | None, layer: str, usual: Any) -> Any:
    """The value of the first pattern that matches a layer's name, else `usual`; matching like peft's rank_pattern."""
    return next((value for end, value in (patterns or {}).items() if re.match(rf"(.*\.)?({end})$", layer)), usual)


def scaling_of(config: LoraOptions) -> Scaling:
    """peft's scale of an adapter: alpha / rank, or with use_rslora alpha / sqrt(rank)."""
    extra, alpha = config.lora_config, config.lora_scale * (config.lora_rank or 0)

    def scaling(layer: str, rank: int) -> float:
        return of_layer(extra.get("alpha_pattern"), layer, alpha) / (rank**0.5 if extra.get("use_rslora") else rank)

    return scaling


def initial_adapter(name: str, shape: torch.Size, draw: torch.Generator, way: str = "kaiming") -> Tensor:
    """An adapter's initial matrix. The second matrix is zero, so the adapter has no effect at first. The first matrix
    is uniform like peft's default (kaiming_uniform with a = sqrt(5)), or normal ("gaussian"). `set_magnitudes` sets
    DoRA's magnitudes once the layers have their weights."""
    if name.endswith((UP, MAGNITUDE)):
        return torch.zeros(shape)
    if way == "gaussian":
        return torch.empty(shape).normal_(0.0, 1 / shape[0], generator=draw)
    bound = shape[1:].numel() ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=draw)


def set_magnitudes(weights: Mapping[str, Tensor], fresh: Collection[str]) -> None:
    """Set these DoRA magnitudes to initial numbers with which adapters have no effect."""
    for name in fresh:
        if name.endswith(MAGNITUDE):
            rows = weights[name.removesuffix(MAGNITUDE) + ".weight"].flatten(1)
            weights[name].copy_(rows.norm(dim=1).view_as(weights[name]))


def is_adapter(name: str) -> bool:
    return name.endswith((DOWN, UP, MAGNITUDE))


def merged_weights(weights: Iterable[tuple[str, Tensor]], scaling: Scaling) -> Iterator[tuple[str, Tensor]]:
    """Yields weights with their layers' own names, each adapter added to its layer; other tensors are unchanged."""
    named = dict(weights)
    for name, tensor in named.items():
        if is_adapter(name):
            continue
        layer = own_layer(name).removesuffix(".weight")
        if (down := named.get(layer + DOWN)) is not None:
            up, exact = named[layer + UP], torch.promote_types(tensor.dtype, torch.float32)
            added = scaling(layer, len(down)) * product(up.to(exact), down.to(exact), tensor, name)
            whole = tensor.to(exact) + added
            if (lengths := named.get(layer + MAGNITUDE)) is not None:
                rows = whole.flatten(1)
                whole = (rows * (lengths.to(exact).view(-1) / rows.norm(dim=1))[:, None]).view_as(whole)
            tensor = whole.to(tensor.dtype)
        yield own_layer(name), tensor


def product(up: Tensor, down: Tensor, weight: Tensor, name: str) -> Tensor:
    """The matrix that an adapter adds to a layer's weight, before scaling; also for convolutions."""
    if up.ndim < 2 or down.ndim < 2 or (up.shape[0], down[0].numel()) != (weight.shape[0], weight[0].numel()):
        sizes = [list(tensor.shape) for tensor in (up, down, weight)]
        raise CheckpointError(f"the adapter {sizes[0]} x {sizes[1]} does not fit its layer {name} of {sizes[2]}")
    if up[0].numel() != down.shape[0]:
        raise CheckpointError(f"the parts of the adapter of {name} are of rank {up[0].numel()} and {down.shape[0]}")
    return (up.flatten(1) @ down.flatten(1)).view_as(weight)


def save_adapters(folder: Path, weights: Iterable[tuple[str, Tensor]], config: LoraOptions, base: str) -> None:
    """Write adapters and the modules of modules_to_save in peft's format: adapter_config.json and
    adapter_model.safetensors. `weights` are the trained weights."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = whole_names(config)
    kept = {name: tensor for name, tensor in weights if is_adapter(name) or is_saved(name, ends)}
    described = peft_config(config, {name.removesuffix(DOWN) for name in kept if name.endswith(DOWN)})
    described.base_model_name_or_path, described.inference_mode = base, True
    described.modules_to_save = list(ends) or None
    described.save_pretrained(str(folder))
    write_tensors(folder / ADAPTER_WEIGHTS, {f"{WRAPPED}{pefts_name(name)}": tensor for name, tensor in kept.items()})


def whole_names(config: LoraOptions) -> tuple[str, ...]:
    return tuple(config.lora_config.get("modules_to_save", ()))


def is_saved(name: str, ends: Collection[str]) -> bool:
    """True if a weight belongs to a module of modules_to_save."""
    return any(f".{end}." in f".{name}" for end in ends)


# Adapters from folders that peft saved. Rank, scale and targets come from the folder; unsupported options are refused
# by name.


def with_adapter_options(config: Any) -> Any:
    """A policy's options, updated by its folder of adapters, if any."""
    if config.lora_path is None:
        return config
    folder = Path(config.lora_path)
    if config.pretrained is None:
        raise ConfigError("policy.lora_path holds adapters for a published model; give policy.pretrained=FOLDER too")
    described = read_config(folder)
    weights = weights_in(folder)
    with reading(folder / ADAPTER_CONFIG, CheckpointError):
        rank, targets = described["r"], described["target_modules"]
        most = max((size for blob in weights.values() for size in blob.spec.shape), default=0)
        if rank not in range(1, most + 1):
            raise ValueError(f"its rank r is {rank!r}, but {ADAPTER_WEIGHTS} has no rank above {most}")
        if isinstance(targets, str) or described.get("layers_to_transform") or described.get("exclude_modules"):
            names = map(own_name, weights)  # target_modules is a pattern of peft's
            targets = sorted({name.removesuffix(DOWN) for name in names if name.endswith(DOWN)})
        names = tuple(sorted(targets)) if config.lora_targets == "linear" else config.lora_targets
        extra = {key: described[key] for key in LORA_FIELDS if described.get(key)}
        more = {"lora_rank": rank, "lora_scale": described["lora_alpha"] / rank, "lora_config": extra}
        options = type(config).model_validate(config.model_dump() | more | {"lora_path": None, "lora_targets": names})
    for key in more:
        asked, stored = getattr(config, key), getattr(options, key)
        if asked not in (type(config).model_fields[key].get_default(call_default_factory=True), stored):
            raise ConfigError(f"policy.{key}={asked}, but the adapters in {folder} have {stored}; leave it out")
    return options


def read_config(folder: Path) -> dict[str, Any]:
    from peft import LoraConfig

    if not (folder / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"policy.lora_path={folder} holds no adapters: {ADAPTER_CONFIG} is missing")
    content = read_json(folder / ADAPTER_CONFIG)
    variants = {field.name for field in fields(LoraConfig) if field.metadata.get("is_lora_variant")} - {*LORA_FIELDS}
    odd = [key for key in (*sorted(variants), *UNKNOWN) if content.get(key)]
    odd += [key for key, usual in {"peft_type": "LORA", "bias": "none"}.items() if content.get(key, usual) != usual]
    if odd:
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG} asks for {odd[0]}={content[odd[0]]!r}, which is not supported; "
            "merge the adapters with peft (merge_and_unload) and give policy.pretrained the merged model"
        )
    return content


def read_adapters(folder: Path, wanted: set[str], stored: dict[str, Blob], config: LoraOptions) -> dict[str, Blob]:
    """Returns adapters by our names, which must equal `wanted`, and the modules saved with them; `stored` are the
    weights of the base model."""
    named, ends = {own_name(name): blob for name, blob in weights_in(folder).items()}, whole_names(config)
    adapters = {name: named.pop(name) for name in [*named] if is_adapter(name)}
    if odd := sorted(adapters.keys() ^ wanted):
        where = "the policy has no such adapter" if odd[0] in adapters else "the folder lacks it"
        raise CheckpointError(f"{folder} does not fit this policy: {odd[0].replace(f'.{ADAPTER}.', '.')}: {where}")
    for name, blob in named.items():
        layer = own_layer(name)
        if layer in stored and is_saved(layer, ends):
            adapters[layer] = blob
        elif layer not in stored or not torch.equal(
            tensor := tensor_of(blob), tensor_of(stored[layer]).to(tensor.dtype)
        ):
            # e.g. embeddings, which peft saves unchanged beside their adapters
            raise CheckpointError(f"{folder} changes {layer}, which is not an adapter; merge it with peft")
    return adapters


def weights_in(folder: Path) -> dict[str, Blob]:
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(
            f"{folder} has no {ADAPTER_WEIGHTS}; other formats run code when they are read: save it again"
        )
    return read_safetensors(folder / ADAPTER_WEIGHTS)


# peft's files omit the adapter's name.


def own_name(saved: str) -> str:
    """Our name of a weight in peft's files."""
    name = re.sub(r"\.(lora_[AB]|lora_magnitude_vector)(\.weight)?$", rf".\1.{ADAPTER}.weight", saved)
    return name.removeprefix(WRAPPED)


def pefts_name(name: str) -> str:
    name = name.replace(MAGNITUDE, ".lora_magnitude_vector")
    return name.replace(f".{ADAPTER}.", ".")
