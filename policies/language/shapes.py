"""Sizes of language models with fresh weights, and requirements on published models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, PreTrainedConfig, Qwen2_5_VLConfig, Qwen3Config

from embodied.core.errors import ConfigError

DIM, LAYERS, HEADS, MLP, POSITIONS = 128, 3, 4, 384, 1024
SPREAD = 0.05  # deviation of fresh weights; with 0.02, as in large models, such a narrow model learns more slowly
KINDS = {"full_attention", "sliding_attention"}  # supported kinds of layers
SCALED = {"logit_scale": "cohere", "logits_scaling": "granite", "final_logit_softcapping": "gemma"}
"""Keys of config.json that scale logits, and prefixes of the model types that use them."""
UNKNOWN = ("attn_logit_softcapping",)  # option of attention that kernels silently ignore
READERS = "take a model that sees, such as Qwen2.5-VL or SmolVLM (policy.preset=tiny_vl is a small one)"
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
        "hidden_size": DIM,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "intermediate_size": MLP,
        "max_position_embeddings": POSITIONS,
    }
    if preset == "tiny_vl":
        return fresh_vl_config(common | sizes)
    plain = {"head_dim": DIM // HEADS, "tie_word_embeddings": False, "architectures": ["Qwen3ForCausalLM"]}
    return Qwen3Config(**common, **sizes, **plain)


def fresh_vl_config(text: dict[str, Any]) -> PreTrainedConfig:
    """Qwen2.5-VL's shape with a small vision tower; the last three tokens begin, fill and end a picture."""
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    vision = {
        "depth": 2,
        "hidden_size": DIM // 2,
        "intermediate_size": DIM,
        "num_heads": HEADS,
        "patch_size": PATCH,
        "window_size": 8 * PATCH,
        "fullatt_block_indexes": [1],
        "out_hidden_size": DIM,
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


def scaled(logits: Tensor, shape: PreTrainedConfig) -> Tensor:
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
    kinds = set(getattr(shape, "layer_types", None) or ())
    if not getattr(model, "_supports_sdpa", False) or kinds - KINDS:
        odd = ", ".join(sorted(kinds - KINDS)) or "attention of its own"
        raise ConfigError(
            f"{where} is a {shape.model_type} with {odd}, which cannot read several conversations in one row; take a "
            "model of plain attention, such as Llama, Qwen or GPT-2"
        )
    others = [key for key, kind in SCALED.items() if not shape.model_type.startswith(kind)]
    if odd := [key for key in (*UNKNOWN, *others) if getattr(shape, key, None) not in (None, 1, 1.0)]:
        raise ConfigError(f"{where} is a {shape.model_type}, whose {odd[0]} is not supported; take another model")
