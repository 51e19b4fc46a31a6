"""What an env shows and a policy sees, and the few operations that everything between them needs.

An observation is a dict of arrays, or of dicts of arrays (images by camera), whose first axis counts env rows. Envs
give and policies take "instruction" as a list of texts; in between it is an array, so every leaf is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from embodied.core.arrays import concatenate

# "state": [N,D]; "images": {camera: uint8 [N,H,W,3]}; "instruction": N texts; "privileged": [N,P], numbers that help to
# learn and that no action may depend on
Observation = dict[str, Any]


def map_obs(function: Callable, *observations: Observation) -> Observation:
    """The function's result for every leaf; of several observations it gets the leaves of one name together."""
    mapped: Observation = {}
    for name, part in observations[0].items():
        parts = [obs[name] for obs in observations]
        mapped[name] = map_obs(function, *parts) if isinstance(part, dict) else function(*parts)
    return mapped


def leaves(obs: Observation) -> Iterator[Any]:
    """All arrays (and lists of texts) of an observation."""
    for part in obs.values():
        yield from leaves(part) if isinstance(part, dict) else (part,)


def is_text(part: Any) -> bool:
    """Whether a leaf holds texts, as a list or as an array."""
    return isinstance(part, list) or (isinstance(part, np.ndarray) and part.dtype.kind == "O")


def text_arrays(obs: Observation) -> Observation:
    """The observation with its texts as an array, as it travels."""
    return map_obs(lambda part: np.array(part, object) if is_text(part) else part, obs)


def text_lists(obs: Observation) -> Observation:
    """The observation with its texts as a list, as envs give and policies take it."""
    return map_obs(lambda part: list(part) if is_text(part) else part, obs)


def num_rows(obs: Observation) -> int:
    return len(next(leaves(obs)))


def take_rows(obs: Observation, index: Any) -> Observation:
    """These rows, or whatever else an index selects of every array."""
    return map_obs(lambda array: array[index], obs)


def join_rows(parts: Sequence[Observation], axis: int = 0) -> Observation:
    """Observations one after the other along an axis; a single one is returned as it is."""
    return parts[0] if len(parts) == 1 else map_obs(lambda *arrays: concatenate(arrays, axis), *parts)


def write(room: Observation, index: Any, obs: Observation) -> None:
    """Put an observation at this place of the room."""

    def put(array: Any, part: Any) -> None:
        array[index] = part

    map_obs(put, room, obs)
