"""Measures a worker's memory on its device, and moves it to the host's memory and back.

Moves are in place: a tensor's storage is emptied and refilled, so networks, optimizers and views that share it are
unaffected. Offloaded tensors must not be used. Tensors in shared or mapped memory stay.

Other memory of a worker is measured. A simulator allocates by itself, so its memory is the decrease of the GPU's free
memory while it is built; nothing but simulators may be built meanwhile. On cores nothing is limited or counted.

`device_leases.py` decides whose memory moves; `device_sharing.py` calls the worker.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.core.arrays import is_tensor, is_text
from embodied.core.types import Array
from embodied.runtime.payload import own_device, own_gpu
from embodied.runtime.worker import Timers

if TYPE_CHECKING:
    from torch import Tensor

# Moving


class DeviceTensors:
    """A worker's tensors on its device, by part. Each move is measured under the part's name and bytes."""

    def __init__(self, timers: Timers) -> None:
        self.timers = timers
        self.parts: dict[str, Offloader] = {}

    @property
    def away(self) -> bool:
        return any(tensors.away for tensors in self.parts.values())

    def offload(self, parts: Mapping[str, Iterable[Any]], emptied: Collection[str] = ()) -> None:
        """Moves these parts to the host; `emptied` parts come back as zeros."""
        for name, tensors in parts.items():
            offloader = self.parts.setdefault(name, Offloader(keeps=name not in emptied))
            self.move("offload", name, offloader.offload, tensors)

    def onload(self) -> None:
        for name, offloader in self.parts.items():
            self.move("onload", name, offloader.onload)

    def move(self, verb: str, name: str, move: Callable[..., int], *tensors: Any) -> None:
        """Moves a part by `move`, which returns the number of bytes."""
        started = perf_counter()
        if moved := move(*tensors):
            self.timers.add(f"{verb} {name}, {moved / 1e6:.3g} MB", started)


class Offloader:
    def __init__(self, keeps: bool = True) -> None:
        """`keeps`: the values are kept. Otherwise tensors come back as zeros: fresh memory can hold NaN, which spoils
        even masked sums. Copies are allocated once, since pinned memory is expensive."""
        self.keeps = keeps
        self._copies: dict[int, tuple[Any, Any]] = {}  # by storage: a shard has a new view each time
        self._away: list[tuple[Any, int, Any]] = []  # tensor, bytes, its copy

    @property
    def away(self) -> bool:
        return bool(self._away)

    def offload(self, tensors: Iterable[Any]) -> int:
        """Returns the number of freed bytes."""
        import torch

        seen = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            shared = storage.device.type == "cpu" and storage.is_shared()  # then other processes use it, too
            if not storage.nbytes() or storage.data_ptr() in seen or shared or not storage.resizable():
                continue
            seen.add(storage.data_ptr())
            copy = self._copy_for(tensor, storage) if self.keeps else None
            if copy is not None:
                copy.copy_(bytes_of(storage), non_blocking=True)
            self._away.append((tensor, storage.nbytes(), copy))
        on_gpus = any(tensor.is_cuda for tensor, _, _ in self._away)
        if on_gpus:
            torch.cuda.synchronize()  # the copies are whole before their sources go
        for tensor, _, _ in self._away:
            tensor.untyped_storage().resize_(0)
        if on_gpus:
            torch.cuda.empty_cache()  # for other processes
        return sum(size for _, size, _ in self._away)

    def onload(self) -> int:
        """Returns the number of allocated bytes."""
        import torch

        for tensor, size, copy in self._away:
            storage = tensor.untyped_storage()
            storage.resize_(size)
            if copy is None:
                bytes_of(storage).zero_()
            else:
                bytes_of(storage).copy_(copy, non_blocking=True)
        if any(tensor.is_cuda for tensor, _, _ in self._away):
            torch.cuda.synchronize()
        num_bytes, self._away = sum(size for _, size, _ in self._away), []
        return num_bytes

    def _copy_for(self, tensor: Any, storage: Any) -> Any:
        import torch

        _, copy = self._copies.get(storage._cdata, (None, None))
        if copy is None or copy.numel() != storage.nbytes():
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            self._copies[storage._cdata] = tensor, copy
        return copy


def bytes_of(storage: Any) -> Any:
    """A storage as a tensor of bytes."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def num_bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# Measuring


