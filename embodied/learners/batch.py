"""One learner rank's share of an iteration, as flat items in a fixed order.

An item is one decision of one env. Its global id is e * T + t for the e-th env of the batch (env e, unless a slice was
lost), and with whole episodes it counts their decisions in the order of the episodes: the order never depends on which
worker delivered first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embodied.core.arrays import concatenate, is_tensor
from embodied.core.observations import Observation, is_text, join_rows, map_obs, text_lists
from embodied.core.types import Array, PlayedEpisodes, Trajectory


@dataclass(frozen=True)
class Batch:
    """Items of a block of envs or episodes: tensors [items, ...] on this rank; `first` is the global id of item 0."""

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


def merge(parts: list[Trajectory]) -> Trajectory:
    """Trajectories of disjoint env blocks, side by side in env order."""
    if len(parts) == 1:
        return parts[0]
    parts = sorted(parts, key=lambda part: int(part.env_ids[0]))
    fields = "actions logprobs values final_values rewards terminated truncated mask versions episodes".split()
    return Trajectory(
        env_ids=np.concatenate([part.env_ids for part in parts]),
        obs=join_rows([part.obs for part in parts], axis=1),
        replay={name: concatenate([part.replay[name] for part in parts], axis=1) for name in parts[0].replay},
        **{name: concatenate([getattr(part, name) for part in parts], axis=1) for name in fields},
    )


def flatten(trajectory: Trajectory, first: int, device: str) -> Batch:
    """[T, N, ...] to items in env order; `first` is the global id of the first. What losses are made of goes to the
    device; observations stay where they are, pixels as bytes, until they are looked at."""
    return Batch(
        first=first,
        obs=map_obs(items_of, trajectory.obs),
        actions=items_of(trajectory.actions).to(device),
        logprobs=items_of(trajectory.logprobs).to(device),
        mask=items_of(trajectory.mask).to(device),
        current=torch.ones(trajectory.mask[..., 0].size, dtype=torch.bool, device=device),
        replay={name: items_of(array) for name, array in trajectory.replay.items()},
    )


def flatten_episodes(played: PlayedEpisodes, first: int, version: int, device: str) -> Batch:
    """Whole episodes as items, in their order; what goes to the device is as in `flatten`."""
    return Batch(
        first=first,
        obs=map_obs(own, played.obs),
        actions=own(played.actions).to(device),
        logprobs=own(played.logprobs).to(device),
        mask=own(played.mask).to(device),
        current=torch.from_numpy(played.versions == version).to(device),
        replay={name: own(array) for name, array in played.replay.items()},
    )


def own(array: Array) -> Array:
    """A tensor with contiguous memory of its own, on the device where the array is; texts stay an array."""
    if is_tensor(array):
        return array.clone(memory_format=torch.contiguous_format)
    copy = np.array(array, order="C")
    return copy if is_text(copy) else torch.from_numpy(copy)


def items_of(array: Array) -> Array:
    """[T, N, ...] -> a tensor of its own [N * T, ...]."""
    return own(array.swapaxes(0, 1)).reshape(-1, *array.shape[2:])


def take(array: Array, items: Tensor) -> Array:
    return array[items.to(array.device)] if is_tensor(array) else array[items.numpy()]
