"""SmolVLA as a policy: images, state and an instruction in, a chunk of actions out of noise (`vla.flow`).

The state is a token of the language model; the value is read there.

SmolVLM2's first layers and an action expert beside them, under lerobot's key names.

The language model reads image tokens, words and the state once (the prefix). The expert's even layers attend to the
prefix's keys and values and, causally, to the actions before; its odd layers attend to the prefix alone, through
projections of the language model's keys and values. Rotary embeddings use the base 10,000, although SmolVLM2 was
trained with another base.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.core.arrays import tensor_of
from embodied.core.errors import CheckpointError
from embodied.core.types import Observation
from embodied.policies.vla.flow import FlowPolicy, FlowSettings, normalization_of
from embodied.policies.vla.image_processor import with_bars
from embodied.policies.vla.layers import (
    GatedMLP,
    GroupedAttention,
    NamedParts,
    RotaryTables,
    VisionModel,
    VisionSettings,
    normed,
    rotate,
    sines,
    turns,
    value_head,
)
from embodied.policies.vla.policy import fast_tokenizer, for_acting, hashed_words, padded
from embodied.policies.vla.statistics import MEAN_STD

EPS, THETA = 1e-5, 10_000.0
KeysValues = tuple[Tensor, Tensor]  # [N, kv_heads, tokens, head_dim] each


@dataclass(frozen=True)
class LanguageSettings:
    dim: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


@dataclass(frozen=True, kw_only=True)
class SmolVLASettings(FlowSettings):
    """The whole model. `shuffle` squared patches become one token; every `self_every`-th layer of the expert attends
    to actions, too."""

    vision: VisionSettings
    shuffle: int
    language: LanguageSettings
    depth: int
    expert_dim: int
    self_every: int

    @property
    def image_tokens(self) -> int:
        return self.vision.patches // self.shuffle**2

    @property
    def expert(self) -> LanguageSettings:
        """The expert's sizes; its MLP is 8/3 as wide as its tokens, in steps of 256."""
        language, wide = self.language, 4 * int(2 * self.expert_dim / 3)
        mlp = 256 * math.ceil(wide / 256)
        return LanguageSettings(self.expert_dim, mlp, language.heads, language.kv_heads, language.head_dim, 0)


MODELS = {  # by vlm_model_name
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": (
        VisionSettings(768, 12, 3072, 12, 16, 512),
        4,
        LanguageSettings(960, 2560, 15, 5, 64, 49280),
    ),
    "tiny": (VisionSettings(96, 2, 256, 4, 8, 64), 2, LanguageSettings(128, 384, 4, 2, 32, 1024)),
}
FULL = {
    "type": "smolvla",
    "vlm_model_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
    "chunk_size": 50,
    "max_state_dim": 32,
    "max_action_dim": 32,
    "tokenizer_max_length": 48,
    "num_vlm_layers": 16,
    "self_attn_every_n_layers": 2,
    "expert_width_multiplier": 0.75,
}
TINY = FULL | {"vlm_model_name": "tiny", "chunk_size": 8, "max_action_dim": 8, "num_vlm_layers": 4}
PRESETS = {"tiny": TINY, "full": FULL}
UNLIKE = {  # options of lerobot that change the network -> supported values
    "attention_mode": ("cross_attn",),
    "add_image_special_tokens": (False,),
    "adapt_to_pi_aloha": (False,),
    "use_delta_joint_actions_aloha": (False,),
    "prefix_length": (-1, 0),
    "empty_cameras": (0,),
}