class AllocatedMemory:
    """Bytes that stay allocated from now on."""

    def __init__(self) -> None:
        self.num_bytes = 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        before = free_bytes()
        yield
        self.num_bytes += max(0, before - free_bytes())


class Computing:
    """The largest temporary memory of some work so far; torch keeps it for the next time."""

    def __init__(self) -> None:
        self.num_bytes = 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        before = begin_peak()
        try:
            yield
        finally:
            now, peak = allocated_bytes()
            self.num_bytes = max(self.num_bytes, peak - max(before, now))


def free_bytes() -> int:
    """Returns the free memory of this process's GPU; 0 without a GPU."""
    if not own_gpu():
        return 0
    import torch

    return torch.cuda.mem_get_info()[0]


def begin_peak() -> int:
    """Starts a peak measurement; returns the current bytes of tensors."""
    if not on_gpu():
        return 0
    cuda = sys.modules["torch"].cuda
    cuda.reset_peak_memory_stats()
    return cuda.memory_allocated()


def allocated_bytes() -> tuple[int, int]:
    """Returns the current bytes of tensors, and the peak since `begin_peak`."""
    if not on_gpu():
        return 0, 0
    cuda = sys.modules["torch"].cuda
    return cuda.memory_allocated(), cuda.max_memory_allocated()


def gpu_id() -> str:
    """The id of this process's GPU, equal in all processes; "" without a GPU."""
    return str(sys.modules["torch"].cuda.get_device_properties(0).uuid) if on_gpu() else ""


def synchronize() -> None:
    """Waits until the GPU has finished its work."""
    if on_gpu():
        sys.modules["torch"].cuda.synchronize()


def cpu_memory(size: int) -> Any:
    """Returns a numpy array of zeros in the host's memory, pinned if there is a GPU."""
    if not on_gpu():
        return np.zeros(size, np.uint8)
    torch = sys.modules["torch"]
    return torch.zeros(size, dtype=torch.uint8, pin_memory=True).numpy()


def give_back_unused() -> None:
    """Releases the memory that torch caches."""
    if on_gpu():
        sys.modules["torch"].cuda.empty_cache()


def on_gpu() -> bool:
    return "torch" in sys.modules and own_device() == "cuda"


# Arrays of a batch become tensors, on a device or where they are


def contiguous_tensor(array: Array) -> Array:
    """A contiguous copy as a tensor on the array's device; texts stay an array."""
    import torch

    if is_tensor(array):
        return array.clone(memory_format=torch.contiguous_format)
    copy = np.array(array, order="C")
    return copy if is_text(copy) else torch.from_numpy(copy)


def to_device(arrays: Mapping[str, Array], device: str) -> dict[str, Tensor]:
    """Copies of the arrays as tensors on this device. Each transfer to a GPU waits for it, so all numpy arrays are sent
    in one transfer, in a type that holds every number."""
    import torch

    tensors = {name: contiguous_tensor(array) for name, array in arrays.items()}
    small = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cpu"}
    if device != "cpu" and small:
        together = torch.cat([tensor.reshape(-1).double() for tensor in small.values()]).to(device)
        sent = together.split([tensor.numel() for tensor in small.values()])
        for (name, tensor), numbers in zip(small.items(), sent, strict=True):
            tensors[name] = numbers.view(tensor.shape).to(tensor.dtype)
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def take(array: Array, items: Tensor) -> Array:
    """These items of an array. For an array in host memory `items` must be there, too. Items for a device are sent
    without waiting."""
    if not is_tensor(array):
        return array[items.numpy()]
    return array.index_select(0, items.to(array.device, non_blocking=True))
