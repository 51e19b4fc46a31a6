"""The interface of a backend: start a host, call it, move a payload, report its death, end it. All other code is
shared. The simplest backend, inline, is defined here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from embodied.core.errors import ConfigError
from embodied.runtime.heartbeat import NOTICE_S, PROGRESS_BYTES, Progress, Pulse, Sign, resident_bytes
from embodied.runtime.host import DRIVER, Events, Host, HostPlan, Links

_log = logging.getLogger(__name__)


PROMISES = {  # descriptions of the backends for users
    "inline": "one process for debugging: nothing is pinned or isolated, nothing overlaps",
    "local": "one process per host on this machine",
    "ray": "one process per host, on the machines of a Ray cluster",
}


class Backend(Protocol):
    name: str
    isolates: bool  # a host can die alone, and be restarted
    notice_s: float  # seconds within which the end of a process is noticed; a consequence waits so long for its cause
    host: Host  # the driver's host

    def spawn(self, plan: HostPlan) -> None:
        """Starts or restarts a host with the environment of its plan. Returns before it is ready.

        Later messages to that name reach the new process. All messages of the old process are read first.
        """

    def call(self, host: str, message: tuple, packed: Any = None) -> None:
        """Delivers a control message without waiting, in order with the driver's puts into channels there."""

    def pack(self, item: Any) -> Any:
        """Makes an object ready to be sent, once for any number of receivers."""

    def unpack(self, packed: Any) -> Any: ...

    def describe_host(self, host: str) -> str:
        """Process, cores and log of a host, for error messages."""

    def progress(self, host: str, slot: int) -> Sign:
        """The last sign of life of a worker. Neither this nor `pulse` may wait for the host."""

    def pulse(self, host: str) -> Pulse:
        """The last heartbeat of a host's process; still readable when it has died."""

    def write_stacks(self, host: str) -> bool:
        """Makes a host write its threads' stacks into its log, even inside a native call; False if that is
        impossible."""

    def kill(self, host: str) -> None:
        """Ends a host's process at once, even a stopped one; its death is then reported as any other."""

    def stop(self, seconds: float) -> None:
        """Ends every host: workers get that long to close, then processes are killed."""


def choose_backend(name: str, address: str | None, several_nodes: bool) -> str:
    """Returns the name of the backend, with `auto` resolved; refuses impossible combinations."""
    if name == "auto":
        name = "ray" if address is not None or several_nodes else "local"
    if name != "ray" and address is not None:
        raise ConfigError(f"cluster.address={address} is for cluster.backend=ray, not for {name}")
    if name == "ray":
        from embodied.core.options import RAY  # hosts do without pydantic

        RAY.check("cluster.backend=ray")
    return name


def nodes_of(address: str, describe: Callable[[int, int], Any]) -> dict[str, Any]:
    """Returns the nodes of a running Ray cluster, the one we are on first, and what `describe` returns there, given how
    many GPUs and cores Ray counts."""
    from embodied.runtime.ray_nodes import Connection

    connection = Connection(address)
    try:
        return connection.ask(describe)
    finally:
        connection.close()


def reserve_devices(address: str, plans: Sequence[HostPlan]) -> Callable[[], None]:
    """Reserves the devices of these plans on a running Ray cluster until the returned function is called."""
    from embodied.runtime.ray_nodes import Connection, Reservation

    connection = Connection(address)
    try:
        reservation = Reservation(plans, connection.node)
    except BaseException:
        connection.close()
        raise

    def free() -> None:
        try:
            reservation.free()
        finally:
            connection.close()

    return free


def describe_backend(name: str) -> str:
    """Its name and its description for users."""
    return f"{name}: {PROMISES[name]}"


def make_backend(
    name: str,
    run: str,
    plans: list[HostPlan],
    log_dir: Path | None,
    timeout_s: float,
    events: Events,
    address: str | None = None,
    modules: Sequence[str] = (),
    start_s: float = 300.0,
    reserves: bool = True,
) -> Backend:
    if name not in ("auto", *PROMISES):
        raise ValueError(f"cluster.backend={name!r} is unknown; known: auto, {', '.join(PROMISES)}")
    name = choose_backend(name, address, any(plan.node for plan in plans))
    if name == "inline":
        return InlineBackend(run, plans, timeout_s, events)
    if name == "local":
        from embodied.runtime.local import LocalBackend

        return LocalBackend(run, plans, log_dir, timeout_s, events)
    from embodied.runtime.ray_backend import RayBackend

    return RayBackend(run, log_dir, timeout_s, events, address, modules, start_s, plans, reserves)


class InlineBackend:
    """All hosts in the calling process, for debugging: workers are threads, objects are handed over as they are."""

    name = "inline"
    isolates = False
    notice_s = NOTICE_S

    def __init__(self, run: str, plans: list[HostPlan], timeout_s: float, events: Events) -> None:
        self._progress = Progress(bytearray(PROGRESS_BYTES))
        links = Links(self.pack, self.unpack, self._no_other_host, lambda *report: events.on_report(DRIVER, *report))
        names = [DRIVER, *(plan.name for plan in plans)]
        self.host = Host(run, names, links, self._progress, timeout_s)

    def spawn(self, plan: HostPlan) -> None:
        pass

    def call(self, host: str, message: tuple, packed: Any = None) -> None:
        self.host.control(message, packed)

    def pack(self, item: Any, reader: str = "") -> Any:
        return item

    def unpack(self, packed: Any) -> Any:
        return packed

    def describe_host(self, host: str) -> str:
        return f"pid {os.getpid()}, inline"

    def progress(self, host: str, slot: int) -> Sign:
        return self._progress.read(slot)

    def pulse(self, host: str) -> Pulse:
        return Pulse(0.0, resident_bytes())

    def write_stacks(self, host: str) -> bool:
        return False

    def kill(self, host: str) -> None:
        raise AssertionError("nothing is isolated here, so nothing is killed")

    def stop(self, seconds: float) -> None:
        busy = self.host.stop(seconds)
        if busy:
            _log.warning("still busy in this process, and cannot be killed: %s", ", ".join(busy))

    @staticmethod
    def _no_other_host(*message: Any) -> None:
        raise AssertionError(f"the inline backend has one host, so there is no host to send {message} to")
