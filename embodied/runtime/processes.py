"""Shared by backends whose hosts are processes: starting, watching and ending them.

`placement/placement_plan.py` chooses the cores of a host; this module checks that the machine has them.
"""

from __future__ import annotations

import io
import logging
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied.runtime.heartbeat import PROGRESS_BYTES, Progress, Pulse, Sign
from embodied.runtime.host import DRIVER, Host, HostPlan, Links, ranges

if TYPE_CHECKING:
    from embodied.runtime.backend import Events

_log = logging.getLogger(__name__)

WRITE_STACKS = signal.SIGUSR1  # makes a host write its threads' stacks into its log
WRITING_S = 0.2  # time for a process to write its threads' stacks
START_S = 300.0  # limit for starting a Ray cluster of the run's own
LOG_BYTES = 64 << 20  # maximum size of a host's log; of a longer log the last quarter is kept
LOG_S = 1.0  # between two checks of a log's size
NOTICE_S = 10.0  # limit for noticing the end of a process
KILL_S = 5.0  # limit for a killed process to vanish


@dataclass
class HostProcess:
    """One life of a host."""

    plan: HostPlan
    log: str | None
    memory: mmap.mmap
    progress: Progress = field(init=False)
    pid: int | None = field(default=None, init=False)  # None: not known yet
    stopped: threading.Event = field(default_factory=threading.Event, init=False)  # its workers are closed
    ended: threading.Event = field(default_factory=threading.Event, init=False)
    node = ""  # node of the cluster, if there is one
    here = True  # on this machine
    end_s = KILL_S

    def __post_init__(self) -> None:
        self.progress = Progress(self.memory)

    def where(self) -> str:
        """Process, cores and log, for error messages."""
        parts = [f"node {self.node}"] if self.node else []
        parts.append(f"pid {self.pid}" if self.pid is not None else "starting")
        parts += [f"cores {ranges(self.plan.cores)}"] if self.plan.cores else []
        parts += [f"log: {self.log}"] if self.log is not None else []
        return ", ".join(parts)

    def free(self) -> None:
        self.progress.release()
        self.memory.close()


class Processes:
    """The part of a backend that reads its `HostProcess`es. Subclasses start, call and kill them."""

    isolates = True
    notice_s = NOTICE_S

    def __init__(
        self, run: str, log_dir: Path | None, timeout_s: float, events: Events, pack: Callable, unpack: Callable
    ) -> None:
        self._run, self._log_dir, self._timeout_s, self._events = run, log_dir, timeout_s, events
        self.pack, self.unpack = pack, unpack
        self._processes: dict[str, Any] = {}
        links = Links(pack, unpack, self._post, lambda *report: events.on_report(DRIVER, *report))
        self.host = Host(run, [DRIVER], links, Progress(bytearray(PROGRESS_BYTES)), timeout_s)

    def where(self, host: str) -> str:
        return self._processes[host].where()

    def progress(self, host: str, slot: int) -> Sign:
        return self._processes[host].progress.read(slot)

    def pulse(self, host: str) -> Pulse:
        return self._processes[host].progress.pulse()

    def write_stacks(self, host: str) -> bool:
        process = self._processes[host]
        asked = process.log is not None and process.pid is not None and process.here and not process.ended.is_set()
        if asked:
            with suppress(ProcessLookupError):
                os.kill(process.pid, WRITE_STACKS)
                time.sleep(WRITING_S)
        return asked

    def stop(self, seconds: float) -> None:
        processes = list(self._processes.values())
        try:
            for process in processes:
                self.call(process.plan.name, ("stop", seconds))
            until = time.monotonic() + seconds + 0.5
            for process in processes:
                if not process.stopped.wait(max(until - time.monotonic(), 0)):
                    _log.warning("host %s did not close in time and is killed", process.plan.name)
        finally:
            for process in processes:
                if not process.ended.is_set():
                    self.kill(process.plan.name)
            for process in processes:
                process.ended.wait(process.end_s)
            self.host.stop(0)
            self._close()
            for process in processes:
                process.free()


def progress_memory(more_bytes: int = 0) -> tuple[int, mmap.mmap]:
    """A memory file without a name for a host's signs of life. Only the part with the progress is mapped."""
    fd = os.memfd_create("embodied-progress", os.MFD_CLOEXEC)
    os.ftruncate(fd, PROGRESS_BYTES + more_bytes)
    return fd, mmap.mmap(fd, PROGRESS_BYTES)


class LogFile(io.FileIO):
    """An open log that drops what cannot be written, for example to a full disk."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            return super().write(data) or 0
        return len(memoryview(data).cast("B"))


def print_to_log() -> None:
    """Makes sys.stdout and sys.stderr write to this process's descriptors 1 and 2, without errors: a worker prints the
    cause of its failure, which the driver must get even if the log cannot."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        log = io.BufferedWriter(LogFile(fd, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(log, encoding="utf-8", errors="backslashreplace", line_buffering=True))


def keep_log_short(log: str | None) -> None:
    """Keeps this process's log short, in a separate thread."""

    def look() -> None:
        while True:
            time.sleep(LOG_S)
            with suppress(OSError):  # the folder was removed, or the disk is full
                shorten(Path(log))

    if log is not None:
        threading.Thread(target=look, name="log", daemon=True).start()


def shorten(log: Path, most: int = LOG_BYTES) -> None:
    """Drops the beginning of a log that is longer than `most`. All writers append."""
    if log.stat().st_size <= most:
        return
    with log.open("r+b") as file:
        file.seek(-(most // 4), os.SEEK_END)
        kept = file.read(most // 4).partition(b"\n")[2]
        file.truncate(0)
    with log.open("ab", buffering=0) as file:
        file.write(b"[a log holds at most %d MiB: earlier lines were dropped]\n" % (most >> 20) + kept)


def check_cores(plan: HostPlan, usable: Iterable[int], what: str = "this process") -> None:
    """Refuses a host on cores that `what` may not use."""
    if not set(usable).issuperset(plan.cores):
        raise ValueError(
            f"host {plan.name} is to run on cores {ranges(plan.cores)}, but {what} may use only {ranges(tuple(usable))}"
        )


def boot_order(run: str, plan: HostPlan, timeout_s: float) -> dict[str, Any]:
    """Returns a host's start-up information as plain values."""
    main = sys.modules["__main__"]
    sys.modules.setdefault("__mp_main__", main)  # its name in the hosts
    return {
        "name": plan.name,
        "run": run,
        "timeout_s": timeout_s,
        "cores": list(plan.cores),
        "path": [os.path.abspath(p) for p in sys.path],
        "main_module": main.__spec__.name if getattr(main, "__spec__", None) is not None else None,
        "main_file": getattr(main, "__file__", None),
    }


def describe_exit(code: int) -> str:
    """Puts an exit code of `subprocess` into words; a negative one is a signal."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"
