"""Where learner ranks find each other. Free of torch, since the driver makes it."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class MeetingFile:
    """Ranks in processes of their own find their peers through a file in a private folder."""

    path: str
    timeout_s: float


class MeetingRoom:
    """Ranks in one process meet here; one instance per group, handed to every rank."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.barrier = threading.Barrier(world_size, timeout=timeout_s)
        self.seats: list = [None] * world_size


def meeting_point(cluster) -> MeetingFile | MeetingRoom | None:
    """For the learner ranks of this cluster."""
    ranks = cluster.num_replicas("learner")
    if ranks == 1:
        return None
    if cluster.backend == "inline":
        return MeetingRoom(ranks, cluster.timeout_s)
    return MeetingFile(str(cluster.private_dir / "learners"), cluster.timeout_s)
