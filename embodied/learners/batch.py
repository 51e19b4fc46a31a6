"""One learner rank's part of an iteration, as flat items in a fixed order.

An item is one decision. Its global id counts the decisions of all ranks' sequences, in the order of their ids (env rows
but those whose slice was lost, or whole episodes): the order never depends on which worker delivered first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embodied.core.arrays import is_tensor
from embodied.core.observations import Observation, is_text, map_obs, text_lists
from embodied.core.types import Array, Trajectory


@dataclass(frozen=True)
class Batch:
    """Items of a block of sequences: tensors [items, ...] on this rank; `first` is the global id of item 0."""

    first: int
    obs: Observation
    actions: Tensor
    logprobs: Tensor
    mask: Tensor
    current: Tensor  # bool [items], taken with the weights that the update starts from
    replay: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.mask)

    def inputs(self, items: Tensor) -> dict:
        """What `Policy.forward` needs of these items."""
        replay = {name: take(tensor, items) for name, tensor in self.replay.items()}
        return {"obs": self.observed(items), "actions": take(self.actions, items)} | replay

    def observed(self, items: Tensor) -> Observation:
        """The observations of these items, as policies take them."""
        return text_lists(map_obs(lambda part: take(part, items), self.obs))


def flatten(trajectory: Trajectory, first: int, version: int, device: str) -> Batch:
    """The trajectory's decisions as items; `first` is the global id of the first. What losses are made of goes to the
    device; observations stay where they are, pixels as bytes, until they are encoded."""
    return Batch(
        first=first,
        obs=map_obs(own, trajectory.obs),
        actions=own(trajectory.actions).to(device),
        logprobs=own(trajectory.logprobs).to(device),
        mask=own(trajectory.mask).to(device),
        current=torch.from_numpy(trajectory.versions == version).to(device),
        replay={name: own(array) for name, array in trajectory.replay.items()},
    )


def own(array: Array) -> Array:
    """A tensor with contiguous memory of its own, on the device where the array is; texts stay an array."""
    if is_tensor(array):
        return array.clone(memory_format=torch.contiguous_format)
    copy = np.array(array, order="C")
    return copy if is_text(copy) else torch.from_numpy(copy)


def take(array: Array, items: Tensor) -> Array:
    return array[items.to(array.device)] if is_tensor(array) else array[items.numpy()]
