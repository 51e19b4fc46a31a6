"""Shared by OpenVLA and its successors: the networks, reading and writing folders, prompts and images.

Weights stay empty until `initialise` or `load_weights`, so building a model costs no memory.

A Llama decoder with transformers' key names, and its KV cache.

The vision towers: DINOv2 and SigLIP transformers with timm's key names, their patch features side by side.

Features come from the second to last block, without the final norm. The last block, the norm and SigLIP's pooling exist
only because published checkpoints contain them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.core.arrays import host, tensor_of
from embodied.core.errors import ConfigError
from embodied.core.types import Array, EnvSpec, Observation
from embodied.policies.openvla.components import as_stored
from embodied.policies.openvla.config import PrismaticConfig
from embodied.policies.openvla.folder import COMPANIONS, read_published, read_stored, unwrapped, write_published
from embodied.policies.openvla.settings import PRESETS, LlamaSettings, TowerSettings, settings_of
from embodied.policies.openvla.tokens import STOP, ActionTokens, LlamaTokenizer, LlamaWords, prompt, template_of
from embodied.policies.policy_folder import copy_files, read_blobs
from embodied.policies.vla.image_processor import processor_of
from embodied.policies.vla.layers import (
    MLP,
    GatedMLP,
    GroupedAttention,
    RotaryTables,
    is_scaled,
    normed,
    patch_tokens,
    rotate,
    smooth_filters,
    turns,
    with_adapter,
)
from embodied.policies.vla.lora import add_lora, initial_adapter, is_adapter, with_adapter_options
from embodied.policies.vla.policy import KEYFRAMES, VLAPolicy, for_acting, padded
from embodied.policies.vla.statistics import (
    GRIPPERS,
    OWN,
    RANGES,
    STORED_GRIPPERS,
    Ranges,
    Statistics,
    choose_key,
    stated_ranges,
    statistics_of,
)
from embodied.runtime.published_weights import Blob

VALUE = "value_head."
PATCHES = "patches"


class PrismaticPolicy(VLAPolicy):
    """Families define how actions are read from the language model: `act`, `value`, `forward`."""

    own_scales = (RANGES,)
    tokenizers = (LlamaTokenizer, LlamaWords)
    extras: tuple[str, ...] = (VALUE, RANGES, KEYFRAMES)  # prefixes of weights that published folders may lack

    def __init__(self, config: PrismaticConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        config = self.config
        self.published = read_published(config.pretrained) if config.pretrained else None
        self.origin = self.published and self.published.path
        published = self.published
        self.settings = published.settings if published else settings_of(PRESETS[config.preset], "policy.preset")
        self.where = str(self.origin or "policy.preset")
        self.stated, self.data_set = stated_ranges(published.norm_stats if published else {}, config.statistics, spec)
        self.cameras = self.choose_cameras()
        self.check_env()
        settings, numbers = self.settings, published.preprocessor if published else {}
        kinds = [tower.kind for tower in settings.towers]
        size, area, rlds = settings.image_size, config.crop_area, config.rlds_images
        self.images = processor_of(numbers, kinds, size, settings.resize, area, rlds)
        self.template = template_of(settings, self.where)
        self.tokenizer = self.choose_tokenizer()
        self.codes = ActionTokens(settings.bins)
        self.dtype = getattr(torch, config.dtype)
        self.exact = torch.promote_types(self.dtype, torch.float32)
        with torch.device("meta"):
            self.build()
        self.to(self.dtype).to_empty(device="cpu")
        self.ranges = None if published else Ranges(self.stated[OWN])

    @classmethod
    def check_folder(cls, config: PrismaticConfig) -> None:
        published = read_published(config.pretrained)
        if published.settings.tokenizer != "words":
            LlamaTokenizer(published.path)
        if not (config.statistics and Path(config.statistics).is_dir()):
            statistics_of(published.norm_stats, config.statistics, config.pretrained)

    @classmethod
    def choices(cls, config: PrismaticConfig, task: str) -> dict[str, Any]:
        """The options that a published folder decides in evaluations on a benchmark's task."""
        stats, suite = read_published(config.pretrained).norm_stats, task.partition("/")[0]
        if config.statistics is not None:
            return {"statistics": choose_key(stats, config.statistics, config.pretrained)}
        keys = [key for key in stats if suite in (key, key.removesuffix("_no_noops"))]
        return {"statistics": keys[0] if keys else next(iter(stats)) if len(stats) == 1 else None}

    @classmethod
    def numbers(cls, config: PrismaticConfig) -> tuple[int, int | None]:
        """The numbers of action and state dimensions of a published folder's model (state None: not used)."""
        published = read_published(config.pretrained)
        return len(statistics_of(published.norm_stats, config.statistics, config.pretrained).low), None

    @classmethod
    def for_memory_estimate(cls, config: PrismaticConfig, spec: EnvSpec) -> PrismaticPolicy:
        without = with_adapter_options(config).model_copy(
            update={"pretrained": None, "statistics": None, "rlds_images": False}
        )
        return type(cls.__name__, (cls,), {"hashes_words": True})(without, spec)

    def check_env(self) -> None:
        super().check_env()
        if (asked := self.spec.action.dim) != (known := len(self.statistics.low)):
            raise ConfigError(
                f"this model was trained for {known} action numbers, the env takes {asked}; choose another "
                "env.control_mode (pd_ee_delta_pose has 7), or policy.statistics"
            )

    def choose_cameras(self) -> tuple[str, ...]:
        raise NotImplementedError

    def build(self) -> None:
        """The networks."""
        settings = self.settings
        self.vision_backbone = VisionBackbone(settings.towers, settings.image_size)
        self.projector = Projector(settings.vision_dim, settings.llama.dim, len(settings.towers) > 1)
        self.language_model = LanguageModel(settings.llama)
        self.value_head = nn.Sequential(
            nn.Linear(settings.llama.dim, 512), nn.GELU(), nn.Linear(512, 128), nn.GELU(), nn.Linear(128, 1, bias=False)
        )

    def adapt(self, whole: tuple[nn.Module, ...] = ()) -> None:
        """Add LoRA to the published networks; `whole` parts are trained in full."""
        config = self.config
        if config.train == "language":
            self.vision_backbone.requires_grad_(False)
            for layer in whole:
                layer.requires_grad_(True)
        self.add_keyframe_head(len(self.cameras) * self.settings.patches, self.settings.llama.dim)
        if config.lora_rank:
            parts = {name: getattr(self, name) for name in ("vision_backbone", "projector", "language_model")}
            add_lora(parts, config, whole)

    def vision_encoder(self) -> nn.Module:
        return self.projector

    def unit_state(self, state: Tensor) -> Tensor:
        return tensor_of(self._statistics("proprio").to_unit(host(state).astype(np.float64)), self.device)

    def start(self, name: str, shape: torch.Size, draw: torch.Generator) -> Tensor:
        if is_adapter(name):
            return initial_adapter(name, shape, draw, self.config.lora_init)
        if name.endswith("patch_embed.proj.weight"):
            return smooth_filters(shape, draw)
        if name.endswith("pos_embed"):
            return torch.empty(shape).normal_(generator=draw)
        if name.endswith("bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        return torch.empty(shape).normal_(generator=draw) * spread(name, shape)

    def read_folder(self) -> dict[str, Blob]:
        return read_stored(self.published, self.components()) if self.published else {}

    def is_extra(self, name: str) -> bool:
        return name.startswith(self.extras) or is_adapter(name)

    # Conversion between actions and the networks' outputs

    @property
    def norm_stats(self) -> dict[str, Any]:
        ranges = getattr(self, "ranges", None)  # missing while networks are built or only counted
        return self.stated if ranges is None or ranges.action_min.is_meta else ranges.norm_stats()

    @property
    def statistics(self) -> Statistics:
        return self._statistics("action")

    def _statistics(self, part: str) -> Statistics:
        return statistics_of(self.norm_stats, self.data_set, self.where, part)

    def actions_of(self, units: np.ndarray) -> np.ndarray:
        """Converts numbers in [-1, 1], [..., A], to the env's units."""
        actions = self.statistics.from_unit(units)
        actions[..., -1] = GRIPPERS[self.config.gripper](actions[..., -1])
        return actions.astype(np.float32)

    def units_of(self, actions: Array) -> np.ndarray:
        """Converts demonstrated actions [..., A] to numbers in [-1, 1]."""
        stored = host(actions).astype(np.float64)
        stored[..., -1] = STORED_GRIPPERS[self.config.gripper](stored[..., -1])
        return self.statistics.to_unit(stored)

    def tokens_of(self, inputs: dict[str, Any]) -> Tensor:
        """The generated tokens [B, C, A], or the tokens of demonstrated actions."""
        if "tokens" in inputs:
            return tensor_of(inputs["tokens"], self.device)
        return tensor_of(self.codes.encode(self.units_of(inputs["actions"])), self.device)

    # Prompts and images

    def _words(self, obs: Observation, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the prompts [N, L], and their mask."""
        texts = [prompt(text, self.template) for text in self.instructions(obs, count)]
        return padded([self.tokenizer.encode(text) for text in texts], self.settings.pad_id, in_front=True)

    def _pixels(self, obs: Observation) -> list[Tensor]:
        """Processed pixels of each camera [N, 3 * towers, size, size]."""
        frames = [tensor_of(obs["images"][camera], self.device) for camera in self.cameras]
        return [self.images(part).to(self.dtype) for part in frames]

    def _see(self, *seen: Tensor) -> Tensor:
        return for_acting(self.config, VisionBackbone.forward, self.device)(self.vision_backbone, *seen)

    def frozen_features(self, obs: Observation) -> dict[str, Tensor]:
        """Features of frozen towers [B, cameras, patches, dim]."""
        if any(p.requires_grad for p in self.vision_backbone.parameters()):
            return {}
        return {PATCHES: torch.stack([self.vision_backbone(pixels) for pixels in self._pixels(obs)], dim=1)}

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits of the action tokens, divided by `policy.temperature`."""
        first, words = self.settings.first_action_id, self.language_model.lm_head
        rows = slice(first, first + self.settings.bins)
        if is_scaled(words):
            logits = words(hidden)[..., rows]
        else:
            logits = with_adapter(nn.functional.linear(hidden, words.weight[rows]), words, hidden, rows)
        return logits.to(self.exact) / self.config.temperature

    def _word_losses(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Cross entropy [B, K] of these tokens [B, K] over the whole vocabulary, from hidden states [B, K, D]; with one
        more hidden state, of the stop token, too."""
        ids = tokens + self.settings.first_action_id
        ids = nn.functional.pad(ids, (0, hidden.shape[1] - ids.shape[1]), value=STOP)
        logits = self.language_model.lm_head(hidden).to(self.exact)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)

    def _value(self, hidden: Tensor) -> Tensor:
        return self.value_head(hidden).squeeze(-1).to(self.exact)

    # For learners

    def blocks(self) -> list[nn.Module]:
        towers = [block for tower in self.vision_backbone.towers() for block in tower.blocks[:-1]]
        return [*towers, *self.language_model.model.layers]

    # On disk

    def description(self) -> dict[str, Any]:
        """The published config plus our settings, so that the folder can be `policy.pretrained` again."""
        ours = super().description()
        ours["policy"] |= {"pretrained": "." if self.origin else None, "statistics": self.origin and self.data_set}
        return self.published_config() | ours

    def published_config(self) -> dict[str, Any]:
        return self.settings.published | {"norm_stats": self.norm_stats}

    def stored_names(self) -> dict[str, str]:
        return {name: name for name in read_blobs(self.origin)}

    def write_folder(self, folder: Path, tensors=None, specs=None) -> None:
        super().write_folder(folder, tensors, specs)
        if self.origin:
            copy_files(self.origin, folder, COMPANIONS)

    def save_published(self, folder: Path | str, shard_bytes: int = 5 * 10**9) -> None:
        """Write the layout that other programs read: without value head, adapters merged, large weights in shards."""
        weights = self.published_weights()
        known = self.published.components if self.published else {}
        parts = {kind: as_stored(known.get(kind), self.component(kind, weights)) for kind in self.components()}
        inside = {unwrapped(n): t for n, t in weights.items() if not self.is_extra(n)}
        write_published(Path(folder), self.published_config(), inside, parts, self.published, shard_bytes)

    def components(self) -> tuple[str, ...]:
        """Parts that upstream stores in separate files."""
        return ()

    def component(self, kind: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        raise NotImplementedError


def spread(name: str, shape: torch.Size) -> float:
    """The deviation of initial weights, which keeps the scale of activations. Values begin near zero."""
    if name.startswith(VALUE):
        return 0.02
    return 1.0 if name.endswith("embed_tokens.weight") else shape[1:].numel() ** -0.5


ALL = slice(None)


class Cache:
    """The KV cache of every layer: `length` tokens of up to `width` are filled. The memory is reused for later batches
    and grows to the largest."""

    def __init__(self) -> None:
        self.rows = self.width = self.length = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, rows: int, width: int) -> None:
        self.rows, self.width, self.length = rows, width, 0

    def add(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append new tokens; returns all keys and values so far."""
        end = self.length + k.shape[2]
        keys, values = self.room(layer, k)
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def room(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Allocate the memory for this batch."""
        keys, values = self._memory(layer, like)
        return keys[: self.rows, :, : self.width], values[: self.rows, :, : self.width]

    def __deepcopy__(self, _: dict) -> Cache:
        return Cache()

    def tensors(self) -> list[Tensor]:
        return [memory for pair in self.layers.values() for memory in pair]

    def _memory(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.layers.get(layer)
        if memory is None or memory[0].dtype != like.dtype or memory[0].device != like.device:
            rows, width = self.rows, self.width
        elif memory[0].shape[0] >= self.rows and memory[0].shape[2] >= self.width:
            return memory
        else:
            rows, width = max(self.rows, memory[0].shape[0]), max(self.width, memory[0].shape[2])
        shape = (rows, like.shape[1], width, like.shape[3])
        self.layers[layer] = like.new_empty(shape), like.new_empty(shape)
        return self.layers[layer]


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * normed(x, self.eps).to(x.dtype)


class LlamaAttention(GroupedAttention):
    def __init__(self, settings: LlamaSettings, layer: int) -> None:
        super().__init__(settings.dim, settings.heads, settings.kv_heads, settings.dim // settings.heads)
        self.layer = layer

    def forward(
        self, x: Tensor, turn: RotaryTables, mask: Tensor | None, causal: bool, cache: Cache | None, read: slice
    ):
        cos, sin = turn
        q, k, v = self.split(self.q_proj(x[:, read])), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        q, k = rotate(q, cos[:, :, read], sin[:, :, read]), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.add(self.layer, k, v)
        return self.attend(q, k, v, mask, causal)


class LlamaLayer(nn.Module):
    def __init__(self, settings: LlamaSettings, layer: int) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(settings, layer)
        self.mlp = GatedMLP(settings.dim, settings.mlp, F.silu)
        self.input_layernorm = RMSNorm(settings.dim, settings.eps)
        self.post_attention_layernorm = RMSNorm(settings.dim, settings.eps)

    def forward(
        self,
        x: Tensor,
        turn: RotaryTables,
        mask: Tensor | None,
        causal: bool,
        cache: Cache | None = None,
        read: slice = ALL,
    ) -> Tensor:
        x = x[:, read] + self.self_attn(self.input_layernorm(x), turn, mask, causal, cache, read)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaStack(nn.Module):
    """The model up to the last norm."""

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.settings = settings
        self.embed_tokens = nn.Embedding(settings.vocab, settings.dim)
        self.layers = nn.ModuleList(LlamaLayer(settings, layer) for layer in range(settings.depth))
        self.norm = RMSNorm(settings.dim, settings.eps)

    def forward(
        self,
        x: Tensor,
        present: Tensor,
        cache: Cache | None = None,
        bidirectional: bool = False,
        padded: bool = True,
        read: slice = ALL,
    ) -> Tensor:
        """Hidden states [N, L, D] of embeddings [N, L, D]; with `read`, the last layer computes only these places.

        `present` [N, all tokens so far] is False for padding; cached tokens come first. `padded`: there may be padding.
        `bidirectional`: every token attends to every other one.
        """
        new, total = x.shape[1], present.shape[1]
        position = (present.long().cumsum(1) - 1).clamp(min=0)[:, -new:]
        head_dim = self.settings.dim // self.settings.heads
        turn = turns(position, head_dim, self.settings.rope_theta, x.dtype)
        plain = not padded and (bidirectional or new in (1, total))
        mask = None if plain else visible(present, new, bidirectional)
        causal = plain and not bidirectional and new > 1
        *first, last = self.layers
        for layer in first:
            x = layer(x, turn, mask, causal, cache)
        if causal and read != ALL:
            causal, mask = False, visible(present, new, False)
        x = last(x, turn, mask if mask is None else mask[:, :, read], causal, cache, read)
        if cache is not None:
            cache.length += new
        return self.norm(x)


class LanguageModel(nn.Module):
    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.model = LlamaStack(settings)
        self.lm_head = nn.Linear(settings.dim, settings.vocab, bias=False)


def visible(present: Tensor, new: int, bidirectional: bool) -> Tensor:
    """Attention mask [N, 1, new, all]; padding attends to itself, so that its rows stay finite."""
    total = present.shape[1]
    here = torch.arange(total, device=present.device)
    seen = torch.ones(new, total, dtype=torch.bool, device=present.device)
    if not bidirectional:
        seen = here <= here[-new:, None]
    return ((seen & present[:, None]) | (here == here[-new:, None]))[:, None]


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, dim = x.shape
        q, k, v = self.qkv(x).view(rows, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, dim))


class LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class VisionBlock(nn.Module):
    def __init__(self, tower: TowerSettings) -> None:
        super().__init__()
        scale = LayerScale if tower.kind == "dinov2" else lambda dim: nn.Identity()
        self.norm1 = nn.LayerNorm(tower.dim, eps=1e-6)
        self.attn = Attention(tower.dim, tower.heads)
        self.ls1 = scale(tower.dim)
        self.norm2 = nn.LayerNorm(tower.dim, eps=1e-6)
        self.mlp = MLP(tower.dim, tower.mlp)
        self.ls2 = scale(tower.dim)

    def attend(self, x: Tensor) -> Tensor:
        return x + self.ls1(self.attn(self.norm1(x)))

    def think(self, x: Tensor) -> Tensor:
        return x + self.ls2(self.mlp(self.norm2(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.think(self.attend(x))


class PatchEmbed(nn.Module):
    def __init__(self, dim: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch, stride=patch)

    def forward(self, pixels: Tensor) -> Tensor:
        return patch_tokens(pixels, self.proj)


class UnusedPool(nn.Module):
    """The weights of SigLIP's attention pooling, for saving a checkpoint unchanged."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.empty(1, 1, dim))
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, hidden)


class Tower(nn.Module):
    def __init__(self, tower: TowerSettings, image_size: int) -> None:
        super().__init__()
        self.skip = tower.prefix
        self.patch_embed = PatchEmbed(tower.dim, tower.patch)
        self.pos_embed = nn.Parameter(torch.empty(1, (image_size // tower.patch) ** 2, tower.dim))
        if tower.kind == "dinov2":
            self.cls_token = nn.Parameter(torch.empty(1, 1, tower.dim))
            self.reg_token = nn.Parameter(torch.empty(1, tower.registers, tower.dim))
        self.blocks = nn.ModuleList(VisionBlock(tower) for _ in range(tower.depth))
        self.norm = nn.LayerNorm(tower.dim, eps=1e-6)
        unused = [self.blocks[-1], self.norm]
        if tower.kind == "siglip":
            self.attn_pool = UnusedPool(tower.dim, tower.mlp)
            unused.append(self.attn_pool)
        for module in unused:
            module.requires_grad_(False)

    def forward(self, pixels: Tensor, *words: Tensor) -> Tensor:
        """[N, 3, H, W] -> [N, patches, dim]; blocks with FiLM want the mean word too."""
        x = self.patch_embed(pixels) + self.pos_embed
        if self.skip:
            prefix = torch.cat([self.cls_token, self.reg_token], dim=1).expand(len(x), -1, -1)
            x = torch.cat([prefix.to(x.dtype), x], dim=1)
        for block in self.blocks[:-1]:
            x = block(x, *words)
        return x[:, self.skip :]


class VisionBackbone(nn.Module):
    """The first tower is `featurizer`, an optional second tower `fused_featurizer`."""

    def __init__(self, towers: tuple[TowerSettings, ...], image_size: int) -> None:
        super().__init__()
        self.featurizer = Tower(towers[0], image_size)
        if len(towers) > 1:
            self.fused_featurizer = Tower(towers[1], image_size)

    def towers(self) -> list[Tower]:
        return list(self.children())

    def forward(self, pixels: Tensor, *words: Tensor) -> Tensor:
        """[N, 3 * towers, H, W] -> [N, patches, sum of the towers' dims]."""
        parts = pixels.split(3, dim=1)
        return torch.cat([tower(part, *words) for tower, part in zip(self.towers(), parts, strict=True)], dim=-1)


class Projector(nn.Module):
    """Maps vision features to the language model's embeddings."""

    def __init__(self, vision_dim: int, dim: int, fused: bool) -> None:
        super().__init__()
        first = 4 * vision_dim if fused else dim
        self.fc1 = nn.Linear(vision_dim, first)
        self.fc2 = nn.Linear(first, dim)
        if fused:
            self.fc3 = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        for layer in list(self.children())[1:]:
            x = layer(F.gelu(x))
        return x
