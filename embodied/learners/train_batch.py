"""The batch of one learner rank: a trajectory's decisions as items, each with its advantage.

PPO estimates advantages from values along a sequence; GRPO and its relatives compare whole episodes within groups.
What is normalised is normalised over all ranks, in the order of sequences, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from embodied.algorithms.advantages import (
    Moments,
    episode_weights,
    gae,
    merge_moments,
    moments,
    normalize,
    returns_to_go,
)
from embodied.algorithms.config import GRPOConfig, PPOConfig
from embodied.algorithms.losses import GRPOItems, PPOItems, Stats, grpo_loss_sum, out_of_bounds, ppo_loss_sum
from embodied.core.arrays import Observation, host, is_tensor, map_obs
from embodied.core.types import Array, BatchPart, Trajectory
from embodied.learners.model import Model
from embodied.learners.rollout_buffer import ItemBatch, flatten, own, permutation, step_items, take
from embodied.policies.base import Scores
from embodied.runtime.collective import Collective


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """This rank's items of an iteration, with their advantages."""

    batch: ItemBatch
    num_items: int  # over all ranks
    advantages: Tensor  # [items]
    weights: Tensor  # [items]
    reference: Tensor | None = None  # [items, C, A], log-probs where the divergence from them counts in the loss
    proximal: Tensor | None = None  # [items, C, A], those of the weights that the update starts from, for ratios
    episodes: Tensor | None = None  # int [items], 0, 1, ...: which belong together, where episodes may be masked
    masked: Tensor | None = None  # bool [items], left out of the policy's loss
    about: dict[str, float] = field(default_factory=dict)  # what there is to say of the data

    SUMS: ClassVar[tuple[str, ...]] = ()

    @property
    def sums(self) -> tuple[str, ...]:
        """The parts of the loss that the log shows."""
        return self.SUMS if self.proximal is None else (*self.SUMS, "importance_weight")

    def with_replay(self, known: dict[str, Tensor]) -> RankBatch:
        """The same batch with more inputs of its items."""
        return replace(self, batch=replace(self.batch, replay=self.batch.replay | known))

    def corrected(self, model: Model, config: PPOConfig | GRPOConfig) -> RankBatch:
        """The same batch with all log-probs under the weights that the update starts from: for items that are stale, or
        sampled by an engine whose log-probs differ numerically."""
        batch = self.batch
        proximal = logprobs_of(model, batch, step_items(config, len(batch)))
        masked = None
        if self.episodes is not None:
            masked = out_of_bounds(proximal, batch.logprobs, batch.mask, self.episodes, config)
        return replace(self, proximal=proximal if config.decoupled else None, masked=masked)

    @property
    def num_units(self) -> int:
        """The number of units that minibatches deal, over all ranks: here items."""
        return self.num_items

    def order(self, seed: int, iteration: int, epoch: int) -> np.ndarray:
        """The units of all ranks in the order in which an epoch takes them."""
        return permutation(seed, iteration, epoch, self.num_items)

    def divisor(self, units: int) -> float:
        """The divisor of the loss of a minibatch of so many units."""
        return units

    def stats_divisor(self, units: int) -> float:
        """The divisor of the statistics of a minibatch of so many units."""
        return units

    @property
    def num_masked(self) -> int:
        """This rank's items that are left out of the policy's loss."""
        if self.masked is None or self.batch.first == self.num_units:
            return 0
        return int((self.masked & self.batch.mask.any(dim=1)).sum())

    def weights_of(self, part: Tensor) -> Tensor:
        """The weight of each of these items."""
        return take(self.weights, part)

    def known(self, part: Tensor, weight: float) -> dict[str, Any]:
        """The arguments of all losses for these items (`weight` 0: padding)."""
        mask = take(self.batch.mask, part)
        return {
            "logprobs": take(self.batch.logprobs, part),
            "advantages": take(self.advantages, part),
            "mask": mask if self.masked is None else mask & ~take(self.masked, part)[:, None],
            "weights": weight * self.weights_of(part),
            "reference": None if self.reference is None else take(self.reference, part),
            "proximal": None if self.proximal is None else take(self.proximal, part),
        }

    def summary(self) -> dict[str, float]:
        """Metrics of the data."""
        return self.about


