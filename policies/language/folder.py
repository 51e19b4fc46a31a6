"""A language model on disk, as transformers and vLLM read it: config.json, weights, tokenizer, generation_config.json.

A policy folder of ours is such a folder. What only we need to know of it (`OURS`: options, env, and what adapters were
trained on top of) are further keys of the same config.json, which others leave alone; weights have the names that
transformers gives them. A folder of adapters alone is no model to others: `save_published` writes all weights.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.initialization import no_init_weights

from embodied.core.errors import CheckpointError
from embodied.policies.language.tokenizer import ConversationTokenizer
from embodied.policies.policy_folder import CONFIG, OURS, TOKENIZER_FILES, copy_files, read_blobs, read_json
from embodied.runtime.tensor_bytes import Blob

GENERATION = "generation_config.json"
COMPANIONS = (GENERATION, *TOKENIZER_FILES, "vocab.json", "merges.txt", "chat_template.*")
BUILDING = threading.Lock()  # transformers replaces functions of torch meanwhile, for all threads of the process
LEFTOVERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # no weights, in older files


def read_config(folder: Path) -> PreTrainedConfig:
    """The model's config, as a folder's config.json has it."""
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} is not a folder of a language model: {CONFIG} is missing")
    try:
        found = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as err:  # of many kinds
        cause = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        raise CheckpointError(f"{folder / CONFIG} is not that of a language model: {cause}") from None
    if type(found) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(f"{folder} holds a {found.model_type}, which is not a causal language model")
    for key in OURS:
        found.__dict__.pop(key, None)
    return found


def describe(config: PreTrainedConfig) -> dict[str, Any]:
    """The part of config.json that others read."""
    return {key: value for key, value in json.loads(config.to_json_string()).items() if key not in OURS}


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """The model on the meta device, which costs no memory."""
    # transformers would make this dtype the whole process' default meanwhile, in which other threads compute.
    options = {"dtype": torch.get_default_dtype(), "attn_implementation": "sdpa", "trust_remote_code": False}
    with BUILDING, torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, **options).eval()
    model.config.dtype = dtype
    for weight in model.state_dict(keep_vars=True).values():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    return model


def allocate(model: Any) -> None:
    """Give a model memory on the CPU for weights that are still to come; what is computed and not learned (angles of
    positions) it gets at once."""
    model.to_empty(device="cpu")
    with BUILDING:
        for module in model.modules():
            if module._non_persistent_buffers_set and not list(module.parameters(recurse=False)):
                model._init_weights(module)


def tie(model: Any) -> bool:
    """Make head and embeddings one weight again, in a model where they are; returns whether they are."""
    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    if tied:
        head.weight = words.weight
    return tied


def blocks_of(model: Any) -> list[nn.Module]:
    """A model's transformer blocks."""
    return list(max((part for part in model.base_model.children() if isinstance(part, nn.ModuleList)), key=len))


def behind_blocks(model: Any) -> list[nn.Module]:
    """The modules that the hidden states go through behind the blocks: the final norm."""
    parts = list(model.base_model.children())
    at = next(at for at, part in enumerate(parts) if isinstance(part, nn.ModuleList))
    return parts[at + 1 :]


def stops_of(folder: Path, config: PreTrainedConfig) -> set[int]:
    """All tokens that end an answer, by generation_config.json and config.json."""
    found: set[int] = set()
    generation = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    for ends in (generation.get("eos_token_id"), getattr(config, "eos_token_id", None)):
        found |= set() if ends is None else set(ends) if isinstance(ends, list) else {ends}
    return found


def read_weights(folder: Path, tied: str | None) -> dict[str, Blob]:
    """A folder's weights, without the head's where that is tied, `tied` being its name."""
    stored = read_blobs(folder)
    return {name: blob for name, blob in stored.items() if name != tied and not name.endswith(LEFTOVERS)}


def write_companions(folder: Path, origin: Path | None, tokenizer: ConversationTokenizer) -> None:
    """Write what others need beside config.json and weights: files of `origin` as they are, else those of ours."""
    if origin:
        copy_files(origin, folder, COMPANIONS)
        return
    tokenizer.save(folder)
    ends = sorted(tokenizer.stops)
    GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.own.pad_token_id).save_pretrained(folder)
