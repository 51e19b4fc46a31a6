"""OpenVLA and OpenVLA-OFT as policies: images and an instruction in, actions out.

OpenVLA writes one action token by token. Only the 256 action tokens can be generated, so only their logits are
computed. The value is read at the place that predicts the first action token.

OFT reads all numbers of a whole chunk in one pass, in which every token attends to every other one. A number is read
one place before its own (empty) token, like the prediction of an autoregressive model.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.arrays import host, tensor_of
from embodied.core.errors import ConfigError
from embodied.core.types import NoiseSpec, Observation, PolicyOutput
from embodied.policies.base import Scores
from embodied.policies.openvla import folder as published
from embodied.policies.openvla import network
from embodied.policies.openvla.config import OpenVLAOFTConfig
from embodied.policies.openvla.prismatic import FELT, PATCHES, PrismaticPolicy
from embodied.policies.vla import layers, statistics
from embodied.runtime.published_weights import Blob


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
        self.cache = network.Cache()

    def cache_tensors(self) -> list[Tensor]:
        return self.cache.tensors()

    def row_bytes(self, words: int) -> int:
        llama, tokens = self.settings.llama, self.settings.patches * len(self.cameras) + words
        of_number = next(self.parameters()).element_size()
        return 2 * llama.depth * llama.dim * llama.kv_heads // llama.heads * tokens * of_number

    def noise_spec(self) -> NoiseSpec:
        return NoiseSpec("uniform", self.spec.action.dim)

    @torch.inference_mode()
    def act(self, obs: Observation, noise: np.ndarray, temperature: float = 1.0) -> PolicyOutput:
        inputs = {"obs": self.as_tensors(obs), "uniform": tensor_of(noise, self.device)}
        made = self.compute(("act", temperature), partial(self._decide, temperature), inputs)
        actions = self.actions_of(self.codes.decode(made["tokens"]))
        return PolicyOutput(
            host(actions[:, None]),
            host(made["logprobs"])[:, None],
            host(made["values"]),
            {"tokens": host(made["tokens"])[:, None]},
        )

    def _decide(self, temperature: float, obs: Observation, uniform: Tensor) -> dict[str, Tensor]:
        fused = self.config.compile and self.device.type == "cpu"
        decoder = network.CompiledDecoder if fused else network.Decoder
        x, *masks = self._prefix(obs)
        text = decoder(self.language_model.model, self.cache, *masks, uniform.shape[1] - 1)
        written, logprobs, values = self.write(text, x, uniform, temperature)
        return {"tokens": written, "logprobs": logprobs, "values": values}

    def best_actions(self, obs: Observation, noise: Tensor | None) -> Tensor:
        x, *masks = self._prefix(obs)
        uniform = x.new_zeros(x.shape[0], self.spec.action.dim)
        text = network.Decoder(self.language_model.model, network.Cache(), *masks, uniform.shape[1] - 1)
        return self.actions_of(self.codes.decode(self.write(text, x, uniform, 0.0)[0]))[:, None]

    def write(
        self, text: network.Decoder, x: Tensor, uniform: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Action tokens and their log-probs [N, A], and values [N], from embeddings of image and prompt."""
        hidden = text.read(x)
        values = self._value(hidden)
        written, logits = [], [self._logits(hidden)]
        for column in uniform.unbind(1):
            written.append(network.pick(logits[-1], column, temperature))
            if len(written) < uniform.shape[1]:
                logits.append(self._logits(text.go_on(self._embed(written[-1]))))
        chosen = torch.stack(written, 1)
        return chosen, network.action_scores(torch.stack(logits, 1), chosen)[0], values

    def judge(self, obs: Observation) -> dict[str, Tensor]:
        x, present, padded = self._prefix(obs)
        read = self.language_model.model(x, present, padded=padded, read=network.LAST)
        return {"values": self._value(read[:, -1])}

    def forward(self, inputs: dict[str, Any]) -> Scores:
        chosen = self.tokens_of(inputs)[:, 0]
        hidden = self._states(inputs, chosen[:, :-1])
        logprobs, entropy = network.action_scores(self._logits(hidden), chosen)
        return Scores(logprobs[:, None], entropy[:, None], self._value(hidden[:, 0]))

    def imitate_actions(self, inputs: dict[str, Any], noise: np.ndarray | None) -> Tensor:
        if self.config.sft_loss == "actions":
            return super().imitate_actions(inputs, noise)
        chosen = self.tokens_of(inputs)[:, 0]
        return self._word_losses(self._states(inputs, chosen), chosen)[:, None]

    def _states(self, inputs: dict[str, Any], written: Tensor) -> Tensor:
        """Hidden states [B, K + 1, D] at the end of the prompt and of each written token [B, K]."""
        x, present, padded = self._prefix(inputs["obs"], inputs.get(PATCHES))
        x = torch.cat([x, self._embed(written)], dim=1)
        present = nn.functional.pad(present, (0, written.shape[1]), value=True)
        return self.language_model.model(x, present, padded=padded, read=slice(-written.shape[1] - 1, None))

    def _prefix(self, obs: Observation, patches: Tensor | None = None) -> tuple[Tensor, Tensor, bool]:
        """Returns embeddings [N, L, D] of begin, image and text, their mask [N, L], and True if there is padding.
        `patches` [N, 1, P, D] are features of frozen towers."""
        seen = self._patch_features(*self._pixels(obs)) if patches is None else tensor_of(patches, self.device)[:, 0]
        ids, mask, padded = self.word_ids(obs, seen.shape[0])
        words = self.language_model.model.embed_tokens(ids)
        x, present = self._sequence(words, mask, self.projector(seen))
        return x, present, padded

    def _embed(self, chosen: Tensor) -> Tensor:
        return self.language_model.model.embed_tokens(chosen + self.settings.first_action_id)


