"""One gradient step from groups of episodes that come one after the other, while others are still being played.

Sums of gradients and statistics are divided once, by counts that are known after the last group. So the step is the one
that `update_policy` takes from the same groups, whatever the order in which they came and whichever rank had them.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from embodied.algorithms.config import GRPOConfig, PPOConfig
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.types import BatchEnd, BatchPart, Trajectory
from embodied.learners.model import Model, PolicyOptimizer, lr_factor
from embodied.learners.rollout_buffer import flatten
from embodied.learners.token_batch import Packing, build_token_batch
from embodied.learners.train_batch import GRPOBatch, PPOBatch, logprobs_of, moments_of
from embodied.learners.update import check_finite, check_weights, gradient, mismatch_numbers
from embodied.runtime.collective import Alone, Collective


class Accumulation:
    """Sums over the groups of one rank so far: of gradients, in the parameters, and of statistics."""

    def __init__(
        self,
        model: Model,
        config: PPOConfig | GRPOConfig,
        version: int,
        device: str,
        reference: Model | None = None,
        packing: Packing | None = None,
    ) -> None:
        """`packing`: of a policy that speaks, which learns from conversations."""
        self.model, self.config, self.reference = model, config, reference
        self.version, self.device, self.packing = version, device, packing
        own = model.policy.own_losses
        if own and config.weighting == "episode":
            raise ConfigError(
                f"pipeline.schedule=periodic divides all losses by one count, with algo.weighting=episode that of the "
                f"episodes, but {', '.join(own)} counts decisions; try algo.weighting=decision"
            )
        sums = GRPOBatch.SUMS
        if isinstance(config, PPOConfig):
            compared = reference is not None and config.kl_in == "loss"
            sums = (*PPOBatch.SUMS, "reference_kl") if compared else PPOBatch.SUMS
        self.names = (*sums, *own, "mismatch_k3")
        self.sums = torch.zeros(len(self.names), dtype=model.dtype, device=device)
        self.counts = torch.zeros(3, dtype=torch.float64, device=device)  # of losses, of statistics, and of episodes
        self.largest = torch.full((2,), -math.inf, dtype=model.dtype, device=device)  # gap and k3 of a decision
        self.ids, self.moments = np.zeros(0, np.int64), np.zeros(0)  # [R], and of each episode's observations

    def add(
        self,
        group: Trajectory,
        advantages: np.ndarray | None,
        scores: np.ndarray | None = None,
        is_padding: bool = False,
    ) -> None:
        """Learn from S episodes of a group with these advantages [S], or with these scores [S] and values. Padding
        belongs to another rank, which needs this rank to run a sharded network as often."""
        check_version(group, self.version)
        if self.packing is None:
            share = self._decisions(group, advantages)
            count = len(group.ids) if self.config.weighting == "episode" else share.num_items
            counts = [count, count]
        else:
            part = BatchPart(group.ids, 0, len(group.ids), self.version, scores, advantages)
            about = self.config, Alone(), self.model.dtype, self.device, self.reference, self.packing, self.model
            share = build_token_batch(group, part, *about)
            counts = [share.loss_count, share.weight_sum]
        units = torch.arange(0 if is_padding else share.num_units)
        sums, largest = gradient(self.model, self.config, share, units, 1)
        if is_padding:
            return
        self.sums += sums
        self.counts += torch.tensor([*counts, len(group.ids)], dtype=torch.float64, device=self.device)
        self.largest = torch.maximum(self.largest, largest)

    def _decisions(self, group: Trajectory, advantages: np.ndarray) -> GRPOBatch:
        """A group's decisions as items, which weigh 1, or all of an episode's together."""
        batch = flatten(group, 0, self.version, self.device)
        compared = None if self.reference is None else logprobs_of(self.reference, batch, len(batch))
        weights = np.ones(len(group.ids))
        if self.config.weighting == "episode":  # of every decision: that of its episode, divided among them
            weights = 1 / group.lengths
        tensors = {
            name: torch.from_numpy(np.repeat(each, group.lengths)).to(self.device, self.model.dtype)
            for name, each in (("advantages", advantages), ("weights", weights))
        }
        return GRPOBatch(batch=batch, num_items=len(batch), reference=compared, **tensors)

    def observe(self, group: Trajectory) -> None:
        """Keep the moments of a group's observations, if the policy tracks them."""
        found = moments_of(group, len(group.ids), self.model.policy.observation_moments)
        if found is not None:
            self.moments = np.concatenate([self.moments, found]) if len(self.ids) else found
            self.ids = np.concatenate([self.ids, group.ids])

    def step(self, optimizer: PolicyOptimizer, end: BatchEnd) -> dict[str, float]:
        """Divide what all ranks have summed up, and take the step. Returns numbers for the log; {} where no
        rank had a group."""
        count, counted, episodes = optimizer.collective.sum(self.counts).tolist()
        if not episodes:
            return {}
        totals, norm = optimizer.exchange(self.sums, count or 1.0)
        each = zip(self.names, totals.tolist(), strict=True)
        numbers = {name: total / (counted or 1.0) for name, total in each}
        numbers["grad_norm"] = norm
        check_finite(numbers, end.iteration, 0)
        mismatch = numbers.pop("mismatch_k3")
        factor = lr_factor(self.config.lr_schedule, end.iteration / end.total)
        optimizer.step(norm, factor)
        about = mismatch_numbers(mismatch, check_weights(optimizer, end.iteration, *self.largest.tolist()))
        about |= {"train/epochs": 1.0, "train/lr": self.config.lr * factor}
        ages = {"train/staleness": 0.0, "train/staleness_max": 0.0, "train/staleness_0": 1.0}  # `check_version`
        return {f"train/{name}": value for name, value in numbers.items()} | about | ages

    def merge_moments(self, collective: Collective) -> None:
        """Let the policy's statistics follow the observations of all ranks, in the order of episodes."""
        mine = [len(self.ids), *self.moments.shape[1:]]
        shape = next((found[1:] for found in collective.gather(np.array(mine)) if found[0]), None)
        if shape is None:  # it tracks none, or nothing came
            return
        ids = np.concatenate(collective.gather(self.ids))
        rows = np.concatenate(collective.gather(self.moments.reshape(len(self.ids), *shape)))
        self.model.policy.merge_observation_moments(rows[np.argsort(ids)])


def check_version(group: Trajectory, version: int) -> None:
    """Refuse a group that other weights played than those that learn from it."""
    if odd := {*group.versions[group.mask.any(axis=1)].tolist()} - {version}:
        raise EmbodiedError(
            f"episodes {group.ids[0]} to {group.ids[-1]} were played with version {min(odd)} of the weights, but "
            f"version {version} learns: pipeline.schedule=periodic learns from nothing else"
        )
