"""SmolVLA as a policy: images, state and an instruction in, a chunk of actions out of noise (`vla.flow`).

The state is a token of the language model; the value is read there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied.core.arrays import tensor_of
from embodied.core.types import Observation
from embodied.policies.smolvla.network import PRESETS, Prefix, SmolVLANetwork, SmolVLASettings, own_name, settings_of
from embodied.policies.vla.flow import FlowPolicy
from embodied.policies.vla.image_processor import with_bars
from embodied.policies.vla.layers import value_head
from embodied.policies.vla.policy import for_acting
from embodied.policies.vla.vla_tokenizer import fast_tokenizer, hashed_words, padded

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
