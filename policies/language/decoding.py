"""A decoding step without the modules' overhead, which takes most of the time of a small model's step.

It computes the same as transformers' modules for one token of every conversation, for the most common architectures:
Llama, Qwen3, GPT-2 and Qwen2.5-VL, in float32 or less precise. Other models run through their own modules (slots.py).
Linear layers with adapters are called unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from embodied.policies.language.sight import decoder_of

if TYPE_CHECKING:
    from embodied.policies.language.slots import KeyValues

Step = Callable[[Tensor, Tensor, "KeyValues"], tuple[Tensor, Tensor]]


def fast_step(model: Any, length: int) -> Step | None:
    """Returns a function of the last tokens [N], their positions [N] and the cache, which returns logits [N,
    vocabulary] and the last hidden states [N, D]; None for other architectures. It is valid while the model's
    parameters are the same objects."""
    shape = model.config.get_text_config()
    if model.dtype == torch.float64 or torch.is_autocast_enabled(next(model.parameters()).device.type):
        return None
    if shape.model_type == "gpt2" and not shape.add_cross_attention:
        return of_gpt2(model)
    if shape.model_type not in ("llama", "qwen3", "qwen2_5_vl_text") or shape.hidden_act != "silu":
        return None
    turns_by_place = decoder_of(model).rotary_emb.rope_type in ("default", "linear", "llama3")  # not by length as well
    return of_llama(model, length) if turns_by_place else None


def as_function(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """A linear layer as a function."""
    if type(layer) is nn.Linear:
        weight, bias = layer.weight, layer.bias
        return lambda x: F.linear(x, weight, bias)
    if type(layer) is Conv1D:
        weight, bias = layer.weight, layer.bias
        return lambda x: torch.addmm(bias, x, weight)
    return layer


def attend(query: Tensor, keys: Tensor, values: Tensor, layer: int, cache: KeyValues, scale: float) -> Tensor:
    """Store a token's keys and values [N, KV, D], and attend with its queries [N, H, D]; returns [N, H * D].

    Queries that share keys are passed like tokens of a sequence: they attend to the same keys."""
    rows, _, dim = query.shape
    keys, values = cache.update(keys[:, :, None], values[:, :, None], layer)
    groups = query.view(rows, keys.shape[1], -1, dim)
    return F.scaled_dot_product_attention(groups, keys, values, attn_mask=cache.bias, scale=scale).view(rows, -1)


def of_llama(model: Any, length: int) -> Step:
    body = decoder_of(model)
    places = torch.arange(length, device=body.embed_tokens.weight.device)[None]
    cosines, sines = (table[0, :, None] for table in body.rotary_emb(body.embed_tokens.weight[:1], places))
    half = sines.shape[-1] // 2
    sines = torch.cat((-sines[..., :half], sines[..., half:]), -1)
    embeddings, head = body.embed_tokens.weight, as_function(model.lm_head)
    layers = [llama_layer(layer) for layer in body.layers]
    last = norm(body.norm)

    def step(tokens: Tensor, places: Tensor, cache: KeyValues) -> tuple[Tensor, Tensor]:
        hidden, turn = F.embedding(tokens, embeddings), (cosines[places], sines[places])
        for index, layer in enumerate(layers):
            hidden = layer(hidden, turn, index, cache)
        hidden = last(hidden)
        return head(hidden), hidden

    return step


def norm(layer: Any) -> Callable[[Tensor], Tensor]:
    """A root mean square norm as a function."""
    weight, eps = layer.weight, layer.variance_epsilon
    size = weight.shape
    return lambda x: F.rms_norm(x, size, weight, eps)


def llama_layer(layer: Any) -> Callable[..., Tensor]:
    attention, mlp = layer.self_attn, layer.mlp
    before, behind = norm(layer.input_layernorm), norm(layer.post_attention_layernorm)
    q, k, v, o = (
        as_function(projection)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    )
    gate, up, down = as_function(mlp.gate_proj), as_function(mlp.up_proj), as_function(mlp.down_proj)
    dim, scale = attention.head_dim, attention.scaling
    norms = (norm(attention.q_norm), norm(attention.k_norm)) if hasattr(attention, "q_norm") else None

    def run(hidden: Tensor, turn: tuple[Tensor, Tensor], index: int, cache: KeyValues) -> Tensor:
        x = before(hidden)
        query, key, value = (projection(x).view(len(x), -1, dim) for projection in (q, k, v))
        if norms:
            query, key = norms[0](query), norms[1](key)
        heads = query.shape[1]
        both = torch.cat((query, key), 1)
        low, high = both.chunk(2, -1)
        both = torch.addcmul(both * turn[0], torch.cat((high, low), -1), turn[1])
        hidden = hidden + o(attend(both[:, :heads], both[:, heads:], value, index, cache, scale))
        x = behind(hidden)
        return hidden + down(F.silu(gate(x)) * up(x))

    return run


def of_gpt2(model: Any) -> Step:
    body = model.transformer
    words, positions, head, last = body.wte.weight, body.wpe.weight, as_function(model.lm_head), body.ln_f
    layers = [gpt2_layer(block) for block in body.h]

    def step(tokens: Tensor, places: Tensor, cache: KeyValues) -> tuple[Tensor, Tensor]:
        hidden = F.embedding(tokens, words) + F.embedding(places, positions)
        for index, layer in enumerate(layers):
            hidden = layer(hidden, index, cache)
        hidden = last(hidden)
        return head(hidden), hidden

    return step


def gpt2_layer(block: Any) -> Callable[..., Tensor]:
    attention, mlp = block.attn, block.mlp
    before, behind, act = block.ln_1, block.ln_2, mlp.act
    into, out, wide, narrow = (
        as_function(layer) for layer in (attention.c_attn, attention.c_proj, mlp.c_fc, mlp.c_proj)
    )
    dim, scale = attention.head_dim, attention.scaling

    def run(hidden: Tensor, index: int, cache: KeyValues) -> Tensor:
        query, key, value = (tensor.view(len(hidden), -1, dim) for tensor in into(before(hidden)).chunk(3, -1))
        hidden = hidden + out(attend(query, key, value, index, cache, scale))
        return hidden + narrow(act(wide(behind(hidden))))

    return run
