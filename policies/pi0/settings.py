"""Sizes of the networks, and how published config.json files (openpi's and lerobot's) spell them. Free of torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.types import EnvSpec
from embodied.policies.pi0.config import Pi0Config

MEAN_STD, QUANTILES = "mean_std", "quantiles"


@dataclass(frozen=True)
class GemmaSettings:
    dim: int
    depth: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class VisionSettings:
    dim: int
    depth: int
    mlp: int
    heads: int
    patch: int
    image_size: int

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch) ** 2


@dataclass(frozen=True)
class Pi0Settings:
    """The whole model. `action_dim` numbers are the width of states and actions inside; a robot's are padded."""

    kind: str  # "pi0": the state is a token of the expert; "pi05": it is read in the prompt, time steers the norms
    language: GemmaSettings
    expert: GemmaSettings
    vision: VisionSettings
    vocab: int
    horizon: int
    action_dim: int
    state_dim: int
    max_tokens: int
    normalization: str
    tokenizer: str = "folder"  # "folder": tokenizer.json; "words": words hashed to ids, for small models
    published: dict[str, Any] = field(default_factory=dict)  # config.json as it was read

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
TINY = FULL | {  # a small model has nothing to spare for action numbers that no robot has
    "action_dim": 8,
    "max_state_dim": 32,
    "action_horizon": 8,
    "paligemma_variant": "tiny_language",
    "action_expert_variant": "tiny_expert",
}
PRESETS = {"tiny": TINY, "full": FULL}


def settings_of(config: dict[str, Any], names: Collection[str], where: str, kind: str | None = None) -> Pi0Settings:
    """Read a published config.json; `names` of the weights tell Pi0 from Pi0.5 where it does not (openpi's)."""
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
            normalization=_normalization(config, kind, where),
            tokenizer="words" if tiny else "folder",
            published=config,
        )
    except KeyError as err:
        raise CheckpointError(f"{where} is not a complete config of Pi0: {err} is missing") from None
    counts = (settings.horizon, settings.action_dim, settings.state_dim, settings.max_tokens)
    if odd := [number for number in counts if type(number) is not int or number < 1]:
        raise CheckpointError(f"{where}: its sizes should be whole numbers, one is {odd[0]!r}")
    return settings


def kind_of(names: Collection[str], where: str) -> str:
    """Only Pi0.5 has an MLP for the time alone."""
    ends = {name.rpartition("model.")[2].partition(".")[0] for name in names}
    if "time_mlp_in" in ends:
        return "pi05"
    if "action_time_mlp_in" in ends:
        return "pi0"
    raise CheckpointError(f"{where}: these weights are neither those of Pi0 (action_time_mlp_in) nor of Pi0.5")


def _gemma(variant: str, where: str) -> GemmaSettings:
    plain = str(variant).removesuffix("_lora")
    if plain not in GEMMAS:
        raise CheckpointError(f"{where} names {variant!r}; known sizes: {', '.join(GEMMAS)}")
    if plain != variant:
        raise CheckpointError(f"{where} names {variant!r}: merge the adapters into the weights first")
    return GEMMAS[variant]


def _normalization(config: dict[str, Any], kind: str, where: str) -> str:
    """openpi: by kind; lerobot: as the file says."""
    asked = config.get("normalization_mapping")
    if not asked:
        return QUANTILES if kind == "pi05" else MEAN_STD
    mapping = asked if isinstance(asked, dict) else {}
    modes = {str(mapping.get(part)).lower() for part in ("STATE", "ACTION")}
    if modes not in ({MEAN_STD}, {QUANTILES}):
        raise CheckpointError(f"{where} normalises by {', '.join(sorted(modes))}; known: {MEAN_STD}, {QUANTILES}")
    return modes.pop()


def check_sizes(config: Pi0Config, spec: EnvSpec, settings: Pi0Settings) -> None:
    """Refuse an env whose actions or state the model has no room for."""
    if spec.action.dim > settings.action_dim:
        raise ConfigError(
            f"this model has room for {settings.action_dim} action numbers, the env takes {spec.action.dim}"
        )
    if config.chunk > settings.horizon:
        raise ConfigError(
            f"policy.chunk={config.chunk} is more than the {settings.horizon} actions that the model predicts at "
            f"once; try policy.chunk={settings.horizon}"
        )
    if (not settings.adaptive or config.state_in_prompt) and not spec.state_dim:
        raise ConfigError(
            f"policy.name={config.name} needs the robot's state, but this env gives none; set env.state=proprio"
        )
    if not settings.adaptive and spec.state_dim > settings.state_dim:
        raise ConfigError(
            f"this model has room for {settings.state_dim} state numbers, the env gives {spec.state_dim}; "
            "set env.state=proprio"
        )
    if config.relative_actions > min(spec.state_dim or 0, spec.action.dim):
        raise ConfigError(
            f"policy.relative_actions={config.relative_actions} is more than the env's state ({spec.state_dim}) or "
            f"its actions ({spec.action.dim}) have"
        )
