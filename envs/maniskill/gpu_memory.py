"""The memory of PhysX on a GPU: its buffers are made once, sized by the number of rows. Overflows end the run.

PhysX goes on without the contacts that have no room, and says so only in the log. A worker reads its own log for it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import sapien.physx

from embodied.core.errors import EmbodiedError

ROWS = 4096  # for which the capacities of ManiSkill and its tasks are meant
GROW = ("max_rigid_contact_count", "max_rigid_patch_count", "collision_stack_size")
MOST = 1 << 31  # PhysX takes numbers of 32 bits
WORDS = {
    "Contact buffer": "max_rigid_contact_count",
    "Patch buffer": "max_rigid_patch_count",
    "collisionStackSize": "collision_stack_size",
    "foundLostPairsCapacity": "found_lost_pairs_capacity",
    "foundLostAggregatePairsCapacity": "found_lost_aggregate_pairs_capacity",
    "totalAggregatePairsCapacity": "total_aggregate_pairs_capacity",
}
OVERFLOW = re.compile(rf"({'|'.join(WORDS)})\b[^\n]*?\bto(?: at least)? (\d+)")


def capacities(usual: Mapping[str, int], num_envs: int, chosen: Mapping[str, int]) -> dict[str, int]:
    """The capacities for so many rows: a task's own for up to ROWS rows, then a power of two in proportion."""
    grown = {name: min(MOST, power_of_two(size * num_envs // ROWS)) for name, size in usual.items() if name in GROW}
    return {**usual, **{name: max(usual[name], size) for name, size in grown.items()}, **chosen}


def power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


@contextmanager
def gpu_capacities(num_envs: int, chosen: Mapping[str, int]) -> Iterator[None]:
    """Inside, an env on a GPU is built with room for so many rows."""
    set_capacities = sapien.physx.set_gpu_memory_config
    sapien.physx.set_gpu_memory_config = lambda **usual: set_capacities(**capacities(usual, num_envs, chosen))
    try:
        yield
    finally:
        sapien.physx.set_gpu_memory_config = set_capacities


class Overflows:
    """Reads what PhysX has written to this process's log since the last look."""

    def __init__(self, descriptor: int = 2) -> None:
        self.log = Path(f"/proc/self/fd/{descriptor}")
        self.is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self.descriptor, self.seen = descriptor, os.fstat(descriptor).st_size

    def check(self, task: str, num_envs: int) -> None:
        """Raise if contacts were lost."""
        size = os.fstat(self.descriptor).st_size
        if not self.is_file or size <= self.seen:
            return
        with self.log.open("rb") as log:
            log.seek(self.seen)
            written = log.read().decode(errors="replace")
        self.seen = size
        needed: dict[str, int] = {}
        for word, number in OVERFLOW.findall(written):
            needed[WORDS[word]] = max(needed.get(WORDS[word], 0), power_of_two(int(number)))
        if needed:
            setting = ", ".join(f"{name}: {number}" for name, number in needed.items())
            raise EmbodiedError(
                f"PhysX on the GPU had too little room for {num_envs} envs of {task} and lost contacts; try "
                f"env.gpu_memory='{{{setting}}}' or fewer envs on each GPU"
            )
