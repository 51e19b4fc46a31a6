"""Graphs: operations of a device that are recorded once and then repeated on the same memory, without Python.

A pass of a small network is some hundred operations, and each takes a GPU less time than Python needs to ask for it.
`record` makes a CUDA graph. On a CPU it makes a `HostGraph`, which keeps to the same rules: inputs are copied into
buffers that stay where they are, sizes never change, and nothing that is computed may be read meanwhile. No pass is
faster by that; it lets tests compare recorded steps with others where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from embodied.core.arrays import flat_dict, map_obs
from embodied.learners.train_batch import OF_ITEMS, RankBatch

WARM_UP = 3  # runs before CUDA records: libraries take their memory in the first
SIZES = 8  # of padded minibatches, at most: each has a graph
READS = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select")
UNCOUNTED = ("mask", "current", "weights")  # zeros of items that only pad


class HostGraph(TorchDispatchMode):
    """Records the operations that run inside of it, and repeats them into the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READS:
            raise RuntimeError(f"{func} reads what is only being recorded")
        result = func(*args, **(kwargs or {}))
        known = tree_map_only(Tensor, lambda tensor: tensor.detach(), (args, kwargs or {}, tree_leaves(result)))
        self.calls.append((func, *known))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, results in self.calls:
            for old, new in zip(results, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # neither in place nor a view
                    old.copy_(new)


def record(work: Callable[[], None], device: str, pool: Any = None) -> Any:
    """A graph of the operations of `work`, with a method `replay`. They may run several times on the way."""
    if device != "cuda":
        with HostGraph() as graph:
            work()
        return graph
    stream, cuda_graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    # Other threads of this process, which may act or simulate, go on meanwhile.
    with torch.cuda.graph(cuda_graph, pool=pool, capture_error_mode="thread_local"):
        work()
    return cuda_graph


class FixedPass:
    """The inputs of a pass in memory that stays where it is, and the graph of the pass."""

    def __init__(self, batch: RankBatch, size: int, dtype: torch.dtype) -> None:
        device = batch.mask.device
        self.size, self.index = size, torch.zeros(size, dtype=torch.int64, device=device)
        self.batch = batch.select(self.index)
        self.counts = torch.ones(size, dtype=dtype, device=device)
        self.divisor, self.own_weight = (torch.ones((), dtype=dtype, device=device) for _ in range(2))
        self.graph: Any = None

    @property
    def inputs(self) -> dict[str, Any]:
        """The inputs of `Policy.forward`."""
        return {"obs": self.batch.obs, "actions": self.batch.actions} | self.batch.replay

    def fill(self, batch: RankBatch, items: Tensor, divisor: float) -> None:
        """Copy these items there; more that count nothing follow, up to the size."""
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
    """All that a batch has of its items, by name."""
    known = {"obs": batch.obs, "replay": batch.replay, "actions": batch.actions}
    known |= {name: getattr(batch, name) for name in OF_ITEMS}
    return {name: tensor for name, tensor in flat_dict(known).items() if tensor is not None}


def moved(batch: RankBatch, device: str) -> RankBatch:
    """The same batch, with all that passes through the network on this device."""

    def move(array: Tensor) -> Tensor:
        return array.to(device, non_blocking=True)

    return replace(batch, obs=map_obs(move, batch.obs), replay=map_obs(move, batch.replay))


def padded_size(count: int, most: int) -> int:
    """One of a few sizes that so many items are padded to, out of at most `most`."""
    step = -(-most // SIZES)
    return min(most, -(-count // step) * step)
