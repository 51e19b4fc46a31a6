"""A published OpenVLA folder: config.json with the networks' sizes, statistics, tokenizer, image processor and weights.

Reading it checks that all files exist, and reads weights last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodied.core.errors import CheckpointError
from embodied.core.files import reading
from embodied.policies import policy_folder as files
from embodied.policies.lora import ADAPTER_CONFIG
from embodied.policies.openvla.components import component_weights, find_components
from embodied.policies.vla.policy import check_sizes
from embodied.policies.vla.statistics import RANGES
from embodied.runtime.published_weights import Blob, blob_of

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


PURE = "In: What action should the robot take to {}?\nOut:"
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions. USER: What action should the robot take to {}? ASSISTANT:"
)


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
    template: str = PURE  # of prompts
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


def settings_of(config: dict[str, Any]) -> OpenVLASettings:
    """Read a published config.json."""
    if config.get("model_type") != MODEL_TYPE:
        raise ValueError(f"it has model_type={config.get('model_type')!r}; an OpenVLA folder says 'openvla'")
    names, sizes = config["timm_model_ids"], config["image_sizes"]
    sides = {side for size in sizes for side in (size if isinstance(size, list) else [size])}
    if len(sides) != 1:
        raise ValueError(f"image_sizes={sizes}; only square images, alike for both towers, are supported")
    if odd := [name for name in names if name not in TOWERS]:
        raise ValueError(f"timm_model_ids names {odd[0]!r}; known vision towers: {', '.join(TOWERS)}")
    backbone = str(config.get("llm_backbone_id", "llama2-7b-pure"))
    if not backbone.startswith("vicuna") and not backbone.endswith(("-pure", "-words")):
        raise ValueError(
            f"llm_backbone_id={backbone!r} uses an unsupported prompt format; supported are llama2-7b-pure (OpenVLA) "
            "and vicuna-v15-7b (OpenVLA v0.1)"
        )
    settings = OpenVLASettings(
        towers=tuple(TOWERS[name] for name in names),
        llama=_llama(config["text_config"]),
        image_size=sides.pop(),
        resize=config.get("image_resize_strategy", "letterbox"),
        bins=config.get("n_action_bins", 256),
        padding=config.get("pad_to_multiple_of", 64),
        pad_id=config.get("pad_token_id", 32000),
        template=VICUNA if backbone.startswith("vicuna") else PURE,
        tokenizer="words" if backbone.endswith("-words") else "folder",
        published=config,
    )
    llama, size = settings.llama, settings.image_size
    check_sizes(size, settings.bins, llama.vocab, llama.dim, llama.depth, llama.heads, llama.kv_heads, llama.mlp)
    if len({size // tower.patch for tower in settings.towers}) > 1:
        raise ValueError(f"the towers {names} cut an image of {size} pixels into different grids")
    return settings


def _llama(text: dict[str, Any]) -> LlamaSettings:
    """Missing fields default to Llama 2 7B's."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise ValueError(f"text_config scales its rotary embedding ({kind}), which is not supported")
    names = {
        "vocab": "vocab_size",
        "dim": "hidden_size",
        "depth": "num_hidden_layers",
        "heads": "num_attention_heads",
        "mlp": "intermediate_size",
        "eps": "rms_norm_eps",
    }
    given = {key: text[name] for key, name in names.items() if name in text}
    given["kv_heads"] = text.get("num_key_value_heads") or given.get("heads", LlamaSettings.heads)
    theta = text.get("rope_theta", rope.get("rope_theta", LlamaSettings.rope_theta))
    return LlamaSettings(**given, rope_theta=theta)


OFT = "openvla_oft"
STATISTICS = "dataset_statistics.json"
PREPROCESSOR = "preprocessor_config.json"
# Files beside the weights that are copied unchanged
COMPANIONS = ("generation_config.json", PREPROCESSOR, STATISTICS, *files.TOKENIZER_FILES)


@dataclass(frozen=True)
class PublishedOpenVLA:
    """A published folder, without its weights."""

    path: Path
    settings: OpenVLASettings
    norm_stats: dict[str, Any]
    preprocessor: dict[str, Any]
    components: dict[str, Path]  # files beside the shards, by kind
    oft: dict[str, Any]  # our settings of head, proprio and film


def read_published(path: Path) -> PublishedOpenVLA:
    if not (path / files.CONFIG).is_file():
        more = ""
        if (path / ADAPTER_CONFIG).is_file():
            more = f"; it holds adapters: policy.lora_path={path}, with the model they are for as policy.pretrained"
        if (path / "lora_adapter" / ADAPTER_CONFIG).is_file():  # finetune.py without merging writes this
            more = "; it holds adapters that are not merged: upstream's merge_lora_weights_and_save.py writes the rest"
        raise CheckpointError(f"{path} is not an OpenVLA folder: {files.CONFIG} is missing{more}")
    config = {key: value for key, value in files.read_json(path / files.CONFIG).items() if key not in files.OURS}
    if "llm_backbone_id" not in config and "v01" in path.resolve().name:  # upstream distinguishes versions by this
        config["llm_backbone_id"] = "vicuna-v15-7b"
    with reading(path / files.CONFIG, CheckpointError):
        settings = settings_of(config)
        stats = dict(config.get("norm_stats") or {})
    if (path / STATISTICS).is_file():
        stats |= files.read_json(path / STATISTICS)
    if not stats:
        raise CheckpointError(
            f"{path} has no action statistics, without which its actions have no units: norm_stats in {files.CONFIG}, "
            f"or {STATISTICS}, is missing; copy the latter from the training run"
        )
    numbers = files.read_json(path / PREPROCESSOR) if (path / PREPROCESSOR).is_file() else {}
    return PublishedOpenVLA(path, settings, stats, numbers, find_components(path), config.get(OFT, {}))


def read_stored(published: PublishedOpenVLA, kinds: tuple[str, ...]) -> dict[str, Blob]:
    """All weights of a folder and of these components, with the names of our networks. Ranges are left out: they are in
    config.json."""
    stored = {name: blob for name, blob in files.read_blobs(published.path).items() if not name.startswith(RANGES)}
    for kind in published.components.keys() & set(kinds):
        weights = component_weights(kind, published.components[kind])
        for name in weights:
            stored.pop(unwrapped(name), None)
        stored |= {name: blob_of(tensor) for name, tensor in weights.items()}
    return stored


def unwrapped(name: str) -> str:
    """The name of a tower's weight without a FiLM wrapper."""
    return name.replace(".block.", ".")
