"""Pi0 and Pi0.5 as a policy: images, state and an instruction in, a chunk of actions out of noise (`vla.flow`).

The value does not depend on noise or time: it is read at the state's token (Pi0), or over the prefix (Pi0.5).

The network's inputs: augmented images, and the prompt, for Pi0.5 with the state as numbers from 0 to 255.

The whole network: images and words are computed once (the prefix), then state, noisy actions and time (the suffix)
in each denoising step.

Attention: images and words attend to each other; the state attends to them; actions attend to all tokens. So the prefix
does not depend on the suffix, and the state's token does not depend on actions or time.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.core.arrays import tensor_of
from embodied.core.types import Observation
from embodied.policies.pi0.config import Pi0Config
from embodied.policies.pi0.settings import PRESETS, GemmaSettings, Pi0Settings, own_name, settings_of
from embodied.policies.policy_folder import TOKENIZER
from embodied.policies.vla.flow import FlowPolicy
from embodied.policies.vla.image_processor import with_bars
from embodied.policies.vla.layers import (
    GatedMLP,
    GroupedAttention,
    NamedParts,
    RotaryTables,
    VisionModel,
    normed,
    rotate,
    sines,
    turns,
    value_head,
)
from embodied.policies.vla.policy import fast_tokenizer, for_acting, hashed_words, padded

BOS = 2
EDGES = np.linspace(-1, 1, 257)[:-1]  # bin edges of the state's numbers in the prompt


# openpi's image augmentation, drawn separately for each image.
#
# The base camera's images are cropped to 95% at a random place, resized and rotated by up to 5 degrees (with black
# borders); all images change in brightness, contrast and saturation.

DRAWS = 6  # uniform numbers per image: row, column, rotation, brightness, contrast, saturation
CUT, DEGREES, STILL = 0.95, 5.0, 0.1  # rotations below STILL degrees are skipped


def augmented(pixels: Tensor, uniform: Tensor) -> Tensor:
    """Pixels [B, cameras, 3, S, S] from -1 to 1, the base camera first, by uniform numbers [B, cameras, 6]."""
    pixels, uniform = pixels / 2 + 0.5, uniform.to(pixels.dtype)
    base = turned(cut(pixels[:, 0], uniform[:, 0, :2]), uniform[:, 0, 2])
    pixels = torch.cat([base[:, None], pixels[:, 1:]], dim=1)
    return coloured(pixels, uniform[:, :, 3:, None, None, None].unbind(2)) * 2 - 1


def cut(pixels: Tensor, uniform: Tensor) -> Tensor:
    """Crops images [B, 3, S, S] at a whole pixel and resizes them (bilinear)."""
    size = pixels.shape[-1]
    part = int(size * CUT)
    first = (uniform * (size - part + 1)).floor().clamp(max=size - part)  # [B, 2]
    inside = ((torch.arange(size, device=pixels.device) + 0.5) * part / size - 0.5).clamp(0, part - 1)
    rows, columns = (2 * (begin[:, None] + inside) / (size - 1) - 1 for begin in first.unbind(1))
    grid = torch.stack([columns[:, None].expand(-1, size, -1), rows[:, :, None].expand(-1, -1, size)], dim=-1)
    return F.grid_sample(pixels, grid, mode="bilinear", align_corners=True)


def turned(pixels: Tensor, uniform: Tensor) -> Tensor:
    degrees = (2 * uniform - 1) * DEGREES
    angle = torch.where(degrees.abs() > STILL, degrees, 0.0)[:, None, None] * math.pi / 180
    line = torch.linspace(-1, 1, pixels.shape[-1], device=pixels.device, dtype=pixels.dtype)
    y, x = torch.meshgrid(line, line, indexing="ij")
    grid = torch.stack([x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()], dim=-1)
    after = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return torch.where(angle[:, None] == 0, pixels, after)


def coloured(pixels: Tensor, uniform: tuple[Tensor, ...]) -> Tensor:
    """[B, cameras, 3, S, S], each image by uniform numbers [B, cameras, 1, 1, 1] of its own."""
    brightness, contrast, saturation = uniform
    pixels = pixels * (0.7 + 0.6 * brightness)
    mean = pixels.mean(dim=(2, 3, 4), keepdim=True)
    pixels = mean + (pixels - mean) * (0.6 + 0.8 * contrast)
    grey = pixels.mean(dim=2, keepdim=True)
    return (grey + (pixels - grey) * (0.5 + saturation)).clamp(0, 1)


# The prompt, and the tokenizers


def prompt(instruction: str, state: np.ndarray | None) -> str:
    """`state` is in the model's units; None: the prompt has no state."""
    text = instruction.strip().replace("_", " ").replace("\n", " ")
    if state is None:
        return f"{text}\n"
    numbers = " ".join(str(number) for number in np.digitize(state, EDGES) - 1)
    return f"Task: {text}, State: {numbers};\nAction: "


