"""A process that has done the slow imports of hosts, and forks to become a host.

The driver never imports torch, and four hosts that each import it take four times as long on busy cores. So one process
imports it for all hosts of a cluster, and ends when they run. A forked host is a child of the driver like any other
host: the server forks twice, its own child ends at once, and the driver adopts the orphan. Native libraries read the
environment when they are loaded, so there is one server for each environment.
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
from contextlib import suppress
from typing import Any

from embodied.runtime.awake_clock import is_stopped

# Prefixes of variables that native libraries, torch and the interpreter read when they are loaded.
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
FORK_S = 60.0  # deadline for a server's imports and fork
STOPPED_S = 2.0  # a server that is stopped for longer is given up
ADOPTED_S = 5.0  # deadline for the kernel to make a fork the driver's child
MARK = "EMBODIED_HOST"  # a variable of hosts, inherited by programs that they start; servers do not have it
TITLE = "embodied fork server"
_PR_SET_CHILD_SUBREAPER = 36
_SERVE = """
import ctypes, json, os, sys
order = json.loads(sys.argv[1])
if order["follow"]:
    ctypes.CDLL(None).prctl(1, 9)  # the kernel kills it when the driver dies, even a stopped one
    if os.getppid() != order["driver"]:
        sys.exit(1)
sys.path[:] = order["path"]
from embodied.runtime.fork_server import serve
serve(order)
"""


class Forked:
    """A forked host, with the interface of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """The exit code, negative for a signal."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class ForkServer:
    """The driver's side of a fork server."""

    def __init__(self, env: dict[str, str], modules: Sequence[str], path: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The parent-death signal comes at the end of the *thread* that started a process, so only the main thread
        # starts some.
        follow = threading.current_thread() is threading.main_thread()
        order = {"fd": theirs.fileno(), "modules": [*modules], "path": [*path], "driver": os.getpid()}
        order["follow"] = follow
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
        """Returns a new host, whose boot order has copies of `fds` under their names; None if it was too slow. A
        process that comes later ends without touching them."""
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
                if not self._answers(ours):
                    return None
                answer = os.read(ours, 20)
                return Forked(int(answer)) if answer else None
        except OSError:
            return None
        finally:
            os.close(ours)

    def _answers(self, fd: int) -> bool:
        until, running = time.monotonic() + FORK_S, time.monotonic()
        while not select.select([fd], [], [], min(FORK_S, STOPPED_S) / 4)[0]:
            now = time.monotonic()
            running = running if is_stopped(self.process.pid) else now
            if now > min(until, running + STOPPED_S):
                return False
        return True

    def close(self) -> None:
        """End the server; hosts forked from it continue."""
        self._socket.close()
        self.process.kill()
        self.process.wait()


class _Adopting:
    """Inside, orphaned descendants become children of this process."""

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
        self._failed: set[tuple] = set()  # servers that are not tried again, since a host waits for each attempt

    def fork(
        self, boot: dict[str, Any], env: dict[str, str], modules: Sequence[str], fds: dict[str, int]
    ) -> Forked | None:
        """Returns a host from the server with these modules and this environment; None without modules, if that fails
        or if the servers have ended. Then the caller starts a fresh process."""
        if self._servers is None or not modules:
            return None
        once = {name: value for name, value in env.items() if name.startswith(READ_ONCE)}
        key = (tuple(modules), tuple(sorted(once.items())))
        if key in self._failed:
            return None
        if key not in self._servers:
            unmarked = {name: value for name, value in env.items() if name != MARK}
            self._servers[key] = ForkServer(unmarked, modules, boot["path"])
        forked = self._servers[key].fork(boot, env, fds)
        if forked is None:
            self._failed.add(key)
            self._servers.pop(key).close()
        return forked

    def close(self) -> None:
        """End all servers."""
        servers, self._servers = self._servers or {}, None
        for server in servers.values():
            server.close()


# The server's side


def serve(order: dict[str, Any]) -> None:
    """Import, then fork on request until the driver closes its end."""
    import gc
    import importlib

    from embodied.runtime.local_host import show_title

    show_title(TITLE.removeprefix("embodied "))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in order["modules"]:
        with suppress(Exception):  # the import fails again, with its message, in the host that needs it
            importlib.import_module(name)
    gc.freeze()  # present objects are never collected, so their memory pages stay shared
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
    """Run a host as a fresh process would, after reporting to the driver once it is our parent."""
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
    """Take on the environment, folder, cores and path of a host."""
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    os.sched_setaffinity(0, order["boot"]["cores"] or order["usable"])
    sys.path[:] = order["boot"]["path"]
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # from the system's entropy, as in a process that has just imported it


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