@dataclass(frozen=True, kw_only=True)
class PPOBatch(RankBatch):
    values: Tensor  # [items], at act time
    returns: Tensor  # [items]

    SUMS: ClassVar = (
        "policy_loss",
        "value_loss",
        "entropy",
        "approx_kl",
        "clip_fraction",
        "dual_clip_fraction",
        "value_clip_fraction",
    )

    @property
    def sums(self) -> tuple[str, ...]:
        """The parts of the loss that the log shows."""
        return super().sums if self.reference is None else (*super().sums, "reference_kl")

    def loss_sum(self, scores: Scores, part: Tensor, weight: float, config: PPOConfig) -> tuple[Tensor, Stats]:
        """The loss of some items (`weight` 0: padding), and the parts of it that `sums` names."""
        known = self.known(part, weight)
        items = PPOItems(values=take(self.values, part), returns=take(self.returns, part), **known)
        return ppo_loss_sum(scores.logprobs, scores.entropy, scores.values, items, config)

    def summary(self) -> dict[str, float]:
        return {"train/explained_variance": explained_variance(self)} | self.about


@dataclass(frozen=True, kw_only=True)
class GRPOBatch(RankBatch):
    SUMS: ClassVar = ("policy_loss", "entropy", "reference_kl", "approx_kl", "clip_fraction", "dual_clip_fraction")

    def loss_sum(self, scores: Scores, part: Tensor, weight: float, config: GRPOConfig) -> tuple[Tensor, Stats]:
        """The loss of some items (`weight` 0: padding), and the parts of it that `sums` names."""
        return grpo_loss_sum(scores.logprobs, scores.entropy, GRPOItems(**self.known(part, weight)), config)


# From trajectories to a rank's batch


def build_rank_batch(
    trajectory: Trajectory,
    part: BatchPart,
    config: PPOConfig | GRPOConfig,
    collective: Collective,
    dtype: torch.dtype,
    device: str = "cpu",
    reference: Model | None = None,
) -> PPOBatch | GRPOBatch:
    """This rank's sequences as items with their advantages; all ranks take part."""
    mine = part.last - part.first
    lengths = np.concatenate([found[:, 0] for found in collective.gather(trajectory.lengths[:mine, None])])
    first = int(lengths[: part.first].sum()) if mine else int(lengths.sum())  # nobody's items, where it has no part
    batch = flatten(trajectory, first, part.version, device)
    compared = None if reference is None else logprobs_of(reference, batch, step_items(config, len(batch)))
    away = None if compared is None or config.kl_in != "reward" else divergences(batch, compared)
    about = staleness(part.version - trajectory.versions[: trajectory.lengths[:mine].sum()], collective)
    common = {"batch": batch, "num_items": int(lengths.sum()), "reference": compared if away is None else None}
    if config.episode_mask != "none":
        common["episodes"] = torch.from_numpy(episodes_within(trajectory)).to(device)
    if part.advantages is None:
        found, more = ppo_advantages(trajectory, away, config, collective)
        found["weights"] = rollout_weights(trajectory, mine, config.weighting, collective)
        kind, common["values"] = PPOBatch, own(trajectory.values).to(device)
    else:
        found, more = spread_group_advantages(trajectory, part, lengths, away, config, collective)
        kind = GRPOBatch
    tensors = {name: torch.from_numpy(numbers).to(device, dtype) for name, numbers in found.items()}
    return kind(**common, **tensors, about=about | more)


def staleness(ages: np.ndarray, collective: Collective) -> dict[str, float]:
    """The age in versions of the decisions of all ranks, of which these [K] are this one's: the mean, the largest,
    and the share of each age that there is."""
    rows = np.stack(np.unique(ages, return_counts=True), axis=1)
    found, counts = np.concatenate(collective.gather(rows)).T
    shares = {f"train/staleness_{age}": counts[found == age].sum() / counts.sum() for age in np.unique(found)}
    about = {"train/staleness": (found * counts).sum() / counts.sum(), "train/staleness_max": found.max()}
    return {name: float(number) for name, number in (about | shares).items()}


