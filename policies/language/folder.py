"""A language model on disk, as transformers and vLLM read it: config.json, weights, tokenizer, generation_config.json.

Our policy folders have this format. Our own settings (`OURS`: options, env, and the base model of adapters) are
additional keys of config.json, which other programs ignore. Other programs cannot read a folder with adapters alone:
`save_published` writes all weights.

Some published folders have other names and shapes than transformers' modules (Mixtral has separate tensors for
experts): `as_modules` and `as_published` convert them by transformers' own rules. Policies save weights as modules have
them, which transformers also reads. A model without a folder has one of our small shapes (`fresh_config`). Models whose
log-probs would be computed wrongly are refused (`check_kind`).
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GPT2Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion
from transformers.utils import logging

from embodied.core.errors import CheckpointError, ConfigError, in_a_line
from embodied.policies.language.attention import DENSE, implementation, is_special, window_of
from embodied.policies.language.sight import PREPROCESSOR, SIGHTS, decoder_of
from embodied.policies.policy_folder import CONFIG, OURS, TOKENIZER_FILES, own_layer, read_blobs, read_json
from embodied.runtime.published_weights import Blob, Spec, blob_of, tensor_of

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # sizes with kernels in vLLM
GENERATION = "generation_config.json"
COMPANIONS = (GENERATION, PREPROCESSOR, *TOKENIZER_FILES, "vocab.json", "merges.txt", "chat_template.*")
# transformers replaces global functions meanwhile; two concurrent calls would restore wrong ones.
BUILDING = threading.Lock()
LEFTOVERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # no weights, in older files


def read_config(folder: Path) -> PreTrainedConfig:
    """The model's config, as a folder's config.json has it."""
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} is not a folder of a language model: {CONFIG} is missing")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as err:  # of many kinds
        if "auto_map" in read_json(folder / CONFIG):
            why = f"{folder} needs code of its own ({CONFIG} has auto_map), and no code of a folder is run"
            raise CheckpointError(f"{why}; take a model that transformers knows") from None
        raise CheckpointError(f"{folder / CONFIG} is not that of a language model: {in_a_line(err)}") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and config.model_type not in SIGHTS:
        raise CheckpointError(f"{folder} holds a {config.model_type}, which is not a causal language model")
    for key in OURS:
        config.__dict__.pop(key, None)
    return config


def check_division(shape: Any, heads: tuple[int, int], parts: int) -> None:
    """Refuse to divide a model of this shape (None: unknown) with these heads into `parts` if vLLM cannot."""
    (queries, pairs), names = heads, ("moe_intermediate_size", "intermediate_size")
    width = next((size for size in (getattr(shape, name, None) for name in names) if size), 0)

    def fits(n: int) -> bool:
        return not (queries % n or width % n or (pairs % n and n % pairs))

    fit = next(n for n in range(min(parts, queries), 0, -1) if fits(n))
    if fit < parts:
        what = f"{queries} attention heads and {pairs} key-value heads"
        what += f" and the width of its MLPs, {width}" if width % parts else ""
        raise ConfigError(
            f"policy.tensor_parallel={parts} does not divide the model's {what}; try policy.tensor_parallel={fit}"
        )


def describe(config: PreTrainedConfig) -> dict[str, Any]:
    """The part of config.json for other programs."""
    return {key: value for key, value in json.loads(config.to_json_string()).items() if key not in OURS}


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """The model on the meta device, without memory."""
    # transformers would set this dtype as the process's default meanwhile, which affects other threads.
    kernel = implementation(DENSE, config.get_text_config())
    options = {"dtype": torch.get_default_dtype(), "attn_implementation": kernel, "trust_remote_code": False}
    try:
        with BUILDING, torch.device("meta"):
            model = auto_class(config).from_config(config, **options).eval()
    except (ValueError, ImportError) as err:  # a missing attention kernel or package
        cause = in_a_line(err).partition(". ")[0]
        raise ConfigError(f"a {config.model_type} cannot be run here: {cause}; take another model") from None
    model.config.dtype = dtype
    if dtype == torch.float64:  # for which there are no grouped products of experts
        model.set_experts_implementation("eager")
    for weight in model.state_dict(keep_vars=True).values():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    return model


def auto_class(config: PreTrainedConfig) -> Any:
    """transformers' class that makes a model with a head for words of this config."""
    return AutoModelForImageTextToText if config.model_type in SIGHTS else AutoModelForCausalLM


