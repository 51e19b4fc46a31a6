"""What went wrong in a worker, as the driver keeps and tells it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from embodied.core.errors import WorkerFailed

FRAME = re.compile(r'^ *File "(.+", line \d+)', re.MULTILINE)


class RemoteTraceback(Exception):
    """Carries the traceback of a worker as text: the `__cause__` of a WorkerFailed."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass
class Failure:
    worker: str
    cause: str
    traceback: str = ""
    follows: tuple[str, str] | None = None  # (worker, cause) of the ChannelClosed that this is a consequence of
    fatal: bool = False  # the worker is gone for good: its process died or its constructor failed
    mendable: bool = False  # its host is to be started again
    exit_code: int = WorkerFailed.exit_code  # a mistake of the user's side keeps its own
    told: bool = False

    @property
    def raised_at(self) -> str | None:
        """The line that raised it; None of a process that died without a word."""
        frames = FRAME.findall(self.traceback)
        return frames[-1] if frames else None

    def error(self) -> WorkerFailed:
        self.told = True
        error = WorkerFailed(self.worker, self.cause)
        error.exit_code = self.exit_code
        if self.traceback:
            error.__cause__ = RemoteTraceback(self.traceback)
        return error

    def final(self, reason: str) -> Failure:
        """The same, and why the worker is not replaced."""
        return replace(self, cause=f"{self.cause}; {reason}" if reason else self.cause, fatal=True)


def readable(num_bytes: int) -> str:
    """1300234240 -> "1.2 GiB"."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