def episodes_within(trajectory: Trajectory) -> np.ndarray:
    """Int [K], counted from 0: decisions of one sequence that belong to the same episode have the same number.

    Two sequences of episodes 7, 7, 9 and 9, 9: 0, 0, 1 and 2, 2.
    """
    begins = np.zeros(len(trajectory.episodes), bool)
    begins[1:] = np.diff(trajectory.episodes) != 0
    begins[np.cumsum(trajectory.lengths)[:-1]] = True
    return np.cumsum(begins)


def rollout_weights(trajectory: Trajectory, counted: int, weighting: str, collective: Collective) -> np.ndarray:
    """The weight [K] of each decision of a rollout, whose first `counted` sequences are this rank's own. With
    `weighting` episode all parts of episodes, over all ranks, count alike, as `episode_weights` says."""
    if weighting != "episode":
        return np.ones(len(trajectory.episodes))
    _, lengths = np.unique(episodes_within(trajectory), return_counts=True)
    own = lengths[: np.searchsorted(np.cumsum(lengths), trajectory.lengths[:counted].sum(), side="right")]
    mean = np.concatenate([rows[:, 0] for rows in collective.gather(own[:, None])]).mean()
    return np.repeat(mean / lengths, lengths)


def ppo_advantages(
    trajectory: Trajectory, away: np.ndarray | None, config: PPOConfig, collective: Collective
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Advantages and returns [K], where decisions that left the reference so far pay for it, and what to log."""
    rewards, about = trajectory.rewards, {}
    if away is not None:
        rewards = penalised_rewards(rewards, away, config.kl_coef)
        about["train/reference_kl"] = everywhere(away, trajectory.lengths, collective).mean
    advantages, returns = gae_of(trajectory, rewards, config)
    if config.normalize_advantages:
        advantages = normalize(advantages, everywhere(advantages, trajectory.lengths, collective))
    return {"advantages": advantages, "returns": returns}, about


def gae_of(trajectory: Trajectory, rewards: np.ndarray, config: PPOConfig) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns [K]; shorter sequences are padded with decisions that nobody played."""
    lengths = trajectory.lengths
    ends, rows = np.cumsum(lengths), np.arange(len(lengths))
    at = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths), np.repeat(rows, lengths)

    def side_by_side(array: np.ndarray, more: int = 0) -> np.ndarray:
        """[K, ...] -> [T, R, ...]"""
        room = np.zeros((lengths.max() + more, len(rows), *array.shape[1:]), array.dtype)
        room[at] = array
        return room

    flags = (trajectory.terminated, trajectory.truncated, trajectory.mask)
    values = side_by_side(trajectory.values, 1)
    values[lengths, rows] = trajectory.next_values[ends - 1]
    fields = [side_by_side(array) for array in (rewards, *flags)]
    following = side_by_side(trajectory.next_values)
    levels = (config.gamma, config.gae_lambda, config.advantage_level)
    advantages, returns = gae(*fields, values, following, *levels)
    return advantages[at], returns[at]


