"""Behaviour cloning: the learner of demonstrations instead of trajectories.

An item is one env step of a demonstration with the actions of the decision that would begin there (a chunk; what would
reach past the end does not count). Ranks own blocks of whole episodes and take the same steps.
"""

from __future__ import annotations

from pathlib import Path

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
    demos: Demonstrations | None = None

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
        steps = -(-sum(lengths) // self.algo.minibatch_size) * self.algo.epochs
        if self.algo.warmup_steps >= steps:
            raise ConfigError(
                f"sft.warmup_steps={self.algo.warmup_steps} is not less than the {steps} gradient steps of "
                f"sft.epochs={self.algo.epochs} over {sum(lengths):,} env steps; try sft.warmup_steps={steps // 10}"
            )
        mine = env_blocks(count, self.world_size)[self.rank]
        self.demos = Demonstrations(policy.spec, policy.horizon, sum(lengths[: mine.start]), sum(lengths))
        own = sum(lengths[mine.start : mine.stop])
        seen = self.demos.read((dataset[number] for number in mine), own, self.algo.cache)
        moments = [policy.observation_moments(map_obs(lambda array: array[:, None], obs)) for obs in seen]
        if moments[0] is not None:
            policy.merge_observation_moments(np.concatenate(self.collective.gather(np.concatenate(moments))))
        return self.demos.total

    def imitate(self, iteration: int, total: int) -> dict[str, float]:
        """One pass over all demonstrations."""
        demos, config, rows = self.demos, self.algo, []
        blocks = self._blocks()
        parts = list(minibatches(permutation(self.seed, iteration, 0, demos.total), config.minibatch_size))
        with self.store.updating(), self.computing.counted():
            for number, minibatch in enumerate(parts, iteration * len(parts)):
                factor = sft_factor(config, number, len(parts), total * len(parts))
                mine = torch.from_numpy(owned(minibatch, demos.first, len(demos)))
                passes = max((self.model.passes(len(owned(minibatch, *block))) for block in blocks), default=0)
                totals, norm = self.optimizer.exchange(self._gradient(mine, len(minibatch), passes, iteration))
                rows.append({"loss": float(totals[0]) / len(minibatch), "grad_norm": norm})
                check_finite(rows[-1], iteration, 0)
                self.optimizer.step(norm, factor)
            check_weights(self.optimizer, iteration)
        means = {f"train/{name}": float(np.mean([row[name] for row in rows])) for name in rows[0]}
        return means | {"train/lr": config.lr * factor}

    def _gradient(self, mine: Tensor, count: int, passes: int, iteration: int) -> Tensor:
        """Leave the gradient of this rank's items in the parameters; return the sum of their losses."""
        demos, sums = self.demos, torch.zeros(1, dtype=self.model.dtype, device=self.device)
        micro_batches = self.model.micro_batches(mine, passes)
        for number, (part, counts) in enumerate(micro_batches, 1):
            inputs = demos.batch(part)
            inputs |= {name: inputs[name].to(self.device) for name in ("actions", "mask")}
            losses = self.model.imitate(inputs, self._noise(part.numpy() + demos.first, iteration))
            loss = mean_of_items(losses, inputs["mask"]) * float(counts)
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

    def _blocks(self) -> list[tuple[int, int]]:
        """(first item, number of items) of every rank where all must run the network equally often: it is sharded."""
        if not self.optimizer.sharded:
            return []
        mine = np.array([[self.demos.first, len(self.demos)]])
        return [(int(row[0, 0]), int(row[0, 1])) for row in self.collective.gather(mine)]


def mean_of_items(losses: Tensor, mask: Tensor) -> Tensor:
    """losses [B, C, A], mask [B, C] -> the sum over items of the mean over an item's demonstrated numbers. Losses
    [B] are these means."""
    if losses.ndim == 1:
        return losses.sum()
    shown = mask[:, :, None].expand_as(losses)
    return (torch.where(shown, losses, 0.0).sum((1, 2)) / shown.sum((1, 2))).sum()