SLACK = 1e-8  # upstream widens every range by this
LOG_SCALE = "log_scale"
CENTER = "action_head.model.fc2.weight"
FILM = (".scale.weight", ".scale.bias", ".shift.weight", ".shift.bias")


class OpenVLAOFTPolicy(PrismaticPolicy):
    extras = (*PrismaticPolicy.extras, LOG_SCALE, "action_head.", "proprio_projector.")

    @classmethod
    def choices(cls, config: OpenVLAOFTConfig, task: str) -> dict[str, Any]:
        """Folders without components are RLinf's models, which use the first camera and no stop token; folders with
        components are upstream's."""
        alone = not cls.folder_of(config).components
        more = {"cameras": config.cameras[:1], "stop_token": False} if alone else {}
        return super().choices(config, task) | more

    @classmethod
    def numbers(cls, config: OpenVLAOFTConfig) -> tuple[int, int | None]:
        source, felt = cls.folder_of(config), None
        if first_answer(config.proprio, source.oft.get("proprio"), "proprio_projector" in source.components):
            felt = statistics.statistics_of(source.norm_stats, config.statistics, config.pretrained, "proprio")
        return super().numbers(config)[0], felt and len(felt.low)

    def build(self) -> None:
        config, dim, numbers = self.config, self.settings.llama.dim, self.spec.action.dim
        has, says = (self.source.components, self.source.oft) if self.source else ({}, {})
        self.head = config.head or says.get("head") or ("l1" if "action_head" in has else "discrete")
        self.proprio = first_answer(config.proprio, says.get("proprio"), "proprio_projector" in has)
        self.film = first_answer(config.film, says.get("film"), "vision_backbone" in has)
        super().build()
        if self.head == "l1":
            if config.sft_loss != "actions":
                raise ConfigError("policy.sft_loss is of tokens, but policy.head=l1 writes none; leave it out")
            if config.temperature != 1.0:
                raise ConfigError("policy.temperature is of tokens, but policy.head=l1 writes none; leave it at 1")
            self.language_model.lm_head.requires_grad_(False)  # the l1 head does not use its logits
            self.action_head = layers.NamedParts(model=network.ResidualMLP(numbers * dim, dim, numbers))
            self.log_scale = nn.Parameter(torch.empty(numbers))
        if self.proprio:
            self._check_state()
            self.proprio_projector = network.Projector(self.spec.state_dim, dim)
        self.adapt(self._wrap_blocks() if self.film else ())

    @property
    def proprio_statistics(self) -> statistics.Statistics:
        return self._statistics_of("proprio")

    def _check_state(self) -> None:
        felt, state_dim = self.proprio_statistics, self.spec.state_dim
        if state_dim != len(felt.low):
            raise ConfigError(
                f"this model feels {len(felt.low)} numbers (policy.proprio), the env gives {state_dim or 'none'}; "
                "set env.state=proprio, or policy.proprio=false"
            )

    def _wrap_blocks(self) -> tuple[nn.Module, ...]:
        """Wrap all vision blocks in FiLM; returns its layers."""
        layers: list[nn.Module] = []
        for tower, settings in zip(self.vision_backbone.towers(), self.settings.towers, strict=True):
            wrapped = [network.FiLM(block, self.settings.llama.dim, settings.dim) for block in tower.blocks]
            wrapped[-1].requires_grad_(False)
            tower.blocks = nn.ModuleList(wrapped)
            layers += [layer for film in wrapped for layer in (film.scale, film.shift)]
        return tuple(layers)

    def start(self, name: str, shape: torch.Size, draw: torch.Generator) -> Tensor:
        """The head's first actions are near 0, where single precision is finer."""
        first = super().start(name, shape, draw)
        if name == LOG_SCALE:
            return first.fill_(self.config.initial_log_scale)
        return first * 0.1 if name == CENTER else first

    def noise_spec(self) -> NoiseSpec:
        return NoiseSpec("uniform", self.config.chunk * self.spec.action.dim)

    @torch.inference_mode()
    def act(self, obs: Observation, noise: np.ndarray, temperature: float = 1.0) -> PolicyOutput:
        inputs = {"obs": self.as_tensors(obs), "uniform": tensor_of(noise, self.device)}
        made = self.compute(("act", temperature), partial(self._decide, temperature), inputs)
        logprobs, values = (host(made.pop(name)) for name in ("logprobs", "values"))
        units = made["units"] if self.head == "l1" else self.codes.decode(made["tokens"])
        replay = {name: host(tensor) for name, tensor in made.items()}
        return PolicyOutput(host(self.actions_of(units)), logprobs, values, replay)

    def _decide(self, temperature: float, obs: Observation, uniform: Tensor) -> dict[str, Tensor]:
        hidden = self._hidden(obs)
        uniform, values = uniform.view(hidden.shape[:3]), self._value(hidden[:, 0, 0])
        if self.head == "l1":
            center = self._center(hidden)
            units = center + temperature * self._log_scale().exp() * network.laplace_noise(uniform).to(self.exact)
            logprobs, _ = network.laplace(center, self._log_scale(), units)
            return {"units": units, "logprobs": logprobs, "values": values}
        logits = self._logits(hidden)
        written = network.pick(logits, uniform, temperature)
        return {"tokens": written, "logprobs": network.action_scores(logits, written)[0], "values": values}

    def as_tensors(self, obs: Observation, device: torch.device | str | None = None) -> Observation:
        ready = super().as_tensors(obs, device)
        return ready | ({FELT: self.proprio_statistics.to_unit(ready["state"])} if self.proprio else {})

    def best_actions(self, obs: Observation, noise: Tensor | None) -> Tensor:
        hidden = self._hidden(obs)
        if self.head == "l1":
            return self.actions_of(self._center(hidden))
        return self.actions_of(self.codes.decode(self._logits(hidden).argmax(-1)))

    def judge(self, obs: Observation) -> dict[str, Tensor]:
        return {"values": self._value(self._hidden(obs)[:, 0, 0])}

    def forward(self, inputs: dict[str, Any]) -> Scores:
        hidden = self._hidden(inputs["obs"], inputs.get(PATCHES))
        if self.head == "l1":
            units = inputs["units"] if "units" in inputs else self.units_of(inputs["actions"])
            units = tensor_of(units, self.device).to(self.exact)
            scores = network.laplace(self._center(hidden), self._log_scale(), units)
        else:
            scores = network.action_scores(self._logits(hidden), self.tokens_of(inputs))
        return Scores(*scores, self._value(hidden[:, 0, 0]))

    def imitate_actions(self, inputs: dict[str, Any], noise: np.ndarray | None) -> Tensor:
        """The loss of demonstrated actions. With an l1 head: the absolute difference, plus a loss that fits the scale
        to it. With a pure likelihood, constant action numbers would suppress the gradients of other numbers."""
        if self.config.sft_loss == "vocabulary":
            return self._word_losses_of_items(inputs)
        if self.head != "l1":
            return super().imitate_actions(inputs, noise)
        center = self._center(self._hidden(inputs["obs"], inputs.get(PATCHES)))
        units = tensor_of(self.units_of(inputs["actions"]), self.device).to(self.exact)
        logprobs, _ = network.laplace(center.detach(), self._log_scale(), units)
        return (units - center).abs() - logprobs

    def _word_losses_of_items(self, inputs: dict[str, Any]) -> Tensor:
        """Losses [B]: the mean over the demonstrated numbers and the stop token, if any."""
        chosen, more = self.tokens_of(inputs), int(self.config.stop_token)
        losses = self._word_losses(self._states(inputs["obs"], inputs.get(PATCHES), more), chosen.flatten(1))
        counts = inputs["mask"].to(losses.device)[:, :, None].expand_as(chosen).flatten(1)
        counts = nn.functional.pad(counts, (0, more), value=True)
        return torch.where(counts, losses, 0.0).sum(1) / counts.sum(1)

    def deviations(self) -> list[nn.Parameter]:
        return [self.log_scale] if self.head == "l1" else []

    # Inside

    def _hidden(self, obs: Observation, patches: Tensor | None = None) -> Tensor:
        """Hidden states [N, C, A, D] from which the numbers of the chunk are read; `patches` [N, cameras, P, D] are
        features of frozen towers."""
        hidden = self._states(obs, patches)
        return hidden.view(hidden.shape[0], self.config.chunk, self.spec.action.dim, -1)

    def _states(self, obs: Observation, patches: Tensor | None = None, more: int = 0) -> Tensor:
        """Hidden states [N, C * A + more, D] from which the action numbers, and `more` tokens after them, are read."""
        count, numbers = obs["images"][self.cameras[0]].shape[0], self.config.chunk * self.spec.action.dim
        ids, present, padded = self.word_ids(obs, count)
        after = int(self.config.stop_token)  # it follows the actions
        present = nn.functional.pad(present, (0, after), value=True)
        words = self.language_model.model.embed_tokens(nn.functional.pad(ids, (0, after), value=network.STOP))
        seen = (
            self._image_features(obs, words, present)
            if patches is None
            else tensor_of(patches, self.device).flatten(1, 2)
        )
        seen = self.projector(seen)
        if self.proprio:
            state = obs[FELT] if FELT in obs else self.proprio_statistics.to_unit(tensor_of(obs["state"], self.device))
            seen = torch.cat([seen, self.proprio_projector(state.to(self.dtype))[:, None]], 1)
        x, mask = self._sequence(words, present, seen, numbers, after)
        begin, both = x.shape[1] - numbers - after - 1, self.config.bidirectional
        read = slice(begin, begin + numbers + more)
        stack = self.for_acting(network.LlamaStack.forward)
        return stack(self.language_model.model, x, mask, bidirectional=both, padded=padded, read=read)

    def _image_features(self, obs: Observation, words: Tensor, present: Tensor) -> Tensor:
        """Vision features of all images, one after the other [N, cameras * P, D]."""
        images, modulation = self._pixels(obs), ()
        if self.film:
            weights = present[:, :, None].to(words.dtype)
            mean = (words * weights).sum(1) / weights.sum(1)
            modulation = (mean.repeat(len(images), 1),)
        patches = self._patch_features(torch.cat(images), *modulation)
        return patches.unflatten(0, (len(images), -1)).transpose(0, 1).flatten(1, 2)

    def _center(self, hidden: Tensor) -> Tensor:
        return self.action_head.model(hidden.flatten(2)).to(self.exact)

    def _log_scale(self) -> Tensor:
        return self.log_scale.to(self.exact)

    def _statistics_of(self, part: str) -> statistics.Statistics:
        return statistics.statistics_of(self.norm_stats, self.data_set, self.where, part, self.config.bounds, SLACK)

    # On disk

    def stored_name(self, stored: dict[str, Blob], name: str) -> str:
        return name if name in stored else published.unwrapped(name)

    def is_extra(self, name: str) -> bool:
        return super().is_extra(name) or (self.film and name.endswith(FILM))

    def published_config(self) -> dict[str, Any]:
        ours = {"head": self.head, "proprio": self.proprio, "film": self.film}
        return super().published_config() | {published.OFT: ours}

    def left_out(self) -> dict[str, str]:
        """Stores towers with FiLM in full: the folder's shards and its file of the towers differ."""
        return {n: f for n, f in super().left_out().items() if not (self.film and n.startswith("vision_backbone."))}

    def components(self) -> tuple[str, ...]:
        flags = {"action_head": self.head == "l1", "proprio_projector": self.proprio, "vision_backbone": self.film}
        return tuple(kind for kind, present in flags.items() if present)


def first_answer(*answers: bool | None) -> bool:
    """The first answer that is not None."""
    return next(answer for answer in answers if answer is not None)
