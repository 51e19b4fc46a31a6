"""Sizes of the networks, read from the published config.json. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from embodied.core.errors import CheckpointError

MODEL_TYPE = "openvla"


@dataclass(frozen=True)
class TowerSettings:
    """A vision transformer. Of `kind` DINOv2 it has class and register tokens and LayerScale, of SigLIP an unused
    attention pooling."""

    kind: str  # "dinov2" or "siglip"
    dim: int
    depth: int
    heads: int
    mlp: int
    patch: int
    registers: int = 0

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches."""
        return 1 + self.registers if self.kind == "dinov2" else 0


@dataclass(frozen=True)
class LlamaSettings:
    vocab: int = 32064
    dim: int = 4096
    depth: int = 32
    heads: int = 32
    kv_heads: int = 32
    mlp: int = 11008
    eps: float = 1e-6
    rope_theta: float = 10000.0


@dataclass(frozen=True)
class OpenVLASettings:
    """The whole model. The last `bins` ids before the vocabulary's `padding` are the action tokens."""

    towers: tuple[TowerSettings, ...]
    llama: LlamaSettings
    image_size: int
    resize: str = "resize-naive"
    bins: int = 256
    padding: int = 64
    pad_id: int = 32000
    tokenizer: str = "folder"  # "folder": tokenizer.json; "words": words hashed to ids, for small models
    published: dict[str, Any] = field(default_factory=dict)  # the rest of config.json, unchanged

    @property
    def vocab(self) -> int:
        """Number of ids without padding."""
        return self.llama.vocab - self.padding

    @property
    def first_action_id(self) -> int:
        return self.vocab - self.bins

    @property
    def patches(self) -> int:
        return (self.image_size // self.towers[0].patch) ** 2

    @property
    def vision_dim(self) -> int:
        return sum(tower.dim for tower in self.towers)


TOWERS = {
    "vit_large_patch14_reg4_dinov2.lvd142m": TowerSettings("dinov2", 1024, 24, 16, 4096, 14, registers=4),
    "vit_so400m_patch14_siglip_224": TowerSettings("siglip", 1152, 27, 16, 4304, 14),
    "tiny_patch16_reg4_dinov2": TowerSettings("dinov2", 96, 4, 4, 384, 16, registers=4),
    "tiny_patch16_siglip": TowerSettings("siglip", 96, 4, 4, 384, 16),
}

FULL = {
    "model_type": MODEL_TYPE,
    "arch_specifier": "no-align+fused-gelu-mlp",
    "vision_backbone_id": "dinosiglip-vit-so-224px",
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "use_fused_vision_backbone": True,
    "image_sizes": [224, 224],
    "image_resize_strategy": "resize-naive",
    "n_action_bins": 256,
    "pad_to_multiple_of": 64,
    "pad_token_id": 32000,
    "llm_backbone_id": "llama2-7b-pure",
    "text_config": {"model_type": "llama", "vocab_size": 32064, "pad_token_id": 32000},
}
TINY = FULL | {
    "vision_backbone_id": "dinosiglip-tiny-64px",
    "timm_model_ids": ["tiny_patch16_reg4_dinov2", "tiny_patch16_siglip"],
    "image_sizes": [64, 64],
    "pad_token_id": 1024,
    "llm_backbone_id": "llama-tiny-words",
    "text_config": {
        "model_type": "llama",
        "vocab_size": 1088,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
}
PRESETS = {"tiny": TINY, "full": FULL}


def settings_of(config: dict[str, Any], where: str) -> OpenVLASettings:
    """Read a published config.json; errors name `where`."""
    if config.get("model_type") != MODEL_TYPE:
        raise CheckpointError(f"{where} has model_type={config.get('model_type')!r}; an OpenVLA folder says 'openvla'")
    try:
        ids, sizes, text = config["timm_model_ids"], config["image_sizes"], config["text_config"]
        size = _one_size(sizes, where)
        settings = OpenVLASettings(
            towers=tuple(_tower(name, where) for name in ids),
            llama=_llama(text, where),
            image_size=size,
            resize=config.get("image_resize_strategy", "letterbox"),
            bins=config.get("n_action_bins", 256),
            padding=config.get("pad_to_multiple_of", 64),
            pad_id=config.get("pad_token_id", 32000),
            tokenizer="words" if str(config.get("llm_backbone_id")).endswith("-words") else "folder",
            published=config,
        )
    except KeyError as err:
        raise CheckpointError(f"{where} is not a complete OpenVLA config: {err} is missing") from None
    except (TypeError, AttributeError) as err:
        raise CheckpointError(f"{where} is not an OpenVLA config: {err}") from None
    if odd := [n for n in (size, settings.bins, *counts_of(settings.llama)) if type(n) is not int or n < 1]:
        raise CheckpointError(f"{where}: its sizes should be whole numbers, one is {odd[0]!r}")
    if len({size // tower.patch for tower in settings.towers}) > 1:
        raise CheckpointError(f"{where}: its towers {ids} cut an image of {size} pixels into different grids")
    return settings


def _one_size(sizes: Any, where: str) -> int:
    flat = {side for size in sizes for side in (size if isinstance(size, list) else [size])}
    if len(flat) != 1:
        raise CheckpointError(f"{where}: image_sizes={sizes}; only square images, alike for both towers, are supported")
    return flat.pop()


def _tower(name: str, where: str) -> TowerSettings:
    if name not in TOWERS:
        raise CheckpointError(f"{where}: timm_model_ids names {name!r}; known vision towers: {', '.join(TOWERS)}")
    return TOWERS[name]


def counts_of(llama: LlamaSettings) -> tuple[int, ...]:
    return llama.vocab, llama.dim, llama.depth, llama.heads, llama.kv_heads, llama.mlp


def _llama(text: dict[str, Any], where: str) -> LlamaSettings:
    """Missing fields default to Llama 2 7B's."""
    usual = LlamaSettings()
    heads = text.get("num_attention_heads", usual.heads)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise CheckpointError(f"{where}: text_config scales its rotary embedding ({kind}), which is not supported")
    return LlamaSettings(
        vocab=text.get("vocab_size", usual.vocab),
        dim=text.get("hidden_size", usual.dim),
        depth=text.get("num_hidden_layers", usual.depth),
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        mlp=text.get("intermediate_size", usual.mlp),
        eps=text.get("rms_norm_eps", usual.eps),
        rope_theta=text.get("rope_theta", rope.get("rope_theta", usual.rope_theta)),
    )
