"""Hosts as processes of this machine, wired to the driver and to each other by socket pairs. They are started fresh, or
forked from a process that has imported torch already (processes.py).

A host gets its environment and cores before it imports anything. It ends with the driver, however the driver ends, and
runs in its own session, so Ctrl-C reaches only the driver.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from embodied.runtime.host import DRIVER, HostPlan
from embodied.runtime.payload import Loop, MessageSocket, Payload, decode, encode, segments, socket_pair
from embodied.runtime.processes import (
    MARK,
    Forked,
    ForkServers,
    HostProcess,
    Processes,
    boot_order,
    check_cores,
    describe_exit,
    progress_memory,
)

if TYPE_CHECKING:
    from embodied.runtime.backend import Events

# Runs first in the child: later imports need the cores and the driver's path.
_BOOT = """
import json, sys
boot = json.loads(sys.argv[1])
if boot["cores"]:
    import os
    os.sched_setaffinity(0, boot["cores"])
sys.path[:] = boot["path"]
from embodied.runtime.processes import main
main(boot)
"""


MARKED_ROUNDS = 5  # rounds of searching for processes that a host has left behind


@dataclass
class LocalProcess(HostProcess):
    popen: subprocess.Popen | Forked
    control: MessageSocket
    channels: MessageSocket  # the driver's own end

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pid = self.popen.pid


class LocalBackend(Processes):
    name = "local"

    def __init__(
        self, run: str, plans: Sequence[HostPlan], log_dir: Path | None, timeout_s: float, events: Events
    ) -> None:
        super().__init__(run, log_dir, timeout_s, events, encode, decode)
        self._first = {plan.name for plan in plans}  # hosts that have not been started yet
        self._fork_servers = ForkServers()
        self._control, self._channels = Loop(), Loop()
        self._threads = [
            threading.Thread(target=self._control.run, name="control", daemon=True),
            threading.Thread(target=self._channels.run, name="channels", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def spawn(self, plan: HostPlan) -> None:
        check_cores(plan, os.sched_getaffinity(0))
        log = str(self._log_dir / f"{plan.name}.log") if self._log_dir is not None else None
        mine, theirs = socket_pair()
        memory_fd, memory = progress_memory()
        try:
            popen = self._start(plan, theirs.fileno(), memory_fd, log)
        except BaseException:
            mine.close()
            raise
        finally:
            theirs.close()
            os.close(memory_fd)
        control = MessageSocket(mine)
        channels = self._connect_to_driver(plan.name, control)
        process = LocalProcess(plan, log, memory, popen, control, channels)
        before = self._processes.pop(plan.name, None)
        for other in self._processes.values():
            end, other_end = socket_pair()
            with end, other_end:
                control.post(("peer", other.plan.name), fd=end.fileno())
                other.control.post(("peer", plan.name), fd=other_end.fileno())
        self._processes[plan.name] = process
        if before is not None:
            before.free()
        self._first.discard(plan.name)
        if not self._first:
            self._fork_servers.close()
        self._events.on_start(plan.name, popen.pid)
        self._control.add(control, lambda message, payload, _: self._on_report(process, message, payload), lambda: None)
        self._control.watch(os.pidfd_open(popen.pid), lambda: self._died(process))

    def call(self, host: str, message: tuple, packed: Payload | None = None) -> None:
        self._processes[host].control.post(message, packed)

    def kill(self, host: str) -> None:
        process = self._processes[host]
        if process.popen.returncode is None:
            _kill_group(process.popen)

    # Inside

    def _close(self) -> None:
        self._fork_servers.close()
        for loop in (self._control, self._channels):
            loop.stop()
        for thread in self._threads:
            thread.join(timeout=5)
        segments.drop()

    def _start(self, plan: HostPlan, control_fd: int, memory_fd: int, log: str | None) -> subprocess.Popen | Forked:
        boot, env = boot_order(self._run, plan, self._timeout_s), {**os.environ, **plan.environment()}
        boot["log"], env[MARK] = log, mark_of(self._run, plan.name)
        with ExitStack() as stack:
            out, err = 1, 2
            if log is not None:
                os.makedirs(os.path.dirname(log), exist_ok=True)
                out = err = stack.enter_context(open(log, "ab")).fileno()
            modules = () if plan.gpu else plan.imports  # forking hosts that use CUDA has not been tried
            fds = {"control_fd": control_fd, "progress_fd": memory_fd, "out_fd": out, "err_fd": err}
            if (forked := self._fork_servers.fork(boot, env, modules, fds)) is not None:
                return forked
            # The parent-death signal comes when the *thread* that started a process ends, so only the main one counts.
            driver = os.getpid() if threading.current_thread() is threading.main_thread() else None
            boot |= {"control_fd": control_fd, "progress_fd": memory_fd, "driver": driver}
            return subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(boot)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=(control_fd, memory_fd),
                start_new_session=True,
            )

    def _connect_to_driver(self, name: str, control: MessageSocket) -> MessageSocket:
        mine, theirs = socket_pair()
        with theirs:
            control.post(("peer", DRIVER), fd=theirs.fileno())
        peer = MessageSocket(mine)
        self._channels.add(
            peer, lambda message, payload, _: self.host.serve_channel(name, message, payload), lambda: None
        )
        return peer

    def _post(self, host: str, message: tuple, payload: Payload | None = None) -> None:
        self._processes[host].control.post(("channel", message), payload)  # in order with calls and news of deaths

    def _on_report(self, process: LocalProcess, message: tuple, payload: Payload | None) -> None:
        if message[0] == "stopped":
            process.stopped.set()
        else:
            self._events.on_report(process.plan.name, message, payload)

    def _died(self, process: LocalProcess) -> None:
        _kill_group(process.popen)  # its children; the process id is not reused before it is reaped
        code = process.popen.wait()
        kill_marked(mark_of(self._run, process.plan.name))  # and processes that have left its group
        self._control.drain(process.control)  # its last reports come first,

        def tell() -> None:
            self._channels.drain(process.channels)  # then its last items in the driver's channels
            process.ended.set()
            process.stopped.set()
            self._events.on_death(process.plan.name, describe_exit(code))

        self._channels.submit(tell)


def _kill_group(popen: subprocess.Popen | Forked) -> None:
    """Kills the remaining processes of a host's process group."""
    with suppress(ProcessLookupError):
        os.killpg(popen.pid, signal.SIGKILL)


def mark_of(run: str, host: str) -> str:
    """The value of `MARK` in a host's environment, which all programs started there inherit."""
    return f"{run}/{host}"


def kill_marked(mark: str) -> None:
    """Kills all processes of this machine whose readable environment has this mark."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(MARKED_ROUNDS):  # a process may start another one meanwhile
        marked = [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if wanted in _environment(folder)]
        if not marked:
            return
        for pid in marked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:  # a process of another user, or an ended process
        return []
