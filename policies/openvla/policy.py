"""OpenVLA as a policy: one image and an instruction in, one action out, written token by token.

What surprises: only the 256 action tokens can be written, so only their logits are computed, and the value is read
where the first action token is about to be written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.arrays import tensor_of
from embodied.core.errors import ConfigError
from embodied.core.types import NoiseSpec, Observation, PolicyOutput
from embodied.policies.base import Scores
from embodied.policies.openvla.action_tokens import action_scores, pick
from embodied.policies.openvla.base import PATCHES, PrismaticPolicy
from embodied.policies.openvla.decoding import LAST, CompiledWriting, way_to_write
from embodied.policies.openvla.llama import Cache


class OpenVLAPolicy(PrismaticPolicy):
    def choose_cameras(self) -> tuple[str, ...]:
        names, asked = sorted(self.spec.images), self.config.camera
        self.check_cameras((asked,) if asked else (), "policy.camera")
        if asked is None and len(names) > 1:
            raise ConfigError(f"policy.name={self.config.name} sees one image; choose policy.camera={'|'.join(names)}")
        return (asked or names[0],)

    def build(self) -> None:
        super().build()
        self.adapt()
        self.cache = Cache()

    def cache_tensors(self) -> list[Tensor]:
        return self.cache.tensors()

    def noise_spec(self) -> NoiseSpec:
        return NoiseSpec("uniform", self.spec.action.dim)

    @torch.inference_mode()
    def act(self, obs: Observation, noise: np.ndarray, temperature: float = 1.0) -> PolicyOutput:
        uniform = torch.as_tensor(noise).to(self.device)
        tokens, logprobs, values = self.write(*self._prefix(obs), uniform, temperature)
        chosen = tokens.cpu().numpy()
        return PolicyOutput(
            self.actions_of(self.codes.decode(chosen))[:, None],
            logprobs[:, None].cpu().numpy(),
            values.cpu().numpy(),
            {"tokens": chosen[:, None]},
        )

    @torch.inference_mode()
    def write(
        self, x: Tensor, present: Tensor, padded: bool, uniform: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Action tokens and their log-probs [N, A], and values [N], from embeddings of image and prompt."""
        stack, numbers = self.language_model.model, uniform.shape[1]
        way = CompiledWriting if self.config.compile else way_to_write(stack)
        text = way(stack, self.cache, present, padded, numbers - 1)
        hidden = text.read(x)
        values = self._value(hidden)
        tokens, logits = [], [self._logits(hidden)]
        for column in uniform.T:
            tokens.append(pick(logits[-1], column, temperature))
            if len(tokens) < numbers:
                logits.append(self._logits(text.go_on(self._embed(tokens[-1]))))
        chosen = torch.stack(tokens, 1)
        return chosen, action_scores(torch.stack(logits, 1), chosen)[0], values

    @torch.inference_mode()
    def value(self, obs: Observation) -> np.ndarray:
        x, present, padded = self._prefix(obs)
        return self._value(self.language_model.model(x, present, padded=padded, read=LAST)[:, -1]).cpu().numpy()

    def forward(self, inputs: dict[str, Any]) -> Scores:
        tokens = self.tokens_of(inputs)[:, 0]
        x, present, padded = self._prefix(inputs["obs"], inputs.get(PATCHES))
        x = torch.cat([x, self._embed(tokens[:, :-1])], dim=1)
        present = nn.functional.pad(present, (0, tokens.shape[1] - 1), value=True)
        written = slice(-tokens.shape[1], None)
        hidden = self.language_model.model(x, present, padded=padded, read=written)
        logprobs, entropy = action_scores(self._logits(hidden), tokens)
        return Scores(logprobs[:, None], entropy[:, None], self._value(hidden[:, 0]))

    def imitate(self, inputs: dict[str, Any], noise: np.ndarray | None) -> Tensor:
        if self.config.sft_loss == "actions":
            return super().imitate(inputs, noise)
        tokens = self.tokens_of(inputs)[:, 0]
        x, present, padded = self._prefix(inputs["obs"], inputs.get(PATCHES))
        x = torch.cat([x, self._embed(tokens)], dim=1)
        present = nn.functional.pad(present, (0, tokens.shape[1]), value=True)
        written = slice(-tokens.shape[1] - 1, None)
        hidden = self.language_model.model(x, present, padded=padded, read=written)
        return self._word_losses(hidden, tokens)[:, None]

    def _prefix(self, obs: Observation, patches: Tensor | None = None) -> tuple[Tensor, Tensor, bool]:
        """Embeddings [N, L, D] of begin, image and text; which of them are there [N, L]; whether any is not. `patches`
        [N, 1, P, D] are what frozen towers saw."""
        seen = self._see(*self._pixels(obs)) if patches is None else tensor_of(patches, self.device)[:, 0]
        ids, there = self._words(obs, len(seen))
        patches = self.projector(seen)
        words = self.language_model.model.embed_tokens(tensor_of(ids, self.device))
        x = torch.cat([words[:, :1], patches.to(words.dtype), words[:, 1:]], dim=1)
        shown = np.ones((len(ids), patches.shape[1]), bool)
        present = np.concatenate([there[:, :1], shown, there[:, 1:]], axis=1)
        return x, tensor_of(present, self.device), not present.all()

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.language_model.model.embed_tokens(tokens + self.settings.first_action_id)