class GemmaTokenizer:
    """The tokenizer of a published folder."""

    def __init__(self, folder: Path | None) -> None:
        self._fast = fast_tokenizer(
            folder,
            "a Pi0",
            f"Pi0 reads with the tokenizer of google/paligemma-3b-pt-224: put its {TOKENIZER} beside the weights",
        )

    def encode(self, text: str) -> list[int]:
        body = text.removesuffix("\n")  # the answer begins after a newline, which is a separate token
        ids = self._ids(body) + (self._ids("\n") if body != text else [])
        return [BOS, *ids]

    def _ids(self, text: str) -> list[int]:
        return self._fast.encode(text, add_special_tokens=False).ids


class GemmaWords:
    """Tokenizer of small models without a vocabulary file: numbers up to 255 have ids of their own, words a hash."""

    def __init__(self, settings: Pi0Settings) -> None:
        self.words = settings.vocab - 260

    def encode(self, text: str) -> list[int]:
        return [BOS, *(self._id(word) for word in re.findall(r"-?\d+|\w+|[^\w ]", text))]

    def _id(self, word: str) -> int:
        if word.lstrip("-").isdecimal() and -1 <= int(word) < 256:
            return 4 + int(word)
        return 260 + (hashed_words(word, self.words) or [0])[0]


CRITICS = {"pi0": (512, 256, 128), "pi05": (1024, 512, 256)}
EPS, THETA = 1e-6, 10_000.0
# Prefixes of weights that stay float32 in half precision.
EXACT = ("embeddings.", "input_layernorm.", "post_attention_layernorm.", "model.norm.")
KeysValues = tuple[Tensor, Tensor]  # [N, kv_heads, tokens, head_dim] each


@dataclass(frozen=True)
class Prefix:
    seen: list[KeysValues]
    present: Tensor  # bool [N, L]
    hidden: Tensor | None  # [N, L, dim]

    def stacked(self) -> Tensor:
        """Keys and values of all layers [N, depth, 2, kv_heads, L, head_dim]."""
        return torch.stack([torch.stack(pair, dim=1) for pair in self.seen], dim=1)

    @classmethod
    def unstacked(cls, seen: Tensor, present: Tensor, hidden: Tensor | None = None) -> Prefix:
        return cls([(layer[:, 0], layer[:, 1]) for layer in seen.unbind(1)], present, hidden)


