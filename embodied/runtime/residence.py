"""Takes tensors off their device into the host's memory and back, in place.

A tensor's storage is emptied and filled again, so whoever shares it (a policy, an optimizer, a view) need not know.
Until it is back, it must not be used. Storage that belongs to somebody else (mapped memory) stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Residence:
    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}  # id -> (tensor, its copy): pinned memory is dear, so it is kept
        self._away: list[tuple[Any, Any]] = []

    @property
    def away(self) -> bool:
        return bool(self._away)

    def offload(self, tensors: Iterable[Any]) -> int:
        """-> bytes that were freed."""
        import torch

        freed, seen = 0, set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.nbytes() or storage.data_ptr() in seen or not storage.resizable():
                continue
            seen.add(storage.data_ptr())
            copy = self._copy_for(tensor, storage)
            copy.copy_(bytes_of(storage), non_blocking=True)
            self._away.append((tensor, copy))
        on_gpus = any(tensor.is_cuda for tensor, _ in self._away)
        if on_gpus:
            torch.cuda.synchronize()  # the copies are whole before their sources go
        for tensor, copy in self._away:
            freed += copy.numel()
            tensor.untyped_storage().resize_(0)
        if on_gpus:
            torch.cuda.empty_cache()  # for other processes
        return freed

    def onload(self) -> None:
        import torch

        for tensor, copy in self._away:
            storage = tensor.untyped_storage()
            storage.resize_(copy.numel())
            bytes_of(storage).copy_(copy, non_blocking=True)
        if any(tensor.is_cuda for tensor, _ in self._away):
            torch.cuda.synchronize()
        self._away = []

    def _copy_for(self, tensor: Any, storage: Any) -> Any:
        import torch

        _, copy = self._copies.get(id(tensor), (None, None))
        if copy is None or copy.numel() != storage.nbytes():
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            self._copies[id(tensor)] = tensor, copy
        return copy


def bytes_of(storage: Any) -> Any:
    """A storage as a tensor of bytes."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def num_bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
