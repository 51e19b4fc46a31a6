"""Arrays are numpy between processes and torch tensors where data stays on a device; these work with either.

Torch is imported only where a tensor is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.data import Observation

if TYPE_CHECKING:
    import torch


def tensor_of(array: Any, device: torch.device | str) -> torch.Tensor:
    """On this device; the same memory where it is there already. It may be read-only: never write to it."""
    import torch

    return torch.as_tensor(array).to(device)


def map_obs(obs: Observation, arrays: Callable, texts: Callable) -> Observation:
    """Apply one function to every array of an observation and another to its instruction list."""
    out: Observation = {}
    for name, part in obs.items():
        if name == "instruction":
            out[name] = texts(part)
        elif isinstance(part, dict):
            out[name] = {camera: arrays(image) for camera, image in part.items()}
        else:
            out[name] = arrays(part)
    return out


def take_rows(obs: Observation, rows: np.ndarray) -> Observation:
    return map_obs(obs, lambda array: array[rows], lambda texts: [texts[row] for row in rows])


def join_rows(parts: Sequence[Observation]) -> Observation:
    """The rows of several observations, one after the other."""
    joined: Observation = {}
    for name, first in parts[0].items():
        if name == "instruction":
            joined[name] = [text for part in parts for text in part[name]]
        elif isinstance(first, dict):
            joined[name] = {key: np.concatenate([part[name][key] for part in parts]) for key in first}
        else:
            joined[name] = np.concatenate([part[name] for part in parts])
    return joined