class Pi0Network(nn.Module):
    def __init__(self, settings: Pi0Settings) -> None:
        super().__init__()
        self.settings = settings
        dim = settings.expert.dim
        condition = dim if settings.adaptive else None
        vlm = NamedParts(
            vision_tower=NamedParts(vision_model=VisionModel(settings.vision)),
            multi_modal_projector=NamedParts(linear=nn.Linear(settings.vision.dim, settings.language.dim)),
            language_model=GemmaStack(settings.language, settings.vocab),
        )
        expert = NamedParts(model=GemmaStack(settings.expert, condition_dim=condition))
        self.paligemma_with_expert = NamedParts(paligemma=NamedParts(model=vlm), gemma_expert=expert)
        self.action_in_proj = nn.Linear(settings.action_dim, dim)
        self.action_out_proj = nn.Linear(dim, settings.action_dim)
        if settings.adaptive:
            self.time_mlp_in = nn.Linear(dim, dim)
            self.time_mlp_out = nn.Linear(dim, dim)
        else:
            self.state_proj = nn.Linear(settings.state_dim, dim)
            self.action_time_mlp_in = nn.Linear(2 * dim, dim)
            self.action_time_mlp_out = nn.Linear(dim, dim)
            self._freeze_unused()

    @property
    def vlm(self) -> nn.Module:
        return self.paligemma_with_expert.paligemma.model

    @property
    def to_words(self) -> nn.Module:
        """Maps patches to the language model's width."""
        return self.vlm.multi_modal_projector.linear

    @property
    def expert(self) -> GemmaStack:
        return self.paligemma_with_expert.gemma_expert.model

    def prefix(self, pixels: Tensor, ids: Tensor, is_word: Tensor) -> Prefix:
        """`pixels` [N, cameras, 3, S, S], word ids [N, L] and their mask [N, L]."""
        rows = len(pixels)
        patches = self.to_words(self.vlm.vision_tower.vision_model(pixels.flatten(0, 1)))
        patches = patches.view(rows, -1, patches.shape[-1])
        words = self.vlm.language_model.embed_tokens(ids) * math.sqrt(self.settings.language.dim)
        present = torch.cat([is_word.new_ones(rows, patches.shape[1]), is_word], dim=1)
        itself = torch.eye(present.shape[1], dtype=torch.bool, device=present.device)  # for finite rows of padding
        mask = (present[:, None] | itself)[:, None]
        position = (present.long().cumsum(1) - 1).clamp(min=0)
        x = torch.cat([patches, words.to(patches.dtype)], dim=1)
        hidden, seen = self.vlm.language_model(x, position, mask)
        return Prefix(seen, present, hidden)

    def suffix(self, prefix: Prefix, state: Tensor | None, x: Tensor | None, time: Tensor) -> Tensor:
        """Hidden states of the state's token (Pi0 only) and of noisy actions [N, H, D] at `time` [N]; without actions
        only of the state's token."""
        wide = self.action_in_proj.weight
        waves = sines(time, wide.shape[0], self.settings.periods).to(wide.dtype)
        tokens, condition = [], None
        if self.settings.adaptive:
            condition = F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(waves))))
        else:
            tokens.append(self.state_proj(state.to(wide.dtype))[:, None])
        if x is not None:
            actions = self.action_in_proj(x.to(wide.dtype))
            if not self.settings.adaptive:
                both = torch.cat([actions, waves[:, None].expand_as(actions).to(actions.dtype)], dim=2)
                actions = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(both)))
            tokens.append(actions)
        tokens = torch.cat(tokens, dim=1)
        length = tokens.shape[1]
        position = prefix.present.sum(1, keepdim=True) + torch.arange(length, device=tokens.device)
        hidden, _ = self.expert(tokens, position, self._mask(prefix.present, length), prefix.seen, condition)
        return hidden.to(wide.dtype)

    def velocity(self, hidden: Tensor) -> Tensor:
        """The velocity of the noisy actions [N, H, D], from the suffix's hidden states."""
        return self.action_out_proj(hidden[:, -self.settings.horizon :])

    def blocks(self) -> list[nn.Module]:
        towers = self.vlm.vision_tower.vision_model.encoder.layers
        return [*towers, *self.vlm.language_model.layers, *self.expert.layers]

    def _mask(self, present: Tensor, length: int) -> Tensor:
        among = torch.ones(length, length, dtype=torch.bool, device=present.device)
        if not self.settings.adaptive:
            among[0, 1:] = False  # the state does not attend to actions
        rows = len(present)
        return torch.cat([present[:, None].expand(-1, length, -1), among.expand(rows, -1, -1)], dim=2)[:, None]

    def _freeze_unused(self) -> None:
        """Freeze unused weights: of the language model's last layer only keys and values are used."""
        language = self.vlm.language_model
        last = language.layers[-1]
        attention = last.self_attn
        for module in (attention.q_proj, attention.o_proj, last.mlp, last.post_attention_layernorm, language.norm):
            module.requires_grad_(False)


