"""What GRPO and its relatives learn from: whole episodes, each decision with the advantage of its episode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from embodied.algorithms.config import GRPOConfig
from embodied.algorithms.groups import episode_weights
from embodied.algorithms.losses import GRPOItems, Stats, grpo_loss_sum
from embodied.data import GroupBatch, Observation, PlayedEpisodes
from embodied.learners.batch import Batch, flatten_episodes
from embodied.learners.collective import Collective
from embodied.learners.model import Model
from embodied.policies.base import Scores


@dataclass(frozen=True)
class GroupShare:
    """This rank's items of an iteration."""

    batch: Batch
    num_items: int  # over all ranks
    advantages: Tensor  # [items]
    weights: Tensor  # [items]
    staleness: float  # mean over this rank's items
    reference: Tensor | None = None  # [items, C, A]

    sums: ClassVar = ("policy_loss", "entropy", "reference_kl", "approx_kl", "clip_fraction", "dual_clip_fraction")

    def loss_sum(self, scores: Scores, part: Tensor, weight: float, config: GRPOConfig) -> tuple[Tensor, Stats]:
        """Of some items (`weight` 0: padding), and the parts of the loss that `sums` names."""
        items = GRPOItems(
            logprobs=self.batch.logprobs[part],
            advantages=self.advantages[part],
            mask=self.batch.mask[part],
            weights=weight * self.weights[part],
            reference=None if self.reference is None else self.reference[part],
        )
        return grpo_loss_sum(scores.logprobs, scores.entropy, items, config)

    def summary(self) -> dict[str, float]:
        return {"train/staleness": self.staleness}


def prepare_groups(
    played: PlayedEpisodes,
    batch: GroupBatch,
    config: GRPOConfig,
    collective: Collective,
    dtype: torch.dtype,
    reference: Model | None = None,
) -> GroupShare:
    """This rank's episodes as items; all ranks take part."""
    own = slice(batch.first, batch.last)
    mine = len(batch.episodes[own])
    counted = [lengths[:, 0] for lengths in collective.gather(played.lengths[:mine, None])]
    lengths = np.concatenate(counted)
    first = int(lengths[: batch.first].sum()) if mine else int(lengths.sum())  # nobody's items, where it has no part
    items = flatten_episodes(played, first, batch.version)
    advantages, weights = (
        torch.from_numpy(np.repeat(numbers[own] if mine else np.zeros(1), played.lengths)).to(dtype)
        for numbers in (batch.advantages, episode_weights(lengths, config.weighting))
    )
    return GroupShare(
        batch=items,
        num_items=int(lengths.sum()),
        advantages=advantages,
        weights=weights,
        staleness=float((batch.version - played.versions).mean()),
        reference=None if reference is None else logprobs_of(reference, items, config.minibatch_size),
    )


def logprobs_of(model: Model, items: Batch, size: int) -> Tensor:
    """Of all items under another policy, without gradient."""
    size = model.config.micro_batch_size or size
    with torch.no_grad():
        parts = [model.score(items.inputs(part)).logprobs for part in torch.arange(len(items)).split(size)]
    return torch.cat(parts)


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
