"""Behaviour cloning: the learner of demonstrations instead of trajectories.

An item is one env step of a demonstration and the chunk of actions from there on; actions after the end do not count.
Ranks own blocks of whole episodes and take the same steps. Images are decoded once into an unnamed file, which
disappears with the process; states and actions are small and stay in memory.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.algorithms.sft_config import SFTConfig
from embodied.core import rng
from embodied.core.arrays import map_obs
from embodied.core.errors import ConfigError
from embodied.core.types import EnvSpec, Observation, env_blocks
from embodied.datasets import RecordedEpisode, read_dataset
from embodied.learners.model import lr_factor
from embodied.learners.train_batch import owned
from embodied.learners.update import check_finite, check_weights
from embodied.learners.worker import LearnerWorker
from embodied.policies.base import Policy


class ImitationLearner(LearnerWorker):
    demos: Any = None  # the Demonstrations, or an object with their methods
    blocks: list[np.ndarray] = []  # noqa: RUF012  items of all ranks

    def new_policy(self, spec: EnvSpec, start: Path | None) -> Policy:
        policy = super().new_policy(spec, start)
        if not self.algo.learn_deviation:
            for parameter in policy.deviations():
                parameter.requires_grad_(False)
        return policy

    def open_data(self) -> int:
        """Read the demonstrations; a policy without trained weights takes their moments into its observation
        normaliser. Returns the number of items of all ranks."""
        policy = self.policy
        dataset = read_dataset(self.algo.data, images=bool(policy.spec.images), names=self.algo.names)
        count = min(self.algo.episodes or len(dataset), len(dataset))
        lengths = [entry["length"] for entry in dataset.entries[:count]]
        block = env_blocks(count, self.world_size)[self.rank]
        self.demos = Demonstrations(policy.spec, policy.horizon, sum(lengths[: block.start]), sum(lengths))
        own = sum(lengths[block.start : block.stop])
        seen = self.demos.read((dataset[number] for number in block), own, self.algo.cache)
        moments = [policy.observation_moments(map_obs(lambda array: array[:, None], obs)) for obs in seen]
        if moments[0] is not None and not self.started:
            policy.merge_observation_moments(np.concatenate(self.collective.gather(np.concatenate(moments))))
        self.blocks = self.blocks_of_ranks()
        return self.demos.total

    def blocks_of_ranks(self) -> list[np.ndarray]:
        """The numbers of every rank's items."""
        rows = self.collective.gather(np.array([[self.demos.first, len(self.demos)]]))
        return [np.arange(first, first + count) for ((first, count),) in (row.tolist() for row in rows)]

    def imitate(self, iteration: int, total: int) -> dict[str, float]:
        """A pass over all demonstrations, or an iteration's part of one."""
        self._restore_gpus()
        demos, config, rows = self.demos, self.algo, []
        epoch, minibatches = config.minibatches(demos.total, iteration)
        parts = rng.minibatches(rng.permutation(self.seed, epoch, 0, demos.total), config.minibatch_size)
        every = total * config.epochs // config.iterations(demos.total) * len(parts)
        with self.store.updating(), self.computing.measured():
            for at in minibatches:
                minibatch, factor = parts[at], sft_factor(config, epoch * len(parts) + at, len(parts), every)
                items = torch.from_numpy(owned(minibatch, self.blocks[self.rank]))
                count, passes = self._count(minibatch), self._passes(minibatch)
                totals, norm = self.optimizer.exchange(self._gradient(items, count, passes, epoch))
                *losses, grad_norm = torch.cat([(totals / count).double(), norm.view(1)]).tolist()
                rows.append({**dict(zip(self._losses, losses, strict=True)), "grad_norm": grad_norm})
                check_finite(rows[-1], iteration, 0)
                self.optimizer.step(norm, factor)
                rows[-1] |= self.policy.end_step(self.collective.sum)
            check_weights(self.collective, iteration, bool(self.optimizer.broken()))
        means = {f"train/{name}": float(np.mean([row[name] for row in rows])) for name in rows[0]}
        return means | {"train/lr": config.lr * factor}

    def _gradient(self, items: Tensor, count: float, passes: int, iteration: int) -> Tensor:
        """Leave the gradient of this rank's items, divided by `count`, in the parameters; return the sum of their
        losses."""
        demos, sums = self.demos, torch.zeros(len(self._losses), dtype=self.model.dtype, device=self.device)
        micro_batches = [(items[part], True) for part in self._parts(items.numpy() + demos.first)]
        micro_batches += [(torch.zeros(1, dtype=torch.int64), False)] * (passes - len(micro_batches))  # padding
        for number, (part, counts) in enumerate(micro_batches, 1):
            inputs = demos.batch(part)
            inputs |= {name: inputs[name].to(self.device) for name in ("actions", "mask")}
            losses, beside = self.model.imitate(inputs, self._noise(part.numpy() + demos.first, iteration))
            parts = [self._loss_sum(losses, inputs["mask"]), *([] if beside is None else [beside.sum()])]
            values = torch.stack(parts) * float(counts)
            self.model.backward(values.sum() / count, last=number == len(micro_batches))
            sums += values.detach()
        return sums

    @property
    def _losses(self) -> list[str]:
        """The names of the summed losses in the metrics: the actions' loss, and the policy's own."""
        return ["loss", *([self.policy.auxiliary_loss] if self.policy.auxiliary_loss else [])]

    def _noise(self, items: np.ndarray, iteration: int) -> np.ndarray | None:
        """The noise of these items, keyed by item and pass over the data, so it does not depend on the number of
        learners."""
        wanted = self.policy.imitation_noise()
        if wanted is None:
            return None
        draw = rng.normal if wanted.kind == "normal" else rng.uniform
        return draw(self.seed, "imitate", items, np.full(len(items), iteration), wanted.width)

    def close(self) -> None:
        if self.demos is not None:
            self.demos.close()
        super().close()

    # The divisor of a minibatch's loss, and a rank's passes

    def _count(self, minibatch: np.ndarray) -> float:
        """The divisor of the loss of a minibatch, over all ranks."""
        return float(len(minibatch))

    def _loss_sum(self, losses: Tensor, mask: Tensor) -> Tensor:
        """The sum to be divided by this count."""
        return mean_of_items(losses, mask)

    def _passes(self, minibatch: np.ndarray) -> int:
        """The number of times that all ranks must run a sharded network."""
        if not self.optimizer.sharded:
            return 0
        return max(len(self._parts(block[owned(minibatch, block)])) for block in self.blocks)

    def _parts(self, items: np.ndarray) -> list[slice]:
        """The micro-batches of these items of one rank."""
        size = self.config.micro_batch_size or max(len(items), 1)
        return [slice(at, at + size) for at in range(0, len(items), size)]


