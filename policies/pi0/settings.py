"""Sizes of the networks, read from published config.json files and weights (openpi's and lerobot's)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from embodied.core.errors import CheckpointError
from embodied.policies.vla.flow import FlowSettings, normalization_of
from embodied.policies.vla.layers import VisionSettings
from embodied.policies.vla.statistics import MEAN_STD, QUANTILES


@dataclass(frozen=True)
class GemmaSettings:
    dim: int
    depth: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class Pi0Settings(FlowSettings):
    """The whole model. With kind "pi0" the state is a token of the expert; with "pi05" it is in the prompt, and the
    time conditions the norms."""

    language: GemmaSettings
    expert: GemmaSettings
    vision: VisionSettings
    vocab: int

    @property
    def adaptive(self) -> bool:
        return self.kind == "pi05"


GEMMAS = {
    "gemma_2b": GemmaSettings(2048, 18, 16384, 8, 1, 256),
    "gemma_300m": GemmaSettings(1024, 18, 4096, 8, 1, 256),
    "dummy": GemmaSettings(64, 4, 128, 8, 1, 16),
    "tiny_language": GemmaSettings(128, 4, 512, 4, 1, 32),
    "tiny_expert": GemmaSettings(128, 4, 384, 4, 1, 32),
}
SO400M = VisionSettings(1152, 27, 4304, 16, 14, 224)
TINY_VISION = VisionSettings(128, 3, 384, 4, 16, 64)
VOCAB, TINY_VOCAB = 257152, 1024
MAX_TOKENS = {"pi0": 48, "pi05": 200}

FULL = {
    "action_dim": 32,
    "action_horizon": 50,
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "precision": "float32",
}
TINY = FULL | {  # a small model does not pad actions
    "action_dim": 8,
    "max_state_dim": 32,
    "action_horizon": 8,
    "paligemma_variant": "tiny_language",
    "action_expert_variant": "tiny_expert",
}
PRESETS = {"tiny": TINY, "full": FULL}


def settings_of(config: dict[str, Any], names: Collection[str], where: str, kind: str | None = None) -> Pi0Settings:
    """Read a published config.json; `names` of the weights distinguish Pi0 from Pi0.5 if it does not (openpi)."""
    kind = kind or config.get("type") or kind_of(names, where)
    if kind not in MAX_TOKENS:
        raise CheckpointError(f"{where} says type={kind!r}; known: {', '.join(MAX_TOKENS)}")
    if config.get("use_relative_actions") or config.get("use_visual_memory") or config.get("use_proprioceptive_memory"):
        raise CheckpointError(f"{where} asks for relative actions or memory, which this implementation does not have")
    try:
        language, expert = config["paligemma_variant"], config["action_expert_variant"]
        tiny = language == "tiny_language"
        action_dim = config.get("action_dim") or config["max_action_dim"]
        settings = Pi0Settings(
            kind=kind,
            language=_gemma(language, where),
            expert=_gemma(expert, where),
            vision=TINY_VISION if tiny else SO400M,
            vocab=TINY_VOCAB if tiny else VOCAB,
            horizon=config.get("action_horizon") or config["chunk_size"],
            action_dim=action_dim,
            state_dim=config.get("max_state_dim", action_dim),
            max_tokens=config.get("max_token_len") or config.get("tokenizer_max_length") or MAX_TOKENS[kind],
            normalization=normalization_of(config, QUANTILES if kind == "pi05" else MEAN_STD, where),
            tokenizer="words" if tiny else "folder",
            published=config,
        )
    except KeyError as err:
        raise CheckpointError(f"{where} is not a complete config of Pi0: {err} is missing") from None
    settings.check(where)
    return settings


def kind_of(names: Collection[str], where: str) -> str:
    """Only Pi0.5 has an MLP for the time alone."""
    ends = {name.rpartition("model.")[2].partition(".")[0] for name in names}
    if "time_mlp_in" in ends:
        return "pi05"
    if "action_time_mlp_in" in ends:
        return "pi0"
    raise CheckpointError(f"{where}: these weights are neither Pi0's (action_time_mlp_in) nor Pi0.5's")


def _gemma(variant: str, where: str) -> GemmaSettings:
    plain = str(variant).removesuffix("_lora")
    if plain not in GEMMAS:
        raise CheckpointError(f"{where} names {variant!r}; known sizes: {', '.join(GEMMAS)}")
    if plain != variant:
        raise CheckpointError(f"{where} names {variant!r}: merge the adapters into the weights first")
    return GEMMAS[variant]


# The names of weights in published folders. Upstream ties the word embeddings to an unused output layer, and files use
# either name; they also have an unused output layer of the expert.

MODEL = "model."  # prefix of our and lerobot's names
WORDS = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
TIED = "paligemma_with_expert.paligemma.lm_head.weight"
EXPERT_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"


def own_name(published: str) -> str | None:
    """Our name of a published weight; None if it is unused."""
    name = published.removeprefix(MODEL)
    if name == EXPERT_HEAD:
        return None
    if name == TIED:
        name = WORDS
    return MODEL + name.replace(".vision_tower.vision_model.", ".vision_tower.").replace(
        ".vision_tower.", ".vision_tower.vision_model."
    )
