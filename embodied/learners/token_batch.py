"""The batch of a learner rank where the policy speaks: the tokens of whole conversations.

A token is an item, as losses see it, but conversations are the units that minibatches deal, in whole groups: a group's
conversations are neighbours, so that those that share a prompt pass through the network together. Only tokens that the
policy chose (`envs/text/worker.py` marks them) count in anything; what the env said is there to be read.
`trained_tokens` leaves out answers that were cut off, where algo.truncated asks for it; what a long answer pays is
decided with its score (`algorithms/groups.py`).

With PPO nobody predicts values while a conversation is held: engines know no value head. The learner asks the weights
that the update starts from, once, before any step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.algorithms.advantages import normalize, token_gae
from embodied.algorithms.config import AlgoConfig, GRPOConfig, PPOConfig
from embodied.algorithms.sft_config import SFTConfig
from embodied.core.types import BatchPart, Trajectory
from embodied.learners.config import LearnerConfig
from embodied.learners.model import Model
from embodied.learners.rollout_buffer import ItemBatch, own, permutation, take
from embodied.learners.train_batch import (
    GRPOBatch,
    PPOBatch,
    RankBatch,
    divergences,
    everywhere,
    logprobs_of,
    penalised_returns,
    scores_of,
    staleness,
)
from embodied.policies.base import Policy
from embodied.runtime.collective import Collective


@dataclass(frozen=True)
class Packing:
    """The rules by which conversations are dealt and pass through the network of a policy that speaks."""

    pack: Callable[..., list[list[int]]]  # as `Policy.pack`
    pack_tokens: int  # at once
    share_prompts: bool
    group_size: int
    max_tokens: int  # of an answer


def packing_of(policy: Policy, config: LearnerConfig, algo: AlgoConfig | SFTConfig) -> Packing | None:
    """None for a policy that does not speak, and for imitation, which has its own items."""
    if not policy.speaks or isinstance(algo, SFTConfig):
        return None
    return Packing(policy.pack, config.pack_tokens, config.share_prompts, algo.group_size, policy.config.max_tokens)


@dataclass(frozen=True)
class ConversationBatch(ItemBatch):
    """The tokens of a block of conversations as items; `first` is the number of its first conversation among those of
    all ranks."""

    lengths: np.ndarray  # int [R], tokens
    groups: np.ndarray  # int [R], which conversations may share a prompt
    of: Tensor  # int [items], which conversation of the block a token belongs to
    teaching: np.ndarray  # bool [R], whether any of its tokens counts
    packing: Packing

    def inputs(self, items: Tensor) -> dict:
        """The inputs of `Policy.forward` for these tokens, which are those of whole conversations."""
        numbers, lengths = (part.cpu() for part in torch.unique_consecutive(take(self.of, items), return_counts=True))
        tokens = {"actions": take(self.actions, items), "mask": take(self.mask, items)}
        return tokens | {"lengths": lengths, "groups": torch.from_numpy(self.groups)[numbers]}

    def owned(self, minibatch: np.ndarray) -> Tensor:
        """Local numbers of the conversations of a minibatch that are in this block."""
        local = minibatch - self.first
        return torch.from_numpy(local[(local >= 0) & (local < len(self.lengths))])

    def passes(self, model: Model, units: Tensor) -> int:
        """The number of times that the network runs for these conversations."""
        return len(self._packs(units[torch.from_numpy(self.teaching)[units]]))

    def micro_batches(self, model: Model, units: Tensor, passes: int) -> list[tuple[Tensor, bool]]:
        """Tokens of these conversations, pack by pack, and whether they count."""
        packs = [(pack, True) for pack in self._packs(units[torch.from_numpy(self.teaching)[units]])]
        return packs + [(self.padding, False)] * (passes - len(packs))

    def every(self, model: Model, size: int) -> list[Tensor]:
        """All tokens, pack by pack."""
        return self._packs(torch.arange(len(self.lengths)))

    @property
    def padding(self) -> Tensor:
        """Tokens of one conversation, for a pass that counts nothing."""
        return torch.arange(int(self.lengths[0]))

    def _packs(self, units: Tensor) -> list[Tensor]:
        """Tokens of these conversations, those of a pack together, in the order of conversations."""
        if not len(units):
            return []
        units, starts = np.sort(units.numpy()), np.cumsum(self.lengths) - self.lengths
        rows = [np.arange(starts[unit], starts[unit] + self.lengths[unit]) for unit in units]
        said = self.inputs(torch.from_numpy(np.concatenate(rows)))
        tokens, mask, *about = (said[name].cpu().numpy().ravel() for name in ("actions", "mask", "lengths", "groups"))
        packs = self.packing.pack(tokens, mask, *about, self.packing.pack_tokens)
        return [torch.from_numpy(np.concatenate([rows[number] for number in pack])) for pack in packs]


# What a rank learns from, by algorithm


@dataclass(frozen=True, kw_only=True)
class TokenBatch(RankBatch):
    """This rank's tokens of an iteration; `num_items` are the trained tokens of all ranks.

    All minibatches divide by one number, in proportion to their conversations: together they add up to the gradient of
    the batch, whichever conversations meet in one.
    """

    batch: ConversationBatch
    num_conversations: int  # of all ranks
    weight_sum: float  # of all ranks' tokens
    loss_count: float  # what the loss of the whole batch is divided by

    @property
    def num_units(self) -> int:
        """The number of units that minibatches deal, over all ranks: conversations."""
        return self.num_conversations

    def order(self, seed: int, iteration: int, epoch: int) -> np.ndarray:
        """The conversations of all ranks in the order in which an epoch takes them: groups are shuffled, not torn."""
        size = self.batch.packing.group_size
        groups = permutation(seed, iteration, epoch, self.num_conversations // size)
        return (groups[:, None] * size + np.arange(size)).ravel()

    def divisor(self, units: int) -> float:
        """The divisor of the loss of a minibatch of so many conversations."""
        return (self.loss_count or 1.0) * units / self.num_conversations

    def stats_divisor(self, units: int) -> float:
        """The divisor of the statistics of a minibatch of so many conversations."""
        return (self.weight_sum or 1.0) * units / self.num_conversations

    def known(self, part: Tensor, weight: float) -> dict[str, Any]:
        """The arguments of the loss for these tokens (`weight` 0: padding)."""
        return {**super().known(part, weight), "answers": take(self.batch.of, part)}


@dataclass(frozen=True, kw_only=True)
class ComparedTokens(TokenBatch, GRPOBatch):
    """Tokens that are judged by how their conversation did in its group."""


@dataclass(frozen=True, kw_only=True)
class JudgedTokens(TokenBatch, PPOBatch):
    """Tokens that are judged by values."""

    def summary(self) -> dict[str, float]:
        """Metrics of the data."""
        return self.about


# From trajectories to it


def build_token_batch(
    trajectory: Trajectory,
    part: BatchPart,
    config: PPOConfig | GRPOConfig,
    collective: Collective,
    dtype: torch.dtype,
    device: str,
    reference: Model | None,
    packing: Packing,
    model: Model | None = None,
) -> ComparedTokens | JudgedTokens:
    """This rank's conversations as tokens with their advantages; all ranks take part. `model` predicts the values of
    PPO."""
    mine, lengths = part.last - part.first, trajectory.lengths
    trained = trained_tokens(trajectory, config)
    counts = np.add.reduceat(trained, np.cumsum(lengths) - lengths, dtype=np.int64)
    everyone = np.concatenate([rows[:, 0] for rows in collective.gather(counts[:mine, None])])
    first = part.first if mine else len(part.ids)  # nobody's, where it has no part
    batch = conversations(trajectory, trained, first, part.version, device, packing)
    compared = None if reference is None else logprobs_of(reference, batch, 1)
    scores = part.scores[part.first : part.last] if mine and part.scores is not None else np.zeros(len(lengths))
    about = {}
    if everyone.any():
        counted = trained[: lengths[:mine].sum()]
        about = staleness(part.version - trajectory.versions[: len(counted)][counted], collective)
    away = None
    if compared is not None and config.kl_in == "reward":
        away, compared = divergences(batch, compared), None
    if isinstance(config, PPOConfig):
        kind, values = JudgedTokens, values_of(model, batch)
        found, more = judged(trajectory, trained, scores, values, away, mine, config, collective)
    else:
        kind, advantages = ComparedTokens, part.advantages[part.first : part.last] if mine else np.zeros(len(lengths))
        found, more = {"advantages": np.repeat(advantages, lengths)}, {}
        if away is not None:
            more, found["advantages"] = penalised_returns(trajectory, scores, away, mine, config, collective, trained)
    about |= more
    by_answer = config.weighting == "episode"
    each = 1 / np.maximum(counts, 1) if by_answer else np.ones(len(counts))
    found["weights"] = np.repeat(each, lengths) * trained
    weight_sum = float((everyone > 0).sum() if by_answer else everyone.sum())
    return kind(
        batch=batch,
        num_items=int(everyone.sum()),
        num_conversations=len(part.ids),
        weight_sum=weight_sum,
        loss_count=float(len(part.ids) * packing.max_tokens) if config.weighting == "constant" else weight_sum,
        reference=compared,
        episodes=batch.of if config.episode_mask != "none" else None,
        about=about,
        **{name: torch.from_numpy(numbers).to(device, dtype) for name, numbers in found.items()},
    )


def values_of(model: Model, batch: ConversationBatch) -> np.ndarray:
    """Float64 [K], what every token that counts was worth, before any step of the update."""
    return scores_of(model, batch, 1, lambda scores: scores.values).double().cpu().numpy()


def judged(
    trajectory: Trajectory,
    trained: np.ndarray,
    scores: np.ndarray,
    values: np.ndarray,
    away: np.ndarray | None,
    counted: int,
    config: PPOConfig,
    collective: Collective,
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Advantages, returns and values [K] of conversations with these scores [R], of which the first `counted` are this
    rank's own, and what to log. Tokens that left the reference so far pay for it.

    A turn's reward is earned by its last token. What the conversation's score has more or less than these rewards (an
    answer that was too long, or cut off) is earned by the last one of all.
    """
    lengths = trajectory.lengths
    rewards, about = np.where(trained, trajectory.rewards[:, 0], 0.0).astype(np.float64), {}
    earned = np.add.reduceat(rewards, np.cumsum(lengths) - lengths)
    of = np.repeat(np.arange(len(lengths)), lengths)
    last = np.flatnonzero(trained)[np.diff(of[trained], append=len(lengths)) > 0]
    rewards[last] += (scores - earned)[of[last]]
    mine = lengths[:counted]
    if away is not None:
        about["train/reference_kl"] = everywhere(away, mine, collective, trained).mean
        rewards = rewards - config.kl_coef * away
    advantages, returns = token_gae(rewards, values, trained, lengths, config.gamma, config.gae_lambda)
    spread, error = (everywhere(each, mine, collective, trained).m2 for each in (returns, returns - values))
    about["train/explained_variance"] = 1.0 - error / spread if spread else 0.0
    if config.normalize_advantages:
        advantages = normalize(advantages, everywhere(advantages, mine, collective, trained))
    return {"advantages": advantages, "returns": returns, "values": values}, about