def allocate(model: Any) -> None:
    """Allocate CPU memory for a model's weights; computed constants (position angles, embedding scales) are set at
    once."""
    model.to_empty(device="cpu")
    with BUILDING, torch.no_grad():
        for module in model.modules():
            if module._non_persistent_buffers_set:
                for parameter in module.parameters(recurse=False):
                    parameter._is_hf_initialized = True  # so that transformers leaves it unchanged
                model._init_weights(module)


def tie(model: Any) -> bool:
    """Tie head and embeddings again if the model ties them; returns True if it does."""
    if tied := bool(getattr(model.config, "tie_word_embeddings", False)):
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return tied


def heads_of(shape: Any) -> tuple[int, int]:
    """The numbers of heads of attention, and of heads of keys and values."""
    return shape.num_attention_heads, getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads


def head_size(shape: Any) -> int:
    return getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads


def longest(max_length: int | None, shape: PreTrainedConfig) -> int:
    """The most tokens of a conversation: `max_length`, else the model's number of positions."""
    positions = getattr(shape.get_text_config(), "max_position_embeddings", None)
    if not (positions or max_length):
        raise ConfigError("this model does not say how many positions it has; set policy.max_length")
    if max_length and positions and max_length > positions:
        why = f"policy.max_length={max_length} is more than this model's {positions} positions"
        raise ConfigError(f"{why}; try policy.max_length={positions}")
    return max_length or positions


def blocks_of(model: Any) -> list[nn.Module]:
    """A model's transformer blocks."""
    return list(max(_lists(_body(model)), key=len))


def behind_blocks(model: Any) -> list[nn.Module]:
    """The modules after the blocks: the final norm."""
    parts = list(_body(model).children())
    return parts[parts.index(_lists(_body(model))[0]) + 1 :]


def _body(model: Any) -> nn.Module:
    """The module that holds the blocks: the base model, or its decoder."""
    reader = decoder_of(model)
    return next(part for part in (reader, *reader.children()) if not isinstance(part, nn.ModuleList) and _lists(part))


def _lists(module: nn.Module) -> list[nn.ModuleList]:
    return [child for child in module.children() if isinstance(child, nn.ModuleList)]


def first_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a model's first layers, at least two, as few as contain every kind of layer, with sliding windows
    that a short text is longer than."""
    whole = copy.deepcopy(config)
    cut = whole.get_text_config()
    layers = cut.num_hidden_layers
    lists = {key: kinds for key, kinds in vars(cut).items() if isinstance(kinds, list) and len(kinds) == layers}
    newest = [kinds.index(kind) for kinds in lists.values() for kind in kinds if not isinstance(kind, list | dict)]
    dense = getattr(cut, "first_k_dense_replace", None) or 0
    if window_of(cut):
        cut.sliding_window = min(cut.sliding_window, SHORT_WINDOW)
    cut.num_hidden_layers = min(layers, max([2, dense + 1, *(at + 1 for at in newest)]))
    for key, kinds in lists.items():
        setattr(cut, key, kinds[: cut.num_hidden_layers])
    return whole


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' notes on unused weights, and its progress bars."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@dataclass(frozen=True)
class WeightSource:
    """The names in a folder from which a module's weight comes: one, or several that a rule combines."""

    names: list[str]
    rule: WeightConverter | None = None
    patterns: list[str] = field(default_factory=list)  # patterns of the rule that the names match
    first: str = ""  # the first weight that the rule makes


