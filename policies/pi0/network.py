"""The whole network: images and words are computed once (the prefix), then state, noisy actions and time (the suffix)
in each denoising step.

Attention: images and words attend to each other; the state attends to them; actions attend to all tokens. So the prefix
does not depend on the suffix, and the state's token does not depend on actions or time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.policies.pi0.settings import GemmaSettings, Pi0Settings
from embodied.policies.vla.layers import (
    GatedMLP,
    GroupedAttention,
    NamedParts,
    RotaryTables,
    normed,
    rotate,
    sines,
    turns,
    value_head,
)
from embodied.policies.vla.siglip import VisionModel

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
