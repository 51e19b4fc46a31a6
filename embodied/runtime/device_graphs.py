"""Graphs: device operations that are captured once and then replayed on the same memory, without Python.

A pass of a small network has some hundred operations, and each takes a GPU less time than Python needs to launch it.
`capture` makes a CUDA graph. On a CPU it makes a `CpuGraph` with the same rules: inputs are copied into fixed buffers,
sizes never change, results must not be read during the capture, and no array is sent to the device. That is not faster,
but lets tests compare captured with ordinary passes without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from embodied.core.arrays import Observation, flat_dict, is_tensor, leaves, map_obs, num_rows, padded_rows

WARM_UP = 3  # runs before CUDA captures: libraries allocate their memory in the first run
READS = ("_local_scalar_dense", "item", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select")
FETCHES, SENDS = ("cpu", "numpy", "tolist", "__array__"), ("tensor", "as_tensor")  # what a GPU waits for
MOST = 16  # graphs; they share their temporary memory


class CpuGraph(TorchDispatchMode):
    """Captures the operations that run inside, and replays them into the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READS:
            raise RuntimeError(f"{func} reads a result while it is captured")
        result = func(*args, **(kwargs or {}))
        detached = tree_map_only(Tensor, lambda tensor: tensor.detach(), (args, kwargs or {}, tree_leaves(result)))
        self.calls.append((func, *detached))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, results in self.calls:
            for old, new in zip(results, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # neither in place nor a view
                    old.copy_(new)


class NoTransfers(TorchFunctionMode):
    """Refuses what a GPU cannot capture: reading a tensor on the host, and sending numbers of the host to it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in FETCHES or (name in SENDS and not isinstance(args[0], Tensor | bool | int | float)):
            raise RuntimeError(f"{name} goes to or from the host's memory while it is captured")
        return func(*args, **(kwargs or {}))


def capture(work: Callable[[], None], device: str, pool: Any = None) -> Any:
    """Returns a graph of the operations of `work`, with a method `replay`. The capture may run `work` several times."""
    if device != "cuda":
        work()
        with CpuGraph() as graph, NoTransfers():
            work()
        return graph
    stream, cuda_graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    # Other threads of this process, which may act or simulate, continue meanwhile.
    with torch.cuda.graph(cuda_graph, pool=pool, capture_error_mode="thread_local"):
        work()
    return cuda_graph


class CapturedGraphs:
    """Graphs of functions of tensors, by the tensors' shapes and the weights' addresses."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.graphs: dict[tuple, Any] = {}  # inputs, graph and results; None: came once; False: cannot be captured
        self.failed = False
        self.clear()

    def clear(self) -> None:
        """Forget all graphs, and free their memory."""
        self.graphs.clear()
        self.pool = torch.cuda.graph_pool_handle() if self.device == "cuda" else None  # temporary memory of all graphs
        self.bytes = 0  # of that memory

    def run_padded(
        self, name: Hashable, work: Callable[..., Observation], inputs: Observation, weights: Iterable[Tensor]
    ) -> Observation:
        """`run` with a number of rows out of a few: the last row is repeated, and its repeated results are cut off."""
        rows = num_rows(inputs)
        more = padded_rows(rows) - rows

        def padded(array: Tensor) -> Tensor:
            return torch.cat([array, array[-1:].expand(more, *array.shape[1:])]) if more else array

        return map_obs(lambda array: array[:rows], self.run(name, work, map_obs(padded, inputs), weights))

    def run(
        self, name: Hashable, work: Callable[..., Observation], inputs: Observation, weights: Iterable[Tensor]
    ) -> Observation:
        """Returns the results of `work(**inputs)`; from the second call with such inputs on, by replaying a graph."""
        shapes = [(path, tensor.dtype, tensor.shape) for path, tensor in flat_dict(inputs).items()]
        key = (name, *shapes, *(weight.data_ptr() for weight in weights))
        with torch.inference_mode():
            if key not in self.graphs:
                results = work(**inputs)
                self.graphs[key] = None if all(map(is_tensor, leaves(results))) else False
                while len(self.graphs) > MOST:
                    del self.graphs[next(iter(self.graphs))]
                return results
            self.graphs[key] = self.graphs.pop(key)  # the last one used goes last
            if self.graphs[key] is None:
                self.graphs[key] = self._capture(work, inputs)
            if not self.graphs[key]:
                return work(**inputs)
            held, graph, results = self.graphs[key]
            map_obs(lambda room, array: room.copy_(array), held, inputs)
            graph.replay()
            return map_obs(torch.clone, results)

    def _capture(self, work: Callable[..., Observation], inputs: Observation) -> Any:
        held, results = map_obs(torch.clone, inputs), dict[str, Any]()
        before = self._reserved()
        try:
            graph = capture(lambda: results.update(work(**held)), self.device, self.pool)
        except RuntimeError as err:
            if not self.failed:
                print(f"acting is not captured: {err}", flush=True)
            self.failed = True
            return False
        self.bytes += max(0, self._reserved() - before)
        return held, graph, results

    def _reserved(self) -> int:
        """The bytes that torch has taken from the device for tensors and graphs."""
        if self.device != "cuda":
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()
