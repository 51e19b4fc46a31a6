"""The losses as sums over items. The caller divides them by a count, so sums over micro-batches and ranks can be added.

An item is one decision: C env steps of A action dimensions (or tokens). `level` defines the *term* with its own
probability ratio: "action_dim" each of C * A numbers, "action" each env step (log-probs summed over A), "chunk" the
decision (summed over C and A). An item counts as the mean over its terms, so its weight does not depend on C * A or on
the level. Steps after an episode's end (mask False) are in no sum, mean or ratio. An item of weight 0 is padding: it
adds nothing, but must have finite numbers.

Items may be stale (sampled with older weights than the weights at the start of the update), or sampled by an engine
whose log-probs differ numerically. `policy_loss_sum` and `out_of_bounds` correct for both, only in the policy's loss,
since values are regressed on returns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.algorithms.config import AlgoConfig, PPOConfig


@dataclass(frozen=True)
class LossItems:
    """The data of B decisions from before the update."""

    logprobs: Tensor  # [B, C, A], at act time
    advantages: Tensor  # [B]
    mask: Tensor | None  # bool [B, C]; None: all True, which saves a tenth of a small network's operations
    weights: Tensor  # [B], 0 for padding
    values: Tensor | None = None  # [B], at act time; of tokens, by the weights at the start of the update
    returns: Tensor | None = None  # [B], targets of values, if values are trained
    reference: Tensor | None = None  # [B, C, A], log-probs under the reference policy, if it counts in the loss
    proximal: Tensor | None = None  # [B, C, A], log-probs under the weights at the start of the update, if needed
    sequences: Tensor | None = None  # int [B], number of the item's episode or answer, for level "episode"


Stats = dict[str, Tensor]  # sums over items, scalars without gradient; terms that a loss does not have are absent


def loss_terms(config: AlgoConfig) -> tuple[str, ...]:
    """The names of the loss's terms in the log."""
    ppo, compared = isinstance(config, PPOConfig), bool(config.kl_coef) and config.kl_in == "loss"
    terms = ("policy_loss", "value_loss", "entropy") if ppo else ("policy_loss", "entropy", "reference_kl")
    terms += ("approx_kl", "clip_fraction", "dual_clip_fraction", *(("value_clip_fraction",) if ppo else ()))
    return terms + ("importance_weight",) * config.decoupled + ("reference_kl",) * (ppo and compared)


def loss_sum(
    logprobs: Tensor, entropy: Tensor, values: Tensor | None, items: LossItems, config: AlgoConfig
) -> tuple[Tensor, Stats]:
    """The whole loss of new log-probs and entropies [B, C, A] and, if values are trained, values [B]: a sum over items,
    and its terms."""
    loss, bonus, stats = _surrogate(logprobs, entropy, items, config)
    parts = {"policy_loss": loss, "entropy": bonus}
    if isinstance(config, PPOConfig) and items.returns is not None:  # else a separate critic trains the values
        fields, clip, delta = (items.values, items.returns, items.weights), config.value_clip, config.huber_delta
        parts["value_loss"], more = value_loss_sum(values, *fields, value_clip=clip, huber_delta=delta)
        loss, stats = loss + config.value_coef * parts["value_loss"], stats | more
    if config.entropy_coef:
        loss = loss - config.entropy_coef * bonus
    if items.reference is not None:
        others = (items.logprobs, items.reference, items.mask, items.weights)
        parts["reference_kl"] = reference_kl_sum(
            logprobs, *others, config.kl_estimator, level_within_episode(config.logprob_level)
        )
        loss = loss + config.kl_coef * parts["reference_kl"]
    return loss, {name: term.detach() for name, term in parts.items()} | stats


def _surrogate(logprobs: Tensor, entropy: Tensor, items: LossItems, config: AlgoConfig) -> tuple[Tensor, Tensor, Stats]:
    """The clipped policy loss and the entropy bonus of PPO and GRPO, and their terms."""
    level = config.logprob_level
    policy_loss, stats = policy_loss_sum(
        logprobs,
        items.logprobs,
        items.advantages,
        items.mask,
        items.weights,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        level=level,
        clip=config.clip,
        ratio_cap=config.ratio_cap,
        proximal=items.proximal,
        importance_cap=config.importance_cap,
        answers=items.sequences,
    )
    if not config.entropy_coef:  # only for the log
        entropy = entropy.detach()
    return policy_loss, entropy_sum(entropy, items.mask, items.weights, level_within_episode(level)), stats


# The terms of a loss


