"""The networks of OpenVLA and OpenVLA-OFT, and how actions are decoded token by token.

A Llama decoder with transformers' key names, and its KV cache; two vision transformers, DINOv2 and SigLIP, with timm's
key names, their patch features side by side. Features come from the second to last block, without the final norm. The
last block, the norm and SigLIP's pooling exist only because published checkpoints contain them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.policies.openvla.folder import LlamaSettings, TowerSettings
from embodied.policies.vla import layers
from embodied.policies.vla.layers import MLP, GatedMLP, GroupedAttention, RotaryTables, turns
from embodied.policies.vla.policy import compiled

BOS, STOP = 1, 2
SPACE = 29871  # Llama's "▁", which precedes the first action token in training
Memory = list[tuple[Tensor, Tensor]]  # keys and values of every layer [N, kv_heads, width, head_dim]
ALL, LAST = slice(None), slice(-1, None)


class Cache:
    """The KV cache of every layer: `length` tokens of up to `width` are filled. The memory is reused for later batches
    and grows to the largest."""

    def __init__(self) -> None:
        self.rows = self.width = self.length = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, rows: int, width: int) -> None:
        self.rows, self.width, self.length = rows, width, 0

    def add(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append new tokens; returns all keys and values so far."""
        end = self.length + k.shape[2]
        keys, values = self.room(layer, k)
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def room(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Allocate the memory for this batch."""
        keys, values = self._memory(layer, like)
        return keys[: self.rows, :, : self.width], values[: self.rows, :, : self.width]

    def __deepcopy__(self, _: dict) -> Cache:
        return Cache()

    def tensors(self) -> list[Tensor]:
        return [memory for pair in self.layers.values() for memory in pair]

    def _memory(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.layers.get(layer)
        if memory is None or memory[0].dtype != like.dtype or memory[0].device != like.device:
            rows, width = self.rows, self.width
        elif memory[0].shape[0] >= self.rows and memory[0].shape[2] >= self.width:
            return memory
        else:
            rows, width = max(self.rows, memory[0].shape[0]), max(self.width, memory[0].shape[2])
        shape = (rows, like.shape[1], width, like.shape[3])
        self.layers[layer] = like.new_empty(shape), like.new_empty(shape)
        return self.layers[layer]


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * layers.normed(x, self.eps).to(x.dtype)


class LlamaAttention(GroupedAttention):
    def __init__(self, settings: LlamaSettings, layer: int) -> None:
        super().__init__(settings.dim, settings.heads, settings.kv_heads, settings.dim // settings.heads)
        self.layer = layer

    def forward(
        self, x: Tensor, turn: RotaryTables, mask: Tensor | None, causal: bool, cache: Cache | None, read: slice
    ):
        cos, sin = turn
        q, k, v = self.split(self.q_proj(x[:, read])), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        q, k = layers.rotate(q, cos[:, :, read], sin[:, :, read]), layers.rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.add(self.layer, k, v)
        return self.attend(q, k, v, mask, causal)


class LlamaLayer(nn.Module):
    def __init__(self, settings: LlamaSettings, layer: int) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(settings, layer)
        self.mlp = GatedMLP(settings.dim, settings.mlp, F.silu)
        self.input_layernorm = RMSNorm(settings.dim, settings.eps)
        self.post_attention_layernorm = RMSNorm(settings.dim, settings.eps)

    def forward(
        self,
        x: Tensor,
        turn: RotaryTables,
        mask: Tensor | None,
        causal: bool,
        cache: Cache | None = None,
        read: slice = ALL,
    ) -> Tensor:
        x = x[:, read] + self.self_attn(self.input_layernorm(x), turn, mask, causal, cache, read)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaStack(nn.Module):
    """The model up to the last norm."""

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.settings = settings
        self.embed_tokens = nn.Embedding(settings.vocab, settings.dim)
        self.layers = nn.ModuleList(LlamaLayer(settings, layer) for layer in range(settings.depth))
        self.norm = RMSNorm(settings.dim, settings.eps)

    def forward(
        self,
        x: Tensor,
        present: Tensor,
        cache: Cache | None = None,
        bidirectional: bool = False,
        padded: bool = True,
        read: slice = ALL,
    ) -> Tensor:
        """Hidden states [N, L, D] of embeddings [N, L, D]; with `read`, the last layer computes only these places.

        `present` [N, all tokens so far] is False for padding; cached tokens come first. `padded`: there may be padding.
        `bidirectional`: every token attends to every other one.
        """
        new, total = x.shape[1], present.shape[1]
        position = (present.long().cumsum(1) - 1).clamp(min=0)[:, -new:]
        head_dim = self.settings.dim // self.settings.heads
        turn = turns(position, head_dim, self.settings.rope_theta, x.dtype)
        plain = not padded and (bidirectional or new in (1, total))
        mask = None if plain else attention_mask(present, new, bidirectional)
        causal = plain and not bidirectional and new > 1
        *first, last = self.layers
        for layer in first:
            x = layer(x, turn, mask, causal, cache)
        if causal and read != ALL:
            causal, mask = False, attention_mask(present, new, False)
        x = last(x, turn, mask if mask is None else mask[:, :, read], causal, cache, read)
        if cache is not None:
            cache.length += new
        return self.norm(x)


class LanguageModel(nn.Module):
    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.model = LlamaStack(settings)
        self.lm_head = nn.Linear(settings.dim, settings.vocab, bias=False)


def attention_mask(present: Tensor, new: int, bidirectional: bool) -> Tensor:
    """Attention mask [N, 1, new, all]; padding attends to itself, so that its rows stay finite."""
    total = present.shape[1]
    here = torch.arange(total, device=present.device)
    seen = torch.ones(new, total, dtype=torch.bool, device=present.device)
    if not bidirectional:
        seen = here <= here[-new:, None]
    return ((seen & present[:, None]) | (here == here[-new:, None]))[:, None]


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, dim = x.shape
        q, k, v = self.qkv(x).view(rows, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, dim))


class LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class VisionBlock(nn.Module):
    def __init__(self, tower: TowerSettings) -> None:
        super().__init__()
        scale = LayerScale if tower.kind == "dinov2" else lambda dim: nn.Identity()
        self.norm1 = nn.LayerNorm(tower.dim, eps=1e-6)
        self.attn = Attention(tower.dim, tower.heads)
        self.ls1 = scale(tower.dim)
        self.norm2 = nn.LayerNorm(tower.dim, eps=1e-6)
        self.mlp = MLP(tower.dim, tower.mlp)
        self.ls2 = scale(tower.dim)

    def attend(self, x: Tensor) -> Tensor:
        return x + self.ls1(self.attn(self.norm1(x)))

    def think(self, x: Tensor) -> Tensor:
        return x + self.ls2(self.mlp(self.norm2(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.think(self.attend(x))


class UnusedPool(nn.Module):
    """The weights of SigLIP's attention pooling, for saving a checkpoint unchanged."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.empty(1, 1, dim))
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, hidden)


