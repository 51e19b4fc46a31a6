"""Draws tokens from logits, and checks whether tokens were drawn correctly."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.core.conversations import SamplingRule


def likeliest(logits: Tensor, count: int) -> tuple[tuple[int, float], ...]:
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
