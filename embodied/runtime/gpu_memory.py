"""What a worker takes of its GPU besides the tensors that it keeps: a simulator's memory, and what computing takes.

Simulators allocate by themselves, so what they take is what the GPU has less of afterwards; nobody else builds on it
meanwhile but sims. On cores nothing is limited and nothing is counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from embodied.runtime.payload import own_device, own_gpu


class Taken:
    """Bytes that are there from now on."""

    def __init__(self) -> None:
        self.num_bytes = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        before = free_bytes()
        yield
        self.num_bytes += max(0, before - free_bytes())


class Computing:
    """The most that some work took for as long as it lasted, so far; torch keeps it for the next time."""

    def __init__(self) -> None:
        self.num_bytes = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        before = begin_peak()
        try:
            yield
        finally:
            now, peak = allocated_bytes()
            self.num_bytes = max(self.num_bytes, peak - max(before, now))


def free_bytes() -> int:
    """Of the GPU that this process holds; 0 where it holds none."""
    if not own_gpu():
        return 0
    import torch

    return torch.cuda.mem_get_info()[0]


def begin_peak() -> int:
    """-> bytes of tensors there now."""
    if not on_gpu():
        return 0
    cuda = sys.modules["torch"].cuda
    cuda.reset_peak_memory_stats()
    return cuda.memory_allocated()


def allocated_bytes() -> tuple[int, int]:
    """Of tensors, now and at most since `begin_peak`."""
    if not on_gpu():
        return 0, 0
    cuda = sys.modules["torch"].cuda
    return cuda.memory_allocated(), cuda.max_memory_allocated()


def give_back_unused() -> None:
    """What torch keeps for the next time."""
    if on_gpu():
        sys.modules["torch"].cuda.empty_cache()


def on_gpu() -> bool:
    return "torch" in sys.modules and own_device() == "cuda"
