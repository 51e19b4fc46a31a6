"""What a backend supplies: start a host, call it, move a payload, tell that it died. All else is shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from embodied.runtime.hosts import Host, HostPlan


@dataclass(frozen=True)
class Events:
    """What a backend tells the cluster, from any thread."""

    on_report: Callable[[str, tuple, Any], None]  # (host name, message, packed result): a host answers
    on_death: Callable[[str, str], None]  # (host name, cause): its process ended


class Backend(Protocol):
    name: str
    promise: str  # what a user can expect of it, one line
    host: Host  # the driver's own

    def spawn(self, plan: HostPlan) -> None:
        """Starts a host with the environment of its plan. Returns before it is up."""

    def call(self, host: str, message: tuple, packed: Any = None) -> None:
        """Delivers a control message, in order, without waiting."""

    def pack(self, item: Any) -> Any:
        """Makes an object ready to be sent, once for any number of receivers."""

    def unpack(self, packed: Any) -> Any: ...

    def where(self, host: str) -> str:
        """Process, cores and log of a host, for error messages."""

    def progress(self, host: str, slot: int) -> tuple[int, float]:
        """Ticks of a worker so far, and seconds since the last."""

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
