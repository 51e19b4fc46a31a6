"""Inputs for recorded passes of gradient steps (`runtime/device_graphs.py`): in memory with fixed addresses, for few
sizes of minibatches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodied.core.arrays import flat_dict, map_obs
from embodied.learners.train_batch import OF_ITEMS, RankBatch

SIZES = 8  # most sizes of padded minibatches, each with its own graph
UNCOUNTED = ("mask", "current", "weights")  # zeros for padding items


class FixedPass:
    """The inputs of a pass in memory with fixed addresses, and the graph of the pass."""

    def __init__(self, batch: RankBatch, size: int, dtype: torch.dtype) -> None:
        device = batch.mask.device
        self.index = torch.zeros(size, dtype=torch.int64, device=device)
        self.batch = batch.select(self.index)
        self.counts = torch.ones(size, dtype=dtype, device=device)  # 0 for padding items
        self.divisor, self.own_weight = (torch.ones((), dtype=dtype, device=device) for _ in range(2))
        self.graph: Any = None

    @property
    def inputs(self) -> dict[str, Any]:
        """The inputs of `Policy.forward`."""
        return {"obs": self.batch.obs, "actions": self.batch.actions} | self.batch.replay

    def fill(self, batch: RankBatch, items: Tensor, divisor: float) -> None:
        """Copy these items into the inputs, followed by padding up to the size."""
        count, buffers = len(items), tensors_of(self.batch)
        self.index[:count] = items
        self.index[count:].zero_()
        for name, tensor in tensors_of(batch).items():
            torch.index_select(tensor, 0, self.index, out=buffers[name])
        self.counts.fill_(1.0)
        for buffer in (self.counts, *(buffers[name] for name in UNCOUNTED)):
            buffer[count:].zero_()
        self.divisor.fill_(divisor)
        self.own_weight.fill_(batch.weight_sum / (batch.num_units or 1))


def tensors_of(batch: RankBatch) -> dict[str, Tensor]:
    """All tensors of a batch with a row per item, by name."""
    columns = {"obs": batch.obs, "replay": batch.replay, "actions": batch.actions}
    columns |= {name: getattr(batch, name) for name in OF_ITEMS}
    return {name: tensor for name, tensor in flat_dict(columns).items() if tensor is not None}


def moved(batch: RankBatch, device: str) -> RankBatch:
    """The same batch, with the network's inputs on this device."""

    def move(array: Tensor) -> Tensor:
        return array.to(device, non_blocking=True)

    return replace(batch, obs=map_obs(move, batch.obs), replay=map_obs(move, batch.replay))


def padded_size(count: int, most: int) -> int:
    """The size to which `count` items are padded, one of a few sizes up to `most`."""
    step = -(-most // SIZES)
    return min(most, -(-count // step) * step)