def mean_of_items(losses: Tensor, mask: Tensor) -> Tensor:
    """losses [B, C, A], mask [B, C] -> the sum over items of the mean over an item's demonstrated numbers. Losses
    [B] are these means."""
    if losses.ndim == 1:
        return losses.sum()
    shown = mask[:, :, None].expand_as(losses)
    return (torch.where(shown, losses, 0.0).sum((1, 2)) / shown.sum((1, 2))).sum()


class Demonstrations:
    """`first` is the number of this rank's first item among all `total`."""

    def __init__(self, spec: EnvSpec, horizon: int, first: int, total: int) -> None:
        self.spec, self.horizon, self.first, self.total = spec, horizon, first, total
        self.image_cache: DemoImages | None = None
        self._states, self._actions = np.zeros((0, 0), np.float32), np.zeros((0, 0), np.float32)
        self._keyframes = np.zeros(0, np.int64)  # next keyframe of each item
        self._texts: list[str] = []  # instruction of each episode
        self._ends = np.zeros(0, np.int64)  # end of each episode, in items

    def __len__(self) -> int:
        return len(self._actions)

    def read(self, episodes: Iterable[RecordedEpisode], items: int, folder: Path | None) -> Iterator[Observation]:
        """Store these episodes with `items` items in all; yields the observations of each, numbers only."""
        if self.spec.images:
            self.image_cache = DemoImages(dict(self.spec.images), items, folder)
        states, actions, keyframes = [], [], []
        for episode in episodes:
            if self.image_cache:
                self.image_cache.add(episode.obs["images"])
            self._texts.append(episode.obs["instruction"][0])
            states.append(episode.obs["state"] if self.spec.state_dim else np.zeros((len(episode), 0), np.float32))
            keyframes.append(next_keyframes(episode.actions))
            actions.append(episode.actions)
            yield {"state": states[-1]} if self.spec.state_dim else {}
        self._states, self._actions = np.concatenate(states), np.concatenate(actions)
        lengths = np.array([len(part) for part in actions])
        self._ends = np.cumsum(lengths)
        self._keyframes = np.concatenate(keyframes) + np.repeat(self._ends - lengths, lengths)

    def batch(self, items: Tensor) -> dict[str, Any]:
        """The targets of these items for `Policy.imitate`: the actions from each item on, and a mask of existing
        actions."""
        rows = items.numpy()
        episodes = np.searchsorted(self._ends, rows, side="right")
        steps = rows[:, None] + np.arange(self.horizon)
        ends = self._ends[episodes][:, None]
        obs: Observation = {"state": torch.from_numpy(self._states[rows])} if self.spec.state_dim else {}
        if self.image_cache:
            obs["images"] = self.image_cache.take(rows)
        if self.spec.instruction:
            obs["instruction"] = [self._texts[episode] for episode in episodes]
        actions = torch.from_numpy(self._actions[np.minimum(steps, ends - 1)])
        inputs = {"obs": obs, "actions": actions, "mask": torch.from_numpy(steps < ends)}
        if self.spec.state_dim:
            ahead = np.stack([self._keyframes[rows], ends[:, 0] - 1], axis=1)
            inputs["keyframes"] = torch.from_numpy(self._states[ahead])
        return inputs

    def close(self) -> None:
        if self.image_cache:
            self.image_cache.close()


