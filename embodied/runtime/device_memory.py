"""A worker's memory on its device: what it takes there, and moving it to the host's memory and back.

Moving is in place: a tensor's storage is emptied and filled again, so whatever shares it (a network, an optimizer, a
view) need not know. Until it is back, it must not be used. Storage that belongs to another (mapped memory) stays.

A worker's memory besides its tensors is measured. A simulator allocates by itself, so what it takes is what the GPU has
less of afterwards, provided that only simulators are built meanwhile. On cores nothing is limited or counted.

Whose memory has to move is decided in `device_leases.py`, and asked of the worker by `device_sharing.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np

from embodied.runtime.payload import own_device, own_gpu
from embodied.runtime.timers import Timers

# Moving


class DeviceTensors:
    """A worker's tensors on its device, part by part; each move is measured under the part's name and its bytes."""

    def __init__(self, timers: Timers) -> None:
        self.timers = timers
        self.parts: dict[str, Offloader] = {}

    @property
    def away(self) -> bool:
        return any(part.away for part in self.parts.values())

    def offload(self, parts: Mapping[str, Iterable[Any]], emptied: Collection[str] = ()) -> None:
        """Moves these parts away; those `emptied` come back as zeros."""
        for name, tensors in parts.items():
            offloader = self.parts.setdefault(name, Offloader(keeps=name not in emptied))
            self.measured("offload", name, offloader.offload, tensors)

    def onload(self) -> None:
        for name, offloader in self.parts.items():
            self.measured("onload", name, offloader.onload)

    def measured(self, verb: str, name: str, move: Callable[..., int], *tensors: Any) -> None:
        """Moves a part by a function that returns the bytes."""
        started = perf_counter()
        if moved := move(*tensors):
            self.timers.add(f"{verb} {name}, {moved / 1e6:.3g} MB", started)


class Offloader:
    def __init__(self, keeps: bool = True) -> None:
        """`keeps`: the tensors' values are kept. Otherwise they come back as zeros, since fresh memory can hold NaN,
        which spoils masked sums, too. Copies are allocated once: pinned memory is expensive."""
        self.keeps = keeps
        self._copies: dict[int, tuple[Any, Any]] = {}  # by storage, which has a new view each time where it is a shard
        self._away: list[tuple[Any, int, Any]] = []  # tensor, bytes, its copy

    @property
    def away(self) -> bool:
        return bool(self._away)

    def offload(self, tensors: Iterable[Any]) -> int:
        """-> bytes that were freed."""
        import torch

        seen = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            shared = storage.device.type == "cpu" and storage.is_shared()  # then it is not this process's to free
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
        """-> bytes that were taken again."""
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
        taken, self._away = sum(size for _, size, _ in self._away), []
        return taken

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
    """The most that some work took for as long as it lasted, so far; torch keeps it for the next time."""

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
    """Returns the free memory of the GPU that this process holds; 0 where it holds none."""
    if not own_gpu():
        return 0
    import torch

    return torch.cuda.mem_get_info()[0]


def begin_peak() -> int:
    """-> bytes of tensors there now."""
    if not on_gpu():
        return 0
    cuda = sys.modules["torch"].cuda
    cuda.reset_peak_memory_stats()
    return cuda.memory_allocated()


def allocated_bytes() -> tuple[int, int]:
    """Returns bytes of tensors now, and the most since `begin_peak`."""
    if not on_gpu():
        return 0, 0
    cuda = sys.modules["torch"].cuda
    return cuda.memory_allocated(), cuda.max_memory_allocated()


def gpu_id() -> str:
    """The id of the GPU that this process computes on, alike in all processes; "" where it computes on none."""
    return str(sys.modules["torch"].cuda.get_device_properties(0).uuid) if on_gpu() else ""


def synchronize() -> None:
    """Waits until the GPU has finished its work."""
    if on_gpu():
        sys.modules["torch"].cuda.synchronize()


def host_memory(size: int) -> Any:
    """Zeros in the host's memory as numpy has them, pinned where a GPU is to copy them."""
    if not on_gpu():
        return np.zeros(size, np.uint8)
    torch = sys.modules["torch"]
    return torch.zeros(size, dtype=torch.uint8, pin_memory=True).numpy()


def give_back_unused() -> None:
    """Gives back what torch keeps for the next time."""
    if on_gpu():
        sys.modules["torch"].cuda.empty_cache()


def on_gpu() -> bool:
    return "torch" in sys.modules and own_device() == "cuda"
