"""What OpenVLA and OpenVLA-OFT share: towers, projector and language model, words, statistics, folders.

Weights stay empty until `initialise` or `load_weights`, so building a model costs no memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.arrays import host, tensor_of
from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.files import reading
from embodied.core.types import Array, EnvSpec, Observation
from embodied.policies import policy_folder as files
from embodied.policies.lora import add_lora
from embodied.policies.openvla import folder as published
from embodied.policies.openvla import network
from embodied.policies.openvla.components import as_stored
from embodied.policies.openvla.config import PrismaticConfig
from embodied.policies.vla import layers, statistics
from embodied.policies.vla.image_processor import processor_of
from embodied.policies.vla.policy import KEYFRAMES, VLAPolicy, hashed_words, pad_rows
from embodied.runtime.published_weights import Blob

VALUE = "value_head."
PATCHES = "patches"
FELT = "felt"  # in an observation: the state in the model's units


class PrismaticPolicy(VLAPolicy):
    """Families define how actions are read from the language model: `act`, `value`, `forward`."""

    own_scales = (statistics.RANGES,)
    companions = published.COMPANIONS
    vocabulary = (
        "a published OpenVLA",
        "a folder with only tokenizer.model needs one: "
        "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes it",
    )
    extras: tuple[str, ...] = (VALUE, statistics.RANGES, KEYFRAMES)  # prefixes of weights that folders may lack

    def __init__(self, config: PrismaticConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        config, source = self.config, self.source
        self.settings = settings = (
            source.settings if source else published.settings_of(published.PRESETS[config.preset])
        )
        self.where = str(self.origin or "policy.preset")
        stored = source.norm_stats if source else {}
        self.stated, self.data_set = statistics.stated_ranges(stored, config.statistics, spec)
        self.cameras = self.choose_cameras()
        self.check_env()
        kinds = [tower.kind for tower in settings.towers]
        with reading(Path(self.where, published.PREPROCESSOR), CheckpointError):
            numbers = source.preprocessor if source else {}
            usual = (settings.image_size, settings.resize, config.crop_area, config.rlds_images)
            self.images = processor_of(numbers, kinds, *usual)
        self.choose_tokenizer()
        self.codes = network.ActionTokens(settings.bins)
        self.dtype = getattr(torch, config.dtype)
        self.exact = torch.promote_types(self.dtype, torch.float32)
        with torch.device("meta"):
            self.build()
        layers.allocate(self.to(self.dtype))
        self.ranges = None if source else statistics.Ranges(self.stated[statistics.OWN])

    @classmethod
    def folder_of(cls, config: PrismaticConfig) -> published.PublishedOpenVLA:
        return published.read_published(Path(config.pretrained))

    @classmethod
    def check_statistics(cls, folder: published.PublishedOpenVLA, config: PrismaticConfig) -> None:
        if not (config.statistics and Path(config.statistics).is_dir()):
            statistics.statistics_of(folder.norm_stats, config.statistics, config.pretrained)

    @classmethod
    def choices(cls, config: PrismaticConfig, task: str) -> dict[str, Any]:
        """The options that a published folder decides in evaluations on a benchmark's task."""
        stats, suite = cls.folder_of(config).norm_stats, task.partition("/")[0]
        if config.statistics is not None:
            return {"statistics": statistics.choose_key(stats, config.statistics, config.pretrained)}
        keys = [key for key in stats if suite in (key, key.removesuffix("_no_noops"))]
        return {"statistics": keys[0] if keys else next(iter(stats)) if len(stats) == 1 else None}

    @classmethod
    def numbers(cls, config: PrismaticConfig) -> tuple[int, int | None]:
        """The numbers of action and state dimensions of a published folder's model (state None: not used)."""
        stats = cls.folder_of(config).norm_stats
        return len(statistics.statistics_of(stats, config.statistics, config.pretrained).low), None

    def check_env(self) -> None:
        super().check_env()
        if (asked := self.spec.action.dim) != (width := len(self.statistics.low)):
            raise ConfigError(
                f"this model was trained for {width} action numbers, the env takes {asked}; choose another "
                "env.control_mode (pd_ee_delta_pose has 7), or policy.statistics"
            )

    def choose_cameras(self) -> tuple[str, ...]:
        self.check_cameras(self.config.cameras)
        return self.config.cameras or tuple(sorted(self.spec.images))

    def build(self) -> None:
        """The networks."""
        settings, dim = self.settings, self.settings.llama.dim
        self.vision_backbone = network.VisionBackbone(settings.towers, settings.image_size)
        self.projector = network.Projector(sum(tower.dim for tower in settings.towers), dim, len(settings.towers) > 1)
        self.language_model = network.LanguageModel(settings.llama)
        self.value_head = nn.Sequential(
            nn.Linear(dim, 512), nn.GELU(), nn.Linear(512, 128), nn.GELU(), nn.Linear(128, 1, bias=False)
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
        return self._statistics_of("proprio").to_unit(state)

    def start(self, name: str, shape: torch.Size, draw: torch.Generator) -> Tensor:
        if name.endswith("patch_embed.proj.weight"):
            return layers.smooth_filters(shape, draw)
        if name.endswith("pos_embed"):
            return torch.empty(shape).normal_(generator=draw)
        if name.endswith("bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        return torch.empty(shape).normal_(generator=draw) * initial_deviation(name, shape)

    def read_folder(self) -> dict[str, Blob]:
        return published.read_stored(self.source, self.components()) if self.source else {}

    def is_extra(self, name: str) -> bool:
        return name.startswith(self.extras)

    # Conversion between actions and the networks' outputs

    @property
    def norm_stats(self) -> dict[str, Any]:
        ranges = getattr(self, "ranges", None)  # missing while networks are built or only counted
        return self.stated if ranges is None or ranges.action_min.is_meta else ranges.norm_stats()

    @property
    def statistics(self) -> statistics.Statistics:
        return self._statistics_of("action")

    def _statistics_of(self, part: str) -> statistics.Statistics:
        return statistics.statistics_of(self.norm_stats, self.data_set, self.where, part)

    def before_export(self) -> None:
        self.stated, self.ranges = self.norm_stats, None

    def actions_of(self, units: Tensor) -> Tensor:
        """Converts numbers in [-1, 1], [..., A], to the env's units."""
        return statistics.for_env(self.statistics.from_unit(units), self.config.gripper)

    def units_of(self, actions: Array) -> np.ndarray:
        """Converts demonstrated actions [..., A] to numbers in [-1, 1]."""
        stored = host(actions).astype(np.float64)
        stored[..., -1] = statistics.STORED_GRIPPERS[self.config.gripper](stored[..., -1])
        return host(self.statistics.to_unit(torch.from_numpy(stored)))

    def tokens_of(self, inputs: dict[str, Any]) -> Tensor:
        """The generated tokens [B, C, A], or the tokens of demonstrated actions."""
        if "tokens" in inputs:
            return tensor_of(inputs["tokens"], self.device)
        return tensor_of(self.codes.encode(self.units_of(inputs["actions"])), self.device)

    # Prompts and images

    def prompt_tokens(self, texts: list[str], multiple: int = 1) -> tuple[np.ndarray, np.ndarray]:
        prompts = [self.settings.template.format(text.lower()) for text in texts]
        ids = [self.encode(text) for text in prompts]
        return pad_rows(ids, self.settings.pad_id, in_front=True, multiple=multiple)

    def as_tensors(self, obs: Observation, device: torch.device | str | None = None) -> Observation:
        ready = super().as_tensors(obs, device)
        ready["images"] = {camera: self.images.through_rlds(ready["images"][camera]) for camera in self.cameras}
        return ready

    def encode(self, text: str) -> list[int]:
        if self.fast is None:  # 0, 1 and 2 are unknown, begin and end
            return [network.BOS, *(3 + number for number in hashed_words(text, self.settings.first_action_id - 3))]
        ids = self.fast.encode(text).ids
        ids = ids if ids[:1] == [network.BOS] else [network.BOS, *ids]
        return ids if ids[-1] == network.SPACE else [*ids, network.SPACE]

    def _sequence(
        self, words: Tensor, present: Tensor, patches: Tensor, numbers: int = 0, after: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Embeddings [N, L, D] of begin, images, text, `numbers` empty tokens and the last `after` words, and their
        mask."""
        text, blank = words.shape[1] - after, words.new_zeros(words.shape[0], numbers, words.shape[2])
        x = torch.cat([words[:, :1], patches.to(words.dtype), words[:, 1:text], blank, words[:, text:]], dim=1)
        ones = present.new_ones(1, 1).expand(words.shape[0], -1)
        parts = (present[:, :1], ones.expand(-1, patches.shape[1]), present[:, 1:text], ones.expand(-1, numbers))
        return x, torch.cat([*parts, present[:, text:]], dim=1)

    def _pixels(self, obs: Observation) -> list[Tensor]:
        """Processed pixels of each camera [N, 3 * towers, size, size]."""
        ready = isinstance(obs.get("instruction"), dict)  # made by `as_tensors`
        frames = [obs["images"][camera] for camera in self.cameras]
        frames = frames if ready else [tensor_of(frame, self.device) for frame in frames]
        return [self.images(frame, ready).to(self.dtype) for frame in frames]

    def _patch_features(self, *seen: Tensor) -> Tensor:
        return self.for_acting(network.VisionBackbone.forward)(self.vision_backbone, *seen)

    def frozen_features(self, obs: Observation) -> dict[str, Tensor]:
        """Features of frozen towers [B, cameras, patches, dim]."""
        if any(p.requires_grad for p in self.vision_backbone.parameters()):
            return {}
        return {PATCHES: torch.stack([self.vision_backbone(pixels) for pixels in self._pixels(obs)], dim=1)}

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits of the action tokens, divided by `policy.temperature`."""
        first, words = self.settings.first_action_id, self.language_model.lm_head
        rows = slice(first, first + self.settings.bins)
        if layers.is_scaled(words):
            logits = words(hidden)[..., rows]
        else:
            logits = layers.with_adapter(nn.functional.linear(hidden, words.weight[rows]), words, hidden, rows)
        return logits.to(self.exact) / self.config.temperature

    def _word_losses(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """Cross entropy [B, K] of these tokens [B, K] over the whole vocabulary, from hidden states [B, K, D]; with one
        more hidden state, of the stop token, too."""
        ids = chosen + self.settings.first_action_id
        ids = nn.functional.pad(ids, (0, hidden.shape[1] - ids.shape[1]), value=network.STOP)
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
        return {name: name for name in files.read_blobs(self.origin)}

    def save_published(self, folder: Path | str, shard_bytes: int = 5 * 10**9) -> None:
        """Write the layout that other programs read: without value head, adapters merged, large weights in shards."""
        folder, weights = Path(folder), self.published_weights()
        inside = {published.unwrapped(name): tensor for name, tensor in weights.items() if not self.is_extra(name)}
        self.write_published(folder, self.published_config(), inside, shard_bytes)
        for kind in self.components():
            path = self.source.components.get(kind) if self.source else None
            prefix = "" if kind == "vision_backbone" else f"{kind}."
            weights_of_kind = {
                name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(f"{kind}.")
            }
            name = path.stem if path else f"{kind}--0_checkpoint"
            files.write_tensors(folder / f"{name}.safetensors", as_stored(path, weights_of_kind))

    def components(self) -> tuple[str, ...]:
        """Parts that upstream stores in separate files."""
        return ()


def initial_deviation(name: str, shape: torch.Size) -> float:
    """The deviation of initial weights, which keeps the scale of activations. Values begin near zero."""
    if name.startswith(VALUE):
        return 0.02
    return 1.0 if name.endswith("embed_tokens.weight") else shape[1:].numel() ** -0.5
