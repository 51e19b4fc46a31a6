"""Hosts as processes of this machine, wired to the driver and to each other by socket pairs. They are started fresh, or
forked from a process that has imported torch already.

The driver never imports torch, and four hosts that each import it take four times as long on busy cores. So one process
does it for all hosts of a cluster, and ends when they are there. A fork is a child of the driver like a host that is
started fresh: the server's own child ends at once, and while it does the driver adopts what is left behind. What native
libraries read when they are loaded is the server's, so there is one for each such environment.

A host gets its environment and its cores before it imports anything, ends with the driver however the driver ends, and
runs in a session of its own, so that Ctrl-C reaches the driver alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied.runtime.host import DRIVER, HostPlan
from embodied.runtime.payload import Payload, decode, encode, segments
from embodied.runtime.processes import (
    HostProcess,
    Processes,
    boot_order,
    check_cores,
    describe_exit,
    progress_memory,
)
from embodied.runtime.socket_io import Loop, MessageSocket, socket_pair

if TYPE_CHECKING:
    from embodied.runtime.backend import Events

# Runs before anything else in the child: what is imported later must already find the cores and the driver's path.
_BOOT = """
import json, sys
boot = json.loads(sys.argv[1])
if boot["cores"]:
    import os
    os.sched_setaffinity(0, boot["cores"])
