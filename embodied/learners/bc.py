"""Behaviour cloning: the learner of demonstrations instead of trajectories.

An item is one env step of a demonstration with the actions of the decision that would begin there (a chunk; what would
reach past the end does not count). Ranks own blocks of whole episodes and take the same steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.algorithms.minibatches import minibatches, owned, permutation, sft_factor
from embodied.core import rng
from embodied.core.arrays import map_obs
from embodied.core.errors import ConfigError
from embodied.core.types import EnvSpec, env_blocks
from embodied.datasets import read_dataset
from embodied.learners.demonstrations import Demonstrations
from embodied.learners.update import check_finite, check_weights
from embodied.learners.worker import LearnerWorker
from embodied.policies.base import Policy


class ImitationLearner(LearnerWorker):
    demos: Any = None  # the Demonstrations, or what has their methods
    blocks: list[tuple[int, int]] = []  # noqa: RUF012  of all ranks

    def new_policy(self, spec: EnvSpec, start: Path | None) -> Policy:
        policy = super().new_policy(spec, start)
        if not self.algo.learn_deviation:
            for parameter in policy.deviations():
                parameter.requires_grad_(False)
        return policy

    def open_data(self) -> int:
        """Read the demonstrations and take their moments into the observation normaliser. -> how many items there are,
        over all ranks."""
        policy = self.policy
        dataset = read_dataset(self.algo.data, images=bool(policy.spec.images), names=self.algo.names)
        count = min(self.algo.episodes or len(dataset), len(dataset))
        lengths = [entry["length"] for entry in dataset.entries[:count]]
        self.check_warmup(sum(lengths), f"{sum(lengths):,} env steps")
        mine = env_blocks(count, self.world_size)[self.rank]
        self.demos = Demonstrations(policy.spec, policy.horizon, sum(lengths[: mine.start]), sum(lengths))
        own = sum(lengths[mine.start : mine.stop])
        seen = self.demos.read((dataset[number] for number in mine), own, self.algo.cache)
        moments = [policy.observation_moments(map_obs(lambda array: array[:, None], obs)) for obs in seen]
        if moments[0] is not None:
            policy.merge_observation_moments(np.concatenate(self.collective.gather(np.concatenate(moments))))
        self.blocks = self.blocks_of_ranks()
        return self.demos.total

    def blocks_of_ranks(self) -> list[tuple[int, int]]:
        """(first item, number of items) of every rank."""
        rows = self.collective.gather(np.array([[self.demos.first, len(self.demos)]]))
        return [(int(row[0, 0]), int(row[0, 1])) for row in rows]

    def check_warmup(self, items: int, described: str) -> None:
        """Refuse a learning rate that would climb all the time."""
        steps = -(-items // self.algo.minibatch_size) * self.algo.epochs
        if self.algo.warmup_steps >= steps:
            raise ConfigError(
                f"sft.warmup_steps={self.algo.warmup_steps} is not less than the {steps} gradient steps of "
                f"sft.epochs={self.algo.epochs} over {described}; try sft.warmup_steps={steps // 10}"
            )

    def imitate(self, iteration: int, total: int) -> dict[str, float]:
        """One pass over all demonstrations."""
        demos, config, rows = self.demos, self.algo, []
        parts = list(minibatches(permutation(self.seed, iteration, 0, demos.total), config.minibatch_size))
        with self.store.updating(), self.computing.counted():
            for number, minibatch in enumerate(parts, iteration * len(parts)):
                factor = sft_factor(config, number, len(parts), total * len(parts))
                mine = torch.from_numpy(owned(minibatch, demos.first, len(demos)))
                count, passes = self._count(minibatch), self._passes(minibatch)
                totals, norm = self.optimizer.exchange(self._gradient(mine, count, passes, iteration))
                rows.append({"loss": float(totals[0]) / count, "grad_norm": norm})
                check_finite(rows[-1], iteration, 0)
                self.optimizer.step(norm, factor)
            check_weights(self.optimizer, iteration)
        means = {f"train/{name}": float(np.mean([row[name] for row in rows])) for name in rows[0]}
        return means | {"train/lr": config.lr * factor}

    def _gradient(self, mine: Tensor, count: float, passes: int, iteration: int) -> Tensor:
        """Leave the gradient of this rank's items, divided by `count`, in the parameters; return the sum of their
        losses."""
        demos, sums = self.demos, torch.zeros(1, dtype=self.model.dtype, device=self.device)
        micro_batches = self._micro_batches(mine, passes)
        for number, (part, counts) in enumerate(micro_batches, 1):
            inputs = demos.batch(part)
            inputs |= {name: inputs[name].to(self.device) for name in ("actions", "mask")}
            losses = self.model.imitate(inputs, self._noise(part.numpy() + demos.first, iteration))
            loss = self._loss_sum(losses, inputs["mask"]) * float(counts)
            self.model.backward(loss / count, last=number == len(micro_batches))
            sums += loss.detach()
        return sums

    def _noise(self, items: np.ndarray, iteration: int) -> np.ndarray | None:
        """Keyed by item and pass over the data, so it does not depend on how many learners share them."""
        wanted = self.policy.imitation_noise()
        if wanted is None:
            return None
        draw = rng.normal if wanted.kind == "normal" else rng.uniform
        return draw(self.seed, "imitate", items, np.full(len(items), iteration), wanted.width)

    def close(self) -> None:
        if self.demos is not None:
            self.demos.close()
        super().close()

    # What a minibatch's loss is a mean of, and how a rank goes through its part

    def _count(self, minibatch: np.ndarray) -> float:
        """What the loss of a minibatch, over all ranks, is divided by."""
        return float(len(minibatch))

    def _loss_sum(self, losses: Tensor, mask: Tensor) -> Tensor:
        """The sum that is divided by it."""
        return mean_of_items(losses, mask)

    def _passes(self, minibatch: np.ndarray) -> int:
        """How often all ranks must run the network, where it is sharded."""
        if not self.optimizer.sharded:
            return 0
        return max(self.model.passes(len(owned(minibatch, *block))) for block in self.blocks)

    def _micro_batches(self, mine: Tensor, passes: int) -> list[tuple[Tensor, bool]]:
        """Items that go through the network at once, and whether they count: padding does not."""
        return self.model.micro_batches(mine, passes)


def mean_of_items(losses: Tensor, mask: Tensor) -> Tensor:
    """losses [B, C, A], mask [B, C] -> the sum over items of the mean over an item's demonstrated numbers. Losses
    [B] are these means."""
    if losses.ndim == 1:
        return losses.sum()
    shown = mask[:, :, None].expand_as(losses)
    return (torch.where(shown, losses, 0.0).sum((1, 2)) / shown.sum((1, 2))).sum()
