"""The processes of hosts: what a host's process does, and the servers from which hosts are forked.

`local.py` starts, wires and ends these processes.

A fork server is a process that has done the slow imports of hosts, and forks to become a host. The driver never imports
torch, and four hosts that each import it take four times as long on busy cores. So one process imports it for all hosts
of a cluster, and ends when they run. A forked host is a child of the process that asked for it, like any other host:
the server forks twice, its own child ends at once, and the asking process adopts the orphan. Native libraries read the
environment when they are loaded, so there is one server for each environment.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from embodied.runtime.heartbeat import PROGRESS_BYTES, Progress, is_stopped
from embodied.runtime.host import DRIVER, Host, Links
from embodied.runtime.payload import Loop, MessageSocket, Payload, decode, encode

WRITE_STACKS = signal.SIGUSR1  # makes a host write its threads' stacks into its log
LOG_BYTES = 64 << 20  # maximum size of a host's log; of a longer log the last quarter is kept
LOG_S = 1.0  # between two checks of a log's size


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


_PR_SET_PDEATHSIG = 1
ARGUMENTS = slice(45, 47)  # the fields of /proc/self/stat, after the name, with the addresses of their begin and end
SHORT = 15  # letters of a process name in top
_DELIVERY_S = 5.0  # limit for sending the puts of an ended call


def main(boot: dict[str, Any]) -> None:
    _follow(boot["parent"])
    show_title(boot["name"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides when a run ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print_to_log()  # a fork's own streams were opened on other files
    faulthandler.enable()
    faulthandler.register(WRITE_STACKS)
    find_main_lazily(boot["main_module"], boot["main_file"])
    keep_log_short(boot["log"])
    _serve(boot)


def _serve(boot: dict[str, Any]) -> None:
    parent = MessageSocket(socket.socket(fileno=boot["control_fd"]))
    peers: dict[str, MessageSocket] = {}  # on this machine; the one called DRIVER passes messages on to all others
    control, channels = Loop(), Loop()

    def post(host: str, message: tuple, payload: Payload | None = None) -> None:
        if host in peers and host != DRIVER:
            peers[host].post(message, payload)
        else:
            peers[DRIVER].post((host, message), payload)

    def report(message: tuple, packed: Payload | None = None) -> None:
        if message[0] == "failed":
            print(message[3], file=sys.stderr, flush=True)
        until = time.monotonic() + (_DELIVERY_S if threading.current_thread() is not threading.main_thread() else 0)
        while any(peer.backed_up() for peer in list(peers.values())) and time.monotonic() < until:
            time.sleep(0.001)  # a call is done when its puts have been sent: they are not lost if this process dies
        parent.post(message, packed)

    progress = Progress(mmap.mmap(boot["progress_fd"], PROGRESS_BYTES))
    os.close(boot["progress_fd"])
    progress.start_beating()
    # GPUs without a node's name are on the driver's machine: elsewhere this process's GPU is another one.
    pack = encode if boot["driver"] is not None else lambda item, reader="": encode(item)
    links = Links(pack, decode, post, report)
    host = Host(boot["run"], [boot["name"]], links, progress, boot["timeout_s"], boot["driver"])

    def connect(name: str, fd: int) -> None:
        if name in peers:  # all messages of a peer's old process come before messages of its new process
            drained = threading.Event()
            channels.submit(lambda: (channels.drain(peers[name]), drained.set()))
            drained.wait()
        peers[name] = peer = MessageSocket(socket.socket(fileno=fd))
        # The end of a peer needs no action here: the driver reports deaths and their causes.
        channels.add(peer, lambda message, payload, _: host.serve_channel(name, message, payload), lambda: None)

    def on_control(message: tuple, payload: Payload | None, fd: int) -> None:
        if message[0] == "peer":
            connect(message[1], fd)
        elif message[0] == "stop":
            host.stop(message[1])
            report(("stopped",))  # before the end, which waits for the last thread of a simulator's library
            parent.flush()
            _exit(0)
        else:
            host.control(message, payload)

    def serve_channels() -> None:
        try:
            channels.run()
        except BaseException:  # a host that no longer listens must not look alive
            traceback.print_exc()
            _exit(1)

    threading.Thread(target=serve_channels, name="channels", daemon=True).start()
    control.add(parent, on_control, lambda: _exit(1))
    control.run()


def _exit(code: int) -> None:
    """Ends the process at once, without waiting for stuck threads or exit handlers of simulator libraries."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _follow(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies, even during a native call."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before this call
        os._exit(1)


