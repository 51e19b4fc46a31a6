"""Arrays are numpy between processes and torch tensors where data stays on a device; these work with either.

Torch is imported only where a tensor is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def is_tensor(array: Any) -> bool:
    return hasattr(array, "detach")


def tensor_of(array: Any, device: torch.device | str) -> torch.Tensor:
    """On this device; the same memory where it is there already. It may be read-only: never write to it."""
    import torch

    return torch.as_tensor(array).to(device)


def host(array: Any) -> np.ndarray:
    """As numpy, fetched from its device where it has one."""
    return array.detach().cpu().numpy() if is_tensor(array) else np.asarray(array)


def as_asked(answer: torch.Tensor, obs: dict[str, Any]) -> Any:
    """A tensor for an observation of tensors, numpy for one of numpy."""
    first = next((part for part in (obs.get("state"), *obs.get("images", {}).values()) if part is not None), None)
    return answer if is_tensor(first) else host(answer)


def room_for(array: Any, count: int) -> Any:
    """Zeros for so many rows like those of this array, where it is."""
    shape = (count, *array.shape[1:])
    return array.new_zeros(shape) if is_tensor(array) else np.zeros(shape, array.dtype)


def concatenate(arrays: Sequence[Any], axis: int = 0) -> Any:
    if not is_tensor(arrays[0]):
        return np.concatenate(arrays, axis=axis)
    import torch

    return torch.cat(list(arrays), dim=axis)


def finite_rows(array: Any) -> np.ndarray:
    """bool [N]: rows without NaN and infinities. Of a tensor on a device, one number is fetched where all is well."""
    if not is_tensor(array):
        return np.isfinite(array).reshape(len(array), -1).all(axis=1)
    finite = array.isfinite()
    if bool(finite.all()):
        return np.ones(len(array), bool)
    return host(finite.reshape(len(array), -1).all(dim=1))


def training_state(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """A network's weights and its optimizer's tensors, as arrays for a checkpoint."""
    found = {f"net.{name}": tensor for name, tensor in net.state_dict().items()}
    for number, kept in optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{number}.{name}": tensor for name, tensor in kept.items()}
    return {name: tensor.cpu().numpy().copy() for name, tensor in found.items()}


def load_training_state(net: torch.nn.Module, optimizer: torch.optim.Optimizer, arrays: dict[str, np.ndarray]) -> None:
    """Continue from `training_state`."""
    tensors = {name: tensor_of(array.copy(), "cpu") for name, array in arrays.items()}
    net.load_state_dict({name[4:]: tensor for name, tensor in tensors.items() if name.startswith("net.")})
    kept: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, number, what = name.split(".", 2)
            kept.setdefault(int(number), {})[what] = tensor
    optimizer.load_state_dict(optimizer.state_dict() | {"state": kept})
