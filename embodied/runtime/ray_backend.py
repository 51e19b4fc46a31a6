"""Hosts as actors of a Ray cluster: a private one on this machine, or a running one that the driver joins by address.

Ray starts the processes, tells that they are alive, and moves large parts between machines. What it does not do is done
by the parent of each host's process (ray_guard.py): cores before any import, the end with the driver, the exit code.
"""

from __future__ import annotations

import itertools
import json
import logging
import mmap
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from embodied.runtime import ray_guard
from embodied.runtime.backend import Events
from embodied.runtime.exits import describe_exit
from embodied.runtime.hosts import DRIVER, Host, HostPlan, Links, ranges
from embodied.runtime.progress import PROGRESS_BYTES, Progress, Pulse, Sign
from embodied.runtime.ray_host import actor_class
from embodied.runtime.ray_nodes import Connection, Node, last_words, run_on
from embodied.runtime.ray_payload import Stored, decode, encode, pack_message, unpack_message

_log = logging.getLogger(__name__)

_KILL_S = 5.0  # how long a killed process may take to vanish, and its parent to say how it ended

_EXIT_BYTES = 16  # after the progress: how the process ended
_LAST_WORDS_S = 10.0  # how long it may take to fetch the log of a host on another machine

# Ray would hide every GPU from an actor that asks it for none; which ones a host sees is the plan's business.
_LEAVE_DEVICES = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@dataclass
class _Process:
    plan: HostPlan
    life: int
    node: Node
    actor: Any
    memory_fd: int
    memory: mmap.mmap
    progress: Progress
    log: str | None
    printed_to: str | None  # that log, or a file on another machine that is fetched when the host ends
    exit_file: str
    listener: threading.Thread | None = None
    pid: int | None = None  # told by the host when it is up
    stopped: threading.Event = field(default_factory=threading.Event)  # its workers are closed
    ended: threading.Event = field(default_factory=threading.Event)

    def free(self) -> None:
        self.listener.join(_KILL_S)
        self.progress.release()
        self.memory.close()
        os.close(self.memory_fd)