def find_main_lazily(module: str | None, file: str | None) -> None:
    """Imports the driver's main program only when one of its classes is needed."""
    main = sys.modules["__mp_main__"] = sys.modules["__main__"]

    lock, loaded = threading.RLock(), []  # several workers may search at once

    def find(name: str) -> Any:
        import runpy

        if name.startswith("__") or (module is None and file is None):
            raise AttributeError(name)
        with lock:
            if not loaded:
                loaded.append(True)
                run = runpy.run_module(module, run_name="__mp_main__", alter_sys=True) if module else None
                main.__dict__.update(run if run is not None else runpy.run_path(file, run_name="__mp_main__"))
        if name not in main.__dict__:
            raise AttributeError(f"the main program has no {name!r}")
        return main.__dict__[name]

    main.__getattr__ = find


def show_title(host: str) -> None:
    """Shows `embodied a+b-0` for this process in ps and top, and `a+b-0` where only a short name is shown.

    The system shows the bytes of the command line where the process got them, so they are written over. A last byte
    that is not zero marks them as a title for Linux, which ends at the first zero.
    """
    with suppress(OSError, ValueError):  # a system without these files keeps its own title
        Path("/proc/self/comm").write_text(host[:SHORT])
        words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = map(int, words[ARGUMENTS])
        if 0 < begin < end:
            title = f"embodied {host}".encode()[: end - begin - 2]
            ctypes.memmove(begin, title.ljust(end - begin - 1, b"\0") + b".", end - begin)


# Prefixes of variables that native libraries, torch and the interpreter read when they are loaded.
READ_ONCE = tuple("OMP_ GOMP_ KMP_ MKL_ OPENBLAS_ ATEN_ TORCH PYTORCH CUDA NVIDIA LD_ PYTHON".split())
FORK_S = 60.0  # deadline for a server's imports and fork
STOPPED_S = 2.0  # a server that is stopped for longer is given up
ADOPTED_S = 5.0  # deadline for the kernel to make a fork the asking process's child
MARK = "EMBODIED_HOST"  # a variable of hosts, inherited by programs that they start; servers do not have it
TITLE = "embodied fork server"
_PR_SET_CHILD_SUBREAPER = 36
_SERVE = """
import ctypes, json, os, sys
order = json.loads(sys.argv[1])
ctypes.CDLL(None).prctl(1, 9)  # the kernel kills it when its parent dies, even a stopped one
if os.getppid() != order["parent"]:
    sys.exit(1)
sys.path[:] = order["path"]
from embodied.runtime.processes import serve
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
    """The side of a fork server that asks for forks. The kernel ends the server, like any host, when the *thread* ends
    that has started it."""

    def __init__(self, env: dict[str, str], modules: Sequence[str], path: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = {"fd": theirs.fileno(), "modules": [*modules], "path": [*path], "parent": os.getpid()}
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
    """The fork servers of a cluster's hosts on this machine, while they are started for the first time."""

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
    """Import, then fork on request until the asking process closes its end."""
    import gc
    import importlib

    show_title(TITLE.removeprefix("embodied "))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in order["modules"]:
        with suppress(Exception):  # the import fails again, with its message, in the host that needs it
            importlib.import_module(name)
    gc.freeze()  # present objects are never collected, so their memory pages stay shared
    asking = socket.socket(fileno=order["fd"])
    while True:
        word, fds, _, _ = socket.recv_fds(asking, 16, 8)
        if not word:
            os._exit(0)
        if (child := os.fork()) == 0:
            if os.fork() == 0:
                asking.close()
                _become_host(order["parent"], *fds)
            os._exit(0)
        os.waitpid(child, 0)
        for fd in fds:
            os.close(fd)


def _become_host(parent: int, order_fd: int, reply_fd: int, *fds: int) -> None:
    """Run a host as a fresh process would, after reporting to the asking process once it is our parent."""
    try:
        until = time.monotonic() + ADOPTED_S
        while os.getppid() != parent:
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
        main(order["boot"] | named | {"parent": parent})
    finally:
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