def spread_group_advantages(
    trajectory: Trajectory,
    part: BatchPart,
    lengths: np.ndarray,
    away: np.ndarray | None,
    config: GRPOConfig,
    collective: Collective,
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Advantages and weights [K] of the decisions of whole episodes, of all of which `lengths` are known, and what to
    log. Decisions that left the reference so far pay for it, and are compared with all decisions of the iteration."""
    mine, counted = slice(part.first, part.last), part.last - part.first
    each = (part.advantages, part.scores, episode_weights(lengths, config.weighting))
    advantages, scores, weights = (numbers[mine] if counted else np.zeros(1) for numbers in each)
    found = {
        name: np.repeat(each, trajectory.lengths) for name, each in (("advantages", advantages), ("weights", weights))
    }
    if away is None:
        return found, {}
    about, found["advantages"] = penalised_returns(trajectory, scores, away, counted, config, collective)
    return found, about


def penalised_returns(
    trajectory: Trajectory,
    scores: np.ndarray,
    away: np.ndarray,
    counted: int,
    config: GRPOConfig,
    collective: Collective,
    exists: np.ndarray | None = None,
) -> tuple[dict[str, float], np.ndarray]:
    """Metrics, and advantages [K]: scores less the divergences `away` [K] that follow, compared with those of all
    decisions of the first `counted` sequences of every rank, of those that exist (bool [K]; None: all)."""
    returns = returns_to_go(scores, away, trajectory.lengths, config.kl_coef)
    lengths = trajectory.lengths[:counted]
    about = {"train/reference_kl": everywhere(away, lengths, collective, exists).mean}
    return about, normalize(returns, everywhere(returns, lengths, collective, exists))


def everywhere(
    numbers: np.ndarray, lengths: np.ndarray, collective: Collective, exists: np.ndarray | None = None
) -> Moments:
    """Moments of the numbers [K] of all ranks that exist, sequence by sequence; `lengths` are those that count here."""
    weights = np.ones_like(numbers) if exists is None else exists.astype(numbers.dtype)
    cuts = np.cumsum(lengths)
    parts = [np.split(each[: lengths.sum()], cuts[:-1]) if len(lengths) else [] for each in (numbers, weights)]
    rows = np.array([moments(part, weight) for part, weight in zip(*parts, strict=True)]).reshape(-1, 3)
    return merge_moments(np.concatenate(collective.gather(rows)))


def penalised_rewards(rewards: np.ndarray, divergences: np.ndarray, kl_coef: float) -> np.ndarray:
    """Rewards [K, C], where each decision pays for its divergence [K] as it begins.

    One decision of two steps with rewards 1 and 2, divergence 0.5, kl_coef 2: 0 and 2.
    """
    paid = np.array(host(rewards), np.float64)
    paid[:, 0] -= kl_coef * divergences
    return paid


# Log-probs and other scores of a whole batch


def divergences(batch: ItemBatch, reference: Tensor) -> np.ndarray:
    """[items], by how much an item was likelier when it was taken than under the reference, in nats."""
    differences = torch.where(batch.mask[:, :, None], batch.logprobs - reference, 0.0)
    return differences.sum((1, 2)).double().cpu().numpy()


def logprobs_of(model: Model, batch: ItemBatch, size: int) -> Tensor:
    """Log-probs of all items under a policy, without gradient."""
    return scores_of(model, batch, size, lambda scores: scores.logprobs)


def scores_of(model: Model, batch: ItemBatch, size: int, which: Callable[[Scores], Tensor]) -> Tensor:
    """One of the scores of all items under a policy, without gradient."""
    parts = batch.every(model, size)
    padding = [batch.padding] * (model.most_passes(len(parts)) - len(parts))
    with torch.no_grad():
        found = [which(model.score(batch.inputs(part))) for part in (*parts, *padding)]
    return take(torch.cat(found[: len(parts)]), torch.argsort(torch.cat(parts)))


def explained_variance(share: PPOBatch) -> float:
    """The share of the returns' variance that the value function predicted at act time (this rank's items)."""
    variance = float(share.returns.var(unbiased=False))
    error = float((share.returns - share.values).var(unbiased=False))
    return 1.0 - error / variance if variance > 0 else 0.0


def moments_of(
    trajectory: Trajectory, count: int, moments: Callable[[Observation], np.ndarray | None]
) -> np.ndarray | None:
    """The observation moments of the first `count` sequences, a row each; None for policies that track none."""
    rows: dict[int, np.ndarray] = {}
    starts = np.cumsum(trajectory.lengths) - trajectory.lengths
    for length in np.unique(trajectory.lengths):
        alike = np.flatnonzero(trajectory.lengths == length)
        at = (starts[alike, None] + np.arange(length)).ravel()
        rows_of = slice(None) if len(alike) == len(starts) else at
        found = moments(map_obs(partial(by_step, rows=rows_of, count=len(alike)), trajectory.obs))
        if found is None:
            return None
        rows |= zip(alike.tolist(), found, strict=True)
    return np.array([rows[sequence] for sequence in range(len(starts))])[:count]


def by_step(array: Array, rows: Any, count: int) -> Array:
    """These rows [count * T, ...], sequence after sequence, as [T, count, ...]; only images are not copied."""
    found = array[rows].reshape(count, -1, *array.shape[1:]).swapaxes(0, 1)
    if found.ndim > 3:
        return found
    return found.contiguous() if is_tensor(found) else np.ascontiguousarray(found)
