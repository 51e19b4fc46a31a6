"""Sizes of the models with fresh weights, and what must hold of a model that others made. Imports transformers."""

from __future__ import annotations

from typing import Any

from transformers import GPT2Config, PreTrainedConfig, Qwen3Config

from embodied.core.errors import ConfigError
from embodied.policies.config import LanguageConfig

DIM, LAYERS, HEADS, MLP, POSITIONS = 128, 3, 4, 384, 1024
SPREAD = 0.05  # of fresh weights: from 0.02, as in large models, one so narrow learns more slowly
KINDS = {"full_attention", "sliding_attention"}  # of layers
SCALED = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # of a head that is more than a product


def fresh(preset: str, vocabulary: int, end: int) -> PreTrainedConfig:
    """The sizes of a small model; `end` is the token that ends an answer."""
    words: dict[str, Any] = {"vocab_size": vocabulary, "eos_token_id": end, "bos_token_id": None}
    words["initializer_range"] = SPREAD
    if preset == "tiny_gpt2":
        sizes = {"n_embd": DIM, "n_layer": LAYERS, "n_head": HEADS, "n_inner": MLP, "n_positions": POSITIONS}
        return GPT2Config(**words, **sizes, tie_word_embeddings=True, architectures=["GPT2LMHeadModel"])
    return Qwen3Config(
        **words,
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=DIM // HEADS,
        intermediate_size=MLP,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    )


def check_kind(model: Any, where: str) -> None:
    """Refuse a model whose log-probs we would not compute as it does."""
    shape = model.config
    kinds = set(getattr(shape, "layer_types", None) or ())
    if not getattr(model, "_supports_sdpa", False) or kinds - KINDS:
        odd = ", ".join(sorted(kinds - KINDS)) or "attention of its own"
        raise ConfigError(
            f"{where} is a {shape.model_type} with {odd}, which cannot read several conversations in one row; take a "
            "model of plain attention, such as Llama, Qwen or GPT-2"
        )
    if odd := [key for key in SCALED if getattr(shape, key, None) not in (None, 1, 1.0)]:
        raise ConfigError(f"{where} is a {shape.model_type}, whose {odd[0]} is not supported; take another model")


def longest(config: LanguageConfig, shape: PreTrainedConfig) -> int:
    """Tokens of a whole conversation, at most: as many as are asked for, else as the model has positions for."""
    limits = {"positions": getattr(shape, "max_position_embeddings", None)}
    window = getattr(shape, "sliding_window", None)
    if "sliding_attention" in (getattr(shape, "layer_types", None) or ["sliding_attention"]):
        limits["tokens that a layer sees"] = window
    known = {what: number for what, number in limits.items() if number}
    if not known and config.max_length is None:
        raise ConfigError("this model does not say how many positions it has; set policy.max_length")
    for what, number in known.items():
        if config.max_length and config.max_length > number:
            raise ConfigError(
                f"policy.max_length={config.max_length} is more than this model's {number} {what}; "
                f"try policy.max_length={number}"
            )
    return config.max_length or min(known.values())
