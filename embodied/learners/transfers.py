"""Arrays of a batch become tensors, on a learner's device or where they are; some items of them are taken there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from embodied.core.arrays import is_tensor, is_text
from embodied.core.types import Array


def contiguous_tensor(array: Array) -> Array:
    """A contiguous copy as a tensor on the array's device; texts stay an array."""
    if is_tensor(array):
        return array.clone(memory_format=torch.contiguous_format)
    copy = np.array(array, order="C")
    return copy if is_text(copy) else torch.from_numpy(copy)


def to_device(arrays: Mapping[str, Array], device: str) -> dict[str, Tensor]:
    """Copies of the arrays as tensors on this device. Each transfer to a GPU waits for it, so all numpy arrays are sent
    in one transfer, in a type that holds every number."""
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
