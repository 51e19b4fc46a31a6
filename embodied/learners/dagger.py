"""The learner of DAgger: the policy plays, an expert labels what it saw, and the learner imitates all labels so far.

Every iteration adds its decisions to the aggregate. An item is a decision, numbered by iteration, env row and place in
the rollout, so neither the number of learners nor a resume changes a minibatch. Checkpoints hold the aggregate.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.algorithms.imitation import DaggerConfig
from embodied.core import rng
from embodied.core.arrays import (
    flat_dict,
    host,
    is_text,
    join_rows,
    map_obs,
    nested_dict,
    take_rows,
    text_arrays,
    text_lists,
)
from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.files import read_arrays
from embodied.core.types import LABELS, BatchEnd, EnvSpec, Observation, Trajectory, env_blocks, join_units
from embodied.learners.imitation import ImitationLearner
from embodied.learners.model import scheduled
from embodied.learners.train_batch import RolloutBuffer
from embodied.learners.update import GradientSteps
from embodied.policies.base import Policy
from embodied.runtime import Channel
from embodied.runtime.device_memory import contiguous_tensor

PLACES, ROWS = 2**20, 2**20  # more than the decisions of a rollout, and than env rows


class DaggerLearner(ImitationLearner):
    algo: DaggerConfig

    def new_policy(self, spec: EnvSpec, start: Path | None) -> Policy:
        policy = super().new_policy(spec, start)
        if policy.horizon > 1 or policy.auxiliary_loss:
            raise ConfigError(
                "algo.name=dagger: an expert labels one action of a decision, and this policy learns "
                f"{policy.horizon} from an observation; try policy.chunk=1"
            )
        self.demos = Aggregate()
        return policy

    def learn(self, trajectories: Channel, batch: int, *others: Any, **more: Any) -> dict[str, float]:
        """Add this rank's labelled decisions of a batch to the aggregate, and imitate it, with all ranks. Labels are
        valid whichever version played, and the step needs all of them, so the other arguments change nothing."""
        self._restore_gpus()
        self.model.first_backward, started = None, perf_counter()
        buffer = RolloutBuffer(horizon=self.algo.rollout_decisions)
        unit = join_units([*buffer.units(trajectories, batch, self.timers)])
        played = buffer.take(unit.sources)
        self._observe(played, unit)
        self._merge_observed()
        self.demos.add(played, buffer.end.iteration)
        with self.store.updating(), self.computing.measured():
            numbers = self._imitate_aggregate(buffer.end)
        if self.model.first_backward is None:
            return numbers
        waited_s = started + buffer.end.seconds
        return numbers | {"time/first_backward_s": self.model.first_backward - waited_s}

    def _imitate_aggregate(self, end: BatchEnd) -> dict[str, float]:
        """The gradient steps of an iteration, each on a minibatch of all ranks' items."""
        numbers = np.sort(np.concatenate(self.collective.gather(self.demos.numbers)))
        if self.algo.keep and len(numbers) > self.algo.keep:
            self.demos.drop_before(numbers[-self.algo.keep])
            numbers = numbers[-self.algo.keep :]
        order = rng.generator(self.seed, "dagger", end.iteration).permutation(numbers)
        size, factor = min(self.algo.minibatch_size, len(order)), scheduled(self.algo, end.iteration, end.total)
        steps = GradientSteps(self.model, self.optimizer, self._losses)
        for step in range(self.algo.steps):
            minibatch = np.take(order, np.arange(step * size, (step + 1) * size), mode="wrap")
            items = torch.from_numpy(self.demos.find(minibatch))
            passes = self._passes(self._micro_batches(items))
            steps.add_passes(passes, partial(self.loss_of, end.iteration, float(size)), 1.0)
            steps.step((factor, factor), 0, size, 1.0)
        rows, _ = steps.finished(end.iteration)
        means = {f"train/{name}": float(np.mean([row[name] for row in rows])) for name in rows[0]}
        return means | {"train/lr": self.algo.lr * factor, "train/labels": float(len(numbers))}

    def _write(self, folder: Path) -> None:
        super()._write(folder)
        if not folder.parent.is_dir():
            raise CheckpointError(
                f"learner {self.rank + 1} cannot see {folder}, and algo.name=dagger saves every learner's labels "
                "there; take a run.dir that all learners see"
            )
        (folder / "learner").mkdir(parents=True, exist_ok=True)  # rank 0 may be later
        self.demos.save(folder / "learner" / f"labels-{self.rank + 1}-of-{self.world_size}.npz")

    def load(self, checkpoint: Path) -> None:
        super().load(checkpoint)
        files = sorted((checkpoint / "learner").glob("labels-*.npz"))
        if not files or len(files) != int(files[0].stem.rpartition("-")[2]):
            raise CheckpointError(f"{checkpoint} lacks labels of algo.name=dagger: {len(files)} files are there")
        self.demos.load([read_arrays(file, CheckpointError) for file in files], self.rank, self.world_size)