class MadeBlob(Blob):
    """A weight computed from other weights when its bytes are read."""

    def __init__(self, spec: Spec, make: Callable[[], np.ndarray]) -> None:
        object.__setattr__(self, "spec", spec)
        object.__setattr__(self, "make", make)

    @property
    def data(self) -> np.ndarray:  # type: ignore[override]
        return self.make()


def origins(model: Any, stored: Iterable[str]) -> dict[str, WeightSource]:
    """For each weight of the model's modules, its source in a folder with these names; unknown names map to
    themselves."""
    rules, ours = get_model_conversion_mapping(model), module_weights(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    sources: dict[str, WeightSource] = {}
    for name in sorted(stored, key=by_number):
        new, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, ours)
        if new not in ours:
            new, pattern = rename_source_key(name, [], [], model.base_model_prefix, ours)
        if pattern is None:
            sources[new if new in ours else name] = WeightSource([name])
            continue
        rule = of_pattern[pattern]
        for target in rule.target_patterns:
            origin = sources.setdefault(new.replace(rule.target_patterns[0], target), WeightSource([], rule, first=new))
            origin.names.append(name)
            origin.patterns.append(pattern)
    return sources


def as_modules(model: Any, stored: dict[str, Blob]) -> dict[str, Blob]:
    """A folder's weights with the names and shapes of the model's modules."""
    ours, weights = module_weights(model), {}
    for name, origin in origins(model, stored).items():
        weights[name] = first = stored[origin.names[0]]
        if origin.rule:
            spec = Spec(first.spec.dtype, tuple(ours[name].shape))
            weights[name] = MadeBlob(spec, partial(convert, model, name, origin, stored, spec))
    return weights


def module_weights(model: Any) -> dict[str, Tensor]:
    """The weights of a model by the names of its modules without adapters."""
    return {own_layer(name): tensor for name, tensor in model.state_dict().items()}


def convert(model: Any, name: str, origin: WeightSource, stored: dict[str, Blob], spec: Spec) -> np.ndarray:
    """The bytes of a weight that a rule combines from a folder's weights."""
    rule = copy.deepcopy(origin.rule)
    for pattern, source in zip(origin.patterns, origin.names, strict=True):
        rule.add_tensor(origin.first, source, pattern, tensor_of(stored[source]))
    try:
        made = rule.convert(origin.first, model=model, config=model.config)[name]
        blob = blob_of(made[0] if isinstance(made, list) else made)
    except (RuntimeError, ValueError, KeyError) as err:
        raise CheckpointError(f"{name} cannot be made of {origin.names[0]} and others: {err}") from None
    if blob.spec != spec:
        made_of = f"{len(origin.names)} weights, {origin.names[0]} and so on"
        shapes = f"is to be {list(spec.shape)}, not {list(blob.spec.shape)}"
        raise CheckpointError(f"{name} is made of {made_of}, and {shapes}: some are missing")
    return blob.data


def read_modules(folder: Path) -> dict[str, Blob]:
    """The weights of a published folder as transformers' modules have them."""
    return as_modules(empty_model(read_config(folder), torch.float32), read_blobs(folder))


def by_number(name: str) -> list[tuple[int, Any]]:
    """A sort key that puts experts.10 after experts.9."""
    return [(0, int(piece)) if piece.isdecimal() else (1, piece) for piece in name.split(".")]


