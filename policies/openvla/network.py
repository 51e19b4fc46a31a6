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
from embodied.policies.vla.layers import ALL, MLP, GatedMLP, GroupedAttention, RotaryTables, layer_norm, linear, turns
from embodied.policies.vla.policy import compiled

BOS, STOP = 1, 2
SPACE = 29871  # Llama's "▁", which precedes the first action token in training
Memory = list[tuple[Tensor, Tensor]]  # keys and values of every layer [N, kv_heads, width, head_dim]
LAST = slice(-1, None)


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
        return layers.rms_norm(x, self._parameters["weight"], self.eps)


class LlamaAttention(GroupedAttention):
    def __init__(self, settings: LlamaSettings, layer: int) -> None:
        super().__init__(settings.dim, settings.heads, settings.kv_heads, settings.dim // settings.heads)
        self.layer = layer

    def forward(
        self,
        x: Tensor,
        turn: RotaryTables,
        mask: Tensor | None,
        causal: bool,
        cache: Cache | None,
        read: slice,
        add_to: Tensor,
    ) -> Tensor:
        q, k, v = self.project(x, turn, read)
        if cache is not None:
            k, v = cache.add(self.layer, k, v)
        return self.attend(q, k, v, mask, causal, add_to)


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
        attention, mlp, norm_1, norm_2 = self._modules.values()
        kept = x if read is ALL else x[:, read]
        x = attention.forward(norm_1.forward(x), turn, mask, causal, cache, read, kept)
        return mlp.forward(norm_2.forward(x), x)


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
        turn: RotaryTables | None = None,
    ) -> Tensor:
        """Hidden states [N, L, D] of embeddings [N, L, D]; with `read`, the last layer computes only these places.

        `present` [N, all tokens so far] is False for padding; cached tokens come first. `padded`: there may be padding.
        `bidirectional`: every token attends to every other one. `turn` are the rotary tables, if known.
        """
        new, total = x.shape[1], present.shape[1]
        read = ALL if new == 1 else read
        turn = turn or self.turn(present, slice(total - new, None))
        plain = not padded and (bidirectional or new in (1, total))
        mask = None if plain else attention_mask(present, new, bidirectional)
        causal = plain and not bidirectional and new > 1
        *first, last = self.layers
        for layer in first:
            x = layer(x, turn, mask, causal, cache)
        if causal and read is not ALL:  # the last token attends to all
            causal, mask = False, None if read == LAST else attention_mask(present, new, False)
        x = last(x, turn, mask if mask is None else mask[:, :, read], causal, cache, read)
        if cache is not None:
            cache.length += new
        return self.norm(x)

    def turn(self, present: Tensor, places: slice | Tensor = ALL) -> RotaryTables:
        """The rotary tables of these places in rows with padding."""
        settings, position = self.settings, (present.long().cumsum(1) - 1).clamp(min=0)[:, places]
        return turns(position, settings.dim // settings.heads, settings.rope_theta, self.norm.weight.dtype)


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
        inputs, proj = self._modules.values()
        q, k, v = linear(x, inputs).view(rows, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        return linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, dim), proj)


class LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, change: Tensor) -> Tensor:
        return torch.addcmul(x, change, self._parameters["scale_factor"])


class Sum(nn.Module):
    def forward(self, x: Tensor, change: Tensor) -> Tensor:
        return x + change


class VisionBlock(nn.Module):
    def __init__(self, tower: TowerSettings) -> None:
        super().__init__()
        scale = LayerScale if tower.kind == "dinov2" else lambda dim: Sum()
        self.norm1 = nn.LayerNorm(tower.dim, eps=1e-6)
        self.attn = Attention(tower.dim, tower.heads)
        self.ls1 = scale(tower.dim)
        self.norm2 = nn.LayerNorm(tower.dim, eps=1e-6)
        self.mlp = MLP(tower.dim, tower.mlp)
        self.ls2 = scale(tower.dim)

    def attend(self, x: Tensor) -> Tensor:
        norm, attention, scale, *_ = self._modules.values()
        return scale.forward(x, attention.forward(layer_norm(x, norm)))

    def think(self, x: Tensor) -> Tensor:
        *_, norm, mlp, scale = self._modules.values()
        return scale.forward(x, mlp.forward(layer_norm(x, norm)))

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
        return torch.cat([tower(image, *words) for tower, image in zip(self.towers(), parts, strict=True)], dim=-1)


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


# Decoding of action tokens after a prompt


class Decoder:
    """A batch of prompts; `present` [N, L] is False for padding, `more` tokens will follow."""

    def __init__(self, stack: LlamaStack, cache: Cache, present: Tensor, padded: bool, more: int) -> None:
        self.stack, self.cache, self.padded = stack, cache, padded
        self.present = F.pad(present, (0, more), value=True)
        self.turn = stack.turn(self.present if padded else self.present[:1])
        cache.begin(*self.present.shape)

    def read(self, x: Tensor) -> Tensor:
        """The last hidden states [N, D] of prompts with embeddings [N, L, D]."""
        return self._run(x)

    def go_on(self, x: Tensor) -> Tensor:
        """Hidden states [N, D] of one more token with embeddings [N, D]."""
        return self._run(x[:, None])

    def _run(self, x: Tensor) -> Tensor:
        begin, end = self.cache.length, self.cache.length + x.shape[1]
        turn = self.turn[0][:, begin:end], self.turn[1][:, begin:end]
        return self.stack(x, self.present[:, :end], self.cache, padded=self.padded, read=LAST, turn=turn)[:, -1]


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
            memory[:, :, present.shape[1] :] = 0  # masked values must be finite

    def _one_token(self, dtype: torch.dtype) -> Tensor:
        settings = self.stack.settings
        shape = len(self.present), settings.kv_heads, 1, settings.dim // settings.heads
        return self.stack.norm.weight.new_empty(shape, dtype=dtype)

    def _run(self, x: Tensor) -> Tensor:
        begin = self.cache.length
        self.cache.length += x.shape[1]
        place = torch.arange(begin, self.cache.length, device=x.device)
        return compiled(step)(self.stack, x, place, self.shown, self.memory)


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
    turn, here = stack.turn(present, place), torch.arange(present.shape[1], device=x.device)
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
