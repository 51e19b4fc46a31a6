"""What GRPO and its relatives learn from: whole episodes, each decision with the advantage of its episode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from embodied.algorithms.advantages import merge_moments, moments, normalize
from embodied.algorithms.config import GRPOConfig
from embodied.algorithms.groups import episode_weights, returns_to_go
from embodied.algorithms.losses import GRPOItems, Stats, grpo_loss_sum
from embodied.core.types import GroupBatch, Observation, PlayedEpisodes
from embodied.learners.batch import Batch, flatten_episodes, take
from embodied.learners.collective import Collective
from embodied.learners.model import Model
from embodied.learners.update import divergences, logprobs_of
from embodied.policies.base import Scores


@dataclass(frozen=True)
class GroupShare:
    """This rank's items of an iteration."""

    batch: Batch
    num_items: int  # over all ranks
    advantages: Tensor  # [items]
    weights: Tensor  # [items]
    about: dict[str, float]  # what there is to say of the data
    reference: Tensor | None = None  # [items, C, A]

    sums: ClassVar = ("policy_loss", "entropy", "reference_kl", "approx_kl", "clip_fraction", "dual_clip_fraction")

    def loss_sum(self, scores: Scores, part: Tensor, weight: float, config: GRPOConfig) -> tuple[Tensor, Stats]:
        """Of some items (`weight` 0: padding), and the parts of the loss that `sums` names."""
        items = GRPOItems(
            logprobs=take(self.batch.logprobs, part),
            advantages=take(self.advantages, part),
            mask=take(self.batch.mask, part),
            weights=weight * take(self.weights, part),
            reference=None if self.reference is None else take(self.reference, part),
        )
        return grpo_loss_sum(scores.logprobs, scores.entropy, items, config)

    def with_replay(self, known: dict[str, Tensor]) -> GroupShare:
        """With more inputs of its items."""
        return replace(self, batch=replace(self.batch, replay=self.batch.replay | known))

    def summary(self) -> dict[str, float]:
        return self.about


def prepare_groups(
    played: PlayedEpisodes,
    batch: GroupBatch,
    config: GRPOConfig,
    collective: Collective,
    dtype: torch.dtype,
    reference: Model | None = None,
    device: str = "cpu",
) -> GroupShare:
    """This rank's episodes as items; all ranks take part."""
    own = slice(batch.first, batch.last)
    mine = len(batch.episodes[own])
    counted = [lengths[:, 0] for lengths in collective.gather(played.lengths[:mine, None])]
    lengths = np.concatenate(counted)
    first = int(lengths[: batch.first].sum()) if mine else int(lengths.sum())  # nobody's items, where it has no part
    items = flatten_episodes(played, first, batch.version, device)
    advantages, weights = (
        np.repeat(numbers[own] if mine else np.zeros(1), played.lengths)
        for numbers in (batch.advantages, episode_weights(lengths, config.weighting))
    )
    summary = {"train/staleness": float((batch.version - played.versions).mean())}
    compared = None if reference is None else logprobs_of(reference, items, config.minibatch_size)
    if compared is not None and config.kl_in == "reward":
        scores = batch.scores[own] if mine else np.zeros(1)
        advantages, mean = penalised(scores, items, compared, played.lengths, mine, config.kl_coef, collective)
        summary["train/reference_kl"], compared = mean, None
    return GroupShare(
        batch=items,
        num_items=int(lengths.sum()),
        advantages=torch.from_numpy(advantages).to(device, dtype),
        weights=torch.from_numpy(weights).to(device, dtype),
        about=summary,
        reference=compared,
    )


def penalised(
    scores: np.ndarray,
    items: Batch,
    reference: Tensor,
    lengths: np.ndarray,
    mine: int,
    kl_coef: float,
    collective: Collective,
) -> tuple[np.ndarray, float]:
    """Advantages of decisions that pay for leaving the reference, compared with all decisions of the iteration, and the
    mean divergence of a decision; of the episodes here the first `mine` count."""
    away = divergences(items, reference)
    returns = returns_to_go(scores, away, lengths, kl_coef)
    cuts = np.cumsum(lengths)[:-1]
    rows = [
        np.concatenate([moments(part, np.ones(len(part))) for part in pair])
        for pair in zip(np.split(returns, cuts), np.split(away, cuts), strict=True)
    ]
    everywhere = np.concatenate(collective.gather(np.array(rows)[:mine]))  # episode order, however many ranks
    return normalize(returns, merge_moments(everywhere[:, :3])), merge_moments(everywhere[:, 3:]).mean


def moments_of(played: PlayedEpisodes, count: int, moments: Callable[[Observation], np.ndarray | None]):
    """The observation moments of the first `count` episodes, a row each; None for policies that track none."""
    rows, start = [], 0
    for length in played.lengths.tolist():
        rows_of = {name: played.obs[name] for name in ("state", "privileged") if name in played.obs}
        found = moments({name: part[start : start + length, None] for name, part in rows_of.items()})
        if found is None:
            return None
        rows.append(found)
        start += length
    return np.concatenate(rows)[:count]