def settings_of(config: dict[str, Any], names: Collection[str], where: str, kind: str | None = None) -> SmolVLASettings:
    """Read lerobot's config.json."""
    if config.get("type") != "smolvla":
        raise CheckpointError(f"{where} says type={config.get('type')!r}, not 'smolvla'")
    try:
        if config["vlm_model_name"] not in MODELS:
            raise CheckpointError(f"{where} is built on {config['vlm_model_name']!r}; known: {', '.join(MODELS)}")
        vision, shuffle, language = MODELS[config["vlm_model_name"]]
        depth = config["num_vlm_layers"]
        allowed = UNLIKE | {
            "num_expert_layers": (-1, 0, depth),
            "resize_imgs_with_padding": ([vision.image_size] * 2,),
        }
        if odd := [key for key, values in allowed.items() if config.get(key, values[0]) not in values]:
            raise CheckpointError(f"{where} asks for {odd[0]}={config[odd[0]]!r}, which is not supported")
        settings = SmolVLASettings(
            kind="smolvla",
            horizon=config["chunk_size"],
            action_dim=config["max_action_dim"],
            state_dim=config["max_state_dim"],
            max_tokens=config.get("tokenizer_max_length", 48),
            normalization=normalization_of(config, MEAN_STD, where),
            tokenizer="words" if config["vlm_model_name"] == "tiny" else "folder",
            published=config,
            vision=vision,
            shuffle=shuffle,
            language=language,
            depth=depth,
            expert_dim=int(language.dim * config["expert_width_multiplier"]),
            self_every=config["self_attn_every_n_layers"],
        )
    except KeyError as err:
        raise CheckpointError(f"{where} is not a complete config of SmolVLA: {err} is missing") from None
    except TypeError as err:
        raise CheckpointError(f"{where} is not a config of SmolVLA: {err}") from None
    settings.check(where, settings.depth)
    return settings


def own_name(published: str) -> str | None:
    """Our name of a published weight; None if it is unused: output layers, and statistics of older folders."""
    name = published.replace("model._orig_mod.", "model.")
    unused = ".lm_head." in name or "lm_expert.embed_tokens" in name or not name.startswith("model.")
    return None if unused else name


@dataclass(frozen=True)
class Prefix:
    seen: list[KeysValues]  # of each layer
    present: Tensor  # bool [N, L]
    state: Tensor  # hidden states of the state's token [N, dim]


