"""What a backend supplies: start a host, call it, move a payload, tell that it died, end it. All else is shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from embodied.runtime.hosts import Host, HostPlan
from embodied.runtime.progress import Pulse, Sign


@dataclass(frozen=True)
class Events:
    """What a backend tells the cluster, from any thread."""

    on_report: Callable[[str, tuple, Any], None]  # (host name, message, packed result): a host answers
    on_death: Callable[[str, str], None]  # (host name, cause): its process ended, and all it has sent here is told


class Backend(Protocol):
    name: str
    promise: str  # what a user can expect of it, one line
    isolates: bool  # a host can die without the others, and be started again
    host: Host  # the driver's own

    def spawn(self, plan: HostPlan) -> None:
        """Starts a host with the environment of its plan, or one that died again. Returns before it is up.

        What is sent to that name from now on reaches the new life, after everything the old one has sent was read.
        """

    def call(self, host: str, message: tuple, packed: Any = None) -> None:
        """Delivers a control message without waiting, in order also with what the driver puts into channels there."""

    def pack(self, item: Any) -> Any:
        """Makes an object ready to be sent, once for any number of receivers."""

    def unpack(self, packed: Any) -> Any: ...

    def where(self, host: str) -> str:
        """Process, cores and log of a host, for error messages."""

    def progress(self, host: str, slot: int) -> Sign:
        """The last sign of life of a worker. Neither this nor `pulse` may wait for the host."""

    def pulse(self, host: str) -> Pulse:
        """The last heartbeat of a host's process; still readable when it has died."""

    def kill(self, host: str) -> None:
        """Ends a host's process at once, even a stopped one; its death is then told as any other."""

    def stop(self, seconds: float) -> None:
        """Ends every host: workers get that long to close, then processes are killed."""


def describe_backend(name: str) -> str:
    """Its name and what a user can expect of it."""
    if name == "inline":
        from embodied.runtime.inline import InlineBackend as kind
    else:
        from embodied.runtime.local import LocalBackend as kind
    return f"{kind.name}: {kind.promise}"


def make_backend(
    name: str, run: str, plans: list[HostPlan], log_dir: Path | None, timeout_s: float, events: Events
) -> Backend:
    if name == "inline":
        from embodied.runtime.inline import InlineBackend

        return InlineBackend(run, plans, timeout_s, events)
    if name in ("auto", "local"):
        from embodied.runtime.local import LocalBackend

        return LocalBackend(run, log_dir, timeout_s, events)
    raise ValueError(f"cluster.backend={name!r} is unknown; known: auto, inline, local")
