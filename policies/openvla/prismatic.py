"""Shared by OpenVLA and its successors: the networks, reading and writing folders, prompts and images.

Weights stay empty until `initialise` or `load_weights`, so building a model costs no memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.arrays import host, tensor_of
from embodied.core.errors import ConfigError
from embodied.core.types import Array, EnvSpec, Observation
from embodied.policies.openvla.components import as_stored
from embodied.policies.openvla.config import PrismaticConfig
from embodied.policies.openvla.folder import COMPANIONS, read_published, read_stored, unwrapped, write_published
from embodied.policies.openvla.llama import LanguageModel
from embodied.policies.openvla.settings import PRESETS, settings_of
from embodied.policies.openvla.tokens import STOP, ActionTokens, LlamaTokenizer, LlamaWords, prompt, template_of
from embodied.policies.openvla.vision import Projector, VisionBackbone
from embodied.policies.policy_folder import copy_files, read_blobs
from embodied.policies.vla.image_processor import processor_of
from embodied.policies.vla.layers import is_scaled, smooth_filters, with_adapter
from embodied.policies.vla.lora import add_lora, initial_adapter, is_adapter, with_adapter_options
from embodied.policies.vla.policy import KEYFRAMES, VLAPolicy, for_acting
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
from embodied.policies.vla.vla_tokenizer import padded
from embodied.runtime.tensor_bytes import Blob

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
