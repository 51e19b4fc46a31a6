"""Where learner ranks find each other. Free of torch, since the driver makes it."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MeetingFile:
    """Ranks in processes of their own find their peers through a file in a private folder."""

    path: str
    timeout_s: float

    def remove(self) -> None:
        """What was needed to meet: the file itself, and others beside it."""
        whole = Path(self.path)
        for file in whole.parent.glob(f"{whole.name}*"):
            file.unlink(missing_ok=True)


class MeetingRoom:
    """Ranks in one process meet here; one instance per group, handed to every rank."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.barrier = threading.Barrier(world_size, timeout=timeout_s)
        self.seats: list = [None] * world_size


def meeting_point(ranks: int, backend: str, folder: Path, timeout_s: float) -> MeetingFile | MeetingRoom | None:
    """For the learner ranks of a run; the file lies in a folder that only this run uses."""
    if ranks == 1:
        return None
    if backend == "inline":
        return MeetingRoom(ranks, timeout_s)
    return MeetingFile(str(folder / f"learners-{secrets.token_hex(4)}"), timeout_s)