def as_published(model: Any, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Weights of the model's modules with the names and shapes of published folders."""
    return revert_weight_conversion(model, dict(weights))


DIM, LAYERS, HEADS, MLP, POSITIONS, EXPERTS = 128, 3, 4, 384, 1024, 8
SPREAD = 0.05  # deviation of fresh weights; with 0.02, as in large models, such a narrow model learns more slowly
KINDS = {"full_attention", "sliding_attention"}  # supported kinds of layers
SCALED = {"logit_scale": "cohere", "logits_scaling": "granite", "final_logit_softcapping": "gemma"}
"""Keys of config.json that scale logits, and prefixes of the model types that use them."""
SHORT_WINDOW = 5
PATCH = 8  # pixels per side of a patch; a place of a picture is two by two patches
PROCESSED = {"patch_size": PATCH, "size": {"shortest_edge": (4 * PATCH) ** 2, "longest_edge": (16 * PATCH) ** 2}}


def fresh_config(preset: str, vocabulary: int, end: int) -> PreTrainedConfig:
    """The sizes of a small model; `end` is the token that ends an answer."""
    common: dict[str, Any] = {"vocab_size": vocabulary, "eos_token_id": end, "bos_token_id": None}
    common["initializer_range"] = SPREAD
    if preset == "tiny_gpt2":
        sizes = {"n_embd": DIM, "n_layer": LAYERS, "n_head": HEADS, "n_inner": MLP, "n_positions": POSITIONS}
        return GPT2Config(**common, **sizes, tie_word_embeddings=True, architectures=["GPT2LMHeadModel"])
    sizes = {
        **{"hidden_size": DIM, "num_hidden_layers": LAYERS, "intermediate_size": MLP},
        **{"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": POSITIONS},
    }
    if preset == "tiny_vl":
        return fresh_vl_config(common | sizes)
    plain = {"head_dim": DIM // HEADS, "tie_word_embeddings": False}
    if preset == "tiny_moe":
        experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": MLP // 4}
        return Qwen3MoeConfig(**common, **sizes, **plain, **experts, architectures=["Qwen3MoeForCausalLM"])
    return Qwen3Config(**common, **sizes, **plain, architectures=["Qwen3ForCausalLM"])


def fresh_vl_config(text: dict[str, Any]) -> PreTrainedConfig:
    """Qwen2.5-VL's shape with a small vision tower; the last three tokens begin, fill and end a picture."""
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    vision = {
        **{"depth": 2, "hidden_size": DIM // 2, "intermediate_size": DIM, "num_heads": HEADS, "patch_size": PATCH},
        **{"window_size": 8 * PATCH, "fullatt_block_indexes": [1], "out_hidden_size": DIM},
    }
    begin, place, end = range(text["vocab_size"] - 3, text["vocab_size"])
    tokens = {"vision_start_token_id": begin, "image_token_id": place, "vision_end_token_id": end}
    return Qwen2_5_VLConfig(
        text_config=text | {"rope_parameters": sections},
        vision_config=vision,
        **tokens,
        video_token_id=place,
        tie_word_embeddings=False,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )


def scaled_logits(logits: Tensor, shape: PreTrainedConfig) -> Tensor:
    """The scaled logits of models such as Cohere, Granite and Gemma."""
    if (scale := getattr(shape, "logit_scale", None)) not in (None, 1):
        logits = logits * scale
    if (scale := getattr(shape, "logits_scaling", None)) not in (None, 1):
        logits = logits / scale
    if (cap := getattr(shape, "final_logit_softcapping", None)) is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits


def check_kind(model: Any, where: str) -> None:
    """Refuse a model whose log-probs would be computed wrongly here."""
    shape = model.config.get_text_config()
    kinds = set(getattr(shape, "layer_types", None) or ()) - KINDS
    if not (getattr(model, "_supports_sdpa", False) or is_special(shape)) or kinds:
        odd = f"{shape.model_type} with {', '.join(sorted(kinds)) or 'attention of its own'}"
        why = f"{where} is a {odd}, which cannot read several conversations in one row"
        raise ConfigError(f"{why}; take a model of plain attention, such as Llama, Qwen or GPT-2")
    others = [key for key, kind in SCALED.items() if not shape.model_type.startswith(kind)]
    if odd := [key for key in others if getattr(shape, key, None) not in (None, 1, 1.0)]:
        raise ConfigError(f"{where} is a {shape.model_type}, whose {odd[0]} is not supported; take another model")
