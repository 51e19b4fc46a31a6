"""OpenVLA as a policy: one image and an instruction in, one action out, written token by token.

Only the 256 action tokens can be generated, so only their logits are computed. The value is read at the place that
predicts the first action token.

OpenVLA-OFT as a policy: images, an instruction and perhaps the robot's state in, a whole chunk of actions out.

All numbers of all actions are read in one pass, in which every token attends to every other one. A number is read one
place before its own (empty) token, like the prediction of an autoregressive model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.core.arrays import host, tensor_of
from embodied.core.errors import ConfigError
from embodied.core.types import NoiseSpec, Observation, PolicyOutput
from embodied.policies.base import Scores
from embodied.policies.openvla.config import OpenVLAOFTConfig
from embodied.policies.openvla.folder import OFT, read_published, unwrapped
from embodied.policies.openvla.network import (
    PATCHES,
    Cache,
    LlamaAttention,
    LlamaLayer,
    LlamaStack,
    PrismaticPolicy,
    RMSNorm,
    VisionBlock,
    visible,
)
from embodied.policies.openvla.tokens import STOP, action_scores, pick
from embodied.policies.vla.layers import GatedMLP, turns
from embodied.policies.vla.policy import compiled, for_acting
from embodied.policies.vla.statistics import Statistics, statistics_of
from embodied.runtime.published_weights import Blob

Memory = list[tuple[Tensor, Tensor]]  # keys and values of every layer [N, kv_heads, width, head_dim]
LAST = slice(-1, None)
PLAIN = {LlamaStack, LlamaLayer, LlamaAttention, GatedMLP, RMSNorm, nn.ModuleList, nn.Linear, nn.Embedding}


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

    def row_bytes(self, words: int) -> int:
        llama, tokens = self.settings.llama, self.settings.patches * len(self.cameras) + words
        of_number = next(self.parameters()).element_size()
        return 2 * llama.depth * llama.dim * llama.kv_heads // llama.heads * tokens * of_number

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
        way = CompiledDecoder if self.config.compile else FastDecoder if is_plain(stack) else Decoder
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

    def imitate_actions(self, inputs: dict[str, Any], noise: np.ndarray | None) -> Tensor:
        if self.config.sft_loss == "actions":
            return super().imitate_actions(inputs, noise)
        tokens = self.tokens_of(inputs)[:, 0]
        x, present, padded = self._prefix(inputs["obs"], inputs.get(PATCHES))
        x = torch.cat([x, self._embed(tokens)], dim=1)
        present = nn.functional.pad(present, (0, tokens.shape[1]), value=True)
        written = slice(-tokens.shape[1] - 1, None)
        hidden = self.language_model.model(x, present, padded=padded, read=written)
        return self._word_losses(hidden, tokens)[:, None]

    def _prefix(self, obs: Observation, patches: Tensor | None = None) -> tuple[Tensor, Tensor, bool]:
        """Returns embeddings [N, L, D] of begin, image and text, their mask [N, L], and True if there is padding.
        `patches` [N, 1, P, D] are features of frozen towers."""
        seen = self._see(*self._pixels(obs)) if patches is None else tensor_of(patches, self.device)[:, 0]
        ids, mask = self._words(obs, len(seen))
        patches = self.projector(seen)
        words = self.language_model.model.embed_tokens(tensor_of(ids, self.device))
        x = torch.cat([words[:, :1], patches.to(words.dtype), words[:, 1:]], dim=1)
        shown = np.ones((len(ids), patches.shape[1]), bool)
        present = np.concatenate([mask[:, :1], shown, mask[:, 1:]], axis=1)
        return x, tensor_of(present, self.device), not present.all()

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.language_model.model.embed_tokens(tokens + self.settings.first_action_id)


# Decoding of action tokens after a prompt. Acting needs no gradients, and small batches are limited by the number of
# operations, so `FastDecoder` computes the same as `LlamaStack` in far fewer operations, in place and on flat rows. It
# supports plain layers only. With adapters, autocast or half precision, whose rounding must equal the learner's,
# `Decoder` runs the stack itself.


class Decoder:
    """A batch of prompts; `present` [N, L] is False for padding, `more` tokens will follow."""

    def __init__(self, stack: LlamaStack, cache: Cache, present: Tensor, padded: bool, more: int) -> None:
        self.stack, self.cache, self.padded = stack, cache, padded
        self.present = F.pad(present, (0, more), value=True)
        cache.begin(*self.present.shape)

    def read(self, x: Tensor) -> Tensor:
        """The last hidden states [N, D] of prompts with embeddings [N, L, D]."""
        return self._run(x)

    def go_on(self, x: Tensor) -> Tensor:
        """Hidden states [N, D] of one more token with embeddings [N, D]."""
        return self._run(x[:, None])

    def _run(self, x: Tensor) -> Tensor:
        so_far = self.present[:, : self.cache.length + x.shape[1]]
        return self.stack(x, so_far, self.cache, padded=self.padded, read=LAST)[:, -1]


class FastDecoder(Decoder):
    def __init__(self, stack: LlamaStack, cache: Cache, present: Tensor, padded: bool, more: int) -> None:
        super().__init__(stack, cache, present, padded, more)
        settings = stack.settings
        self.rows = len(self.present)
        self.heads, self.kv_heads = settings.heads, settings.kv_heads
        self.head_dim = settings.dim // settings.heads
        weight = stack.norm.weight
        self.eps = weight.new_tensor(settings.eps)
        rows = self.present if padded else self.present[:1]  # without padding all rows have the same positions
        position = (rows.long().cumsum(1) - 1).clamp(min=0)
        cos, sin = turns(position, self.head_dim, settings.rope_theta, weight.dtype)
        left, right = sin.chunk(2, dim=-1)
        self.cos, self.sin = cos.transpose(1, 2), torch.cat([-left, right], dim=-1).transpose(1, 2)  # [N, W, 1, d]
        self.seen = as_bias(self.present[:, None, None], weight.dtype) if padded else None  # [N, 1, 1, W]

    def _run(self, x: Tensor) -> Tensor:
        begin, new = self.cache.length, x.shape[1]
        end = begin + new
        mask = None
        if self.padded:
            first = as_bias(visible(self.present[:, :end], new, False), x.dtype) if new > 1 else None
            mask = self.seen[..., :end] if first is None else first
        turn = self.cos[:, begin:end], self.sin[:, begin:end]
        x = x.reshape(self.rows * new, -1).clone()
        *layers, last = self.stack.layers
        for layer in layers:
            x = self._layer(layer, x, turn, mask, begin, new)
        x = self._layer(last, x, turn, mask, begin, new, read_last=new > 1)
        self.cache.length = end
        return self._norm(self.stack.norm, x)

    def _layer(
        self,
        layer: LlamaLayer,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        mask: Tensor | None,
        begin: int,
        new: int,
        read_last: bool = False,
    ) -> Tensor:
        """Runs a layer on embeddings [N * new, D], overwriting them; returns its outputs, on request only of the last
        tokens."""
        attention, mlp, (cos, sin) = layer.self_attn, layer.mlp, turn
        normed = self._norm(layer.input_layernorm, x)
        k = self._turned(normed @ attention.k_proj.weight.t(), cos, sin)
        v = normed @ attention.v_proj.weight.t()
        causal = mask is None and new > 1
        if read_last:
            x, normed = x.view(self.rows, new, -1)[:, -1].contiguous(), normed.view(self.rows, new, -1)[:, -1]
            cos, sin, causal = cos[:, -1:], sin[:, -1:], False
            mask = None if mask is None else mask[:, :, -1:]
        q = self._turned(normed @ attention.q_proj.weight.t(), cos, sin).transpose(1, 2)
        k, v = self.cache.add(attention.layer, k.transpose(1, 2), v.view(k.shape).transpose(1, 2))
        grouped = self.heads != self.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)
        x.addmm_(out.transpose(1, 2).reshape(len(x), -1), attention.o_proj.weight.t())
        normed = self._norm(layer.post_attention_layernorm, x)
        gate = F.silu(normed @ mlp.gate_proj.weight.t(), inplace=True)
        return x.addmm_(gate.mul_(normed @ mlp.up_proj.weight.t()), mlp.down_proj.weight.t())

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[N * L, heads * d] -> [N, L, heads, d], by the places of its tokens."""
        x = x.view(self.rows, -1, x.shape[-1] // self.head_dim, self.head_dim)
        return (x * cos).addcmul_(x.roll(self.head_dim // 2, -1), sin)

    def _norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(self.eps, size, size, value=1 / x.shape[-1]).rsqrt_()).mul_(norm.weight)


def as_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias for attention scores: 0 for visible tokens."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def is_plain(stack: LlamaStack) -> bool:
    weight = stack.norm.weight
    exact = weight.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(weight.device.type)
    return exact and all(type(module) in PLAIN for module in stack.modules())


# With torch.compile: one program for prompts and one for a single token, from the stack's own layers. A program needs
# memory of a fixed size, so each token attends to all of it, with a mask for empty places.


class CompiledDecoder(Decoder):
    def __init__(self, stack: LlamaStack, cache: Cache, present: Tensor, padded: bool, more: int) -> None:
        super().__init__(stack, cache, present, padded, more)
        self.shown = self.present if padded else self.present[:1]  # without padding all rows are equal
        weight = stack.norm.weight
        half = torch.is_autocast_enabled(weight.device.type)
        dtype = torch.get_autocast_dtype(weight.device.type) if half else weight.dtype
        self.memory = [cache.room(layer, self._one_token(dtype)) for layer in range(stack.settings.depth)]
        for memory in (memory for pair in self.memory for memory in pair):
            torch._dynamo.mark_static_address(memory)  # a CUDA graph may write to it
            memory[:, :, present.shape[1] :] = 0  # masked values must be finite

    def _one_token(self, dtype: torch.dtype) -> Tensor:
        settings = self.stack.settings
        shape = len(self.present), settings.kv_heads, 1, settings.dim // settings.heads
        return self.stack.norm.weight.new_empty(shape, dtype=dtype)

    def _run(self, x: Tensor) -> Tensor:
        begin = self.cache.length
        self.cache.length += x.shape[1]
        place = torch.arange(begin, self.cache.length, device=x.device)
        return compiled(step, x.device.type)(self.stack, x, place, self.shown, self.memory)


class Slots:
    """A cache for layers; new tokens are written to these places."""

    def __init__(self, memory: Memory, place: Tensor) -> None:
        self.memory, self.place = memory, place

    def add(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.memory[layer]
        keys.index_copy_(2, self.place, k)
        values.index_copy_(2, self.place, v)
        return keys, values


def step(stack: LlamaStack, x: Tensor, place: Tensor, present: Tensor, memory: Memory) -> Tensor:
    """The last hidden states [N, D] of tokens x [N, L, D] at places [L]."""
    head_dim = stack.settings.dim // stack.settings.heads
    position = (present.long().cumsum(1) - 1).clamp(min=0)[:, place]
    turn = turns(position, head_dim, stack.settings.rope_theta, x.dtype)
    here = torch.arange(present.shape[1], device=x.device)
    mask = (((here <= place[:, None]) & present[:, None]) | (here == place[:, None]))[:, None]
    slots, (*first, last) = Slots(memory, place), stack.layers
    for layer in first:
        x = layer(x, turn, mask, False, slots)
    return stack.norm(last(x, turn, mask[:, :, LAST], False, slots, LAST))[:, -1]


# The networks that OFT adds: a regression head, a projector for the state, FiLM in vision blocks. Key names are
# upstream's.


class ResidualBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class ResidualMLP(nn.Module):
    def __init__(self, inputs: int, dim: int, outputs: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(inputs)
        self.fc1 = nn.Linear(inputs, dim)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(dim) for _ in range(2))
        self.layer_norm2 = nn.LayerNorm(dim)
        self.fc2 = nn.Linear(dim, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(self.layer_norm1(x)).relu()
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class L1Head(nn.Module):
    """Maps the hidden states of an action's numbers [N, C, A * D] to the action [N, C, A]."""

    def __init__(self, dim: int, actions: int) -> None:
        super().__init__()
        self.model = ResidualMLP(actions * dim, dim, actions)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.model(hidden)


class ProprioProjector(nn.Module):
    def __init__(self, inputs: int, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, dim)
        self.fc2 = nn.Linear(dim, dim)

    def forward(self, state: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(state)))


class FiLM(nn.Module):
    """A vision block whose features are scaled and shifted by the mean word embedding."""

    def __init__(self, block: VisionBlock, words: int, dim: int) -> None:
        super().__init__()
        self.block = block
        self.scale = nn.Linear(words, dim)
        self.shift = nn.Linear(words, dim)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        x = self.block.attend(x)
        x = x * (1 + self.scale(words)[:, None]) + self.shift(words)[:, None]
        return self.block.think(x)


def laplace(center: Tensor, log_scale: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Log-density of numbers around a center, and its entropy. Its maximum is the L1 regression."""
    log_width = log_scale + torch.log(torch.tensor(2.0, dtype=center.dtype))
    return -(numbers - center).abs() * (-log_scale).exp() - log_width, (1 + log_width).expand_as(center)


def laplace_noise(uniform: Tensor) -> Tensor:
    """Converts uniform to standard Laplace numbers, by the inverse distribution function."""
    side = (uniform.double() - 0.5).clamp(-0.5 + 1e-12, 0.5 - 1e-12)
    return -side.sign() * torch.log1p(-2 * side.abs())


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
        alone = not read_published(config.pretrained).components
        more = {"cameras": config.cameras[:1], "stop_token": False} if alone else {}
        return super().choices(config, task) | more

    @classmethod
    def numbers(cls, config: OpenVLAOFTConfig) -> tuple[int, int | None]:
        published = read_published(config.pretrained)
        feels = first(config.proprio, published.oft.get("proprio"), "proprio_projector" in published.components)
        felt = statistics_of(published.norm_stats, config.statistics, config.pretrained, "proprio") if feels else None
        return super().numbers(config)[0], felt and len(felt.low)

    def choose_cameras(self) -> tuple[str, ...]:
        self.check_cameras(self.config.cameras)
        return self.config.cameras or tuple(sorted(self.spec.images))

    def build(self) -> None:
        config, dim, numbers = self.config, self.settings.llama.dim, self.spec.action.dim
        has = self.published.components if self.published else {}
        says = self.published.oft if self.published else {}
        self.head = config.head or says.get("head") or ("l1" if "action_head" in has else "discrete")
        self.proprio = first(config.proprio, says.get("proprio"), "proprio_projector" in has)
        self.film = first(config.film, says.get("film"), "vision_backbone" in has)
        super().build()
        if self.head == "l1":
            if config.sft_loss != "actions":
                raise ConfigError("policy.sft_loss is of tokens, but policy.head=l1 writes none; leave it out")
            if config.temperature != 1.0:
                raise ConfigError("policy.temperature is of tokens, but policy.head=l1 writes none; leave it at 1")
            self.language_model.lm_head.requires_grad_(False)  # the l1 head does not use its logits
            self.action_head = L1Head(dim, numbers)
            self.log_scale = nn.Parameter(torch.empty(numbers))
        if self.proprio:
            self._check_state()
            self.proprio_projector = ProprioProjector(self.spec.state_dim, dim)
        self.adapt(self._wrap_blocks() if self.film else ())

    @property
    def felt(self) -> Statistics:
        return self._statistics("proprio")

    def _check_state(self) -> None:
        felt, state_dim = self.felt, self.spec.state_dim
        if state_dim != len(felt.low):
            raise ConfigError(
                f"this model feels {len(felt.low)} numbers (policy.proprio), the env gives {state_dim or 'none'}; "
                "set env.state=proprio, or policy.proprio=false"
            )

    def _wrap_blocks(self) -> tuple[nn.Module, ...]:
        """Wrap all vision blocks in FiLM; returns its layers."""
        layers: list[nn.Module] = []
        for tower, settings in zip(self.vision_backbone.towers(), self.settings.towers, strict=True):
            wrapped = [FiLM(block, self.settings.llama.dim, settings.dim) for block in tower.blocks]
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
        hidden = self._hidden(obs)
        uniform = tensor_of(noise, self.device).view(hidden.shape[:3])
        if self.head == "l1":
            center = self._center(hidden)
            units = center + temperature * self._log_scale().exp() * laplace_noise(uniform).to(self.exact)
            logprobs, _ = laplace(center, self._log_scale(), units)
            chosen, replay = host(units), {"units": host(units)}
        else:
            logits = self._logits(hidden)
            tokens = pick(logits, uniform, temperature)
            logprobs, _ = action_scores(logits, tokens)
            chosen, replay = self.codes.decode(host(tokens)), {"tokens": host(tokens)}
        return PolicyOutput(self.actions_of(chosen), host(logprobs), host(self._value(hidden[:, 0, 0])), replay)

    @torch.inference_mode()
    def value(self, obs: Observation) -> np.ndarray:
        return host(self._value(self._hidden(obs)[:, 0, 0]))

    def forward(self, inputs: dict[str, Any]) -> Scores:
        hidden = self._hidden(inputs["obs"], inputs.get(PATCHES))
        if self.head == "l1":
            units = inputs["units"] if "units" in inputs else self.units_of(inputs["actions"])
            scores = laplace(self._center(hidden), self._log_scale(), tensor_of(units, self.device).to(self.exact))
        else:
            scores = action_scores(self._logits(hidden), self.tokens_of(inputs))
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
        logprobs, _ = laplace(center.detach(), self._log_scale(), units)
        return (units - center).abs() - logprobs

    def _word_losses_of_items(self, inputs: dict[str, Any]) -> Tensor:
        """Losses [B]: the mean over the demonstrated numbers and the stop token, if any."""
        tokens, more = self.tokens_of(inputs), int(self.config.stop_token)
        losses = self._word_losses(self._states(inputs["obs"], inputs.get(PATCHES), more), tokens.flatten(1))
        counts = inputs["mask"].to(losses.device)[:, :, None].expand_as(tokens).flatten(1)
        counts = nn.functional.pad(counts, (0, more), value=True)
        return torch.where(counts, losses, 0.0).sum(1) / counts.sum(1)

    def deviations(self) -> list[nn.Parameter]:
        return [self.log_scale] if self.head == "l1" else []

    # Inside

    def _hidden(self, obs: Observation, patches: Tensor | None = None) -> Tensor:
        """Hidden states [N, C, A, D] from which the numbers of the chunk are read; `patches` [N, cameras, P, D] are
        features of frozen towers."""
        hidden = self._states(obs, patches)
        return hidden.view(len(hidden), self.config.chunk, self.spec.action.dim, -1)

    def _states(self, obs: Observation, patches: Tensor | None = None, more: int = 0) -> Tensor:
        """Hidden states [N, C * A + more, D] from which the action numbers, and `more` tokens after them, are read."""
        count, numbers = len(obs["images"][self.cameras[0]]), self.config.chunk * self.spec.action.dim
        ids, there = self._words(obs, count)
        if self.config.stop_token:
            ids, there = (np.pad(part, ((0, 0), (0, 1)), constant_values=c) for part, c in ((ids, STOP), (there, True)))
        present = tensor_of(there, self.device)
        words = self.language_model.model.embed_tokens(tensor_of(ids, self.device))
        seen = self._seen(obs, words, present) if patches is None else tensor_of(patches, self.device).flatten(1, 2)
        seen = self.projector(seen)
        if self.proprio:
            state = self.felt.to_unit(host(obs["state"]).astype(np.float64))
            seen = torch.cat([seen, self.proprio_projector(tensor_of(state, self.device).to(self.dtype))[:, None]], 1)
        text = words.shape[1] - self.config.stop_token  # the stop token follows the actions
        blank = words.new_zeros(count, numbers, words.shape[2])
        x = torch.cat([words[:, :1], seen.to(words.dtype), words[:, 1:text], blank, words[:, text:]], dim=1)
        known = present.new_ones(1, 1).expand(count, -1)
        parts = (present[:, :1], known.expand(-1, seen.shape[1]), present[:, 1:text], known.expand(-1, numbers))
        mask = torch.cat([*parts, present[:, text:]], dim=1)
        begin, both = seen.shape[1] + text - 1, self.config.bidirectional
        read = slice(begin, begin + numbers + more)
        stack = for_acting(self.config, LlamaStack.forward, self.device)
        return stack(self.language_model.model, x, mask, bidirectional=both, padded=not there.all(), read=read)

    def _seen(self, obs: Observation, words: Tensor, present: Tensor) -> Tensor:
        """Vision features of all images, one after the other [N, cameras * P, D]."""
        images, modulation = self._pixels(obs), ()
        if self.film:
            weights = present[:, :, None].to(words.dtype)
            mean = (words * weights).sum(1) / weights.sum(1)
            modulation = (mean.repeat(len(images), 1),)
        patches = self._see(torch.cat(images), *modulation)
        return torch.cat(patches.chunk(len(images)), dim=1)

    def _center(self, hidden: Tensor) -> Tensor:
        return self.action_head(hidden.flatten(2)).to(self.exact)

    def _log_scale(self) -> Tensor:
        return self.log_scale.to(self.exact)

    def _statistics(self, part: str) -> Statistics:
        return statistics_of(self.norm_stats, self.data_set, self.where, part, self.config.bounds, SLACK)

    # On disk

    def stored_name(self, stored: dict[str, Blob], name: str) -> str:
        return name if name in stored else unwrapped(name)

    def is_extra(self, name: str) -> bool:
        return super().is_extra(name) or (self.film and name.endswith(FILM))

    def published_config(self) -> dict[str, Any]:
        return super().published_config() | {OFT: {"head": self.head, "proprio": self.proprio, "film": self.film}}

    def left_out(self) -> dict[str, str]:
        """Stores towers with FiLM in full: the folder's shards and its file of the towers differ."""
        return {n: f for n, f in super().left_out().items() if not (self.film and n.startswith("vision_backbone."))}

    def components(self) -> tuple[str, ...]:
        flags = {"action_head": self.head == "l1", "proprio_projector": self.proprio, "vision_backbone": self.film}
        return tuple(kind for kind, present in flags.items() if present)

    def component(self, kind: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        if kind == "vision_backbone":
            return {name: tensor for name, tensor in weights.items() if name.startswith("vision_backbone.")}
        return {n.removeprefix(f"{kind}."): tensor for n, tensor in weights.items() if n.startswith(f"{kind}.")}


def first(*answers: bool | None) -> bool:
    """The first answer that is not None."""
    return next(answer for answer in answers if answer is not None)