class Aggregate:
    """The labelled decisions of one rank, in the order of their numbers."""

    first = 0  # as in `Demonstrations`

    def __init__(self) -> None:
        self.numbers = np.zeros(0, np.int64)
        self.obs: Observation = {}
        self.labels = np.zeros((0, 1, 1), np.float32)

    def __len__(self) -> int:
        return len(self.numbers)

    def add(self, played: Trajectory, iteration: int) -> None:
        """Add the executed decisions of an iteration's rollout."""
        places = np.concatenate([np.arange(length) for length in played.lengths])
        rows = np.flatnonzero(host(played.mask).any(axis=1))
        numbers = (iteration * ROWS + np.repeat(played.ids, played.lengths)) * PLACES + places
        obs, labels = map_obs(host, text_arrays(played.obs)), host(played.replay[LABELS])
        self._join((self.numbers, self.obs, self.labels), (numbers[rows], take_rows(obs, rows), labels[rows]))

    def _join(self, *parts: tuple[np.ndarray, Observation, np.ndarray]) -> None:
        parts = tuple(items for items in parts if len(items[0])) or parts[:1]
        self.numbers = np.concatenate([numbers for numbers, _, _ in parts])
        self.obs = join_rows([obs for _, obs, _ in parts])
        self.labels = np.concatenate([labels for _, _, labels in parts])

    def drop_before(self, number: int) -> None:
        """Forget the items before this one."""
        kept = slice(int(np.searchsorted(self.numbers, number)), None)
        self.numbers, self.obs, self.labels = self.numbers[kept], take_rows(self.obs, kept), self.labels[kept]

    def find(self, numbers: np.ndarray) -> np.ndarray:
        """The places of the items with these numbers; items of other ranks are left out."""
        at = np.minimum(np.searchsorted(self.numbers, numbers), max(len(self) - 1, 0))
        return at[self.numbers[at] == numbers] if len(self) else at[:0]

    def batch(self, items: Tensor) -> dict[str, Any]:
        """The inputs of `Policy.imitate`."""
        rows = items.numpy()
        obs = text_lists(map_obs(contiguous_tensor, take_rows(self.obs, rows)))
        labels = torch.from_numpy(self.labels[rows])
        return {"obs": obs, "actions": labels, "mask": torch.ones(len(rows), 1, dtype=torch.bool)}

    def save(self, path: Path) -> None:
        as_saved = map_obs(lambda array: array.astype(str) if is_text(array) else array, self.obs)
        np.savez(path, numbers=self.numbers, labels=self.labels, **flat_dict({"obs": as_saved}))

    def load(self, saved: list[dict[str, np.ndarray]], rank: int, ranks: int) -> None:
        """Take this rank's share of the labels that all ranks saved."""
        parts = []
        for arrays in saved:
            obs = nested_dict({name[4:]: array for name, array in arrays.items() if name.startswith("obs.")})
            obs = map_obs(lambda column: column.astype(object) if column.dtype.kind == "U" else column, obs)
            parts.append((arrays["numbers"], obs, arrays["labels"]))
        self._join(*parts)
        share = env_blocks(len(self), ranks)[rank]
        at = np.argsort(self.numbers)[share.start : share.stop]
        self.numbers, self.obs, self.labels = self.numbers[at], take_rows(self.obs, at), self.labels[at]

    def close(self) -> None:
        """Nothing is open."""
