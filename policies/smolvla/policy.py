"""SmolVLA as a policy: images, state and an instruction in, a chunk of actions out of noise (`vla.flow`).

SmolVLM2's first layers and an action expert beside them, under lerobot's key names. The language model reads image
tokens, words and the state once (the prefix); the value is read at the state's token. The expert's even layers attend
to the prefix's keys and values and, causally, to the actions before; its odd layers attend to the prefix alone, through
projections of the language model's keys and values. Rotary embeddings use the base 10,000, although SmolVLM2 was
trained with another base.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.core.types import Observation
from embodied.policies.vla import flow_network as networks
from embodied.policies.vla.config import HORIZONS
from embodied.policies.vla.flow import FlowPolicy, FlowSettings, normalization_of
from embodied.policies.vla.layers import NamedParts
from embodied.policies.vla.policy import hashed_words, pad_rows
from embodied.policies.vla.statistics import MEAN_STD


@dataclass(frozen=True, kw_only=True)
class SmolVLASettings(FlowSettings):
    """`shuffle` squared patches become one token; every `self_every`-th layer of the expert attends to actions, too."""

    shuffle: int
    self_every: int

    @property
    def image_tokens(self) -> int:
        return self.vision.patches // self.shuffle**2


MODELS = {  # by vlm_model_name: vision, shuffle, language, vocabulary
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": (
        networks.VisionSettings(768, 12, 3072, 12, 16, 512),
        4,
        networks.StackSettings(960, 32, 2560, 15, 5, 64),
        49280,
    ),
    "tiny": (networks.VisionSettings(96, 2, 256, 4, 8, 64), 2, networks.StackSettings(128, 4, 384, 4, 2, 32), 1024),
}
FULL = {
    "type": "smolvla",
    "vlm_model_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
    "chunk_size": HORIZONS["full"],
    "max_state_dim": 32,
    "max_action_dim": 32,
    "tokenizer_max_length": 48,
    "num_vlm_layers": 16,
    "self_attn_every_n_layers": 2,
    "expert_width_multiplier": 0.75,
}
TINY = FULL | {"vlm_model_name": "tiny", "chunk_size": HORIZONS["tiny"], "max_action_dim": 8, "num_vlm_layers": 4}
UNLIKE = {  # options of lerobot that change the network -> supported values
    "attention_mode": ("cross_attn",),
    "add_image_special_tokens": (False,),
    "adapt_to_pi_aloha": (False,),
    "use_delta_joint_actions_aloha": (False,),
    "prefix_length": (-1, 0),
}  # pictures of `empty_cameras` are masked, so without them nothing changes


def settings_of(config: dict[str, Any], names: Collection[str] = (), kind: str = "smolvla") -> SmolVLASettings:
    """Read lerobot's config.json."""
    if config.get("type") != kind:
        raise ValueError(f"it says type={config.get('type')!r}, not 'smolvla'")
    model, depth = config["vlm_model_name"], config["num_vlm_layers"]
    if model not in MODELS:
        raise ValueError(f"it is built on {model!r}; known: {', '.join(MODELS)}")
    vision, shuffle, language, vocab = MODELS[model]
    allowed = UNLIKE | {"num_expert_layers": (-1, 0, depth), "resize_imgs_with_padding": ([vision.image_size] * 2,)}
    if odd := [key for key, values in allowed.items() if config.get(key, values[0]) not in values]:
        raise ValueError(f"it asks for {odd[0]}={config[odd[0]]!r}, which is not supported")
    language = replace(language, depth=depth)
    width = int(language.dim * config["expert_width_multiplier"])
    mlp = 256 * math.ceil(4 * int(2 * width / 3) / 256)  # 8/3 as wide as its tokens, in steps of 256
    return SmolVLASettings(
        kind=kind,
        horizon=config["chunk_size"],
        action_dim=config["max_action_dim"],
        state_dim=config["max_state_dim"],
        max_tokens=config.get("tokenizer_max_length", 48),
        normalization=normalization_of(config, MEAN_STD),
        tokenizer="words" if model == "tiny" else "folder",
        published=config,
        vision=vision,
        shuffle=shuffle,
        language=language,
        expert=replace(language, dim=width, mlp=mlp),
        vocab=vocab,
        self_every=config["self_attn_every_n_layers"],
    )


def own_name(published: str) -> str | None:
    """Our name of a published weight; None if it is unused: output layers, and statistics of older folders."""
    name = published.replace("model._orig_mod.", "model.")
    unused = ".lm_head." in name or "lm_expert.embed_tokens" in name or not name.startswith("model.")
    return None if unused else name