class Tower(nn.Module):
    def __init__(self, tower: TowerSettings, image_size: int) -> None:
        super().__init__()
        self.skip = tower.prefix
        self.patch_embed = layers.NamedParts(proj=nn.Conv2d(3, tower.dim, tower.patch, stride=tower.patch))
        self.pos_embed = nn.Parameter(torch.empty(1, (image_size // tower.patch) ** 2, tower.dim))
        if tower.kind == "dinov2":
            self.cls_token = nn.Parameter(torch.empty(1, 1, tower.dim))
            self.reg_token = nn.Parameter(torch.empty(1, tower.registers, tower.dim))
        self.blocks = nn.ModuleList(VisionBlock(tower) for _ in range(tower.depth))
        self.norm = nn.LayerNorm(tower.dim, eps=1e-6)
        unused = [self.blocks[-1], self.norm]
        if tower.kind == "siglip":
            self.attn_pool = UnusedPool(tower.dim, tower.mlp)
            unused.append(self.attn_pool)
        for module in unused:
            module.requires_grad_(False)

    def forward(self, pixels: Tensor, *words: Tensor) -> Tensor:
        """[N, 3, H, W] -> [N, patches, dim]; blocks with FiLM want the mean word too."""
        x = layers.patch_tokens(pixels, self.patch_embed.proj) + self.pos_embed
        if self.skip:
            prefix = torch.cat([self.cls_token, self.reg_token], dim=1).expand(x.shape[0], -1, -1)
            x = torch.cat([prefix.to(x.dtype), x], dim=1)
        for block in self.blocks[:-1]:
            x = block(x, *words)
        return x[:, self.skip :]


class VisionBackbone(nn.Module):
    """The first tower is `featurizer`, an optional second tower `fused_featurizer`."""

    def __init__(self, towers: tuple[TowerSettings, ...], image_size: int) -> None:
        super().__init__()
        self.featurizer = Tower(towers[0], image_size)
        if len(towers) > 1:
            self.fused_featurizer = Tower(towers[1], image_size)

    def towers(self) -> list[Tower]:
        return list(self.children())

    def forward(self, pixels: Tensor, *words: Tensor) -> Tensor:
        """[N, 3 * towers, H, W] -> [N, patches, sum of the towers' dims]."""
        parts = pixels.split(3, dim=1)
        return torch.cat([tower(part, *words) for tower, part in zip(self.towers(), parts, strict=True)], dim=-1)


class Projector(nn.Module):
    """Maps vision features, or the robot's state, to the language model's embeddings."""

    def __init__(self, inputs: int, dim: int, fused: bool = False) -> None:
        super().__init__()
        first = 4 * inputs if fused else dim
        self.fc1 = nn.Linear(inputs, first)
        self.fc2 = nn.Linear(first, dim)
        if fused:
            self.fc3 = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        for layer in list(self.children())[1:]:
            x = layer(F.gelu(x))
        return x


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
            first = as_bias(attention_mask(self.present[:, :end], new, False), x.dtype) if new > 1 else None
            mask = self.seen[..., :end] if first is None else first
        turn = self.cos[:, begin:end], self.sin[:, begin:end]
        x = x.reshape(self.rows * new, -1).clone()
        *layers, last = self.stack.layers
        for layer in layers:
            x = self._layer(layer, x, turn, mask, new)
        x = self._layer(last, x, turn, mask, new, read_last=new > 1)
        self.cache.length = end
        return self._norm(self.stack.norm, x)

    def _layer(
        self,
        layer: LlamaLayer,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        mask: Tensor | None,
        new: int,
        read_last: bool = False,
    ) -> Tensor:
        """Runs a layer on embeddings [N * new, D], overwriting them; returns its outputs, on request only of the last
        tokens."""
        attention, mlp, (cos, sin) = layer.self_attn, layer.mlp, turn
        normed = self._norm(layer.input_layernorm, x)
        k = self._rotate_heads(normed @ attention.k_proj.weight.t(), cos, sin)
        v = normed @ attention.v_proj.weight.t()
        causal = mask is None and new > 1
        if read_last:
            x, normed = x.view(self.rows, new, -1)[:, -1].contiguous(), normed.view(self.rows, new, -1)[:, -1]
            cos, sin, causal = cos[:, -1:], sin[:, -1:], False
            mask = None if mask is None else mask[:, :, -1:]
        q = self._rotate_heads(normed @ attention.q_proj.weight.t(), cos, sin).transpose(1, 2)
        k, v = self.cache.add(attention.layer, k.transpose(1, 2), v.view(k.shape).transpose(1, 2))
        grouped = self.heads != self.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)
        x.addmm_(out.transpose(1, 2).reshape(len(x), -1), attention.o_proj.weight.t())
        normed = self._norm(layer.post_attention_layernorm, x)
        gate = F.silu(normed @ mlp.gate_proj.weight.t(), inplace=True)
        return x.addmm_(gate.mul_(normed @ mlp.up_proj.weight.t()), mlp.down_proj.weight.t())

    def _rotate_heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[N * L, heads * d] -> [N, L, heads, d], by the places of its tokens."""
        x = x.view(self.rows, -1, x.shape[-1] // self.head_dim, self.head_dim)
        return (x * cos).addcmul_(x.roll(self.head_dim // 2, -1), sin)

    def _norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(self.eps, size, size, value=1 / x.shape[-1]).rsqrt_()).mul_(norm.weight)


PLAIN = {LlamaStack, LlamaLayer, LlamaAttention, GatedMLP, RMSNorm, nn.ModuleList, nn.Linear, nn.Embedding}


def as_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias for attention scores: 0 for visible tokens."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def fastest_decoder(stack: LlamaStack) -> type[Decoder]:
    weight = stack.norm.weight
    exact = weight.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(weight.device.type)
    return FastDecoder if exact and all(type(module) in PLAIN for module in stack.modules()) else Decoder


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


# The networks that OFT adds: a regression head, and FiLM in vision blocks. Key names are upstream's.


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


# Actions as tokens, 256 bins of [-1, 1] on the last ids of the vocabulary, or as numbers with Laplace noise. 256 ids
# share 255 bin centres (the two lowest ids mean the same), and ids fall as actions grow.


class ActionTokens:
    """Tokens count from 0: `OpenVLASettings.first_action_id` is added for the vocabulary."""

    def __init__(self, bins: int) -> None:
        self.edges = np.linspace(-1, 1, bins)
        self.centers = (self.edges[:-1] + self.edges[1:]) / 2
        self.bins = bins

    def decode(self, tokens: Tensor) -> Tensor:
        """Numbers in [-1, 1]."""
        centers = torch.from_numpy(self.centers).to(tokens.device)
        return centers[(self.bins - 1 - tokens).clamp(max=self.bins - 2)]

    def encode(self, actions: np.ndarray) -> np.ndarray:
        return self.bins - np.digitize(np.clip(actions, -1, 1), self.edges)


def pick(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Draws a token from logits [..., bins], by the inverse of the cumulative probabilities; temperature 0: the best
    token."""
    if temperature == 0:
        return logits.argmax(-1)
    steps = (logits.double() / temperature).softmax(-1).cumsum(-1)
    below = uniform[..., None].double() * steps[..., -1:]
    return torch.searchsorted(steps, below).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def action_scores(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of these tokens, and entropies, [...] of logits [..., bins]."""
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, tokens[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def laplace(center: Tensor, log_scale: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Log-density of numbers around a center, and its entropy. Its maximum is the L1 regression."""
    log_width = log_scale + torch.log(torch.tensor(2.0, dtype=center.dtype))
    return -(numbers - center).abs() * (-log_scale).exp() - log_width, (1 + log_width).expand_as(center)


def laplace_noise(uniform: Tensor) -> Tensor:
    """Converts uniform to standard Laplace numbers, by the inverse distribution function."""
    side = (uniform.double() - 0.5).clamp(-0.5 + 1e-12, 0.5 - 1e-12)
    return -side.sign() * torch.log1p(-2 * side.abs())