def next_keyframes(actions: np.ndarray) -> np.ndarray:
    """For each step [L] of a demonstration with actions [L, A], returns the index of its next keyframe: the next step
    at which the gripper (the last action) crosses the middle of its range, else the last step.

    Open, open, closed, closed, open: 2, 2, 4, 4, 4.
    """
    gripper = actions[:, -1]
    opened = gripper > (gripper.min() + gripper.max()) / 2
    changes = np.flatnonzero(opened[1:] != opened[:-1]) + 1
    places = np.append(changes, len(actions) - 1)
    return places[np.searchsorted(changes, np.arange(len(actions)), side="right")]


class DemoImages:
    """Images on disk: uint8 [items, H, W, 3] for each camera."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], items: int, folder: Path | None) -> None:
        self.shapes = shapes
        self.item_bytes = sum(int(np.prod(shape)) for shape in shapes.values())
        place = Path(tempfile.gettempdir() if folder is None else folder)
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise ConfigError(
                f"sft.cache={place} is not a folder that can be written to; mkdir {place}, or name another"
            )
        needed, free = items * self.item_bytes, shutil.disk_usage(place).free
        if needed > free:
            raise ConfigError(
                f"the images of {items:,} env steps take {needed / 1e9:.3g} GB decoded, and {place} has "
                f"{free / 1e9:.3g} GB left; name another folder as sft.cache, or take fewer with sft.episodes"
            )
        self._file, name = tempfile.mkstemp(prefix="embodied-images-", dir=place)
        os.unlink(name)

    def add(self, images: dict[str, np.ndarray]) -> None:
        """Append the images of the next items."""
        parts = [images[camera].reshape(len(images[camera]), -1) for camera in self.shapes]
        rest = memoryview(np.concatenate(parts, axis=1)).cast("B")
        while len(rest):
            rest = rest[os.write(self._file, rest) :]

    def take(self, items: np.ndarray) -> dict[str, Tensor]:
        rows = np.empty((len(items), self.item_bytes), np.uint8)
        for row, item in zip(rows, items.tolist(), strict=True):
            if os.preadv(self._file, [row], item * self.item_bytes) != self.item_bytes:
                raise OSError(f"the images of item {item} are not there any more")
        images, at = {}, 0
        for camera, shape in self.shapes.items():
            size = int(np.prod(shape))
            images[camera] = torch.from_numpy(rows[:, at : at + size].reshape(len(items), *shape))
            at += size
        return images

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def sft_factor(config: SFTConfig, step: int, steps: int, total: int) -> float:
    """The factor on learning rates at gradient step `step` of `total`, with `steps` per pass over the data.

    Cosine with lr 1, final_lr 0.1, 1 step to warm up and 5 in all: 0.5, 1, 0.1 + 0.45 * (1 + cos(pi / 4)) = 0.868,
    0.55, 0.232.
    """
    warm = config.warmup_steps
    if step < warm:
        return lr_factor(config.lr_schedule, step // steps * steps / total) * (step + 1) / (warm + 1)
    if config.lr_schedule != "cosine":
        return lr_factor(config.lr_schedule, step // steps * steps / total)
    last = config.final_lr / config.lr if config.lr else 0.0
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))