def reference_kl_sum(
    logprobs: Tensor,  # [B, C, A], with gradient
    old_logprobs: Tensor,  # [B, C, A]
    reference: Tensor,  # [B, C, A]
    mask: Tensor | None,  # bool [B, C]
    weights: Tensor,  # [B]
    estimator: str,
    level: str,
) -> Tensor:
    """KL(policy || reference) of a term, estimated from the sampled action, with d = log-prob - reference log-prob:

        k1  ratio * d           right on average, and so is its gradient; may be negative
        k2  d^2 / 2             right gradient on average while the ratio is 1; its value is too large far away
        k3  exp(-d) - 1 + d     right on average while the ratio is 1 and never negative; its gradient is that of the
                                other direction, KL(reference || policy)

    For d = ln 2 at ratio 1: k1 0.693, k2 0.240, k3 0.5 - 1 + 0.693 = 0.193.
    """
    difference, valid = _terms(_zero_masked(logprobs - reference, mask), mask, level)
    if estimator == "k1":
        ratio = _terms(_zero_masked(logprobs - old_logprobs, mask), mask, level)[0].exp()
        terms = ratio * difference
    elif estimator == "k2":
        terms = 0.5 * difference**2
    else:
        terms = (-difference).expm1() + difference
    return (weights * _mean(terms, valid)).sum()


def policy_loss_sum(
    logprobs: Tensor,  # [B, C, A], with gradient
    old_logprobs: Tensor,  # [B, C, A]
    advantages: Tensor,  # [B]
    mask: Tensor | None,  # bool [B, C]
    weights: Tensor,  # [B]
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    level: str,
    clip: str = "two_sided",
    ratio_cap: float = 8.0,
    proximal: Tensor | None = None,  # [B, C, A]
    importance_cap: float | None = None,
    answers: Tensor | None = None,  # int [B], with level "episode"
) -> tuple[Tensor, Stats]:
    """Minus the gain of the terms, each with a probability ratio to the acting policy.

    two_sided: min(ratio * A, clip(ratio) * A), and for A < 0 no less than dual_clip * A. One term with clip 0.2 and
    dual clip 3: ratio 1.5, A=1 costs -1.2 and ratio 0.5, A=-1 costs 0.8 (clipped: no gradient); ratio 1.5, A=-1 costs
    1.5 (not clipped); ratio 5, A=-1 costs 3 (dual-clipped).
    aipo: min(ratio, ratio_cap) * A, also for A < 0. The cap is on the ratio, so there is no gradient above it: this is
    the formula as PRIME-RL published it, and what its code computed (a clamp that gradients go through).
    tis: of the same value, but the capped ratio is a constant weight: the gradient is min(ratio, ratio_cap) * A times
    that of the log-prob, also above the cap.

    With `proximal`, the log-probs of the weights at the start of the update, the ratio is to these, and the gain is
    multiplied by the constant min(proximal / old, importance_cap) (decoupled PPO). Proximal twice as likely as old,
    ratio 1.5, A=1, clip 0.2: costs -2 * 1.2.

    With level "episode" (GSPO) all tokens of an answer have its ratio, the geometric mean of theirs: with ratios 2 and
    8 and A=1 each of the two gains clip(4).
    """
    # Ratios of terms to the acting policy
    anchor = old_logprobs if proximal is None else proximal
    log_ratio = _zero_masked(logprobs - anchor, mask)
    terms, valid = _terms(log_ratio, mask, level, answers)
    ratio, advantage = terms.exp(), advantages[:, None]
    # The clipped gain of each term
    cut = None  # terms without gradient, bool [B, terms]
    if clip == "two_sided":
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
        if dual_clip is not None:
            cut = (advantage < 0) & (ratio > dual_clip)
            gain = torch.where(cut, dual_clip * advantage, gain)
    else:
        capped = terms.clamp(max=math.log(ratio_cap)).exp()  # before exp: infinity times no gradient is NaN
        gain = (capped if clip == "aipo" else capped.detach() * (terms - terms.detach()).exp()) * advantage
    importance = None
    if proximal is not None:
        importance = _importance(proximal, old_logprobs, mask, level, importance_cap, answers)
    loss = -(weights * _mean(gain if importance is None else gain * importance, valid)).sum()

    def fraction(which: Tensor) -> Tensor:
        """The sum over items of the fraction of these terms."""
        return (weights * _mean(which.to(ratio.dtype), valid)).sum()

    # For the metrics
    with torch.no_grad():
        outside = ratio > ratio_cap
        if clip == "two_sided":
            outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
        stats = {
            "approx_kl": (weights * (log_ratio.expm1() - log_ratio).sum(dim=(1, 2))).sum(),
            "clip_fraction": fraction(outside),
        }
        if cut is not None:
            stats["dual_clip_fraction"] = fraction(cut)
        if importance is not None:
            stats["importance_weight"] = (weights * _mean(importance, valid)).sum()
    return loss, stats


def _importance(
    proximal: Tensor, old_logprobs: Tensor, mask: Tensor | None, level: str, cap: float | None, answers: Tensor | None
) -> Tensor:
    """[B, terms]: a term's probability under the weights at the start of the update, divided by its probability under
    the acting weights."""
    terms, _ = _terms(_zero_masked(proximal - old_logprobs, mask), mask, level, answers)
    return (terms if cap is None else terms.clamp(max=math.log(cap))).exp()