def in_half(network: nn.Module, dtype: torch.dtype) -> None:
    """Weights in half precision, as upstream keeps them: embeddings of images, norms and small projections exact."""
    for name, parameter in network.named_parameters():
        if name.startswith("paligemma_with_expert.") and not any(part in name for part in EXACT):
            parameter.data = parameter.data.to(dtype)


def critic(settings: Pi0Settings) -> nn.Sequential:
    """The value head, as wide as its input."""
    return value_head(settings.language.dim if settings.adaptive else settings.expert.dim, CRITICS[settings.kind])


# Gemma with transformers' key names: two stacks of different width that share keys and values layer by layer. The
# prefix is computed once; the suffix attends to its keys and values. Pi0.5's expert has adaptive norms: a condition
# (the time) scales and shifts the normed values and gates the residual.


class Norm(nn.Module):
    def __init__(self, dim: int, condition_dim: int | None) -> None:
        super().__init__()
        if condition_dim:
            self.dense = nn.Linear(condition_dim, 3 * dim)
        else:
            self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """Returns the normed tokens and the gate of the residual."""
        exact = normed(x, EPS)
        if condition is None:
            return (exact * (1 + self.weight.to(exact.dtype))).to(x.dtype), 1.0
        scale, shift, gate = self.dense(condition.to(self.dense.weight.dtype))[:, None].chunk(3, dim=-1)
        return (exact * (1 + scale.to(exact.dtype)) + shift.to(exact.dtype)).to(x.dtype), gate.to(x.dtype)


class GemmaAttention(GroupedAttention):
    def __init__(self, settings: GemmaSettings) -> None:
        super().__init__(settings.dim, settings.heads, settings.kv_heads, settings.head_dim)

    def forward(
        self, x: Tensor, turn: RotaryTables, mask: Tensor, past: KeysValues | None
    ) -> tuple[Tensor, KeysValues]:
        q, k, v = (self.split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, *turn), rotate(k, *turn)
        if past is not None:
            k, v = (torch.cat([before, new], dim=2) for before, new in zip(past, (k, v)))
        return self.attend(q, k, v, mask), (k, v)


class GemmaLayer(nn.Module):
    def __init__(self, settings: GemmaSettings, condition_dim: int | None) -> None:
        super().__init__()
        self.self_attn = GemmaAttention(settings)
        self.mlp = GatedMLP(settings.dim, settings.mlp, nn.GELU("tanh"))
        self.input_layernorm = Norm(settings.dim, condition_dim)
        self.post_attention_layernorm = Norm(settings.dim, condition_dim)

    def forward(
        self, x: Tensor, turn: RotaryTables, mask: Tensor, past: KeysValues | None, condition: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        ready, gate = self.input_layernorm(x, condition)
        out, seen = self.self_attn(ready, turn, mask, past)
        x = x + out * gate
        ready, gate = self.post_attention_layernorm(x, condition)
        return x + self.mlp(ready) * gate, seen


class GemmaStack(nn.Module):
    """`vocab` None: the inputs are embeddings only."""

    def __init__(self, settings: GemmaSettings, vocab: int | None = None, condition_dim: int | None = None) -> None:
        super().__init__()
        self.settings = settings
        if vocab:
            self.embed_tokens = nn.Embedding(vocab, settings.dim)
        self.layers = nn.ModuleList(GemmaLayer(settings, condition_dim) for _ in range(settings.depth))
        self.norm = Norm(settings.dim, condition_dim)

    def forward(
        self,
        x: Tensor,
        position: Tensor,
        mask: Tensor,
        past: list[KeysValues] | None = None,
        condition: Tensor | None = None,
    ) -> tuple[Tensor, list[KeysValues]]:
        """Returns hidden states [N, L, D] and each layer's keys and values, for embeddings [N, L, D] at `position` [N,
        L]; `mask` [N, 1, L, all tokens, `past` first] is the attention mask."""
        x = x.to(self.layers[0].mlp.up_proj.weight.dtype)
        turn = turns(position, self.settings.head_dim, THETA, x.dtype)
        seen = []
        for number, layer in enumerate(self.layers):
            x, added = layer(x, turn, mask, past and past[number], condition)
            seen.append(added)
        return self.norm(x, condition)[0], seen


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
