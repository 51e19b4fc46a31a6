"""The demonstrations that a learner rank learns from, an item per env step.

Pictures are decoded once, episode by episode, into a file without a name, and only those of a micro-batch are in
memory; the file is gone when the process is, however it ends. States and actions are small and stay.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.errors import ConfigError
from embodied.core.types import EnvSpec, Observation
from embodied.datasets import RecordedEpisode


class Demonstrations:
    """`first` is the number of this rank's first item among all `total`."""

    def __init__(self, spec: EnvSpec, horizon: int, first: int, total: int) -> None:
        self.spec, self.horizon, self.first, self.total = spec, horizon, first, total
        self.pictures: Pictures | None = None
        self._states, self._actions = np.zeros((0, 0), np.float32), np.zeros((0, 0), np.float32)
        self._texts: list[str] = []  # of each episode
        self._ends = np.zeros(0, np.int64)  # of each episode, in items

    def __len__(self) -> int:
        return len(self._actions)

    def read(self, episodes: Iterable[RecordedEpisode], items: int, folder: Path | None) -> Iterator[Observation]:
        """Take them up, `items` in all; -> what a policy looks at in each, numbers only."""
        if self.spec.images:
            self.pictures = Pictures(dict(self.spec.images), items, folder)
        states, actions = [], []
        for episode in episodes:
            if self.pictures:
                self.pictures.add(episode.obs["images"])
            self._texts.append(episode.obs["instruction"][0])
            states.append(episode.obs["state"] if self.spec.state_dim else np.zeros((len(episode), 0), np.float32))
            actions.append(episode.actions)
            yield {"state": states[-1]} if self.spec.state_dim else {}
        self._states, self._actions = np.concatenate(states), np.concatenate(actions)
        self._ends = np.cumsum([len(part) for part in actions])

    def batch(self, items: Tensor) -> dict[str, Any]:
        """obs, actions [B, C, A] and mask [B, C] of these items: the actions from each on, and which there are."""
        rows = items.numpy()
        episodes = np.searchsorted(self._ends, rows, side="right")
        steps = rows[:, None] + np.arange(self.horizon)
        ends = self._ends[episodes][:, None]
        obs: Observation = {"state": torch.from_numpy(self._states[rows])} if self.spec.state_dim else {}
        if self.pictures:
            obs["images"] = self.pictures.take(rows)
        if self.spec.instruction:
            obs["instruction"] = [self._texts[episode] for episode in episodes]
        actions = torch.from_numpy(self._actions[np.minimum(steps, ends - 1)])
        return {"obs": obs, "actions": actions, "mask": torch.from_numpy(steps < ends)}

    def close(self) -> None:
        if self.pictures:
            self.pictures.close()


class Pictures:
    """uint8 [items, H, W, 3] of each camera, on disk."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], items: int, folder: Path | None) -> None:
        self.shapes = shapes
        self.item_bytes = sum(int(np.prod(shape)) for shape in shapes.values())
        place = Path(tempfile.gettempdir() if folder is None else folder)
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise ConfigError(f"sft.cache={place} is no folder that can be written to; mkdir {place}, or name another")
        needed, free = items * self.item_bytes, shutil.disk_usage(place).free
        if needed > free:
            raise ConfigError(
                f"the pictures of {items:,} env steps take {needed / 1e9:.3g} GB decoded, and {place} has "
                f"{free / 1e9:.3g} GB left; name another folder as sft.cache, or take fewer with sft.episodes"
            )
        self._file, name = tempfile.mkstemp(prefix="embodied-pictures-", dir=place)
        os.unlink(name)

    def add(self, images: dict[str, np.ndarray]) -> None:
        """Of the next items."""
        parts = [images[camera].reshape(len(images[camera]), -1) for camera in self.shapes]
        rest = memoryview(np.concatenate(parts, axis=1)).cast("B")
        while len(rest):
            rest = rest[os.write(self._file, rest) :]

    def take(self, items: np.ndarray) -> dict[str, Tensor]:
        rows = np.empty((len(items), self.item_bytes), np.uint8)
        for row, item in zip(rows, items.tolist(), strict=True):
            if os.preadv(self._file, [row], item * self.item_bytes) != self.item_bytes:
                raise OSError(f"the pictures of item {item} are not there any more")
        found, at = {}, 0
        for camera, shape in self.shapes.items():
            size = int(np.prod(shape))
            found[camera] = torch.from_numpy(rows[:, at : at + size].reshape(len(items), *shape))
            at += size
        return found

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
