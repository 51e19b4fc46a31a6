"""How the next tokens are computed and drawn.

`fast_step` is a decoding step without the modules' overhead, which takes most of the time of a small model's step. It
computes the same as transformers' modules for one token of every conversation, for the most common architectures
(Llama, Qwen3, GPT-2 and Qwen2.5-VL) in float32 or less precise. Other models run through their own modules (slots.py).
Linear layers with adapters are called unchanged. `choose` draws tokens from logits, `draw_errors` checks drawn tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from embodied.core.conversations import SamplingRule
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

    def embed(tokens: Tensor, places: Tensor) -> tuple[Tensor, Any]:
        return F.embedding(tokens, embeddings), (cosines[places], sines[places])

    return stack(embed, [llama_layer(layer) for layer in body.layers], norm(body.norm), head)


def stack(embed: Callable[..., Any], layers: list[Any], last: Callable[[Tensor], Tensor], head: Any) -> Step:
    """A step through these layers. `embed` also returns what layers need of the positions."""

    def step(tokens: Tensor, places: Tensor, cache: KeyValues) -> tuple[Tensor, Tensor]:
        hidden, turn = embed(tokens, places)
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
    words, positions, head = body.wte.weight, body.wpe.weight, as_function(model.lm_head)

    def embed(tokens: Tensor, places: Tensor) -> tuple[Tensor, Any]:
        return F.embedding(tokens, words) + F.embedding(places, positions), None

    return stack(embed, [gpt2_layer(block) for block in body.h], body.ln_f, head)


def gpt2_layer(block: Any) -> Callable[..., Tensor]:
    attention, mlp = block.attn, block.mlp
    before, behind, act = block.ln_1, block.ln_2, mlp.act
    into, out, wide, narrow = (
        as_function(layer) for layer in (attention.c_attn, attention.c_proj, mlp.c_fc, mlp.c_proj)
    )
    dim, scale = attention.head_dim, attention.scaling

    def run(hidden: Tensor, _: Any, index: int, cache: KeyValues) -> Tensor:
        query, key, value = (tensor.view(len(hidden), -1, dim) for tensor in into(before(hidden)).chunk(3, -1))
        hidden = hidden + out(attend(query, key, value, index, cache, scale))
        return hidden + narrow(act(wide(behind(hidden))))

    return run


def likeliest_tokens(logits: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens by logits [vocabulary], and their log-probs at temperature 1."""
    logprobs, tokens = logits.double().log_softmax(-1).topk(count)
    return tuple(zip(tokens.tolist(), logprobs.tolist()))


def choose(logits: Tensor, rule: SamplingRule, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the tokens [N] at which the cumulative probabilities exceed `uniform` [N], and their log-probs at the
    rule's `logprob_temperature`.

    Probabilities .2 .5 .3 and the number .6 give token 1, since .2 <= .6 < .7. At temperature 0 the likeliest token is
    taken. With top_k=2 the first token is excluded, .5 .3 become .625 .375, and .6 still gives token 1.
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    scores = scores - scores.amax(-1, keepdim=True)
    temperature, of_logprobs = rule.temperature, rule.logprob_temperature
    scored = scores if of_logprobs == 1 else scores / of_logprobs
    sums = scored.exp().cumsum(-1, dtype=torch.float64)
    total = sums[:, -1]
    if temperature == 0:
        tokens = scores.argmax(-1)
    else:
        if temperature != of_logprobs or not rule.draws_from_all:
            likely = (scores.double() / temperature).exp()
            sums = (likely if rule.draws_from_all else allowed_probabilities(likely, rule)).cumsum(-1)
        tokens = torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)[:, 0]
        tokens = tokens.clamp(max=scores.shape[-1] - 1)
    return tokens, scored.gather(-1, tokens[:, None])[:, 0].double() - total.log()


def allowed_probabilities(likely: Tensor, rule: SamplingRule) -> Tensor:
    """Unnormalised probabilities [N, vocabulary], with 0 for tokens that the rule excludes. Of equally likely tokens
    the first are kept, so at most top_k remain."""
    ordered, places = likely.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if rule.top_k:
        keep[:, rule.top_k :] = False
    if rule.top_p < 1:
        ordered = ordered * keep
        before = ordered.cumsum(-1) - ordered  # cumulative probability of likelier tokens
        keep &= before < rule.top_p * ordered.sum(-1, keepdim=True)
    return likely * torch.zeros_like(keep).scatter(-1, places, keep)


def probabilities(logits: Tensor, rule: SamplingRule) -> Tensor:
    """The probabilities [N, vocabulary] by which the rule draws, in float64; of temperature 1 if it draws nothing."""
    likely = (logits.double() / (rule.temperature or 1.0)).softmax(-1)
    likely = likely if rule.draws_from_all else allowed_probabilities(likely, rule)
    return likely / likely.sum(-1, keepdim=True)


def draw_errors(logits: Tensor, tokens: Tensor, rule: SamplingRule, uniform: Tensor) -> Tensor:
    """Returns the distance of `uniform` [N] from the interval of cumulative probabilities in which `choose` draws these
    tokens [N]; 0 if it draws them. At temperature 0: how much less likely a token is than the likeliest token.

    Probabilities .2 .5 .3 and the number .6: 0 for token 1 (.2 to .7), .4 for token 0 (0 to .2), .1 for token 2.
    """
    chosen = tokens[:, None]
    if rule.temperature == 0:
        scores = logits.double() - logits.double().amax(-1, keepdim=True)
        return 1 - scores.gather(-1, chosen)[:, 0].exp()
    ends = probabilities(logits, rule).cumsum(-1)
    end = ends.gather(-1, chosen)[:, 0]
    begin = torch.where(tokens > 0, ends.gather(-1, (chosen - 1).clamp(min=0))[:, 0], 0.0)
    return torch.maximum(begin - uniform, uniform - end).clamp(min=0)