def trained_tokens(trajectory: Trajectory, config: PPOConfig | GRPOConfig) -> np.ndarray:
    """Bool [K], tokens that count: the policy chose them, and their conversation is not left out for being cut off."""
    sampled = np.array(trajectory.mask[:, 0])
    if config.truncated == "mask":
        starts = np.cumsum(trajectory.lengths) - trajectory.lengths
        cut = np.logical_or.reduceat(trajectory.truncated[:, 0], starts)
        sampled &= ~np.repeat(cut, trajectory.lengths)
    return sampled


def conversations(
    trajectory: Trajectory, trained: np.ndarray, first: int, version: int, device: str, packing: Packing
) -> ConversationBatch:
    """The trajectory's tokens as items, of which these [K] are trained; `first` is the global number of the first
    conversation."""
    lengths = np.array(trajectory.lengths)
    return ConversationBatch(
        first=first,
        obs={},
        actions=own(trajectory.actions).to(device),
        logprobs=own(trajectory.logprobs).to(device),
        mask=torch.from_numpy(trained[:, None]).to(device),
        current=torch.from_numpy((trajectory.versions == version) & trained).to(device),
        replay={},
        lengths=lengths,
        groups=trajectory.ids // packing.group_size if packing.share_prompts else np.array(trajectory.ids),
        of=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(device),
        teaching=np.logical_or.reduceat(trained, np.cumsum(lengths) - lengths),
        packing=packing,
    )
