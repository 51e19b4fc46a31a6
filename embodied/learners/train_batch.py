"""The batch of one learner rank: `RolloutBuffer` receives pieces of rollouts and whole episodes, of which `build_batch`
makes items with advantages (`RankBatch`).

An item is a decision, in text a token. Minibatches consist of *samples*: items, or for language policies conversations,
of which those with a common prompt stay together (`group_size`). A rank has any set of sequences, from the units that
it received. Samples are numbered by their sequences' ids over all ranks, and statistics are computed over all ranks in
that order: neither the owner of a sequence nor the order of arrival changes the result.

PPO estimates advantages from values along a sequence; GRPO and its relatives compare whole episodes within groups. Only
the sampled tokens of a conversation count (`envs/text/text_worker.py` marks them). Its values are computed once, by the
weights at the start of the update, since engines have no value head.

Frozen parts of a policy encode pieces as they arrive, on learners with devices of their own during the rollout. Their
features do not depend on trained weights and are computed in fixed micro-batches, so the division into pieces cannot
change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from embodied.algorithms.advantages import Moments, gae, merge_moments, moments, normalize, returns_to_go, token_gae
from embodied.algorithms.config import AlgoConfig, PPOConfig
from embodied.algorithms.losses import LossItems, Stats, loss_sum, out_of_bounds
from embodied.core.arrays import (
    Observation,
    host,
    is_tensor,
    leaves,
    map_obs,
    on_cpu,
    room_for,
    take_rows,
    text_lists,
)
from embodied.core.errors import DeadlineExceeded
from embodied.core.rng import permutation
from embodied.core.types import RESTART, BatchEnd, ForLearner, Trajectory, Unit, join, map_decisions
from embodied.learners.model import FrozenFeatures, Model, Pass
from embodied.policies.base import Scores
from embodied.runtime import Channel, Timers
from embodied.runtime.collective import Collective
from embodied.runtime.device_memory import contiguous_tensor, take, to_device

OF_ITEMS = "logprobs mask current sequences advantages weights values returns reference proximal excluded".split()
REFERENCE = "reference_logprobs"  # in `Trajectory.replay`: [K, C, A], if a separate role has computed them


@dataclass(frozen=True, kw_only=True)
class RankBatch(LossItems):
    """This rank's items of an iteration: the tensors [items, ...] of the loss, and those of the network."""

    obs: Observation
    actions: Tensor
    current: Tensor  # bool [items]: sampled with the weights at the start of the update
    replay: dict[str, Tensor]
    sequences: Tensor  # int [items]: number of the item's episode or conversation, from 0
    numbers: np.ndarray  # int [samples], ascending: each sample's number over all ranks; -1: padding
    is_whole: bool = False  # the mask is True everywhere
    groups: np.ndarray | None = None  # int [samples], of conversations: equal for conversations with a common prompt
    group_size: int = 1  # samples that stay together in a minibatch
    # Over all ranks
    num_samples: int = 0
    num_items: int = 0  # counted items
    weight_sum: float = 0.0  # sum of their weights
    loss_count: float = 0.0  # divisor of the whole batch's loss
    # Targets of items, computed last
    advantages: Tensor | None = None
    weights: Tensor | None = None
    excluded: Tensor | None = None  # bool [items]: left out of the policy's loss
    metrics: dict[str, float] = field(default_factory=dict)  # metrics of the data

    def __len__(self) -> int:
        return len(self.mask)

    def with_targets(self, targets: Mapping[str, np.ndarray], model: Model) -> RankBatch:
        """The same batch with these targets of its items, as tensors."""
        tensors = to_device(targets, model.device)
        return replace(self, **{name: tensor.to(model.dtype) for name, tensor in tensors.items()})

    def select_loss_arrays(self, items: Tensor) -> RankBatch:
        """These items with the arrays of the loss, without the network's inputs."""
        index = items.to(self.mask.device, non_blocking=True)
        columns = {name: getattr(self, name) for name in OF_ITEMS}
        tensors = {name: take(tensor, index) for name, tensor in columns.items() if tensor is not None}
        return replace(self, obs={}, replay={}, **tensors)

    def select(self, items: Tensor) -> RankBatch:
        """These items with all their arrays."""
        replay = {name: take(tensor, items) for name, tensor in self.replay.items()}
        seen = {"obs": self.observed(items), "actions": take(self.actions, items), "replay": replay}
        return replace(self.select_loss_arrays(items), **seen)

    @property
    def own_samples(self) -> Tensor:
        """The counted samples; none if the rank only has a copy of another rank's."""
        return torch.from_numpy(np.flatnonzero(self.numbers >= 0))

    # Distributing

    def order(self, seed: int, iteration: int, epoch: int) -> np.ndarray:
        """The samples of all ranks in the order of an epoch: groups are shuffled as a whole."""
        groups = permutation(seed, iteration, epoch, self.num_samples // self.group_size)
        return (groups[:, None] * self.group_size + np.arange(self.group_size)).ravel()

    def split_own_samples(self, minibatches: Sequence[np.ndarray]) -> tuple[Tensor, ...]:
        """For each minibatch the local numbers of this rank's samples, on the batch's device."""
        owned = [indices_of_owned(minibatch, self.numbers) for minibatch in minibatches]
        samples = torch.from_numpy(np.concatenate(owned))
        device = self.mask.device
        if self.groups is None and all(is_tensor(array) and array.device == device for array in leaves(self.obs)):
            samples = samples.to(self.mask.device, non_blocking=True)
        return samples.split([len(of_minibatch) for of_minibatch in owned])

    def divisor(self, samples: int) -> float:
        """The divisor of the loss of a minibatch of so many samples. The minibatches' gradients sum to the gradient of
        the batch, for any division into minibatches."""
        return (self.loss_count or 1.0) * samples / self.num_samples

    def stats_divisor(self, samples: int) -> float:
        """The divisor of the statistics of a minibatch of so many samples."""
        return (self.weight_sum or 1.0) * samples / self.num_samples

    # Passing through the network

    def inputs(self, items: Tensor) -> dict:
        """The inputs of `Policy.forward` for these items: in text, all tokens of some conversations."""
        actions = take(self.actions, items)
        if self.groups is None:
            replay = {name: take(tensor, items) for name, tensor in self.replay.items()}
            return {"obs": self.observed(items), "actions": actions} | replay
        of = take(self.sequences, items).cpu()
        begins = torch.diff(of, prepend=of[:1] - 1) != 0
        if RESTART in self.obs:
            begins |= take(self.obs[RESTART], items).cpu()
        lengths = torch.diff(torch.nonzero(begins)[:, 0], append=torch.tensor([len(of)]))
        groups = torch.from_numpy(self.groups)[of[begins]]
        inputs = {"actions": actions, "mask": take(self.mask, items), "lengths": lengths, "groups": groups}
        if "picture" not in self.obs:
            return inputs
        return inputs | {"pictures": self.pictures(items)}

    def pictures(self, items: Tensor) -> list[str]:
        """The names of the pictures that these items show, one for each time."""
        return [name for name in take(self.obs["picture"], items) if name]

    def read_ahead(self, model: Model, following: Pass) -> None:
        """Let a thread begin to read a pass's pictures."""
        if len(following.items):
            model.policy.sight.read_ahead(self.pictures(following.items))

    def observed(self, items: Tensor) -> Observation:
        """The observations of these items, in the form for policies."""
        return text_lists(map_obs(lambda array: take(array, items), self.obs))

    def passes(self, model: Model, samples: Tensor, size: int | None = None) -> list[Pass]:
        """The micro-batches of these samples, and padding (`Model.passes`). `size`: the micro-batch size if no option
        sets it. If ranks divide sequences, some passes help with sequences of other ranks."""
        if self.groups is None:
            size = model.config.micro_batch_size or size or len(samples)
            micro_batches, padding = samples.split(size) if len(samples) else (), torch.zeros(1, dtype=torch.int64)
        else:
            micro_batches, padding = self._packs(model, samples), torch.nonzero(self.sequences.cpu() == 0)[:, 0]
        if model.table is not None:
            return model.table.passes(micro_batches, self.inputs, padding if model.config.shard else None)
        return model.passes(micro_batches, padding)

    def _packs(self, model: Model, samples: Tensor) -> list[Tensor]:
        """The tokens of these conversations in packs, in the order of conversations."""
        if not len(samples):
            return []
        begins = np.cumsum(np.bincount(self.sequences.cpu(), minlength=len(self.numbers) + 1))
        numbers = np.sort(samples.numpy())
        rows = [np.arange(begins[sample - 1] if sample else 0, begins[sample]) for sample in numbers]
        inputs = self.inputs(torch.from_numpy(np.concatenate(rows)))
        told = (inputs[name].cpu().numpy().ravel() for name in ("actions", "mask"))
        lengths = np.array([len(row) for row in rows])
        packs = model.policy.pack(*told, lengths, self.groups[numbers], model.pack_tokens)
        return [torch.from_numpy(np.concatenate([rows[number] for number in pack])) for pack in packs]

    # Learning

    def teaching(self, samples: Tensor) -> Tensor:
        """The samples with a counted item; some conversations have none."""
        if self.groups is None:
            return samples
        return samples[torch.from_numpy(np.bincount(self.sequences.cpu(), self.mask[:, 0].cpu()) > 0)[samples]]

    def loss_sum(self, scores: Scores, weight: float, config: AlgoConfig) -> tuple[Tensor, Stats]:
        """The loss of all items (`weight` 0: padding), and its parts."""
        mask = None if self.is_whole else self.mask
        mask = mask if self.excluded is None else self.mask & ~self.excluded[:, None]
        items = replace(self, mask=mask, weights=weight * self.weights)
        return loss_sum(scores.logprobs, scores.entropy, scores.values, items, config)

    def corrected(self, model: Model, config: AlgoConfig) -> RankBatch:
        """The same batch with log-probs recomputed by the weights at the start of the update: for stale items, or for
        an engine whose log-probs differ numerically."""
        proximal = logprobs_of(model, self, config)
        excluded = None
        if config.episode_mask != "none":
            excluded = out_of_bounds(proximal, self.logprobs, self.mask, self.sequences, config)
        return replace(self, proximal=proximal if config.decoupled else None, excluded=excluded)

    def rescored(self, model: Model, config: AlgoConfig, collective: Collective) -> RankBatch:
        """The same batch with the learner's log-probs in place of those of acting, for decisions of the weights at the
        start of the update. The gap between both stays in the metrics."""
        scored = logprobs_of(model, self, config)
        apart = torch.where(self.mask[:, :, None], scored - self.logprobs, 0.0).abs().amax((1, 2))
        gap = torch.where(self.current, apart, 0.0).max() if len(self) else scored.new_zeros(())
        largest = max(float(row[0]) for row in collective.gather(np.array([float(gap)])))
        logprobs = torch.where(self.current[:, None, None], scored, self.logprobs)
        return replace(self, logprobs=logprobs, metrics=self.metrics | {"train/logprob_gap": largest})

    @property
    def num_masked(self) -> Tensor:
        """The number [1] of this rank's items that are left out of the policy's loss."""
        if self.excluded is None or not len(self.own_samples):
            return self.mask.new_zeros(1, dtype=torch.float64)
        return (self.excluded & self.mask.any(dim=1)).sum().double().view(1)


def indices_of_owned(minibatch: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The indices in `numbers` (ascending) of a minibatch's samples, in the minibatch's order, without other ranks'
    samples."""
    at = np.minimum(np.searchsorted(numbers, minibatch), len(numbers) - 1)
    return at[numbers[at] == minibatch]


def samples_per_step(config: AlgoConfig, samples: int) -> int:
    """The samples of a minibatch, given the samples of an iteration."""
    return min(config.minibatch_size or samples, samples)


class AllRanks:
    """The sequences of all ranks, in the order of their ids."""

    def __init__(self, unit: Unit, collective: Collective) -> None:
        """`unit` has this rank's sequences."""
        self.collective, self.num_own = collective, 0 if unit.is_padding else len(unit.ids)
        ids = np.concatenate(collective.gather(unit.ids[: self.num_own]))
        self.order = np.argsort(ids)
        self.places = np.searchsorted(ids[self.order], unit.ids)  # indices of this rank's sequences among all

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """The rows of all sequences, given this rank's rows."""
        return np.concatenate(self.collective.gather(rows[: self.num_own]))[self.order]

    def moments(self, numbers: np.ndarray, lengths: np.ndarray, exists: np.ndarray) -> Moments:
        """Moments over all sequences of the numbers [K] where `exists` (bool [K]). `lengths` are the lengths of this
        rank's sequences."""
        cuts = np.cumsum(lengths)[:-1]
        sequences = zip(np.split(numbers, cuts), np.split(exists.astype(numbers.dtype), cuts), strict=True)
        return merge_moments(self.gather(np.array([moments(*sequence) for sequence in sequences])))


# From trajectories to a rank's batch


def build_batch(
    trajectory: Trajectory,
    unit: Unit,
    version: int,
    config: AlgoConfig,
    collective: Collective,
    model: Model,
    reference: Model | None = None,
) -> RankBatch:
    """The sequences of this rank's `unit` as items with their advantages, before an update from this version of the
    weights; all ranks take part."""
    speaks, lengths, all_ranks = model.policy.speaks, trajectory.lengths, AllRanks(unit, collective)
    trained = trained_items(trajectory, config, speaks)
    # Of every sequence: samples, counted items, and episodes or conversations with counted items
    of, sequence = episodes_within(trajectory), np.repeat(np.arange(len(lengths)), lengths)
    sizes = np.bincount(of, trained)
    begins = np.flatnonzero(np.diff(of, prepend=-1))
    samples = np.ones_like(lengths) if speaks else lengths
    counts = np.stack([samples, np.bincount(sequence, trained), np.bincount(sequence[begins], sizes > 0)], axis=1)
    total = all_ranks.gather(counts)
    num_samples, num_items, episodes = total.sum(axis=0).tolist()
    by_episode = config.weighting == "episode"
    weight_sum = episodes if by_episode else num_items
    batch = replace(
        items_of(trajectory, config, model, trained, version),
        numbers=sample_numbers(samples, total[:, 0].astype(np.int64), all_ranks),
        num_samples=int(num_samples),
        num_items=int(num_items),
        weight_sum=weight_sum,
        loss_count=num_samples * model.policy.config.max_tokens if config.weighting == "constant" else weight_sum,
    )
    # Log-probs of the reference, and values of a language policy
    metrics, divergence = {}, None
    if num_items:
        metrics = staleness(version - trajectory.versions[trained & (all_ranks.num_own > 0)], collective)
    compared = None if reference is None else logprobs_of(reference, batch, config)
    if REFERENCE in trajectory.replay:
        compared = contiguous_tensor(trajectory.replay[REFERENCE]).to(model.device)
    if compared is not None and config.kl_in == "reward":
        divergence, compared = divergences(batch, compared), None
    worth: dict[str, np.ndarray]
    if isinstance(config, PPOConfig):
        trajectory = estimated_on_host(trajectory)
        values = trajectory.values
        if values is None:
            values = scores_of(model, batch, 1, lambda scores: scores.values).double().cpu().numpy()
        worth, more = estimate_advantages(trajectory, unit, values, trained, divergence, config, all_ranks)
    else:
        worth, more = compared_in_groups(trajectory, unit, trained, divergence, config, all_ranks)
    # The targets of items, as tensors
    worth["weights"] = trained / np.maximum(sizes, 1)[of] if by_episode else trained
    if isinstance(config, PPOConfig) and not speaks:
        more["train/explained_variance"] = explained_variance(worth["returns"], worth["values"], model.dtype)
    return replace(batch.with_targets(worth, model), reference=compared, metrics=metrics | more)


def items_of(
    trajectory: Trajectory, config: AlgoConfig, model: Model, trained: np.ndarray, version: int = -1
) -> RankBatch:
    """The decisions of a trajectory as items of a single rank; `trained` marks counted ones."""
    speaks, lengths = model.policy.speaks, trajectory.lengths
    mask, current = host(trajectory.mask) & trained[:, None], (trajectory.versions == version) & trained
    arrays = {"actions": trajectory.actions, "logprobs": trajectory.logprobs, "mask": mask, "current": current}
    batch = RankBatch(
        obs=map_obs(contiguous_tensor, trajectory.obs),
        replay={name: contiguous_tensor(array) for name, array in trajectory.replay.items() if name != REFERENCE},
        is_whole=bool(mask.all()),
        numbers=np.arange(len(lengths) if speaks else len(trained)),
        **to_device(arrays | {"sequences": episodes_within(trajectory)}, model.device),
    )
    if not speaks:
        return batch
    groups = trajectory.ids // config.group_size if model.config.share_prompts else trajectory.ids
    return replace(batch, groups=np.array(groups), group_size=config.group_size)


def sample_numbers(samples: np.ndarray, of_all: np.ndarray, all_ranks: AllRanks) -> np.ndarray:
    """The numbers of this rank's samples, from the number of samples of its own sequences and of all sequences. Of
    sequences with 2, 1 and 3 samples, a rank with the first and the last has samples 0, 1, 3, 4, 5."""
    if not all_ranks.num_own:
        return np.full(samples.sum(), -1)
    first = (np.cumsum(of_all) - of_all)[all_ranks.places] - (np.cumsum(samples) - samples)
    return np.arange(samples.sum()) + np.repeat(first, samples)


def trained_items(trajectory: Trajectory, config: AlgoConfig, speaks: bool) -> np.ndarray:
    """Bool [K]: trained decisions. In text they are sampled tokens, with algo.truncated=mask of conversations that are
    not truncated."""
    if not speaks:
        return np.ones(len(trajectory.versions), bool)
    sampled = np.array(trajectory.mask[:, 0])
    if config.truncated == "mask":
        starts = np.cumsum(trajectory.lengths) - trajectory.lengths
        cut = np.logical_or.reduceat(trajectory.truncated[:, 0], starts)
        sampled &= ~np.repeat(cut, trajectory.lengths)
    return sampled


def episodes_within(trajectory: Trajectory) -> np.ndarray:
    """Int [K]: the number of each decision's episode, counted from 0 over all sequences.

    Two sequences of episodes 7, 7, 9 and 9, 9: 0, 0, 1 and 2, 2.
    """
    begins = np.zeros(len(trajectory.episodes), bool)
    begins[1:] = np.diff(trajectory.episodes) != 0
    begins[np.cumsum(trajectory.lengths)[:-1]] = True
    return np.cumsum(begins)


def staleness(ages: np.ndarray, collective: Collective) -> dict[str, float]:
    """The staleness in versions of all ranks' decisions (`ages` [K] on this rank): the mean, the largest, and the share
    of each age."""
    rows = np.stack(np.unique(ages, return_counts=True), axis=1)
    known_ages, counts = np.concatenate(collective.gather(rows)).T
    shares = {f"train/staleness_{age}": counts[known_ages == age].sum() / counts.sum() for age in np.unique(known_ages)}
    overall = {"train/staleness": (known_ages * counts).sum() / counts.sum(), "train/staleness_max": known_ages.max()}
    return {name: float(number) for name, number in (overall | shares).items()}


# Advantages


def estimated_on_host(trajectory: Trajectory) -> Trajectory:
    """The trajectory with rewards and values as numpy, copied from a device in one transfer."""
    names = [name for name in ("rewards", "values", "next_values") if getattr(trajectory, name) is not None]
    return replace(trajectory, **dict(zip(names, on_cpu([getattr(trajectory, name) for name in names]), strict=True)))


def estimate_advantages(
    trajectory: Trajectory,
    unit: Unit,
    values: np.ndarray,
    trained: np.ndarray,
    divergence: np.ndarray | None,
    config: PPOConfig,
    all_ranks: AllRanks,
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Advantages, returns and values [K], and numbers for the log. The `divergence` [K] from the reference is
    subtracted from a decision's first reward."""
    lengths, metrics, speaks = trajectory.lengths, {}, unit.scores is not None
    rewards = (
        conversation_rewards(trajectory, unit.scores, trained) if speaks else np.array(trajectory.rewards, np.float64)
    )
    if divergence is not None:
        rewards[:, 0] -= config.kl_coef * divergence
        metrics["train/reference_kl"] = all_ranks.moments(divergence, lengths, trained).mean
    if speaks:
        advantages, returns = token_gae(rewards[:, 0], values, trained, lengths, config.gamma, config.gae_lambda)
        spread, error = (all_ranks.moments(array, lengths, trained).m2 for array in (returns, returns - values))
        metrics["train/explained_variance"] = 1.0 - error / spread if spread else 0.0
    else:
        advantages, returns = gae_of(trajectory, rewards, config)
    if config.normalize_advantages:
        advantages = normalize(advantages, all_ranks.moments(advantages, lengths, trained))
    if speaks and trajectory.values is not None:  # values of a critic, which trains itself
        return {"advantages": advantages}, metrics
    return {"advantages": advantages, "returns": returns, "values": values}, metrics


def conversation_rewards(trajectory: Trajectory, scores: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """Rewards [K, 1] of conversations with these scores [R]. A turn's reward is on its last token. The difference
    between the score and the sum of rewards (penalties for long or truncated answers) is on the conversation's last
    token."""
    lengths = trajectory.lengths
    rewards = np.where(trained, trajectory.rewards[:, 0], 0.0).astype(np.float64)
    paid = np.add.reduceat(rewards, np.cumsum(lengths) - lengths)
    of = np.repeat(np.arange(len(lengths)), lengths)
    last = np.flatnonzero(trained)[np.diff(of[trained], append=len(lengths)) > 0]
    rewards[last] += (scores - paid)[of[last]]
    return rewards[:, None]


def gae_of(trajectory: Trajectory, rewards: np.ndarray, config: PPOConfig) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns [K]; shorter sequences are padded with masked decisions."""
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


def compared_in_groups(
    trajectory: Trajectory,
    unit: Unit,
    trained: np.ndarray,
    divergence: np.ndarray | None,
    config: AlgoConfig,
    all_ranks: AllRanks,
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Advantages [K], and numbers for the log. With a `divergence` [K] from the reference, scores minus the following
    divergences are compared, over all decisions of the iteration."""
    lengths = trajectory.lengths
    if divergence is None:
        return {"advantages": np.repeat(unit.advantages, lengths)}, {}
    returns = returns_to_go(unit.scores, divergence, lengths, config.kl_coef)
    metrics = {"train/reference_kl": all_ranks.moments(divergence, lengths, trained).mean}
    return {"advantages": normalize(returns, all_ranks.moments(returns, lengths, trained))}, metrics


def explained_variance(returns: np.ndarray, values: np.ndarray, dtype: torch.dtype) -> float:
    """The share of the returns' variance that the value function predicted at act time (this rank's items)."""
    exact, predicted = (contiguous_tensor(array).to(dtype) for array in (returns, values))
    variance, error = (float(tensor.var(unbiased=False)) for tensor in (exact, exact - predicted))
    return 1.0 - error / variance if variance > 0 else 0.0


# Scores and features of a whole batch


def divergences(batch: RankBatch, reference: Tensor) -> np.ndarray:
    """[items]: the log-prob of an item when it was sampled minus its log-prob under the reference, in nats."""
    differences = torch.where(batch.mask[:, :, None], batch.logprobs - reference, 0.0)
    return differences.sum((1, 2)).double().cpu().numpy()


def logprobs_of(model: Model, batch: RankBatch, config: AlgoConfig) -> Tensor:
    """Log-probs of all items under a policy, without gradient."""
    return scores_of(model, batch, samples_per_step(config, len(batch)), lambda scores: scores.logprobs)


def scores_of(model: Model, batch: RankBatch, size: int, which: Callable[[Scores], Tensor]) -> Tensor:
    """One of the scores of all items under a policy, without gradient."""
    with torch.no_grad():
        passes = batch.passes(model, torch.arange(len(batch.numbers)), size)
        scored = [(one_pass, which(model.score(one_pass.inputs(batch.inputs)))) for one_pass in passes]
    counted = [(one_pass.items, scores) for one_pass, scores in scored if one_pass.counts and one_pass.is_own]
    items, scores = map(torch.cat, zip(*counted, strict=True))
    return take(scores, torch.argsort(items))


def frozen_features(model: Model, batch: RankBatch, size: int) -> dict[str, Tensor]:
    """Computes the frozen features of the items' observations; empty if they do not fit into memory."""
    features = FrozenFeatures(model, len(batch))
    for items in torch.arange(len(batch)).split(model.config.micro_batch_size or size):
        features.add(batch.observed(items), items)
        if not features.wanted:
            break
    return features.kept


NO_DEADLINE = float("inf")  # episodes may be long; if the run fails, the channel closes


class RolloutBuffer:
    """The received pieces of one batch."""

    def __init__(self, batch_size: int = 1, horizon: int = 0) -> None:
        """`batch_size`: approximate number of items encoded together; `horizon`: decisions of a rollout in pieces."""
        self.horizon = horizon
        self.batch_size = batch_size
        self.whole: dict[str, Trajectory] = {}  # by source: its trajectory, or memory for it
        self.have: dict[str, int] = {}  # by source: number of received decisions
        self.seen: dict[str, int] = {}  # by source: number of encoded decisions
        self.features: FrozenFeatures | None = None
        self.rows = np.empty(0, np.int64)  # env rows whose observations are encoded, sorted
        self.end: BatchEnd | None = None  # set when no more units follow

    def add(self, piece: Trajectory) -> None:
        source, end = piece.source, piece.first + int(piece.lengths.max())
        if piece.first == 0:
            self.whole[source], self.seen[source] = piece if piece.last else room_for_all(piece, self.horizon), 0
        if not piece.last or piece.first:
            whole = self.whole[source]
            rows = item_numbers(range(len(whole.ids)), range(piece.first, end), self.horizon)
            map_decisions(lambda room, array: room.__setitem__(rows, array), whole, piece)
        self.have[source] = end

    def has_all_of(self, sources: Iterable[str]) -> bool:
        """True if all data of these sources have arrived."""
        return all(s in self.whole and self.have[s] == self.whole[s].lengths.max() for s in sources)

    def take(self, sources: Iterable[str]) -> Trajectory:
        """Remove and return the joined trajectories of these sources, with the columns of `replay` that all have."""
        rollouts = [self.whole.pop(source) for source in sources]
        names = {*rollouts[0].replay}.intersection(*(rollout.replay for rollout in rollouts))
        return join([replace(rollout, replay={name: rollout.replay[name] for name in names}) for rollout in rollouts])

    def units(
        self, channel: Channel, batch: int, timers: Timers, piece_came: Callable[[str], None] = lambda source: None
    ) -> Iterator[Unit]:
        """Yields each unit of a batch when all its data have arrived, until the batch's `end`. `piece_came` is called
        with the source of every piece. Remaining pieces are dropped: their sims died before sending all of them."""
        expected: list[Unit] = []
        while self.end is None or expected:
            with timers.measure("wait"):
                item: ForLearner = channel.get(key=batch, timeout_s=None if expected else NO_DEADLINE)
            if isinstance(item, BatchEnd):
                self.end = item
            elif isinstance(item, Unit):
                expected.append(item)
            else:
                self.add(item)
                piece_came(item.source)
            for unit in [unit for unit in expected if self.has_all_of(unit.sources)]:
                expected.remove(unit)
                yield unit
        with suppress(DeadlineExceeded):
            while True:
                channel.get(key=batch, timeout_s=0.0)

    def encode(self, model: Model, rows: np.ndarray) -> None:
        """Encode all complete micro-batches of the rank's env rows `rows` (sorted)."""
        for source, whole in self.whole.items():
            horizon = int(whole.lengths[0])
            if self.features is None:
                self.rows, self.features = rows, FrozenFeatures(model, len(rows) * horizon)
            size = max(1, self.batch_size // len(whole.ids))
            while self.features.wanted and self.seen[source] < horizon:
                decisions = range(self.seen[source], min(self.seen[source] + size, horizon))
                if decisions.stop > self.have[source]:
                    break
                obs = take_rows(whole.obs, item_numbers(range(len(whole.ids)), decisions, horizon))
                items = item_numbers(np.searchsorted(self.rows, whole.ids), decisions, horizon)
                self.features.add(text_lists(map_obs(contiguous_tensor, obs)), torch.from_numpy(items))
                self.seen[source] = decisions.stop

    def encoded(self, ids: np.ndarray) -> dict[str, Tensor]:
        """Frozen features of these rows; rows of a dead sim worker are missing."""
        assert self.features is not None
        if len(ids) == len(self.rows):
            return self.features.kept
        horizon = self.features.num_items // len(self.rows)
        items = torch.from_numpy(item_numbers(np.searchsorted(self.rows, ids), range(horizon), horizon))
        return {name: tensor[items] for name, tensor in self.features.kept.items()}


def item_numbers(rows: Sequence[int] | np.ndarray, decisions: range, horizon: int) -> np.ndarray:
    """The items of these decisions and rows, if every row has `horizon` decisions."""
    return (np.array(rows)[:, None] * horizon + np.array(decisions)).ravel()


def room_for_all(piece: Trajectory, horizon: int) -> Trajectory:
    """Memory for a rollout that begins with this piece."""
    count = len(piece.ids) * horizon
    room = map_decisions(lambda array: room_for(array, count), piece)
    return replace(piece, lengths=np.full_like(piece.lengths, horizon), last=True, **room)
