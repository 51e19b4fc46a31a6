"""All hosts in the calling process, for debugging: workers are threads and everything is handed over as it is."""

from __future__ import annotations

import logging
import os
from typing import Any

from embodied.runtime.backend import Events
from embodied.runtime.host import DRIVER, Host, HostPlan, Links
from embodied.runtime.progress import PROGRESS_BYTES, Progress, Pulse, Sign, resident_bytes

_log = logging.getLogger(__name__)


class InlineBackend:
    name = "inline"
    isolates = False

    def __init__(self, run: str, plans: list[HostPlan], timeout_s: float, events: Events) -> None:
        self._progress = Progress(bytearray(PROGRESS_BYTES))
        links = Links(self.pack, self.unpack, self._no_other_host, lambda *told: events.on_report(DRIVER, *told))
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

    def where(self, host: str) -> str:
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
        raise AssertionError(f"inline has one host, nobody to send {message} to")
