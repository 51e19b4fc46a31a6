"""Pi0 and Pi0.5 as a policy: images, state and an instruction in, a chunk of actions out of noise (`vla.flow`).

The value does not depend on noise or time: it is read at the state's token (Pi0), or over the prefix (Pi0.5).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.arrays import tensor_of
from embodied.core.types import Observation
from embodied.policies.pi0.config import Pi0Config
from embodied.policies.pi0.inputs import DRAWS, GemmaTokenizer, GemmaWords, augmented, prompt
from embodied.policies.pi0.network import Pi0Network, Prefix, critic, in_half
from embodied.policies.pi0.settings import PRESETS, own_name, settings_of
from embodied.policies.vla.flow import FlowPolicy
from embodied.policies.vla.image_processor import with_bars
from embodied.policies.vla.policy import for_acting
from embodied.policies.vla.vla_tokenizer import padded

SEEN, PRESENT, HIDDEN = "prefix", "prefix_present", "prefix_hidden"
Seen = tuple[Prefix, Tensor]  # (prefix of images and words, state in the model's units and width)


class Pi0Policy(FlowPolicy):
    tokenizers = (GemmaTokenizer, GemmaWords)
    presets = PRESETS
    settings_of = staticmethod(settings_of)
    own_name = staticmethod(own_name)
    model: Pi0Network

    def build(self) -> None:
        settings = self.settings
        self.model = Pi0Network(settings).to(self.exact)
        self.value_head = critic(settings).to(self.exact)
        if self.config.train == "expert":
            self.model.paligemma_with_expert.paligemma.requires_grad_(False)
        self.add_parts(settings.expert.dim, settings.vision.patches, settings.language.dim, "paligemma_with_expert")

    def halve(self) -> None:
        in_half(self.model, torch.bfloat16)

    @classmethod
    def lerobots_own(cls, published: dict[str, Any]) -> dict[str, Any]:
        """Options of lerobot's folders that differ from openpi's on the same task."""
        if "type" not in published:
            return {}
        return {"relative_actions": 0, "state_in_prompt": True, "horizon": None} | super().lerobots_own(published)

    @classmethod
    def reads_state(cls, config: Pi0Config, settings: Any) -> bool:
        return not settings.adaptive or config.state_in_prompt

    def state_room(self) -> int | None:
        return None if self.settings.adaptive else self.settings.state_dim

    def start(self, name: str, shape: torch.Size, draw: torch.Generator) -> Tensor:
        opens = name.endswith((".dense.weight", ".dense.bias"))
        if opens or (name.endswith("norm.weight") and "vision" not in name):
            return torch.zeros(shape)  # for gates, and norms to which Gemma adds 1
        return super().start(name, shape, draw)

    def frozen_features(self, obs: Observation) -> dict[str, Tensor]:
        """Keys and values of a frozen PaliGemma for images and words, with prompts of one length."""
        if self.config.train == "all":
            return {}
        prefix = self._prefix(obs, self._unit_state(obs), self.settings.max_tokens)
        hidden = {HIDDEN: prefix.hidden} if self.settings.adaptive else {}
        return {SEEN: prefix.stacked(), PRESENT: prefix.present} | hidden

    def vision_encoder(self) -> nn.Module:
        return self.model.to_words

    def blocks(self) -> list[nn.Module]:
        return self.model.blocks()

    def num_draws(self) -> int:
        return DRAWS * len(self.views) if self.config.augment else 0

    def read(self, obs: Observation, known: dict[str, Any] | None = None, draws: Tensor | None = None) -> Seen:
        state = self._unit_state(obs)
        if known and SEEN in known:
            parts = [tensor_of(known[name], self.device) for name in (SEEN, PRESENT, HIDDEN) if name in known]
            prefix = Prefix.unstacked(*parts)
        else:
            prefix = self._prefix(obs, state, draws=draws)
        return prefix, self._padded_state(state)

    def denoise(self, seen: Seen, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        hidden = for_acting(self.config, Pi0Network.suffix, self.device)(self.model, *seen, x, time)
        return hidden, self.model.velocity(hidden).to(self.exact)

    def judged(self, seen: Seen, hidden: Tensor | None) -> Tensor:
        prefix, state = seen
        if self.settings.adaptive:
            present = prefix.present[:, :, None].to(self.exact)
            return (prefix.hidden.to(self.exact) * present).sum(1) / present.sum(1)
        if hidden is None:
            hidden = self.model.suffix(prefix, state, None, torch.ones(len(state), device=self.device))
        return hidden[:, 0]

    def _prefix(self, obs: Observation, state: Tensor, width: int = 0, draws: Tensor | None = None) -> Prefix:
        """The prefix of images and prompts, padded to at least `width` tokens. In half precision all prompts have one
        width, as in openpi: other padding changes rounding, by 0.1 nats of a log-prob."""
        width = self.settings.max_tokens if self.config.dtype == "bfloat16" else width
        texts = self.instructions(obs, len(state))
        in_prompt = self.settings.adaptive and self.config.state_in_prompt
        states = self._in_prompt(state) if in_prompt else [None] * len(texts)
        sentences = [self.tokenizer.encode(prompt(text, row)) for text, row in zip(texts, states)]
        most = self.settings.max_tokens
        words = [tensor_of(part, self.device) for part in padded(sentences, most=most, least=width)]
        pixels = self._pixels(obs)
        if draws is not None:
            pixels = augmented(pixels, draws.view(len(draws), -1, DRAWS))
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.config.train == "all"):
            return for_acting(self.config, Pi0Network.prefix, self.device)(self.model, pixels, *words)

    def _pixels(self, obs: Observation) -> Tensor:
        """Pixels of all cameras [N, cameras, 3, S, S], from -1 to 1."""
        size = self.settings.vision.image_size
        frames = [with_bars(tensor_of(obs["images"][view], self.device), size) for view in self.views]
        return torch.stack([view / 255 * 2 - 1 for view in frames], dim=1)

    def _in_prompt(self, state: Tensor) -> np.ndarray:
        """The state for the prompt; zeros when memory is counted by shapes."""
        return np.zeros(state.shape) if state.is_meta else state.cpu().numpy()
