"""Behaviour cloning: the learner of demonstrations instead of trajectories.

An item is one env step of a demonstration with the actions of the decision that would begin there (a chunk; what would
reach past the end does not count). Ranks own blocks of whole episodes and take the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodied import rng
from embodied.algorithms.items import minibatches, owned, permutation
from embodied.algorithms.schedules import lr_factor
from embodied.arrays import join_rows, map_obs
from embodied.data import EnvSpec, Observation
from embodied.datasets import RecordedEpisode, read_dataset
from embodied.episodes import env_blocks
from embodied.learners.batch import take_items
from embodied.learners.update import check_finite, check_weights
from embodied.learners.worker import LearnerWorker
from embodied.policies.base import Policy


@dataclass(frozen=True)
class Demonstrations:
    """This rank's items; `first` is the number of its first one among all `total`."""

    obs: Observation  # tensors [items, ...]
    actions: Tensor  # [items, C, A]
    mask: Tensor  # bool [items, C]
    first: int
    total: int

    def __len__(self) -> int:
        return len(self.actions)


class ImitationLearner(LearnerWorker):
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
        dataset = read_dataset(self.algo.data, images=bool(policy.spec.images))
        count = min(self.algo.episodes or len(dataset), len(dataset))
        lengths = [entry["length"] for entry in dataset.entries[:count]]
        mine = env_blocks(count, self.world_size)[self.rank]
        episodes = [dataset[number] for number in mine]
        moments = [policy.observation_moments(with_axis(shown(episode, policy.spec))) for episode in episodes]
        if moments[0] is not None:
            policy.merge_observation_moments(np.concatenate(self.collective.gather(np.concatenate(moments))))
        parts = [chunks(episode.actions, policy.horizon) for episode in episodes]
        obs = join_rows([shown(episode, policy.spec) for episode in episodes])
        self.demos = Demonstrations(
            obs=map_obs(obs, torch.from_numpy, lambda texts: texts),
            actions=torch.from_numpy(np.concatenate([actions for actions, _ in parts])),
            mask=torch.from_numpy(np.concatenate([mask for _, mask in parts])),
            first=sum(lengths[: mine.start]),
            total=sum(lengths),
        )
        return self.demos.total

    def imitate(self, iteration: int, total: int) -> dict[str, float]:
        """One pass over all demonstrations."""
        demos, config, rows = self.demos, self.algo, []
        factor = lr_factor(config.lr_schedule, iteration / total)
        blocks = self._blocks()
        with self.store.updating(), self.computing.counted():
            for minibatch in minibatches(permutation(self.seed, iteration, 0, demos.total), config.minibatch_size):
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
            inputs = {"obs": take_items(demos.obs, part), "actions": demos.actions[part].to(self.device)}
            losses = self.model.imitate(inputs, self._noise(part.numpy() + demos.first, iteration))
            loss = mean_of_items(losses, demos.mask[part].to(self.device)) * float(counts)
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

    def _blocks(self) -> list[tuple[int, int]]:
        """(first item, number of items) of every rank where all must run the network equally often: it is sharded."""
        if not self.optimizer.sharded:
            return []
        mine = np.array([[self.demos.first, len(self.demos)]])
        return [(int(row[0, 0]), int(row[0, 1])) for row in self.collective.gather(mine)]


def mean_of_items(losses: Tensor, mask: Tensor) -> Tensor:
    """losses [B, C, A], mask [B, C] -> the sum over items of the mean over an item's demonstrated numbers."""
    shown = mask[:, :, None].expand_as(losses)
    return (torch.where(shown, losses, 0.0).sum((1, 2)) / shown.sum((1, 2))).sum()


def chunks(actions: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """[T, A] -> the `size` actions from each step on [T, size, A], and which of them there are [T, size]."""
    steps = np.arange(len(actions))[:, None] + np.arange(size)
    return actions[np.minimum(steps, len(actions) - 1)], steps < len(actions)


def shown(episode: RecordedEpisode, spec: EnvSpec) -> Observation:
    """What a policy of this env looks at."""
    obs: Observation = {"state": episode.obs["state"]} if spec.state_dim else {}
    if spec.images:
        obs["images"] = {camera: episode.obs["images"][camera] for camera in spec.images}
    if spec.instruction:
        obs["instruction"] = episode.obs["instruction"]
    return obs


def with_axis(obs: Observation) -> Observation:
    """[T, ...] -> [T, 1, ...]: as a rollout of one env row."""
    return map_obs(obs, lambda array: array[:, None], lambda texts: [[text] for text in texts])
