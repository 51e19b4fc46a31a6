"""How learner ranks agree: sums and gathers in rank order, so that every rank holds the same bits.

One rank needs nothing; ranks in one process (the inline backend) meet at a barrier; ranks in processes of their own use gloo,
which finds its peers through a file in the run's private folder and listens on loopback only.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class Alone:
    """A single learner rank."""

    def sum(self, values: Tensor) -> Tensor:
        return values

    def gather(self, rows: np.ndarray) -> list[np.ndarray]:
        return [rows]


class Meeting:
    """The common room of several ranks in one process; one instance per group, handed to every rank."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.barrier = threading.Barrier(world_size, timeout=timeout_s)
        self.seats: list = [None] * world_size


class Threads:
    """Ranks that are threads of one process."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def sum(self, values: Tensor) -> Tensor:
        total = torch.zeros_like(values)
        for part in self._exchange(values.clone()):
            total += part
        return values.copy_(total)

    def gather(self, rows: np.ndarray) -> list[np.ndarray]:
        return self._exchange(rows)

    def _exchange(self, mine) -> list:
        self.meeting.seats[self.rank] = mine
        self.meeting.barrier.wait()
        seen = list(self.meeting.seats)
        self.meeting.barrier.wait()
        return seen


class Gloo:
    """Ranks in processes of their own."""

    def __init__(self, path: Path, rank: int, world_size: int, timeout_s: float) -> None:
        import torch.distributed as dist

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(str(path), world_size)
        self.world_size = world_size
        self.group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout_s))

    def sum(self, values: Tensor) -> Tensor:
        self.group.allreduce([values]).wait()
        return values

    def gather(self, rows: np.ndarray) -> list[np.ndarray]:
        mine = torch.from_numpy(np.ascontiguousarray(rows))
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        self.group.allgather([counts], [torch.tensor([len(mine)])]).wait()
        widest = max(int(count) for count in counts)
        padded = mine.new_zeros((widest, *mine.shape[1:]))
        padded[: len(mine)] = mine
        parts = [torch.zeros_like(padded) for _ in range(self.world_size)]
        self.group.allgather([parts], [padded]).wait()
        return [part[: int(count)].numpy() for part, count in zip(parts, counts, strict=True)]
