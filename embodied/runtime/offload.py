"""Takes tensors off their device into the host's memory and back, in place.

A tensor's storage is emptied and filled again, so whoever shares it (a policy, an optimizer, a view) need not know.
Until it is back, it must not be used. Storage that belongs to somebody else (mapped memory) stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from time import perf_counter
from typing import Any

from embodied.runtime.timers import Timers


class Belongings:
    """What a worker has on its device, part by part; each move is measured under the part's name and its bytes."""

    def __init__(self, timers: Timers) -> None:
        self.timers = timers
        self.parts: dict[str, Offloader] = {}

    @property
    def away(self) -> bool:
        return any(part.away for part in self.parts.values())

    def offload(self, parts: Mapping[str, Iterable[Any]], emptied: Collection[str] = ()) -> None:
        """What is in the parts `emptied` is not needed when they are back."""
        for name, tensors in parts.items():
            residence = self.parts.setdefault(name, Offloader(keeps=name not in emptied))
            self._told("offload", name, residence.offload, tensors)

    def onload(self) -> None:
        for name, residence in self.parts.items():
            self._told("onload", name, residence.onload)

    def _told(self, verb: str, name: str, move: Callable[..., int], *tensors: Any) -> None:
        started = perf_counter()
        if moved := move(*tensors):
            self.timers.add(f"{verb} {name}, {moved / 1e6:.3g} MB", started)


class Offloader:
    def __init__(self, keeps: bool = True) -> None:
        """`keeps`: what is in the tensors comes back with them. Copies are made once: pinned memory is dear."""
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
            if not storage.nbytes() or storage.data_ptr() in seen or not storage.resizable():
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
            if copy is not None:
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