def out_of_bounds(
    proximal: Tensor,  # [B, C, A]
    old_logprobs: Tensor,  # [B, C, A]
    mask: Tensor,  # bool [B, C]
    episodes: Tensor,  # int [B], number of the item's episode: 0, 1, ...
    config: AlgoConfig,
) -> Tensor:
    """bool [B]: items of episodes with a ratio (proximal / old) outside of `episode_mask_low` and `episode_mask_high`.

    Two items of one term each with ratios 2 and 8: their product is 16, their geometric mean 4. Their error, which only
    has an upper bound, is 5: the mean over terms of max(r, 1 / r), 1 where log-probs agree.
    """
    level = level_within_episode(config.logprob_level)
    terms, valid = _terms(_zero_masked(proximal - old_logprobs, mask), mask, level)
    none = terms.new_zeros(len(terms))
    if config.episode_mask == "error":
        terms = torch.where(valid, terms.abs().exp(), 0.0)
    totals = none.index_add(0, episodes, terms.sum(dim=1))
    if config.episode_mask in ("mean", "error"):
        totals = totals / none.index_add(0, episodes, valid.sum(dim=1).to(terms.dtype)).clamp(min=1)
    if config.episode_mask == "error":
        totals = totals.log()
    outside = torch.zeros_like(totals, dtype=torch.bool)
    if config.episode_mask_low is not None:
        outside |= totals < math.log(config.episode_mask_low)
    if config.episode_mask_high is not None:
        outside |= totals > math.log(config.episode_mask_high)
    return outside[episodes]


def value_loss_sum(
    values: Tensor,  # [B], with gradient
    old_values: Tensor,  # [B]
    returns: Tensor,  # [B]
    weights: Tensor,  # [B]
    *,
    value_clip: float | None,
    huber_delta: float | None,
) -> tuple[Tensor, Stats]:
    """Half the squared error (or Huber's): the larger of the errors of the value and of the clipped value."""
    loss = _error(values - returns, huber_delta)
    stats = {}
    if value_clip is not None:
        moved = values - old_values
        loss = torch.maximum(loss, _error(old_values + moved.clamp(-value_clip, value_clip) - returns, huber_delta))
        clipped = (moved.abs() > value_clip).to(values.dtype)
        stats["value_clip_fraction"] = (weights * clipped).sum().detach()
    return (weights * loss).sum(), stats


def entropy_sum(entropy: Tensor, mask: Tensor | None, weights: Tensor, level: str) -> Tensor:
    """The entropy [B, C, A] of a term, mean over an item's terms, summed over items."""
    terms, valid = _terms(_zero_masked(entropy, mask), mask, level)
    return (weights * _mean(terms, valid)).sum()


# Terms of the loss: numbers, actions, decisions or answers


def level_within_episode(level: str) -> str:
    """The level at which terms are summed over an episode: "chunk" if ratios are an episode's mean."""
    return "chunk" if level == "episode" else level


def _terms(
    masked: Tensor, mask: Tensor | None, level: str, answers: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """[B, C, A] summed to [B, terms], and a mask of existing terms (None: all). With level "episode" the term of an
    item is the mean over the existing items with the same number in `answers` [B]."""
    if level == "action_dim":
        return masked.flatten(1), None if mask is None else mask.repeat_interleave(masked.shape[2], dim=1)
    if level == "action":
        return masked.sum(dim=2), mask
    sums, valid = masked.sum(dim=(1, 2)), None if mask is None else mask.any(dim=1)
    if level == "episode":
        numbers, of = answers.unique(return_inverse=True)
        none = sums.new_zeros(len(numbers))
        exists = torch.ones_like(of, dtype=torch.bool) if valid is None else valid
        count = none.index_add(0, of, exists.to(sums.dtype)).clamp(min=1)
        sums = (none.index_add(0, of, torch.where(exists, sums, 0.0)) / count)[of]
    else:
        assert level == "chunk", level
    return sums[:, None], None if valid is None else valid[:, None]


def _zero_masked(numbers: Tensor, mask: Tensor | None) -> Tensor:
    """Numbers [B, C, A], with 0 for masked steps."""
    return numbers if mask is None else numbers.masked_fill(~mask[:, :, None], 0.0)


def _mean(terms: Tensor, valid: Tensor | None) -> Tensor:
    """[B]: the mean over existing terms; 0 without any."""
    if terms.shape[1] == 1:
        return terms[:, 0] if valid is None else terms[:, 0].masked_fill(~valid[:, 0], 0.0)
    if valid is None:
        return terms.sum(dim=1) / terms.shape[1]
    return terms.masked_fill(~valid, 0.0).sum(dim=1) / valid.sum(dim=1).clamp(min=1)


def _error(error: Tensor, huber_delta: float | None) -> Tensor:
    if huber_delta is None:
        return 0.5 * error**2
    inside = error.clamp(-huber_delta, huber_delta)
    return inside * (error - 0.5 * inside)
