"""Hosts as processes of this machine: spawned fresh, wired to the driver and to each other by socket pairs.

A host gets its environment and its cores before it imports anything, ends with the driver however the driver ends, and
runs in a session of its own, so that Ctrl-C reaches the driver alone.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from embodied.runtime.backend import Events
from embodied.runtime.exits import describe_exit
from embodied.runtime.hosts import DRIVER, Host, HostPlan, Links, ranges
from embodied.runtime.payload import Payload, decode, encode, segments
from embodied.runtime.progress import PROGRESS_BYTES, Progress, Pulse, Sign
from embodied.runtime.wire import Loop, Wire, socket_pair

_log = logging.getLogger(__name__)

_KILL_S = 5.0  # how long a killed process may take to vanish

# Runs before anything else in the child: what is imported later must already find the cores and the driver's path.
_BOOT = """
import json, sys
boot = json.loads(sys.argv[1])
if boot["cores"]:
    import os
    os.sched_setaffinity(0, boot["cores"])
sys.path[:] = boot["path"]
from embodied.runtime.child import main
main(boot)
"""


@dataclass
class _Process:
    plan: HostPlan
    popen: subprocess.Popen
    control: Wire
    channels: Wire  # the driver's own end
    progress: Progress
    memory: mmap.mmap
    log: Path | None
    ended: threading.Event = field(default_factory=threading.Event)

    def free(self) -> None:
        self.progress.release()
        self.memory.close()


class LocalBackend:
    name = "local"
    isolates = True

    def __init__(self, run: str, log_dir: Path | None, timeout_s: float, events: Events) -> None:
        self.pack, self.unpack = encode, decode
        self._run = run
        self._log_dir = log_dir
        self._timeout_s = timeout_s
        self._events = events
        self._processes: dict[str, _Process] = {}
        links = Links(encode, decode, self._post, lambda *told: events.on_report(DRIVER, *told))
        self.host = Host(run, [DRIVER], links, Progress(bytearray(PROGRESS_BYTES)), timeout_s)
        self._control, self._channels = Loop(), Loop()
        self._threads = [
            threading.Thread(target=self._control.run, name="control", daemon=True),
            threading.Thread(target=self._channels.run, name="channels", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def spawn(self, plan: HostPlan) -> None:
        usable = os.sched_getaffinity(0)
        if not usable.issuperset(plan.cores):
            raise ValueError(
                f"host {plan.name} is to run on cores {ranges(plan.cores)}, but this process may use only "
                f"{ranges(tuple(usable))}"
            )
        mine, theirs = socket_pair()
        memory_fd = os.memfd_create("embodied-progress", os.MFD_CLOEXEC)
        os.ftruncate(memory_fd, PROGRESS_BYTES)
        memory = mmap.mmap(memory_fd, PROGRESS_BYTES)
        log = self._log_dir / f"{plan.name}.log" if self._log_dir is not None else None
        try:
            popen = self._start(plan, theirs.fileno(), memory_fd, log)
        except BaseException:
            mine.close()
            raise
        finally:
            theirs.close()
            os.close(memory_fd)
        control = Wire(mine)
        channels = self._connect_to_driver(plan.name, control)
        process = _Process(plan, popen, control, channels, Progress(memory), memory, log)
        before = self._processes.pop(plan.name, None)
        for other in self._processes.values():
            one, two = socket_pair()
            with one, two:
                control.post(("peer", other.plan.name), fd=one.fileno())
                other.control.post(("peer", plan.name), fd=two.fileno())
        self._processes[plan.name] = process
        if before is not None:
            before.free()
        self._control.add(
            control, lambda message, payload, _: self._events.on_report(plan.name, message, payload), lambda: None
        )
        self._control.watch(os.pidfd_open(popen.pid), lambda: self._died(process))

    def call(self, host: str, message: tuple, packed: Payload | None = None) -> None:
        self._processes[host].control.post(message, packed)

    def where(self, host: str) -> str:
        process = self._processes[host]
        cores = f", cores {ranges(process.plan.cores)}" if process.plan.cores else ""
        log = f", log: {process.log}" if process.log is not None else ""
        return f"pid {process.popen.pid}{cores}{log}"

    def progress(self, host: str, slot: int) -> Sign:
        return self._processes[host].progress.read(slot)

    def pulse(self, host: str) -> Pulse:
        return self._processes[host].progress.pulse()

    def kill(self, host: str) -> None:
        process = self._processes[host]
        if process.popen.returncode is None:
            _kill_session(process.popen)

    def stop(self, seconds: float) -> None:
        processes = list(self._processes.values())
        try:
            for process in processes:
                process.control.post(("stop", seconds))
            until = time.monotonic() + seconds + 0.5
            for process in processes:
                if not process.ended.wait(max(until - time.monotonic(), 0)):
                    _log.warning("host %s did not close in time and is killed", process.plan.name)
        finally:
            for process in processes:
                if not process.ended.is_set():
                    _kill_session(process.popen)
            for process in processes:
                process.ended.wait(_KILL_S)
            self.host.stop(0)
            for loop in (self._control, self._channels):
                loop.stop()
            for thread in self._threads:
                thread.join(timeout=5)
            for process in processes:
                process.free()
            segments.drop()

    # Inside

    def _start(self, plan: HostPlan, control_fd: int, memory_fd: int, log: Path | None) -> subprocess.Popen:
        main = sys.modules["__main__"]
        sys.modules.setdefault("__mp_main__", main)  # its name in the hosts
        boot = {
            "name": plan.name,
            "run": self._run,
            "timeout_s": self._timeout_s,
            "cores": plan.cores,
            "path": [os.path.abspath(p) for p in sys.path],
            "control_fd": control_fd,
            "progress_fd": memory_fd,
            # A process is told of the end of the *thread* that started it, so only the main thread's counts.
            "driver": os.getpid() if threading.current_thread() is threading.main_thread() else None,
            "main_module": main.__spec__.name if getattr(main, "__spec__", None) is not None else None,
            "main_file": getattr(main, "__file__", None),
        }
        output = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = log.open("ab")
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(boot)],
                env={**os.environ, **plan.environment()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                pass_fds=(control_fd, memory_fd),
                start_new_session=True,
            )
        finally:
            if output is not None:
                output.close()

    def _connect_to_driver(self, name: str, control: Wire) -> Wire:
        mine, theirs = socket_pair()
        with theirs:
            control.post(("peer", DRIVER), fd=theirs.fileno())
        wire = Wire(mine)
        self._channels.add(
            wire, lambda message, payload, _: self.host.serve_channel(name, message, payload), lambda: None
        )
        return wire

    def _post(self, host: str, message: tuple, payload: Payload | None = None) -> None:
        self._processes[host].control.post(("channel", message), payload)  # in order with calls and news of deaths

    def _died(self, process: _Process) -> None:
        _kill_session(process.popen)  # what it started; as long as it is not waited for, its number is not reused
        code = process.popen.wait()
        self._control.drain(process.control)  # what it reported before it died comes first,

        def tell() -> None:
            self._channels.drain(process.channels)  # and what it put into channels of the driver
            process.ended.set()
            self._events.on_death(process.plan.name, describe_exit(code))

        self._channels.submit(tell)


def _kill_session(popen: subprocess.Popen) -> None:
    """Kills what is left of a host and of the processes it started."""
    with suppress(ProcessLookupError):
        os.killpg(popen.pid, signal.SIGKILL)
