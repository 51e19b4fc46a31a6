"""Arrays are numpy between processes and torch tensors where data stays on a device; these work with either.

Torch is imported only where a tensor is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def tensor_of(array: Any, device: torch.device | str) -> torch.Tensor:
    """On this device; the same memory where it is there already. It may be read-only: never write to it."""
    import torch

    return torch.as_tensor(array).to(device)
