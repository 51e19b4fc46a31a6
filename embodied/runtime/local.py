"""Hosts as processes of this machine, wired to their parent and to each other by socket pairs. They are started fresh,
or forked from a process that has imported torch already (processes.py).

`LocalBackend`'s parent is the driver. On a Ray cluster an agent on each node is the parent of the hosts there
(`ray_backend.py`).

A host gets its environment and cores before it imports anything. It ends with its parent, however that ends, and runs
in its own session, so Ctrl-C reaches only the driver.
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
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from embodied.runtime.heartbeat import NOTICE_S, PROGRESS_BYTES, Progress, Pulse, Sign
from embodied.runtime.host import DRIVER, Events, Host, HostPlan, Links, ranges
from embodied.runtime.payload import Loop, MessageSocket, Payload, decode, encode, segments, socket_pair
from embodied.runtime.processes import MARK, WRITE_STACKS, Forked, ForkServers

_log = logging.getLogger(__name__)

# Runs first in the child: later imports need the cores and the parent's path.
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
# Waits for the end of its standard input, in a process that is nobody's child: Ray kills an agent's children before
# the agent. Without a word, the hosts' parent was killed: then the programs that hosts have started are killed.
_AFTERWARDS = """
trap '' INT TERM HUP
exec 3<&0
{
  read -r word && exit
  for round in 1 2 3 4 5; do  # a program may start another one meanwhile
    marked=$(grep -lzs "^$1" /proc/[0-9]*/environ)
    [ "$marked" ] || exit
    for file in $marked; do
      pid=${file#/proc/}
      kill -KILL ${pid%/environ}
    done
  done
} <&3 > /dev/null 2>&1 &
"""
WRITING_S = 0.2  # time for a process to write its threads' stacks
KILL_S = 5.0  # limit for a killed process to vanish
MARKED_ROUNDS = 5  # rounds of searching for processes that a host has left behind


@dataclass
class HostProcess:
    """One life of a host, for the driver."""

    plan: HostPlan
    log: str | None
    progress: Progress
    pid: int | None  # None: not known yet
    node: str = ""  # of the cluster, if there is one
    ended: threading.Event = field(default_factory=threading.Event, init=False)

    def describe(self) -> str:
        """Process, cores and log, for error messages."""
        parts = [f"node {self.node}"] if self.node else []
        parts.append(f"pid {self.pid}" if self.pid is not None else "starting")
        parts += [f"cores {ranges(self.plan.cores)}"] if self.plan.cores else []
        parts += [f"log: {self.log}"] if self.log is not None else []
        return ", ".join(parts)


class HostProcesses:
    """The part of a backend that reads its `HostProcess`es."""

    isolates = True

    def __init__(self) -> None:
        self.processes: dict[str, Any] = {}

    def describe_host(self, host: str) -> str:
        return self.processes[host].describe()

    def progress(self, host: str, slot: int) -> Sign:
        return self.processes[host].progress.read(slot)

    def pulse(self, host: str) -> Pulse:
        return self.processes[host].progress.pulse()


@dataclass
class LocalProcess(HostProcess):
    popen: subprocess.Popen | Forked = field(kw_only=True)
    control: MessageSocket = field(kw_only=True)
    channels: MessageSocket = field(kw_only=True)  # its messages to hosts of other parents
    stopped: threading.Event = field(default_factory=threading.Event, init=False)  # its workers are closed


class LocalHosts(HostProcesses):
    """Starts hosts on this machine, and passes on their messages."""

    def __init__(
        self,
        boot: dict[str, Any],
        first: Iterable[str],
        log_dir: Path | None,
        events: Events,
        receive: Callable[[str, str, tuple, Payload | None], None],
    ) -> None:
        """`boot`: what all hosts are told. `first`: the hosts that are started before any work begins.
        `receive(host, destination, message, payload)` gets the channel messages to hosts of other parents."""
        super().__init__()
        self._boot, self._log_dir, self._events, self._receive = boot, log_dir, events, receive
        self._first = {*first}
        self._fork_servers = ForkServers()
        self._afterwards = kill_programs_afterwards(f"{MARK}={mark_of(boot['run'], '')}")
        # A process ends with the thread that has started it, so one thread starts all.
        self._starter = ThreadPoolExecutor(1, "start")
        self.control, self.channels = Loop(), Loop()
        self._threads = [
            threading.Thread(target=self.control.run, name="control", daemon=True),
            threading.Thread(target=self.channels.run, name="channels", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def spawn(self, plan: HostPlan) -> None:
        check_cores(plan, os.sched_getaffinity(0))
        log = str(self._log_dir / f"{plan.name}.log") if self._log_dir is not None else None
        starting = self._starter.submit(self._start, plan, log)
        try:
            popen, control, progress = starting.result()
        except BaseException:  # Ctrl-C
            starting.add_done_callback(lambda started: started.exception() or _kill_group(started.result()[0]))
            raise
        channels, end = socket_pair()
        with end:
            control.post(("peer", DRIVER), fd=end.fileno())
        process = LocalProcess(
            plan, log, progress, popen.pid, popen=popen, control=control, channels=MessageSocket(channels)
        )
        before = self.processes.get(plan.name)
        for other in [other for name, other in self.processes.items() if name != plan.name]:
            one, two = socket_pair()
            with one, two:
                control.post(("peer", other.plan.name), fd=one.fileno())
                other.control.post(("peer", plan.name), fd=two.fileno())
        self.processes[plan.name] = process
        if before is not None:
            before.progress.release()
        self._first.discard(plan.name)
        if not self._first:
            self._fork_servers.close()
        self._events.on_start(plan.name, popen.pid)
        receive = self._receive
        self.channels.add(process.channels, lambda sent, payload, _: receive(plan.name, *sent, payload), _nothing)
        self.control.add(control, lambda message, payload, _: self._on_report(process, message, payload), _nothing)
        self.control.watch(os.pidfd_open(popen.pid), lambda: self._died(process))

    def call(self, host: str, message: tuple, packed: Payload | None = None) -> None:
        self.processes[host].control.post(message, packed)

    def kill(self, host: str) -> None:
        process = self.processes[host]
        if process.popen.returncode is None:
            _kill_group(process.popen)

    def write_stacks(self, host: str) -> bool:
        process = self.processes[host]
        asked = process.log is not None and not process.ended.is_set()
        if asked:
            with suppress(ProcessLookupError):
                os.kill(process.pid, WRITE_STACKS)
                time.sleep(WRITING_S)
        return asked

    def end(self, seconds: float) -> None:
        """Lets workers close for some seconds, then kills all hosts."""
        processes = list(self.processes.values())
        try:
            for process in processes:
                process.control.post(("stop", seconds))
            until = time.monotonic() + seconds + 0.5
            for process in processes:
                if not process.stopped.wait(max(until - time.monotonic(), 0)):
                    _log.warning("host %s did not close in time and is killed", process.plan.name)
        finally:
            for process in processes:
                if not process.ended.is_set():
                    self.kill(process.plan.name)
            for process in processes:
                process.ended.wait(KILL_S)

    def close(self) -> None:
        """All hosts have ended."""
        self._fork_servers.close()
        self._starter.shutdown()
        for loop in (self.control, self.channels):
            loop.stop()
        for thread in self._threads:
            thread.join(timeout=5)
        with suppress(BrokenPipeError), self._afterwards:
            self._afterwards.write(b"nothing is left\n")
        segments.drop()
        for process in self.processes.values():
            process.progress.release()

    # Inside

    def _start(self, plan: HostPlan, log: str | None) -> tuple[subprocess.Popen | Forked, MessageSocket, Progress]:
        """Returns the process, the socket of its control messages, and its signs of life."""
        boot, env = {**self._boot, "log": log}, {**os.environ, **plan.environment()}
        boot |= {"name": plan.name, "cores": list(plan.cores), "path": [os.path.abspath(path) for path in sys.path]}
        env[MARK] = mark_of(self._boot["run"], plan.name)
        on_gpu = any("gpu:" in device for device in plan.devices)
        modules = () if on_gpu else plan.imports  # forking hosts that use CUDA has not been tried
        ours, theirs = socket_pair()
        with ExitStack() as stack:
            stack.enter_context(theirs)
            memory = os.memfd_create("embodied-progress", os.MFD_CLOEXEC)
            stack.callback(os.close, memory)
            os.ftruncate(memory, PROGRESS_BYTES)
            out, err = 1, 2
            if log is not None:
                os.makedirs(os.path.dirname(log), exist_ok=True)
                out = err = stack.enter_context(open(log, "ab")).fileno()
            fds = {"control_fd": theirs.fileno(), "progress_fd": memory}
            popen: subprocess.Popen | Forked | None = self._fork_servers.fork(
                boot, env, modules, {**fds, "out_fd": out, "err_fd": err}
            )
            if popen is None:
                popen = subprocess.Popen(
                    [sys.executable, "-P", "-c", _BOOT, json.dumps({**boot, **fds, "parent": os.getpid()})],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    pass_fds=tuple(fds.values()),
                    start_new_session=True,
                )
            return popen, MessageSocket(ours), Progress(mmap.mmap(memory, PROGRESS_BYTES))

    def _on_report(self, process: LocalProcess, message: tuple, payload: Payload | None) -> None:
        if message[0] == "stopped":
            process.stopped.set()
        elif message[0] == "failed":  # what the call has put into channels is read first

            def tell() -> None:
                self.channels.drain(process.channels)
                self._events.on_report(process.plan.name, message, payload)

            self.channels.submit(tell)
        else:
            self._events.on_report(process.plan.name, message, payload)

    def _died(self, process: LocalProcess) -> None:
        _kill_group(process.popen)  # its children; the process id is not reused before it is reaped
        code = process.popen.wait()
        kill_marked(mark_of(self._boot["run"], process.plan.name))  # and processes that have left its group
        self.control.drain(process.control)  # its last reports come first,

        def tell() -> None:
            self.channels.drain(process.channels)  # then its last items in channels
            self._events.on_death(process.plan.name, describe_exit(code))
            process.ended.set()
            process.stopped.set()

        self.channels.submit(tell)


class LocalBackend(LocalHosts):
    name = "local"
    notice_s = NOTICE_S
    pack, unpack = staticmethod(encode), staticmethod(decode)

    def __init__(
        self, run: str, plans: Iterable[HostPlan], log_dir: Path | None, timeout_s: float, events: Events
    ) -> None:
        links = Links(encode, decode, self._post, lambda *report: events.on_report(DRIVER, *report))
        self.host = Host(run, [DRIVER], links, Progress(bytearray(PROGRESS_BYTES)), timeout_s)
        boot = boot_order(run, timeout_s, os.getpid())
        super().__init__(boot, [plan.name for plan in plans], log_dir, events, self._take)

    def stop(self, seconds: float) -> None:
        try:
            self.end(seconds)
        finally:
            self.host.stop(0)
            self.close()

    def _take(self, host: str, _: str, message: tuple, payload: Payload | None) -> None:
        self.host.serve_channel(host, message, payload)

    def _post(self, host: str, message: tuple, payload: Payload | None = None) -> None:
        self.call(host, ("channel", DRIVER, message), payload)  # in order with calls and news of deaths


def _nothing() -> None:
    pass


def check_cores(plan: HostPlan, usable: Iterable[int], what: str = "this process") -> None:
    """Refuses a host on cores that `what` may not use."""
    if not set(usable).issuperset(plan.cores):
        raise ValueError(
            f"host {plan.name} is to run on cores {ranges(plan.cores)}, but {what} may use only {ranges(tuple(usable))}"
        )


def boot_order(run: str, timeout_s: float, driver: int | None) -> dict[str, Any]:
    """What all hosts of a run are told at their start, in plain values. `driver`: its process id, on this machine."""
    main = sys.modules["__main__"]
    sys.modules.setdefault("__mp_main__", main)  # its name in the hosts
    spec = getattr(main, "__spec__", None)
    about = {"main_module": spec.name if spec is not None else None, "main_file": getattr(main, "__file__", None)}
    return {"run": run, "timeout_s": timeout_s, "driver": driver, **about}


def describe_exit(code: int) -> str:
    """Puts an exit code of `subprocess` into words; a negative one is a signal."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"


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


def kill_programs_afterwards(mark: str) -> IO[bytes]:
    """Kill all processes whose environment has a line that begins with this mark, when this process ends without
    writing a line into the returned pipe."""
    options: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    starter = subprocess.Popen(["sh", "-c", _AFTERWARDS, "sh", mark], **options, start_new_session=True)
    starter.wait()
    assert starter.stdin is not None
    return starter.stdin


def _environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:  # a process of another user, or an ended process
        return []