class SmolVLANetwork(networks.FlowNetwork):
    part = "vlm_with_expert"
    settings: SmolVLASettings

    def __init__(self, settings: SmolVLASettings) -> None:
        super().__init__()
        self.settings = settings
        language, expert = settings.language, settings.expert
        patches = settings.vision.dim * settings.shuffle**2
        vlm = NamedParts(
            vision_model=networks.VisionModel(settings.vision),
            connector=NamedParts(modality_projection=NamedParts(proj=nn.Linear(patches, language.dim, bias=False))),
            text_model=llama(language, settings.vocab),
        )
        self.vlm_with_expert = NamedParts(
            vlm=NamedParts(model=vlm), lm_expert=llama(expert, self_every=settings.self_every)
        )
        self.state_proj = nn.Linear(settings.state_dim, language.dim)
        self.action_in_proj = nn.Linear(settings.action_dim, expert.dim)
        self.action_out_proj = nn.Linear(expert.dim, settings.action_dim)
        self.action_time_mlp_in = nn.Linear(2 * expert.dim, expert.dim)
        self.action_time_mlp_out = nn.Linear(expert.dim, expert.dim)

    vlm = property(lambda self: self.vlm_with_expert.vlm.model)
    tower = property(lambda self: self.vlm.vision_model)
    to_words = property(lambda self: self.vlm.connector.modality_projection.proj)
    language = property(lambda self: self.vlm.text_model)
    expert = property(lambda self: self.vlm_with_expert.lm_expert)

    def merge_patches(self, patches: Tensor) -> Tensor:
        """[N, P, D] -> [N, P / side^2, D * side^2]: the patches of a square become one token, row by row."""
        side, (count, dim) = self.settings.shuffle, patches.shape[1:]
        line = math.isqrt(count) // side
        squares = patches.view(-1, line, side, line, side, dim).transpose(2, 3)
        return squares.reshape(patches.shape[0], line * line, side * side * dim)

    def prefix(self, pixels: Tensor, ids: Tensor, is_word: Tensor, padded: bool, state: Tensor) -> networks.Prefix:
        """`pixels` [N, cameras, 3, S, S], word ids [N, L] and their mask [N, L], and states [N, state_dim]."""
        is_word, scale = is_word if padded else is_word[:1], math.sqrt(self.settings.language.dim)
        images = self.read_patches(pixels) * scale
        words = self.language.embed_tokens(ids) * scale
        felt = self.state_proj(state.to(self.state_proj.weight.dtype))[:, None]
        x = torch.cat([images, words.to(images.dtype), felt.to(images.dtype)], dim=1)
        present = F.pad(is_word, (images.shape[1], 1), value=True)
        blocks = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        blocks[:-1, -1] = False  # images and words do not attend to the state
        x, seen = self.language(x, [networks.places_in(present)], [networks.with_itself(blocks & present[:, None])])
        return networks.Prefix(seen, present, self.language.norm(x[:, -1])[0], padded=padded)

    def suffix(self, prefix: networks.Prefix, x: Tensor, time: Tensor) -> Tensor:
        length, rows = x.shape[1], prefix.present.shape[0]
        actions = self.action_in_proj(x.to(self.action_in_proj.weight.dtype))
        tokens = self.mixed_with_time(actions, self.waves(time))
        here = torch.arange(length, device=x.device)
        before = prefix.present[:, None].expand(-1, length, -1)
        causal = (here <= here[:, None]).expand(rows, -1, -1)
        masks = [torch.cat([before, causal], dim=2)[:, None], before[:, None] if prefix.padded else None]
        positions = [prefix.present.sum(1, keepdim=True) + here, here.expand(rows, -1)]
        return self.expert.norm(self.expert(tokens, positions, masks, prefix.seen)[0])[0]


def llama(sizes: networks.StackSettings, vocab: int = 0, self_every: int | None = None) -> networks.Stack:
    return networks.Stack(sizes, partial(networks.Norm, sizes.dim, 1e-5), F.silu, vocab, self_every)


class SmolVLAPolicy(FlowPolicy):
    vocabulary = ("SmolVLA", "copy it from HuggingFaceTB/SmolVLM2-500M-Video-Instruct, on which the model is built")
    presets: ClassVar = {"tiny": TINY, "full": FULL}
    settings_of = staticmethod(settings_of)
    own_name = staticmethod(own_name)
    network = SmolVLANetwork
    padding: ClassVar = {"in_middle": False, "as_pillow": False}

    def encode(self, text: str) -> list[int]:
        text = text if text.endswith("\n") else f"{text}\n"
        if self.fast is None:  # small models: a hash for each word; a new line ends the prompt
            return [*(1 + number for number in hashed_words(text, self.settings.vocab - 1)), 0]
        return self.fast.encode(text).ids

    def read(
        self, obs: Observation, encoded: dict[str, Any] | None = None, draws: Tensor | None = None
    ) -> networks.Prefix:
        state = self._unit_state(obs)
        prefix = self.for_acting(SmolVLANetwork.prefix)
        return prefix(self.model, self._pixels(obs), *self.word_ids(obs, state.shape[0]), self._padded_state(state))

    def prompt_tokens(self, texts: list[str], multiple: int = 1) -> tuple[np.ndarray, np.ndarray]:
        return pad_rows([self.encode(text) for text in texts], most=self.settings.max_tokens, multiple=multiple)

    def value_features(self, seen: networks.Prefix, hidden: Tensor | None) -> Tensor:
        return seen.hidden
