"""The main program of a host of the local backend. Imports little: a host is up in a fraction of a second."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from embodied.runtime.heartbeat import PROGRESS_BYTES, Progress
from embodied.runtime.host import Host, Links
from embodied.runtime.payload import Payload, decode, encode
from embodied.runtime.processes import WRITE_STACKS, keep_log_short, print_to_log
from embodied.runtime.socket_io import Loop, MessageSocket

_PR_SET_PDEATHSIG = 1
ARGUMENTS = slice(45, 47)  # the fields of /proc/self/stat, after the name, with the addresses of their begin and end
SHORT = 15  # letters of a process name in top
_DELIVERY_S = 5.0  # limit for sending the puts of an ended call


def main(boot: dict[str, Any]) -> None:
    _follow_driver(boot["driver"])
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
    driver = MessageSocket(socket.socket(fileno=boot["control_fd"]))
    peers: dict[str, MessageSocket] = {}
    control, channels = Loop(), Loop()

    def post(host: str, message: tuple, payload: Payload | None = None) -> None:
        peers[host].post(message, payload)

    def report(message: tuple, packed: Payload | None = None) -> None:
        if message[0] == "failed":
            print(message[3], file=sys.stderr, flush=True)
        until = time.monotonic() + (_DELIVERY_S if threading.current_thread() is not threading.main_thread() else 0)
        while any(peer.backed_up() for peer in list(peers.values())) and time.monotonic() < until:
            time.sleep(0.001)  # a call is done when its puts have been sent: they are not lost if this process dies
        driver.post(message, packed)

    progress = Progress(mmap.mmap(boot["progress_fd"], PROGRESS_BYTES))
    os.close(boot["progress_fd"])
    progress.start_beating()
    links = Links(encode, decode, post, report)
    host = Host(boot["run"], [boot["name"]], links, progress, boot["timeout_s"], os.getppid())

    def connect(name: str, fd: int) -> None:
        peers[name] = peer = MessageSocket(socket.socket(fileno=fd))
        # The end of a peer needs no action here: the driver reports deaths and their causes.
        channels.add(peer, lambda message, payload, _: host.serve_channel(name, message, payload), lambda: None)

    def forget(name: str) -> None:
        """Serves all messages of a peer's old process before messages of its new process."""
        drained = threading.Event()
        channels.submit(lambda: (channels.drain(peers[name]), drained.set()))
        drained.wait()

    def on_control(message: tuple, payload: Payload | None, fd: int) -> None:
        if message[0] == "peer":
            if message[1] in peers:
                forget(message[1])
            connect(message[1], fd)
        elif message[0] == "stop":
            host.stop(message[1])
            report(("stopped",))  # before the end, which waits for the last thread of a simulator's library
            driver.flush()
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
    control.add(driver, on_control, lambda: _exit(1))
    control.run()


def _exit(code: int) -> None:
    """Ends the process at once, without waiting for stuck threads or exit handlers of simulator libraries."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _follow_driver(pid: int | None) -> None:
    """Makes the kernel kill this process when the driver dies, even during a native call."""
    if pid is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != pid:  # the driver died before this call
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
    """Shows `embodied a+b-0` for this process in `ps` and `top`, and `a+b-0` where only a short name is shown.

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