sys.path[:] = boot["path"]
from embodied.runtime.local_host import main
main(boot)
"""
# Variables that native libraries, torch and the interpreter read when they are loaded begin with one of these.
READ_ONCE = (
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "ATEN_",
    "TORCH",
    "PYTORCH",
    "CUDA",
    "NVIDIA",
    "LD_",
    "PYTHON",
)
FORK_S = 60.0  # within which a server has imported and forked
ADOPTED_S = 5.0  # within which the kernel makes a fork the driver's child
TITLE = "embodied fork server"
_PR_SET_CHILD_SUBREAPER = 36
_SERVE = """
import json, sys
order = json.loads(sys.argv[1])
sys.path[:] = order["path"]
from embodied.runtime.local import serve
serve(order)
"""


class Forked:
    """A host that came out of a fork; read like a subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """The exit code, negative for a signal."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class ForkServer:
    """The driver's end."""

    def __init__(self, env: dict[str, str], modules: Sequence[str], path: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = {"fd": theirs.fileno(), "modules": [*modules], "path": [*path], "driver": os.getpid()}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _SERVE, json.dumps(order)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def fork(self, boot: dict[str, Any], env: dict[str, str], fds: dict[str, int]) -> Forked | None:
        """A new host, whose boot order has copies of `fds` under their names; None if none came in time. A process that
        comes later than that ends without having touched them."""
        order = {"boot": boot, "env": env, "cwd": os.getcwd(), "fds": [*fds], "usable": [*os.sched_getaffinity(0)]}
        ours, theirs = os.pipe()
        try:
            with _adopting:
                order_fd = os.memfd_create("embodied-order", os.MFD_CLOEXEC)  # it may be longer than a packet
                try:
                    os.write(order_fd, json.dumps(order).encode())
                    socket.send_fds(self._socket, [b"fork"], [order_fd, theirs, *fds.values()])
                finally:
                    os.close(order_fd)
                    os.close(theirs)
                if not select.select([ours], [], [], FORK_S)[0]:
                    return None
                answer = os.read(ours, 20)
                return Forked(int(answer)) if answer else None
        except OSError:
            return None
        finally:
            os.close(ours)

    def close(self) -> None:
        """End the server; hosts that came out of it go on."""
        self._socket.close()
        self.process.kill()
        self.process.wait()


class _Adopting:
    """Makes orphaned descendants children of this process while it is entered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def __exit__(self, *_: object) -> None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        self._lock.release()


_adopting = _Adopting()


class ForkServers:
    """The fork servers of a cluster, while its hosts are started for the first time."""

    def __init__(self) -> None:
        self._servers: dict[tuple, ForkServer] | None = {}

    def fork(
        self, boot: dict[str, Any], env: dict[str, str], modules: Sequence[str], fds: dict[str, int]
    ) -> Forked | None:
        """A host from the server that has these modules and this environment; None where that fails, or when they have
        ended: then a fresh process does what this one would have."""
        if self._servers is None:
            return None
        once = {name: value for name, value in env.items() if name.startswith(READ_ONCE)}
        key = (tuple(modules), tuple(sorted(once.items())))
        if key not in self._servers:
            self._servers[key] = ForkServer(env, modules, boot["path"])
        forked = self._servers[key].fork(boot, env, fds)
        if forked is None:
            self._servers.pop(key).close()
        return forked

    def close(self) -> None:
        """End all of them."""
        servers, self._servers = self._servers or {}, None
        for server in servers.values():
            server.close()


# The server's own end


def serve(order: dict[str, Any]) -> None:
    """Import, then fork whenever it is asked, until the driver has closed its end."""
    import gc
    import importlib

    from embodied.runtime.local_host import show_title

    show_title(TITLE.removeprefix("embodied "))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in order["modules"]:
        with suppress(Exception):  # the import fails again, with its message, in the host that needs it
            importlib.import_module(name)
    gc.freeze()  # what is there now is never collected, so its pages stay shared
    driver = socket.socket(fileno=order["fd"])
    while True:
        word, fds, _, _ = socket.recv_fds(driver, 16, 8)
        if not word:
            os._exit(0)
        if (child := os.fork()) == 0:
            if os.fork() == 0:
                driver.close()
                _become_host(order["driver"], *fds)
            os._exit(0)
        os.waitpid(child, 0)
        for fd in fds:
            os.close(fd)


def _become_host(driver: int, order_fd: int, reply_fd: int, *fds: int) -> None:
    """Tell the driver, once it is our parent, and run a host as a fresh process would."""
    from embodied.runtime import local_host

    try:
        until = time.monotonic() + ADOPTED_S
        while os.getppid() != driver:
            if time.monotonic() > until:
                os._exit(1)
            time.sleep(0.0005)
        os.setsid()
        os.write(reply_fd, str(os.getpid()).encode())
        os.close(reply_fd)
        with open(order_fd) as file:
            file.seek(0)
            order = json.load(file)
        named = dict(zip(order["fds"], fds, strict=True))
        for name, place in (("out_fd", 1), ("err_fd", 2)):
            os.dup2(output := named.pop(name), place)
            os.close(output)
        _adopt(order)
        local_host.main(order["boot"] | named | {"driver": driver})
    finally:
        import traceback

        traceback.print_exc()
        os._exit(1)


def _adopt(order: dict[str, Any]) -> None:
    """The environment, folder, cores and path of a host."""
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    os.sched_setaffinity(0, order["boot"]["cores"] or order["usable"])
    sys.path[:] = order["boot"]["path"]
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # from the system's entropy, as in a process that has just imported it


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


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
        self._first = {plan.name for plan in plans}  # which are not started yet
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
            one, two = socket_pair()
            with one, two:
                control.post(("peer", other.plan.name), fd=one.fileno())
                other.control.post(("peer", plan.name), fd=two.fileno())
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
            _kill_session(process.popen)

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
        with ExitStack() as stack:
            out, err = 1, 2
            if log is not None:
                os.makedirs(os.path.dirname(log), exist_ok=True)
                out = err = stack.enter_context(open(log, "ab")).fileno()
            if plan.imports and not plan.gpu:  # what CUDA makes of a fork is not tried here
                fds = {"control_fd": control_fd, "progress_fd": memory_fd, "out_fd": out, "err_fd": err}
                if (forked := self._fork_servers.fork(boot, env, plan.imports, fds)) is not None:
                    return forked
            # A process is signalled at the end of the *thread* that started it, so only the main thread's counts.
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
        _kill_session(process.popen)  # what it started; as long as it is not waited for, its number is not reused
        code = process.popen.wait()
        self._control.drain(process.control)  # what it reported before it died comes first,

        def tell() -> None:
            self._channels.drain(process.channels)  # and what it put into channels of the driver
            process.ended.set()
            process.stopped.set()
            self._events.on_death(process.plan.name, describe_exit(code))

        self._channels.submit(tell)


def _kill_session(popen: subprocess.Popen | Forked) -> None:
    """Kills what is left of a host and of the processes it started."""
    with suppress(ProcessLookupError):
        os.killpg(popen.pid, signal.SIGKILL)
