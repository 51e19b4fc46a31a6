"""OpenVLA as a policy: one image and an instruction in, one action out, written token by token.

What surprises: only the 256 action tokens can be written, so only their logits are computed, and the value is read
where the first action token is about to be written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied.arrays import tensor_of
from embodied.data import EnvSpec, NoiseSpec, Observation, PolicyOutput
from embodied.errors import CheckpointError, ConfigError
from embodied.policies.base import Policy, Scores
from embodied.policies.config import OpenVLAConfig
from embodied.policies.folder import read_blobs
from embodied.policies.openvla.actions import ActionTokens
from embodied.policies.openvla.folder import copy_companions, read_published, write_published
from embodied.policies.openvla.llama import Cache, LanguageModel
from embodied.policies.openvla.sampling import action_scores, pick
from embodied.policies.openvla.settings import PRESETS, settings_of
from embodied.policies.openvla.text import prompt, tokenizer_of
from embodied.policies.openvla.vision import Projector, VisionBackbone
from embodied.policies.vla.images import processor_of
from embodied.policies.vla.lora import UP, add_lora, is_adapter, merged, published_name, save_adapters
from embodied.policies.vla.statistics import GRIPPERS, statistics_of
from embodied.policies.vla.text import align
from embodied.runtime.blobs import tensor_of as tensor_of_blob

VALUE = "value_head."


class OpenVLAPolicy(Policy):
    def __init__(self, config: OpenVLAConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        published = read_published(config.pretrained) if config.pretrained else None
        self.source = published and published.path
        self.settings = published.settings if published else settings_of(PRESETS[config.preset], "policy.preset")
        self.norm_stats = published.norm_stats if published else unit_statistics(spec.action.dim)
        self.statistics = statistics_of(self.norm_stats, config.statistics, str(self.source or "policy.preset"))
        self.camera = camera_of(config, spec)
        check_env(config, spec, len(self.statistics.low))
        settings, numbers = self.settings, published.preprocessor if published else {}
        kinds = [tower.kind for tower in settings.towers]
        self.images = processor_of(numbers, kinds, settings.image_size, settings.resize, config.crop_area)
        self.tokenizer = tokenizer_of(self.source, settings)
        self.codes = ActionTokens(settings.bins)
        self.dtype = getattr(torch, config.dtype)
        self.exact = torch.promote_types(self.dtype, torch.float32)
        with torch.device("meta"):
            self.build()
        self.to(self.dtype).to_empty(device="cpu")

    def build(self) -> None:
        """The networks."""
        settings = self.settings
        self.vision_backbone = VisionBackbone(settings.towers, settings.image_size)
        self.projector = Projector(settings.vision_dim, settings.llama.dim, len(settings.towers) > 1)
        self.language_model = LanguageModel(settings.llama)
        self.value_head = nn.Sequential(
            nn.Linear(settings.llama.dim, 512), nn.GELU(), nn.Linear(512, 128), nn.GELU(), nn.Linear(128, 1, bias=False)
        )
        if self.config.lora_rank:
            add_lora(self.networks(), self.config.lora_rank, self.config.lora_scale)
            self.language_model.lm_head.requires_grad_(False)

    def networks(self) -> list[nn.Module]:
        """Those that LoRA adapts."""
        return [self.vision_backbone, self.projector, self.language_model.model]

    @torch.no_grad()
    def initialise(self, rng: np.random.Generator) -> None:
        """Published weights where the recipe names some, drawn ones for what is left."""
        draw = torch.Generator().manual_seed(int(rng.integers(2**62)))
        stored = read_blobs(self.source) if self.source else {}
        own = self.state_dict(keep_vars=True)
        where = {name: name if name in stored else published_name(name) for name in own}
        fresh = {name for name in own if not stored or (where[name] not in stored and is_extra(name))}
        if stored and (odd := sorted({where[name] for name in own.keys() - fresh} ^ stored.keys())):
            raise CheckpointError(f"{self.source}: its weights do not fit its config.json: {', '.join(odd[:4])}")
        for name, parameter in own.items():
            if name in fresh:
                start(name, parameter, draw)
            else:
                self.use_weights({name: tensor_of_blob(stored[where[name]]).clone()})

    def noise_spec(self) -> NoiseSpec:
        return NoiseSpec("uniform", self.spec.action.dim)

    @torch.inference_mode()
    def act(self, obs: Observation, noise: np.ndarray, temperature: float = 1.0) -> PolicyOutput:
        stack = self.language_model.model
        x, present, padded = self._prefix(obs)
        uniform = torch.as_tensor(noise).to(x.device)
        cache = Cache(len(x), x.shape[1] + uniform.shape[1] - 1)
        hidden = stack(x, present, cache, padded=padded)[:, -1]
        values = self._value(hidden)
        tokens, logprobs = [], []
        for column in uniform.T:
            if tokens:
                present = nn.functional.pad(present, (0, 1), value=True)
                hidden = stack(self._embed(tokens[-1])[:, None], present, cache, padded=padded)[:, -1]
            logits = self._logits(hidden)
            tokens.append(pick(logits, column, temperature))
            logprobs.append(action_scores(logits, tokens[-1])[0])
        chosen = torch.stack(tokens, 1).cpu().numpy()
        return PolicyOutput(
            self.actions_of(chosen)[:, None].astype(np.float32),
            torch.stack(logprobs, 1)[:, None].cpu().numpy(),
            values.cpu().numpy(),
            {"tokens": chosen[:, None]},
        )

    @torch.inference_mode()
    def value(self, obs: Observation) -> np.ndarray:
        x, present, padded = self._prefix(obs)
        return self._value(self.language_model.model(x, present, padded=padded)[:, -1]).cpu().numpy()

    def forward(self, inputs: dict[str, Any]) -> Scores:
        tokens = tensor_of(inputs["tokens"], self.device)[:, 0]
        x, present, padded = self._prefix(inputs["obs"])
        x = torch.cat([x, self._embed(tokens[:, :-1])], dim=1)
        present = nn.functional.pad(present, (0, tokens.shape[1] - 1), value=True)
        hidden = self.language_model.model(x, present, padded=padded)[:, -tokens.shape[1] :]
        logprobs, entropy = action_scores(self._logits(hidden), tokens)
        return Scores(logprobs[:, None], entropy[:, None], self._value(hidden[:, 0]))

    def actions_of(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens [..., A] in the units that the env takes."""
        actions = self.statistics.from_unit(self.codes.decode(tokens))
        actions[..., -1] = GRIPPERS[self.config.gripper](actions[..., -1])
        return actions

    def blocks(self) -> list[nn.Module]:
        towers = [block for tower in self.vision_backbone.towers() for block in tower.blocks[:-1]]
        return [*towers, *self.language_model.model.layers]

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        named = list(self.named_parameters())
        return {
            "policy": [p for name, p in named if not name.startswith(VALUE)],
            "value": [p for name, p in named if name.startswith(VALUE)],
        }

    def description(self) -> dict[str, Any]:
        """The published config with ours beside it, so that the folder can be `policy.pretrained` again."""
        ours = super().description()
        if self.base:
            ours |= {"base": str(self.base)}
        ours["policy"]["pretrained"] = "." if self.source else None
        return self.settings.published | {"norm_stats": self.norm_stats} | ours

    @property
    def base(self) -> Path | None:
        """The folder that a saved policy refers to for all that was not trained: LoRA saves its adapters only."""
        return self.source and self.source.resolve() if self.config.lora_rank else None

    def saved(self) -> set[str]:
        if not self.base:
            return super().saved()
        return {name for name, tensor in self.state_dict(keep_vars=True).items() if tensor.requires_grad}

    def save_pretrained(self, folder: Path | str, tensors=None) -> None:
        super().save_pretrained(folder, tensors)
        copy_companions(self.source, Path(folder))

    def save_published(self, folder: Path | str, shard_bytes: int = 5 * 10**9) -> None:
        """The layout that other programs read: no value head, adapters merged, large weights in shards."""
        weights = merged(self.state_dict().items(), self.config.lora_scale)
        weights = {name: tensor for name, tensor in weights if not name.startswith(VALUE)}
        config = self.settings.published | {"norm_stats": self.norm_stats}
        write_published(Path(folder), config, weights, self.source, shard_bytes)

    def save_adapters(self, folder: Path | str) -> None:
        """As peft reads them."""
        config = self.config
        save_adapters(Path(folder), self.state_dict().items(), config.lora_rank, config.lora_scale, str(self.source))

    # Inside

    def _prefix(self, obs: Observation) -> tuple[Tensor, Tensor, bool]:
        """Embeddings [N, L, D] of begin, image and text; which of them are there [N, L]; whether any is not."""
        frames = tensor_of(obs["images"][self.camera], self.device)
        texts = obs["instruction"] if self.spec.instruction else [self.config.instruction] * len(frames)
        ids, there = align([self.tokenizer.encode(prompt(text)) for text in texts], self.settings.pad_id)
        pixels = self.images(frames).to(self.dtype)
        patches = self.projector(self.vision_backbone(pixels))
        words = self.language_model.model.embed_tokens(tensor_of(ids, self.device))
        x = torch.cat([words[:, :1], patches.to(words.dtype), words[:, 1:]], dim=1)
        seen = np.ones((len(ids), patches.shape[1]), bool)
        present = np.concatenate([there[:, :1], seen, there[:, 1:]], axis=1)
        return x, tensor_of(present, self.device), not present.all()

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.language_model.model.embed_tokens(tokens + self.settings.first_action_id)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Of the action tokens, tempered as the recipe says."""
        first = self.settings.first_action_id
        weight = self.language_model.lm_head.weight[first : first + self.settings.bins]
        return nn.functional.linear(hidden, weight).to(self.exact) / self.config.temperature

    def _value(self, hidden: Tensor) -> Tensor:
        return self.value_head(hidden).squeeze(-1).to(self.exact)


def is_extra(name: str) -> bool:
    """A weight that published folders do not hold."""
    return name.startswith(VALUE) or is_adapter(name)


def start(name: str, parameter: Tensor, draw: torch.Generator) -> None:
    """The initial numbers of a weight: ones for norms and scales, zero biases, small normal numbers. An adapter begins
    without effect."""
    if name.endswith(("bias", UP)):
        parameter.zero_()
    elif parameter.ndim == 1:
        parameter.fill_(1.0)
    else:
        parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.02, generator=draw))


def unit_statistics(dim: int) -> dict[str, Any]:
    """Of a model with fresh weights: actions are from -1 to 1."""
    return {"unit": {"action": {"q01": [-1.0] * dim, "q99": [1.0] * dim, "mask": [True] * dim}}}


def camera_of(config: OpenVLAConfig, spec: EnvSpec) -> str:
    names = sorted(spec.images)
    if not names:
        raise ConfigError(f"policy.name={config.name} needs images, but this env offers none; set env.cameras")
    if config.camera is None and len(names) > 1:
        raise ConfigError(f"policy.name={config.name} sees one image; choose policy.camera={'|'.join(names)}")
    if config.camera is not None and config.camera not in names:
        raise ConfigError(f"policy.camera={config.camera!r} is none of this env's cameras: {', '.join(names)}")
    return config.camera or names[0]


def check_env(config: OpenVLAConfig, spec: EnvSpec, dim: int) -> None:
    if spec.action.discrete:
        raise ConfigError(f"policy.name={config.name} writes continuous actions, but this env takes a choice")
    if spec.action.dim != dim:
        raise ConfigError(
            f"this model was trained for {dim} action numbers, the env takes {spec.action.dim}; choose another "
            "env.control_mode (pd_ee_delta_pose has 7), or policy.statistics"
        )
    if not spec.instruction and config.instruction is None:
        raise ConfigError(
            f"policy.name={config.name} needs an instruction, but this env gives none; set policy.instruction='...', "
            "or env.instruction=true where the env has that option"
        )