class RayBackend:
    name = "ray"
    isolates = True

    def __init__(
        self,
        run: str,
        log_dir: Path | None,
        timeout_s: float,
        events: Events,
        address: str | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        self.pack, self.unpack = encode, decode
        self._run = run
        self._log_dir = log_dir.absolute() if log_dir is not None else None
        self._timeout_s = timeout_s
        self._events = events
        self._processes: dict[str, _Process] = {}
        self._lives = itertools.count(1)
        self._stopping = False
        self._connection = Connection(address, modules)
        links = Links(encode, decode, self._post, lambda *told: events.on_report(DRIVER, *told))
        self.host = Host(run, [DRIVER], links, Progress(bytearray(PROGRESS_BYTES)), timeout_s)
        self._actor_class = actor_class()

    def spawn(self, plan: HostPlan) -> None:
        node, life = self._connection.node(plan.node), next(self._lives)
        if not set(node.cores).issuperset(plan.cores):
            where = f"node {node.name}" if plan.node else "this process"
            usable = f"{where} may use only {ranges(node.cores)}"
            raise ValueError(f"host {plan.name} is to run on cores {ranges(plan.cores)}, but {usable}")
        memory_fd = os.memfd_create("embodied-progress", os.MFD_CLOEXEC)
        os.ftruncate(memory_fd, PROGRESS_BYTES + _EXIT_BYTES)
        memory = mmap.mmap(memory_fd, PROGRESS_BYTES)
        log = str(self._log_dir / f"{plan.name}.log") if self._log_dir is not None else None
        shared_file = f"/proc/{os.getpid()}/fd/{memory_fd}"
        exit_file = shared_file if node.here else f"{node.folder}/embodied-{self._run}-{life}.exit"
        printed_to = log if node.here or log is None else exit_file.replace(".exit", ".log")
        actor = self._actor_class.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            runtime_env={
                "env_vars": {**plan.environment(), **_LEAVE_DEVICES},
                "py_executable": _guarded(plan, node, exit_file),
            },
        ).remote(self._boot(plan, life, printed_to, shared_file if node.here else None))
        process = _Process(plan, life, node, actor, memory_fd, memory, Progress(memory), log, printed_to, exit_file)
        process.listener = threading.Thread(target=self._listen, args=(process,), name=f"ray-{plan.name}", daemon=True)
        before = self._processes.pop(plan.name, None)
        for other in self._processes.values():
            other.actor.meet.remote(plan.name, life, actor)
            actor.meet.remote(other.plan.name, other.life, other.actor)
        self._processes[plan.name] = process
        if before is not None:
            before.free()
        process.listener.start()

    def call(self, host: str, message: tuple, packed: Stored | None = None) -> None:
        arguments = packed.arguments() if packed is not None else ()
        self._processes[host].actor.control.remote(pack_message(message), *arguments)

    def where(self, host: str) -> str:
        process = self._processes[host]
        pid = f"pid {process.pid}" if process.pid is not None else "starting"
        pid = f"node {process.node.name}, {pid}" if process.node.name else pid
        cores = f", cores {ranges(process.plan.cores)}" if process.plan.cores else ""
        log = f", log: {process.log}" if process.log is not None else ""
        return f"{pid}{cores}{log}"

    def progress(self, host: str, slot: int) -> Sign:
        return self._processes[host].progress.read(slot)

    def pulse(self, host: str) -> Pulse:
        return self._processes[host].progress.pulse()

    def kill(self, host: str) -> None:
        _kill(self._processes[host])

    def stop(self, seconds: float) -> None:
        self._stopping = True
        processes = list(self._processes.values())
        try:
            for process in processes:
                process.actor.control.remote(pack_message(("stop", seconds)))
            until = time.monotonic() + seconds + 0.5
            for process in processes:
                if not process.stopped.wait(max(until - time.monotonic(), 0)):
                    _log.warning("host %s did not close in time and is killed", process.plan.name)
        finally:
            for process in processes:
                _kill(process)
            for process in processes:
                process.ended.wait(_KILL_S + _LAST_WORDS_S * (not process.node.here))
                process.free()
            self.host.stop(0)
            self._processes.clear()
            self._connection.close()

    # Inside

    def _boot(self, plan: HostPlan, life: int, log: str | None, progress_file: str | None) -> dict[str, Any]:
        main = sys.modules["__main__"]
        sys.modules.setdefault("__mp_main__", main)  # its name in the hosts
        return {
            "name": plan.name,
            "life": life,
            "run": self._run,
            "timeout_s": self._timeout_s,
            "cores": list(plan.cores),
            "log": log,
            "path": [os.path.abspath(p) for p in sys.path] if progress_file else None,  # on this machine
            "folder": os.getcwd(),
            "progress_file": progress_file,
            "main_module": main.__spec__.name if getattr(main, "__spec__", None) is not None else None,
            "main_file": getattr(main, "__file__", None),
        }

    def _post(self, host: str, message: tuple, payload: Stored | None = None) -> None:
        self.call(host, ("channel", message), payload)  # in order with calls and news of deaths

    def _listen(self, process: _Process) -> None:
        """A thread per host: takes what it tells, until its end."""
        failed = ""
        try:
            for told in process.actor.listen.remote():
                self._take(process, *ray.get(told))
        except RayError as error:
            failed = str(error)
        code = self._exit_code(process)
        cause = describe_exit(code) if code is not None else f"could not run: {failed.strip()}"
        process.stopped.set()
        process.ended.set()
        if not self._stopping:
            self._events.on_death(process.plan.name, cause)

    def _take(self, process: _Process, kind: str, message: bytes, *payload: Any) -> None:
        told = unpack_message(message)
        packed = Stored(*payload[:2], ref=payload[2] if len(payload) > 2 else None) if payload else None
        if packed is not None and packed.ref is not None:
            packed.parts = ray.get(packed.ref)  # now: who wrote it may die
        if kind == "report":
            self._events.on_report(process.plan.name, told, packed)
        elif kind == "channel":
            self.host.serve_channel(process.plan.name, told, packed)
        elif kind == "progress":
            process.progress.note(told)
        elif kind == "up":
            process.pid = told
        elif kind == "stopped":
            process.stopped.set()

    def _exit_code(self, process: _Process) -> int | None:
        """From the guard; None if the process never came to be, or nobody can say any more."""
        if process.pid is None:
            return None
        if not process.node.here:
            return self._last_words(process)
        until = time.monotonic() + _KILL_S
        while time.monotonic() < until:
            told = os.pread(process.memory_fd, _EXIT_BYTES, PROGRESS_BYTES).rstrip(b"\0")
            if told.endswith(b"\n"):
                return int(told)
            time.sleep(0.01)
        return None

    def _last_words(self, process: _Process) -> int | None:
        asked = run_on(process.node.id, last_words, process.exit_file, process.printed_to)
        try:
            code, printed = ray.get(asked, timeout=_LAST_WORDS_S)
        except RayError:  # the machine is gone
            return None
        if process.log is not None:
            Path(process.log).parent.mkdir(parents=True, exist_ok=True)
            with open(process.log, "ab") as log:
                log.write(printed)
        return code


def _guarded(plan: HostPlan, node: Node, exit_file: str) -> str:
    """What Ray puts before the arguments of a host's process."""
    order = {"cores": list(plan.cores), "driver": os.getpid() if node.here else None, "exit_file": exit_file}
    order["exit_at"] = PROGRESS_BYTES if node.here else 0
    source = Path(ray_guard.__file__).read_text()
    return shlex.join([node.python, "-I", "-S", "-c", source, json.dumps(order), node.python])


def _kill(process: _Process) -> None:
    if process.pid is not None and process.node.here and not process.ended.is_set():
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    else:
        with suppress(RayError):
            ray.kill(process.actor)
