"""Writing action tokens with torch.compile: the stack's own layers as a program for prompts and one for a token.

A program wants memory of one size: each token is shown all of it, and told where nothing is yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.policies.openvla.decoding import LAST, Writing
from embodied.policies.openvla.llama import Cache, LlamaStack
from embodied.policies.vla.compiling import compiled
from embodied.policies.vla.layers import turns

Memory = list[tuple[Tensor, Tensor]]  # keys and values of every layer [N, kv_heads, width, head_dim]


class CompiledWriting(Writing):
    def __init__(self, stack: LlamaStack, cache: Cache, present: Tensor, padded: bool, more: int) -> None:
        super().__init__(stack, cache, present, padded, more)
        self.shown = self.present if padded else self.present[:1]  # else all rows are alike
        weight = stack.norm.weight
        half = torch.is_autocast_enabled(weight.device.type)
        dtype = torch.get_autocast_dtype(weight.device.type) if half else weight.dtype
        self.memory = [cache.room(layer, self._one_token(dtype)) for layer in range(stack.settings.depth)]
        for memory in (memory for pair in self.memory for memory in pair):
            torch._dynamo.mark_static_address(memory)  # a CUDA graph may write to it
            memory[:, :, present.shape[1] :] = 0  # what is not looked at must be numbers

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
    """A cache for layers, whose new tokens come to these places."""

    def __init__(self, memory: Memory, place: Tensor) -> None:
        self.memory, self.place = memory, place

    def add(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.memory[layer]
        keys.index_copy_(2, self.place, k)
        values.index_copy_(2, self.place, v)
        return keys, values


def step(stack: LlamaStack, x: Tensor, place: Tensor, present: Tensor, memory: Memory) -> Tensor:
    """Hidden states [N, D] behind the last of the tokens x [N, L, D] at places [L]."""
    head_dim = stack.settings.dim // stack.settings.heads
    position = (present.long().cumsum(1) - 1).clamp(min=0)[:, place]
    turn = turns(position, head_dim, stack.settings.rope_theta, x.dtype)
    here = torch.arange(present.shape[1], device=x.device)
    mask = (((here <= place[:, None]) & present[:, None]) | (here == place[:, None]))[:, None]
    slots, (*first, last) = Slots(memory, place), stack.layers
    for layer in first:
        x = layer(x, turn, mask, False, slots)
    return stack.norm(last(x, turn, mask[:, :, LAST], False, slots, LAST))[:, -1]
