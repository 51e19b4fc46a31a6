"""Groups of neighbouring ranks that compute a sequence together and exchange tensors during a pass.

Groups of 2, 4, ... ranks are nested: rank 2 of 4 is in the group of ranks 2 and 3, and in the group of all ranks. All
ranks of a group must make the same calls in the same order. Every call has a deadline, and its time is measured as
"sync". As with `collective.Gloo`, every rank listens on a port, on the loopback interface if all ranks are on one
machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from embodied.runtime.collective import GpuRanks
from embodied.runtime.rendezvous import RendezvousAddress, RendezvousFile
from embodied.runtime.worker import Worker


class RankGroup:
    """A group in which this rank is member number `place`."""

    def __init__(self, group: Any, ranks: range, place: int, worker: Worker) -> None:
        self.group, self.ranks, self.place, self.worker = group, ranks, place, worker

    @property
    def size(self) -> int:
        return len(self.ranks)

    def exchange(self, parts: Tensor) -> Tensor:
        """Send part i [N, ...] to member i (all-to-all); returns the parts for this rank, in the order of members."""
        sent = as_bytes(parts)
        came = torch.empty_like(sent)
        with self._measured():
            self.group.alltoall_base(came, sent, [], []).wait()
        return came.view(parts.dtype).view(parts.shape)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """All-gather: the tensors of all members, which have equal shapes."""
        sent = as_bytes(tensor)
        came = [torch.empty_like(sent) for _ in self.ranks]
        with self._measured():
            self.group.allgather([came], [sent]).wait()
        return [each.view(tensor.dtype).view(tensor.shape) for each in came]

    def send_from(self, place: int, tensor: Tensor) -> PendingTensor:
        """Begin to broadcast this member's tensor into the other members' tensors of the same shape."""
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = place, 0
        return PendingTensor(tensor, self.group.broadcast([as_bytes(tensor)], options), self)

    @contextmanager
    def _measured(self) -> Iterator[None]:
        with self.worker.timers.measure("sync"), self.worker.waiting():
            yield


class PendingTensor:
    """A tensor that is being received."""

    def __init__(self, tensor: Tensor, work: Any, group: RankGroup) -> None:
        self.tensor, self.work, self.group = tensor, work, group

    def wait(self) -> Tensor:
        with self.group._measured():
            self.work.wait()
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
