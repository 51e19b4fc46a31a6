"""One update: the same sequence of gradient steps on every rank, each rank adding the items it owns.

The gradient and the step's statistics travel between ranks as one vector.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from embodied.algorithms.config import AlgoConfig
from embodied.core.errors import Diverged, WrongShape
from embodied.learners.model import FrozenFeatures, Model, PolicyOptimizer, lr_factor
from embodied.learners.rollout_buffer import ItemBatch, minibatches, step_items, take
from embodied.learners.train_batch import RankBatch
from embodied.policies.base import Scores


def update_policy(
    model: Model,
    optimizer: PolicyOptimizer,
    config: AlgoConfig,
    share: RankBatch,
    seed: int,
    iteration: int,
    total: int,
) -> dict[str, float]:
    """All epochs of one iteration. Returns means over the gradient steps for the log."""
    factor = lr_factor(config.lr_schedule, iteration / total)
    if config.decoupled or config.episode_mask != "none":  # scored before any step
        share = share.corrected(model, config)
    names = (*share.sums, *model.policy.own_losses, "mismatch_k3")
    history: list[dict[str, float]] = []
    largest, mismatch = None, 0.0  # of the first gradient step, before which no weight has changed
    for epoch in range(config.epochs):
        order = share.order(seed, iteration, epoch)
        kl_sum = 0.0
        for minibatch in minibatches(order, step_items(config, share.num_units)):
            mine = share.batch.owned(minibatch)
            first = largest is None
            stats, found = gradient(model, config, share, mine, share.divisor(len(minibatch)), compare=first)
            totals, norm = optimizer.exchange(stats)
            divisor = share.stats_divisor(len(minibatch))
            numbers = {name: value / divisor for name, value in zip(names, totals.tolist(), strict=True)}
            numbers["grad_norm"] = norm
            check_finite(numbers, iteration, epoch)
            optimizer.step(norm, factor)
            kl_sum += numbers["approx_kl"] * len(minibatch)
            k3 = numbers.pop("mismatch_k3")
            if first:
                largest, mismatch = found, k3
            history.append(numbers)
        if skip_remaining_epochs(kl_sum / share.num_units, config.target_kl):
            break
    everywhere = check_weights(optimizer, iteration, *largest.tolist(), share.num_masked)
    about = mismatch_numbers(mismatch, everywhere[:, :2])
    if share.masked is not None:
        about["train/masked_fraction"] = float(everywhere[:, 2].sum()) / share.num_items
    means = {f"train/{name}": float(np.mean([row[name] for row in history])) for name in history[0]}
    return means | about | {"train/epochs": epoch + 1.0, "train/lr": config.lr * factor, **share.summary()}


def skip_remaining_epochs(mean_kl: float, target_kl: float | None) -> bool:
    """Given `approx_kl` of an epoch (all ranks, measured before each gradient step) divided by its number of items."""
    return target_kl is not None and mean_kl > target_kl


def frozen_features(model: Model, batch: ItemBatch, size: int) -> dict[str, Tensor]:
    """Computes the features of the items' observations that no epoch changes; empty where they do not fit."""
    features = FrozenFeatures(model, len(batch))
    for items in torch.arange(len(batch)).split(model.config.micro_batch_size or size):
        features.add(batch.observed(items), items)
        if not features.wanted:
            break
    return features.kept


def gradient(
    model: Model, config: AlgoConfig, share: RankBatch, mine: Tensor, count: float, compare: bool = True
) -> tuple[Tensor, Tensor]:
    """Leave the gradient of this rank's units of a minibatch in the parameters; return the sums of its statistics and
    the largest of its mismatches, if it is to `compare` log-probs with those at act time."""
    batch = share.batch
    sums = share.advantages.new_zeros(len(share.sums) + len(model.policy.own_losses) + 1)
    largest = sums.new_full((2,), -math.inf)
    passes = model.most_passes(batch.passes(model, mine)) if model.config.shard else 0
    micro_batches = batch.micro_batches(model, mine, passes)
    for number, (part, counts) in enumerate(micro_batches, 1):
        scores = model.score(batch.inputs(part))
        check_scores(scores, take(batch.logprobs, part))
        loss, stats = share.loss_sum(scores, part, float(counts), config)
        parts = [stats[name] for name in share.sums]
        if scores.own_loss is not None:
            own = scores.own_loss.sum() * float(counts)
            loss = loss + own
            parts.append(own.detach())
        model.backward(loss / count, last=number == len(micro_batches))
        if not compare:
            sums[:-1] += torch.stack(parts)
            continue
        k3, gap = mismatch_of(batch, part, scores.logprobs.detach())
        sums += torch.stack([*parts, (float(counts) * share.weights_of(part) * k3).sum()])
        if counts:
            largest = torch.maximum(largest, torch.stack([gap.max(), k3.max()]))
    return sums, largest


def mismatch_of(batch: ItemBatch, part: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """The distance of the log-probs [b, C, A] of some items from those at act time.

    k3 [b], per decision: the sum of r - 1 - log r over its numbers, whose mean is KL(acted || now). The gap [b] in nats
    is the largest difference of a number, -inf for decisions of other weights than those that the update starts from.
    A decision of two numbers with ratios 2 and 1/2: k3 2 - 1 - 0.693 + 1/2 - 1 + 0.693 = 0.5, gap 0.693.
    """
    played = take(batch.mask, part)[:, :, None]
    apart = torch.where(played, logprobs - take(batch.logprobs, part), 0.0)
    gaps = torch.where(take(batch.current, part), apart.abs().amax((1, 2)), -math.inf)
    return (apart.expm1() - apart).sum((1, 2)), gaps


def mismatch_numbers(k3: float, largest: np.ndarray) -> dict[str, float]:
    """The log's numbers of a mean k3 and the largest gaps and k3s [ranks, 2]; no gap where no decision was taken with
    the weights that the update started from."""
    gap, k3_max = largest.max(axis=0).tolist()
    about = {"train/mismatch_k3": k3, "train/mismatch_k3_max": k3_max}
    return about | ({"train/logprob_gap": gap} if gap >= 0 else {})


def check_scores(scores: Scores, acted: Tensor) -> None:
    """Refuse scores that would broadcast against what was stored at act time."""
    wanted, found = list(acted.shape), [list(each.shape) for each in (scores.logprobs, scores.entropy, scores.values)]
    if found != [wanted, wanted, wanted[:1]]:
        raise WrongShape(
            f"the policy's forward returned logprobs {found[0]}, entropy {found[1]}, values {found[2]}; "
            f"act's logprobs ask for {wanted}, {wanted} and {wanted[:1]}"
        )


def check_finite(numbers: dict[str, float], iteration: int, epoch: int) -> None:
    """Stop before a loss that is not finite becomes weights."""
    if odd := [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]:
        raise Diverged(
            f"{', '.join(odd)} in iteration {iteration + 1}, epoch {epoch + 1}; try a lower algo.lr, and look for "
            "very large rewards or observations (policy.normalize_observations=true scales the latter)"
        )


def check_weights(optimizer: PolicyOptimizer, iteration: int, *numbers: float) -> np.ndarray:
    """A step may be finite and still too large: what is published or saved must be usable. Returns these numbers of
    all ranks, a row each."""
    rows = np.array([[0.0 if optimizer.finite() else 1.0, *numbers]])
    rows = np.concatenate(optimizer.collective.gather(rows))
    if rows[:, 0].any():
        raise Diverged(f"weights are NaN or infinite after iteration {iteration + 1}; try a lower algo.lr")
    return rows[:, 1:]
