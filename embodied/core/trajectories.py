"""Putting trajectories together, taking parts of them, and keeping them in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from embodied.core.arrays import concatenate, host, room_for
from embodied.core.observations import Observation, is_text, map_obs, write
from embodied.core.types import Trajectory

FIELDS = ("actions", "logprobs", "rewards", "terminated", "truncated", "mask", "versions", "episodes")
DECISIONS = (*FIELDS, "values", "next_values")  # arrays with a row per decision, besides `obs` and `replay`


def decisions_of(trajectory: Trajectory) -> Observation:
    """All that has a row per decision, as one tree of arrays; without values where there are none."""
    found = {name: getattr(trajectory, name) for name in ("obs", "replay", *DECISIONS)}
    return {name: part for name, part in found.items() if part is not None}


def map_decisions(function: Callable, *trajectories: Trajectory) -> dict[str, Any]:
    """The function's result for every array with a row per decision, by the fields of a trajectory."""
    return map_obs(function, *map(decisions_of, trajectories))


def join(parts: Sequence[Trajectory]) -> Trajectory:
    """The sequences of all parts, in the order of their ids."""
    if len(parts) == 1:
        return parts[0]
    parts = sorted(parts, key=lambda part: int(part.ids[0]))
    about = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "lengths")}
    joined = replace(parts[0], source="", **about, **map_decisions(lambda *arrays: concatenate(arrays), *parts))
    return joined if (np.diff(joined.ids) > 0).all() else choose(joined, np.sort(joined.ids))


def choose(trajectory: Trajectory, ids: Sequence[int] | np.ndarray, source: str = "") -> Trajectory:
    """A copy of these sequences, in this order; all of them are returned as they are."""
    ids = np.array(ids, np.int64)
    if np.array_equal(ids, trajectory.ids):
        return replace(trajectory, source=source)
    place = {int(one): at for at, one in enumerate(trajectory.ids)}
    at = np.array([place[one] for one in ids.tolist()], np.int64)
    ends = np.cumsum(trajectory.lengths)
    starts = ends - trajectory.lengths
    rows = np.concatenate([np.empty(0, np.int64), *(np.arange(starts[i], ends[i]) for i in at)])
    about = {"ids": trajectory.ids[at], "lengths": trajectory.lengths[at], "source": source}
    return replace(trajectory, **about, **map_decisions(lambda array: array[rows], trajectory))


def in_sequences(decisions: list[tuple[np.ndarray, Observation]]) -> tuple[np.ndarray, np.ndarray, Observation]:
    """Ids, lengths and one tree of arrays, sequence after sequence, of decisions in the order in which they were taken:
    each of several sequences, their ids [n] and a tree of arrays [n, ...]. The list is emptied on the way."""
    of = np.concatenate([ids for ids, _ in decisions])
    ids, lengths = np.unique(of, return_counts=True)
    place = np.empty(len(of), np.int64)
    place[np.argsort(of, kind="stable")] = np.arange(len(of))
    room = map_obs(lambda array: room_for(array, len(of)), decisions[0][1])
    decisions.reverse()
    begin = 0
    while decisions:  # what is written is let go: memory does not double
        sequences, arrays = decisions.pop()
        write(room, place[begin : begin + len(sequences)], arrays)
        begin += len(sequences)
    return ids, lengths, room


def arrays_of(trajectory: Trajectory) -> dict[str, np.ndarray]:
    """Everything as flat arrays, for a checkpoint."""
    flat: dict[str, Any] = {"ids": trajectory.ids, "lengths": trajectory.lengths}

    def add(prefix: str, tree: Observation) -> None:
        for name, part in tree.items():
            if isinstance(part, dict):
                add(f"{prefix}{name}.", part)
            else:
                flat[prefix + name] = part.astype(str) if is_text(part) else host(part)

    add("", decisions_of(trajectory))
    return flat


def trajectory_from(arrays: dict[str, np.ndarray]) -> Trajectory:
    """What `arrays_of` was made of."""
    tree: dict[str, Any] = {"replay": {}}
    for name, array in with_flags(arrays).items():
        *groups, leaf = name.split(".")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[leaf] = array.astype(object) if array.dtype.kind == "U" else array
    return Trajectory(**tree)


def with_flags(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of an older checkpoint, which named whole episodes once each, with what was not kept."""
    if "ids" in arrays:
        return arrays
    unknown = np.zeros_like(arrays["mask"])
    of = np.repeat(arrays["episodes"], arrays["lengths"])
    return {**arrays, "ids": arrays["episodes"], "episodes": of, "terminated": unknown, "truncated": unknown}