class SmolVLANetwork(nn.Module):
    def __init__(self, settings: SmolVLASettings) -> None:
        super().__init__()
        self.settings = settings
        language, expert = settings.language, settings.expert
        patches = settings.vision.dim * settings.shuffle**2
        vlm = NamedParts(
            vision_model=VisionModel(settings.vision),
            connector=NamedParts(modality_projection=NamedParts(proj=nn.Linear(patches, language.dim, bias=False))),
            text_model=LlamaStack(language, settings.depth),
        )
        self.vlm_with_expert = NamedParts(
            vlm=NamedParts(model=vlm), lm_expert=LlamaStack(expert, settings.depth, settings.self_every)
        )
        self.state_proj = nn.Linear(settings.state_dim, language.dim)
        self.action_in_proj = nn.Linear(settings.action_dim, expert.dim)
        self.action_out_proj = nn.Linear(expert.dim, settings.action_dim)
        self.action_time_mlp_in = nn.Linear(2 * expert.dim, expert.dim)
        self.action_time_mlp_out = nn.Linear(expert.dim, expert.dim)

    @property
    def vlm(self) -> nn.Module:
        return self.vlm_with_expert.vlm.model

    @property
    def to_words(self) -> nn.Module:
        """Maps shuffled patches to the language model's width."""
        return self.vlm.connector.modality_projection.proj

    @property
    def expert(self) -> LlamaStack:
        return self.vlm_with_expert.lm_expert

    def prefix(self, pixels: Tensor, ids: Tensor, is_word: Tensor, state: Tensor) -> Prefix:
        """`pixels` [N, cameras, 3, S, S], word ids [N, L] and their mask [N, L], and states [N, state_dim]."""
        rows, scale = len(pixels), math.sqrt(self.settings.language.dim)
        patches = shuffled(self.vlm.vision_model(pixels.flatten(0, 1)), self.settings.shuffle)
        images = (self.to_words(patches) * scale).view(rows, -1, self.settings.language.dim)
        words = self.vlm.text_model.embed_tokens(ids) * scale
        felt = self.state_proj(state.to(self.state_proj.weight.dtype))[:, None]
        x = torch.cat([images, words.to(images.dtype), felt.to(images.dtype)], dim=1)
        present = torch.cat([is_word.new_ones(rows, images.shape[1]), is_word, is_word.new_ones(rows, 1)], dim=1)
        length = x.shape[1]
        blocks = torch.ones(length, length, dtype=torch.bool, device=x.device)
        blocks[:-1, -1] = False  # images and words do not attend to the state
        itself = torch.eye(length, dtype=torch.bool, device=x.device)  # keeps the rows of padding finite
        mask = ((blocks & present[:, None]) | itself)[:, None]
        position = (present.long().cumsum(1) - 1).clamp(min=0)
        turn = turns(position, self.settings.language.head_dim, THETA, x.dtype)
        seen = []
        for layer in self.vlm.text_model.layers:
            x, added = layer(x, turn, mask)
            seen.append(added)
        return Prefix(seen, present, self.vlm.text_model.norm(x[:, -1]))

    def suffix(self, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        """Hidden states of noisy actions x [N, H, D] at `time` [N]."""
        wide, rows, length = self.action_in_proj.weight, len(x), x.shape[1]
        actions = self.action_in_proj(x.to(wide.dtype))
        waves = sines(time, wide.shape[0], self.settings.periods).to(wide.dtype)[:, None].expand_as(actions)
        tokens = self.action_time_mlp_in(torch.cat([actions, waves], dim=2))
        tokens = self.action_time_mlp_out(F.silu(tokens))
        here = torch.arange(length, device=x.device)
        before = prefix.present[:, None].expand(-1, length, -1)
        causal = (here <= here[:, None]).expand(rows, -1, -1)
        masks = torch.cat([before, causal], dim=2)[:, None], before[:, None]
        places = prefix.present.sum(1, keepdim=True) + here, here.expand(rows, -1)
        all_turns = [turns(place, self.settings.language.head_dim, THETA, tokens.dtype) for place in places]
        for number, (layer, seen) in enumerate(zip(self.expert.layers, prefix.seen, strict=True)):
            across = int(is_across(number, self.settings.self_every))
            tokens, _ = layer(tokens, all_turns[across], masks[across], seen)
        return self.expert.norm(tokens)

    def velocity(self, hidden: Tensor) -> Tensor:
        return self.action_out_proj(hidden)

    def blocks(self) -> list[nn.Module]:
        return [*self.vlm.vision_model.encoder.layers, *self.vlm.text_model.layers, *self.expert.layers]


def shuffled(patches: Tensor, side: int) -> Tensor:
    """[N, P, D] -> [N, P / side^2, D * side^2]: the patches of a square become one token, row by row."""
    count, dim = patches.shape[1:]
    line = math.isqrt(count) // side
    squares = patches.view(-1, line, side, line, side, dim).transpose(2, 3)
    return squares.reshape(len(patches), line * line, side * side * dim)


def is_across(layer: int, self_every: int) -> bool:
    """True if this layer of the expert attends to the prefix alone."""
    return self_every < 1 or layer % self_every > 0


class RootNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return (normed(x, EPS) * self.weight).to(x.dtype)


class LlamaLayer(nn.Module):
    """`across`: keys and values are projections of the prefix's."""

    def __init__(self, settings: LanguageSettings, across: bool) -> None:
        super().__init__()
        self.across = across
        self.self_attn = GroupedAttention(settings.dim, settings.heads, settings.kv_heads, settings.head_dim)
        if across:
            wide = settings.kv_heads * settings.head_dim
            self.self_attn.k_proj, self.self_attn.v_proj = (nn.Linear(wide, wide, bias=False) for _ in range(2))
        self.mlp = GatedMLP(settings.dim, settings.mlp, F.silu)
        self.input_layernorm, self.post_attention_layernorm = RootNorm(settings.dim), RootNorm(settings.dim)

    def forward(
        self, x: Tensor, turn: RotaryTables, mask: Tensor, past: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        attention, ready = self.self_attn, self.input_layernorm(x)
        q = rotate(attention.split(attention.q_proj(ready)), *turn)
        if self.across:
            sources = [part.transpose(1, 2).flatten(2) for part in past]
        else:
            sources = [ready, ready]
        k, v = (
            attention.split(project(source))
            for project, source in zip((attention.k_proj, attention.v_proj), sources, strict=True)
        )
        if not self.across:
            k = rotate(k, *turn)
            if past is not None:
                k, v = (torch.cat([before, new], dim=2) for before, new in zip(past, (k, v), strict=True))
        x = x + attention.attend(q, k, v, mask)
        return x + self.mlp(self.post_attention_layernorm(x)), (k, v)


class LlamaStack(nn.Module):
    """`self_every` None: every layer attends to its own tokens."""

    def __init__(self, settings: LanguageSettings, depth: int, self_every: int | None = None) -> None:
        super().__init__()
        if settings.vocab:
            self.embed_tokens = nn.Embedding(settings.vocab, settings.dim)
        across = [self_every is not None and is_across(number, self_every) for number in range(depth)]
        self.layers = nn.ModuleList(LlamaLayer(settings, each) for each in across)
        self.norm = RootNorm(settings.dim)


CRITIC = (512, 256, 128)


class SmolTokenizer:
    """SmolVLM2's tokenizer, which lerobot's folders lack."""

    def __init__(self, folder: Path | None) -> None:
        advice = "copy it from HuggingFaceTB/SmolVLM2-500M-Video-Instruct, on which the model is built"
        self.found = fast_tokenizer(folder, "SmolVLA", advice)

    def encode(self, text: str) -> list[int]:
        return self.found.encode(text).ids


class SmolWords:
    """Tokenizer of small models without a vocabulary file; a new line ends the prompt."""

    def __init__(self, settings: SmolVLASettings) -> None:
        self.count = settings.language.vocab - 1

    def encode(self, text: str) -> list[int]:
        return [*(1 + number for number in hashed_words(text, self.count)), 0]


class SmolVLAPolicy(FlowPolicy):
    tokenizers = (SmolTokenizer, SmolWords)
    presets = PRESETS
    settings_of = staticmethod(settings_of)
    own_name = staticmethod(own_name)
    model: SmolVLANetwork

    def build(self) -> None:
        settings = self.settings
        self.model = SmolVLANetwork(settings).to(self.exact)
        self.value_head = value_head(settings.language.dim, CRITIC).to(self.exact)
        if self.config.train == "expert":
            self.model.vlm.requires_grad_(False)
        self.add_parts(settings.expert_dim, settings.image_tokens, settings.language.dim, "vlm_with_expert")

    def vision_encoder(self) -> nn.Module:
        return self.model.to_words

    def blocks(self) -> list[nn.Module]:
        return self.model.blocks()

    def read(self, obs: Observation, known: dict[str, Any] | None = None, draws: Tensor | None = None) -> Prefix:
        state = self._unit_state(obs)
        texts = [text if text.endswith("\n") else f"{text}\n" for text in self.instructions(obs, len(state))]
        ids, mask = padded([self.tokenizer.encode(text) for text in texts], most=self.settings.max_tokens)
        size = self.settings.vision.image_size
        frames = [tensor_of(obs["images"][view], self.device) for view in self.views]
        grey = [with_bars(frame, size, in_middle=False, as_pillow=False) for frame in frames]
        pixels = torch.stack([view / 255 * 2 - 1 for view in grey], dim=1)
        words = tensor_of(ids, self.device), tensor_of(mask, self.device)
        prefix = for_acting(self.config, SmolVLANetwork.prefix, self.device)
        return prefix(self.model, pixels, *words, self._padded_state(state))

    def denoise(self, seen: Prefix, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        hidden = for_acting(self.config, SmolVLANetwork.suffix, self.device)(self.model, seen, x, time)
        return hidden, self.model.velocity(hidden).to(self.exact)

    def judged(self, seen: Prefix, hidden: Tensor | None) -> Tensor:
        return seen.state
