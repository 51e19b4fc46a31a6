"""Sums and gathers among the ranks of a role, in rank order, so that every rank gets the same bits. Ranks find each
other by `rendezvous.py`.

Groups of neighbouring ranks that compute a sequence together and exchange tensors during a pass.

Groups of 2, 4, ... ranks are nested: rank 2 of 4 is in the group of ranks 2 and 3, and in the group of all ranks. All
ranks of a group must make the same calls in the same order. Every call has a deadline, and its time is measured as
"sync". As with `collective.Gloo`, every rank listens on a port, on the loopback interface if all ranks are on one
machine.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.errors import DeadlineExceeded
from embodied.runtime.device_memory import AllocatedMemory
from embodied.runtime.payload import map_shared
from embodied.runtime.rendezvous import InProcessRendezvous, Rendezvous, RendezvousAddress, RendezvousFile, nccl_options
from embodied.runtime.worker import Worker

SPINS = 20_000  # reads of the counters by a waiting rank before it sleeps between reads
HEAD = 64  # bytes before a rank's rows, for their number
ROOM = 1 << 16  # bytes of a slot, unless a sum needs more


class Alone:
    """A single rank."""

    def sum(self, values: Tensor) -> Tensor:
        return values

    def gather(self, rows: np.ndarray) -> list[np.ndarray]:
        return [rows]


class Threads:
    """Ranks that are threads of one process (the inline backend) exchange references."""

    def __init__(self, room: InProcessRendezvous, rank: int) -> None:
        self.room, self.rank = room, rank

    def sum(self, values: Tensor) -> Tensor:
        first, *others = self._exchange(values.clone())
        values.copy_(first)
        for of_rank in others:
            values += of_rank
        return values

    def gather(self, rows: np.ndarray) -> list[np.ndarray]:
        return self._exchange(rows)

    def _exchange(self, value) -> list:
        self.room.seats[self.rank] = value
        self.room.barrier.wait()
        seen = list(self.room.seats)
        self.room.barrier.wait()
        return seen


class Gloo:
    """Ranks in separate processes, on one machine or several. `gpus`, the ranks' NCCL, sums tensors on GPUs. Every rank
    listens on a port; anybody who reaches the port can hold connections open."""

    def __init__(
        self, rendezvous: RendezvousFile | RendezvousAddress, rank: int, world_size: int, gpus: GpuRanks | None = None
    ) -> None:
        import torch.distributed as dist

        rendezvous.use_interface()
        store = rendezvous.store("gloo", world_size)
        self.world_size, self.gpus = world_size, gpus
        self.group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=rendezvous.timeout_s))

    def sum(self, values: Tensor) -> Tensor:
        (self.gpus.group if values.is_cuda else self.group).allreduce([values]).wait()
        return values

    def gather(self, rows: np.ndarray) -> list[np.ndarray]:
        tensor = torch.from_numpy(np.ascontiguousarray(rows))
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        self.group.allgather([counts], [torch.tensor([len(tensor)])]).wait()
        widest = max(int(count) for count in counts)
        padded = tensor.new_zeros((widest, *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        parts = [torch.zeros_like(padded) for _ in range(self.world_size)]
        self.group.allgather([parts], [padded]).wait()
        return [of_rank[: int(count)].numpy() for of_rank, count in zip(parts, counts, strict=True)]


class SharedMemory:
    """Sums and gathers of processes on one machine go through shared memory, several times faster than by gloo, and
    without a port. The memory has no name and no file: a full disk would end the ranks by SIGBUS.

    Every rank has two slots and a counter. It writes its part into the slot of this round's parity, raises its counter,
    waits until all counters have reached the same value, and reads the parts in rank order. A slot is overwritten two
    rounds later, after the next counter of every rank has shown that its reads are done. This relies on x86's ordering
    of stores, so other machines use Gloo.
    """

    def __init__(self, file: RendezvousFile, rank: int, world_size: int, *, role: str) -> None:
        self.store = file.store("sums", world_size)
        self.rank, self.world_size, self.role, self.timeout_s = rank, world_size, role, file.timeout_s
        self.round = 0
        self.slots: np.ndarray | None = None

    def sum(self, values: Tensor) -> Tensor:
        mine = values.numpy()
        slots = self._next(mine.nbytes)[:, : mine.nbytes].view(mine.dtype)
        slots[self.rank] = mine
        self._wait()
        np.add(slots[0], slots[1], out=mine)
        for of_rank in slots[2:]:
            mine += of_rank
        return values

    def gather(self, rows: np.ndarray) -> list[np.ndarray]:
        array, row = np.ascontiguousarray(rows), rows.dtype.itemsize * math.prod(rows.shape[1:])
        slots = self._next(HEAD)
        fits = (slots.shape[1] - HEAD) // max(row, 1)
        slots[self.rank, :8].view(np.int64)[0] = len(array)
        if len(array) <= fits:
            slots[self.rank, HEAD : HEAD + array.nbytes] = array.reshape(-1).view(np.uint8)
        self._wait()
        counts = slots[:, :8].copy().view(np.int64)[:, 0].tolist()
        if max(counts) > fits:
            self._map(HEAD + max(counts) * row)
            return self.gather(rows)
        shown = [
            slot[HEAD : HEAD + count * row].copy().view(array.dtype) for slot, count in zip(slots, counts, strict=True)
        ]
        return [of_rank.reshape(count, *array.shape[1:]) for of_rank, count in zip(shown, counts, strict=True)]

    def _next(self, size: int) -> np.ndarray:
        """The slots of the next round [ranks, bytes], with room for this size."""
        if self.slots is None or self.slots.shape[2] < size:
            self._map(max(size, ROOM))
        self.round += 1
        return self.slots[:, self.round % 2]

    def _wait(self) -> None:
        """Publish this rank's counter, and wait for all other ranks."""
        self._wait_for(0, self.round)

    def _wait_for(self, column: int, value: int) -> None:
        self.counters[self.rank, column] = value
        counters, until = self.counters[:, column], time.monotonic() + self.timeout_s
        tries = 0
        while (counters < value).any():
            tries += 1
            if tries > SPINS:
                time.sleep(0.0001)
                if time.monotonic() > until:
                    late = np.flatnonzero(counters < value).tolist()
                    raise DeadlineExceeded(f"{self.role} ranks {late} did not join a sum within {self.timeout_s:g} s")

    def _map(self, size: int) -> None:
        """Rank 0 allocates the memory, and all ranks map it through rank 0's process. The descriptor's number is passed
        through the file at first, later through the previous memory."""
        size = -(-size // 64) * 64
        total = self.world_size * (64 + 2 * size)
        descriptor = os.memfd_create("embodied-sums", os.MFD_CLOEXEC) if self.rank == 0 else -1
        if self.rank == 0:
            os.ftruncate(descriptor, total)
        place = np.array([os.getpid(), descriptor])
        if self.slots is not None:
            pid, fd = self.gather(place)[0]
        else:
            if self.rank == 0:
                self.store.set("memory", " ".join(map(str, place)))
            self.store.wait(["memory"], timedelta(seconds=self.timeout_s))
            pid, fd = map(int, self.store.get("memory").split())
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        memory = np.frombuffer(map_shared(opened, total), np.uint8)
        os.close(opened)
        head = self.world_size * 64
        self.counters = memory[:head].view(np.uint64).reshape(self.world_size, 8)
        self.slots = memory[head:].reshape(self.world_size, 2, size)
        self.counters[self.rank, 0] = self.round
        self._wait_for(1, 1)  # all ranks have opened it
        if self.rank == 0:
            os.close(descriptor)


class Measured:
    """Wraps a collective and measures its time, including the wait for the slowest rank, as "sync". A waiting rank may
    be silent, so the hung rank is found, not the waiting one."""

    def __init__(self, ranks: Threads | Gloo | SharedMemory, worker: Worker) -> None:
        self.ranks, self.worker = ranks, worker

    def sum(self, values: Tensor) -> Tensor:
        with self.worker.timers.measure("sync"), self.worker.waiting():
            return self.ranks.sum(values)

    def gather(self, rows: np.ndarray) -> list[np.ndarray]:
        with self.worker.timers.measure("sync"), self.worker.waiting():
            return self.ranks.gather(rows)


Collective = Alone | Threads | Gloo | SharedMemory | Measured


class GpuRanks:
    """The only NCCL communicators of this process, which sums, groups of ranks and shards use.

    A rank frees its communicators alone, when another process needs the GPU memory. All ranks make new ones together:

        ranks.free()                   when the worker is offloaded
        ranks.restore(collective)      on every rank, before the next update
    """

    def __init__(self, rendezvous: RendezvousFile | RendezvousAddress, worker: Worker, sharded: bool) -> None:
        """Waits for the other ranks."""
        self.rendezvous, self.worker, self.sharded = rendezvous, worker, sharded
        self.gpu = torch.device("cuda", torch.cuda.current_device())
        self.connections = 0
        self.memory = AllocatedMemory()
        self.divided: list[Any] = []  # groups of some of the ranks (`RankGroup`)
        self.group: Any = None
        if sharded:  # torch owns this group, so it is never freed
            import torch.distributed as dist

            self.group = dist.group.WORLD._get_backend(self.gpu)
        else:
            self._connect()

    def free(self) -> None:
        """Free the communicators of this rank, without the other ranks."""
        if self.group is not None and not self.sharded:
            for group in {division.group for division in self.divided} | {self.group}:
                group.abort()
            self.group = None

    def restore(self, collective: Collective) -> None:
        """Make new communicators if any rank has freed its communicators. All ranks take part."""
        if self.sharded or not np.any(collective.gather(np.array([float(self.group is None)]))):
            return
        self.free()
        self._connect()
        collective.gather(np.zeros(1))  # all ranks have met
        if self.worker.rank == 0:
            self.rendezvous.remove()

    def divide(self, size: int) -> Any:
        """The communicator of this rank's group of `size` neighbouring ranks, split from that of all ranks."""
        return self.group if size == self.worker.world_size else self._communicator(size)

    def _connect(self) -> None:
        self.memory, self.connections = AllocatedMemory(), self.connections + 1
        with self.memory.measured():
            self.rendezvous.use_interface()
            self.group = self._communicator(self.worker.world_size)
            for division in self.divided:
                division.group = self.divide(division.size)

    def _communicator(self, size: int) -> Any:
        import torch.distributed as dist

        place, first = self.worker.rank % size, self.worker.rank - self.worker.rank % size
        store = self.rendezvous.store(f"nccl-{self.connections}-{size}-{first}", size)
        group = dist.ProcessGroupNCCL(store, place, size, nccl_options(self.rendezvous, self.group, color=first))
        group.eager_connect_single_device(self.gpu)
        return group


def connect_gpus(rendezvous: Rendezvous | None, worker: Worker, device: str, sharded: bool) -> GpuRanks | None:
    """None where gradients are not on GPUs, and for ranks in one process."""
    if device != "cuda" or rendezvous is None or isinstance(rendezvous, InProcessRendezvous):
        return None
    return GpuRanks(rendezvous, worker, sharded)


def join(rendezvous: Rendezvous | None, worker: Worker, gpus: GpuRanks | None = None) -> Collective:
    """Waits for the other ranks and returns their collective; `gpus` sums gradients on GPUs."""
    rank, world_size = worker.rank, worker.world_size
    if world_size == 1:
        return Alone()
    if isinstance(rendezvous, InProcessRendezvous):
        return Measured(Threads(rendezvous, rank), worker)
    if gpus is None and isinstance(rendezvous, RendezvousFile) and platform.machine() == "x86_64":
        ranks = SharedMemory(rendezvous, rank, world_size, role=worker.name.rpartition("-")[0])
    else:
        ranks = Gloo(rendezvous, rank, world_size, gpus)
    ranks.gather(np.zeros(1))
    if rank == 0:
        rendezvous.remove()
    return Measured(ranks, worker)


class RankGroup:
    """A group in which this rank is member number `place`."""

    def __init__(self, group: Any, ranks: range, place: int, worker: Worker) -> None:
        self.group, self.ranks, self.place, self.worker = group, ranks, place, worker

    @property
    def size(self) -> int:
        return len(self.ranks)

    def begin_exchange(self, parts: Tensor) -> PendingTensor:
        """Begin to send part i [N, ...] to member i (all-to-all), and to receive parts in the order of members."""
        came = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
        sent = as_bytes(parts)
        return PendingTensor(came, self.group.alltoall_base(as_bytes(came), sent, [], []), self, sent)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """All-gather: the tensors of all members, which have equal shapes."""
        sent = as_bytes(tensor)
        came = [torch.empty_like(sent) for _ in self.ranks]
        with self._measure_sync():
            self.group.allgather([came], [sent]).wait()
        return [flat_tensor.view(tensor.dtype).view(tensor.shape) for flat_tensor in came]

    def send_from(self, place: int, tensor: Tensor) -> PendingTensor:
        """Begin to broadcast this member's tensor into the other members' tensors of the same shape."""
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = place, 0
        return PendingTensor(tensor, self.group.broadcast([as_bytes(tensor)], options), self)

    @contextmanager
    def _measure_sync(self) -> Iterator[None]:
        with self.worker.timers.measure("sync"), self.worker.waiting():
            yield


class PendingTensor:
    """A tensor that is being received."""

    def __init__(self, tensor: Tensor, work: Any, group: RankGroup, sent: Tensor | None = None) -> None:
        """`sent` is kept until it has been sent."""
        self.tensor, self.work, self.group, self.sent = tensor, work, group, sent

    def wait(self) -> Tensor:
        with self.group._measure_sync():
            self.work.wait()
        self.sent = None
        return self.tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as flat bytes, since gloo does not support all types."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def form_groups(
    rendezvous: RendezvousFile | RendezvousAddress, worker: Worker, degrees: Sequence[int], gpus: GpuRanks | None = None
) -> dict[int, RankGroup]:
    """Returns this rank's group of every degree above 1. All ranks must call it; on GPUs their NCCL communicator is
    split."""
    import torch.distributed as dist

    rendezvous.use_interface()
    timeout, groups = timedelta(seconds=rendezvous.timeout_s), {}
    for degree in degrees:
        place, first = worker.rank % degree, worker.rank - worker.rank % degree
        if gpus is None:
            store = rendezvous.store(f"sequences-{degree}-{first}", degree)
            group = dist.ProcessGroupGloo(store, place, degree, timeout)
        else:
            group = gpus.divide(degree)
        groups[degree] = RankGroup(group, range(first, first + degree), place, worker)
        if gpus is not None:
            gpus.divided.append(groups[degree])
        groups[degree].gather(torch.zeros(1, device="cpu" if gpus is None else "cuda"))
    return groups
