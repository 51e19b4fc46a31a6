"""One PPO update: the same sequence of gradient steps on every rank, each rank adding the items it owns.

The gradient and the step's statistics travel between ranks as one vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embodied.algorithms.advantages import gae, merge_moments, moments, normalize
from embodied.algorithms.config import PPOConfig
from embodied.algorithms.items import minibatches, owned, permutation
from embodied.algorithms.losses import PPOItems, ppo_loss_sum
from embodied.algorithms.schedules import lr_factor, skip_remaining_epochs
from embodied.data import Trajectory
from embodied.errors import Diverged
from embodied.learners.batch import Batch, flatten, items_of
from embodied.learners.collective import Collective
from embodied.learners.optimizer import Optimizer

SUMS = (
    "policy_loss",
    "value_loss",
    "entropy",
    "approx_kl",
    "clip_fraction",
    "dual_clip_fraction",
    "value_clip_fraction",
)


@dataclass(frozen=True)
class Share:
    """This rank's items of an iteration."""

    batch: Batch
    advantages: Tensor  # [items]
    returns: Tensor  # [items]
    num_items: int  # over all ranks


def prepare(trajectory: Trajectory, config: PPOConfig, collective: Collective, env_ids: np.ndarray, dtype) -> Share:
    """Advantages of this rank's rows, normalised over all ranks, which together have the rows `env_ids` (sorted)."""
    fields = (trajectory.rewards, trajectory.terminated, trajectory.truncated, trajectory.mask)
    advantages, returns = gae(
        *fields, trajectory.values, trajectory.final_values, config.gamma, config.gae_lambda, config.advantage_level
    )
    if config.normalize_advantages:
        per_env = [moments(column, np.ones_like(column)) for column in advantages.T]
        rows = np.concatenate(collective.gather(np.array(per_env)))  # env order, however many ranks
        advantages = normalize(advantages, merge_moments(rows))
    items = (items_of(advantages).to(dtype), items_of(returns).to(dtype))
    horizon = len(trajectory.rewards)
    first = int(np.searchsorted(env_ids, trajectory.env_ids[0])) * horizon
    return Share(flatten(trajectory, first), *items, num_items=len(env_ids) * horizon)


def update_policy(
    policy,
    optimizer: Optimizer,
    collective: Collective,
    config: PPOConfig,
    share: Share,
    seed: int,
    iteration: int,
    total: int,
) -> dict[str, float]:
    """All epochs of one iteration. Returns means over the gradient steps for the log."""
    factor = lr_factor(config.lr_schedule, iteration / total)
    history: list[dict[str, float]] = []
    gap = None
    for epoch in range(config.epochs):
        order = permutation(seed, iteration, epoch, share.num_items)
        kl_sum = 0.0
        for minibatch in minibatches(order, config.minibatch_size):
            mine = torch.from_numpy(owned(minibatch, share.batch.first, len(share.batch)))
            stats, worst_gap = gradient(policy, optimizer, config, share, mine, len(minibatch))
            flat = collective.sum(optimizer.flat_gradient(stats))
            totals, grads = flat[-len(stats) :], flat[: -len(stats)]
            numbers = {name: float(value) / len(minibatch) for name, value in zip(SUMS, totals, strict=True)}
            check_finite(numbers, iteration, epoch)
            numbers["grad_norm"] = optimizer.step(grads, factor)
            kl_sum += numbers["approx_kl"] * len(minibatch)
            gap = worst_gap if gap is None else gap
            history.append(numbers)
        if skip_remaining_epochs(kl_sum / share.num_items, config.target_kl):
            break
    means = {f"train/{name}": float(np.mean([row[name] for row in history])) for name in history[0]}
    return means | {
        "train/logprob_gap": gap,
        "train/explained_variance": explained_variance(share),
        "train/epochs": epoch + 1.0,
        "train/lr": config.lr * factor,
    }


def gradient(
    policy, optimizer: Optimizer, config: PPOConfig, share: Share, mine: Tensor, count: int
) -> tuple[Tensor, float]:
    """Leave the gradient of this rank's part of a minibatch in the parameters; return the sums of its statistics."""
    if not len(mine):
        return torch.zeros(len(SUMS), dtype=share.advantages.dtype), 0.0
    batch = share.batch
    scores = policy(batch.inputs(mine))
    items = PPOItems(
        logprobs=batch.logprobs[mine],
        values=batch.values[mine],
        advantages=share.advantages[mine],
        returns=share.returns[mine],
        mask=batch.mask[mine],
        weights=torch.ones(len(mine), dtype=share.advantages.dtype),
    )
    loss, stats = ppo_loss_sum(scores.logprobs, scores.entropy, scores.values, items, config)
    (loss / count).backward()
    played = items.mask[:, :, None]
    gap = torch.where(played, scores.logprobs.detach() - items.logprobs, 0.0).abs().max()
    return torch.stack([stats[name] for name in SUMS]), float(gap)


def check_finite(numbers: dict[str, float], iteration: int, epoch: int) -> None:
    """Stop before a loss that is not finite becomes weights."""
    if odd := [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]:
        raise Diverged(
            f"{', '.join(odd)} in iteration {iteration + 1}, epoch {epoch + 1}; try a lower algo.lr, and look for "
            "very large rewards or observations (policy.normalize_observations=true scales the latter)"
        )


def explained_variance(share: Share) -> float:
    """How much of the returns' variance the value function predicted at act time (this rank's items)."""
    variance = float(share.returns.var(unbiased=False))
    error = float((share.returns - share.batch.values).var(unbiased=False))
    return 1.0 - error / variance if variance > 0 else 0.0
