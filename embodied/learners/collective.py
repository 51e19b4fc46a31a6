"""How learner ranks agree: sums and gathers in rank order, so that every rank holds the same bits."""

from __future__ import annotations

import os
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor

from embodied.learners.meeting import MeetingFile, MeetingRoom


class Alone:
    """A single learner rank."""

    def sum(self, values: Tensor) -> Tensor:
        return values

    def gather(self, rows: np.ndarray) -> list[np.ndarray]:
        return [rows]


class Threads:
    """Ranks that are threads of one process (the inline backend) exchange references."""

    def __init__(self, room: MeetingRoom, rank: int) -> None:
        self.room, self.rank = room, rank

    def sum(self, values: Tensor) -> Tensor:
        first, *others = self._exchange(values.clone())
        values.copy_(first)
        for part in others:
            values += part
        return values

    def gather(self, rows: np.ndarray) -> list[np.ndarray]:
        return self._exchange(rows)

    def _exchange(self, mine) -> list:
        self.room.seats[self.rank] = mine
        self.room.barrier.wait()
        seen = list(self.room.seats)
        self.room.barrier.wait()
        return seen


class Gloo:
    """Ranks in processes of their own; gloo listens on loopback only."""

    def __init__(self, file: MeetingFile, rank: int, world_size: int) -> None:
        import torch.distributed as dist

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(file.path, world_size)
        self.world_size = world_size
        self.group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=file.timeout_s))

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


Collective = Alone | Threads | Gloo


def join(meeting: MeetingFile | MeetingRoom | None, rank: int, world_size: int) -> Collective:
    if world_size == 1:
        return Alone()
    return Threads(meeting, rank) if isinstance(meeting, MeetingRoom) else Gloo(meeting, rank, world_size)
