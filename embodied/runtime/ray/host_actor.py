"""A host as a Ray actor. The driver's messages, those of other hosts and the reports each have a thread of Ray's; the
workers have threads of their own, as on every backend.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from embodied.runtime.host import DRIVER, Host, Links, ranges
from embodied.runtime.local_host import find_main_lazily, show_title
from embodied.runtime.processes import WRITE_STACKS
from embodied.runtime.progress import BEAT_S, PROGRESS_BYTES, Progress
from embodied.runtime.ray.object_store import Stored, decode, encode, pack_message, unpack_message

_DELIVERY_S = 5.0  # how long a call that ended may wait until its puts are there
_ONE_THREAD_EACH = {"control": 1, "channels": 1, "reports": 1}


class RayHost:
    """`boot` comes from the driver as plain values; see RayBackend._boot."""

    def __init__(self, boot: dict[str, Any]) -> None:
        self._reports: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self._peers: dict[str, tuple[int, Any]] = {}  # name -> (which life of it, actor)
        self._met = threading.Condition()
        self._sending = threading.Lock()
        self._sent: dict[str, Any] = {}  # peer -> answer to the last message that was sent there
        self._life = boot["life"]
        self._timeout_s = boot["timeout_s"]
        _write_to(boot["log"])
        _check_cores(boot["cores"])
        if boot["path"]:  # the driver is on this machine
            sys.path[:] = boot["path"]
            os.chdir(boot["folder"])
        ray._raylet.setproctitle = lambda *_: None  # Ray would show the method that runs instead
        show_title(boot["name"])
        _die_of_what_kills()
        find_main_lazily(boot["main_module"], boot["main_file"])
        progress = self._progress(boot["progress_file"])
        links = Links(encode, decode, self._post, self._report)
        self._host = Host(boot["run"], [boot["name"]], links, progress, boot["timeout_s"], boot["driver"])
        self._tell("up", os.getpid())

    # Called by the driver

    @ray.method(concurrency_group="control", num_returns=0)
    def meet(self, name: str, life: int, actor: Any) -> None:
        with self._met:
            self._peers[name] = (life, actor)
            self._met.notify_all()

    @ray.method(concurrency_group="control", num_returns=0)
    def control(self, message: bytes, *payload: Any) -> None:
        with _the_end_of_a_host_that_does_not_listen():
            told = unpack_message(message)
            if told[0] == "stop":
                self._host.stop(told[1])
                self._tell("stopped")
            else:
                self._host.control(told, _received(payload))

    @ray.method(concurrency_group="reports", num_returns="streaming")
    def listen(self) -> Iterator[tuple]:
        """All that this host has to tell the driver, in order."""
        while True:
            yield self._reports.get()

    # Called by other hosts

    @ray.method(concurrency_group="channels")
    def serve_channel(self, peer: str, life: int, message: bytes, *payload: Any) -> None:
        with _the_end_of_a_host_that_does_not_listen():
            if life >= self._peers.get(peer, (0, None))[0]:  # not what a life that is over has sent
                self._host.serve_channel(peer, unpack_message(message), _received(payload))

    # Inside

    def _post(self, host: str, message: tuple, payload: Stored | None = None) -> None:
        if host == DRIVER:
            self._tell("channel", message, payload)
            return
        with self._met:
            if not self._met.wait_for(lambda: host in self._peers, self._timeout_s):
                raise TimeoutError(f"the driver never introduced {host}")
            _, actor = self._peers[host]
        packed, arguments = pack_message(message), _arguments(payload)
        with self._sending:
            self._sent[host] = actor.serve_channel.remote(self._host.name, self._life, packed, *arguments)

    def _report(self, message: tuple, packed: Stored | None = None) -> None:
        if message[0] == "failed":
            print(message[3], file=sys.stderr, flush=True)
        if self._host.caller() != self._host.name:  # a worker
            self._wait_until_sent()
        self._tell("report", message, packed)

    def _wait_until_sent(self) -> None:
        """A call is done when what it has put is there: should this process die, it is not lost."""
        with self._sending:
            sent = dict(self._sent)
        if sent:
            ray.wait(list(sent.values()), num_returns=len(sent), timeout=_DELIVERY_S)
        with self._sending:
            for peer, answer in sent.items():
                if self._sent.get(peer) is answer:
                    del self._sent[peer]

    def _tell(self, kind: str, message: Any = None, payload: Stored | None = None) -> None:
        self._reports.put((kind, pack_message(message), *_arguments(payload)))

    def _progress(self, file: str | None) -> Progress:
        if file is not None:
            with open(file, "r+b") as memory:
                progress = Progress(mmap.mmap(memory.fileno(), PROGRESS_BYTES))
        else:
            progress = Progress(bytearray(PROGRESS_BYTES))
            threading.Thread(target=self._report_progress, args=(progress,), name="progress", daemon=True).start()
        progress.start_beating()
        return progress

    def _report_progress(self, progress: Progress) -> None:
        """To a driver on another machine."""
        seen: dict[int, tuple[int, int]] = {}
        while True:
            time.sleep(BEAT_S)
            if news := progress.news(seen):
                seen |= news
                self._tell("progress", news)


def actor_class() -> Any:
    return ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups=_ONE_THREAD_EACH)(RayHost)


def _arguments(payload: Stored | None) -> tuple:
    return () if payload is None else payload.arguments()


def _received(payload: tuple) -> Stored | None:
    return Stored(*payload) if payload else None


def _write_to(log: str | None) -> None:
    if log is None:
        return
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for fd in (1, 2):
        os.dup2(file, fd)
    os.close(file)


def _die_of_what_kills() -> None:
    """With a Python traceback and the signal it was. Ray's handler takes seconds, and ends in SIGABRT if it is slow."""
    faulthandler.disable()
    for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable()
    faulthandler.register(WRITE_STACKS)


def _check_cores(cores: list[int]) -> None:
    """Every thread that Ray has started must be on the cores of the plan."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            found = os.sched_getaffinity(int(thread))
        if cores and found != set(cores):
            raise RuntimeError(
                f"this host was to run on cores {ranges(tuple(cores))}, but is on {ranges(tuple(found))}"
            )


@contextmanager
def _the_end_of_a_host_that_does_not_listen() -> Iterator[None]:
    """It must not look alive."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)
