"""Hosts as actors of a Ray cluster: a cluster of the run's own on this machine, or a running cluster at an address.

Ray starts the processes, reports that they live, and moves large parts between machines. The parent of each host's
process (`guard.py`) sets the cores before any import, ends the process with the driver, and reports the exit code.

`RayBackend` is the driver's side. `RayHost` is the actor. One of Ray's threads receives the driver's messages, one the
other hosts' messages, and one sends reports. Workers have threads of their own, as on every backend.

Moves an object between Ray processes: large buffers through Ray's object store, the rest inside the message.

The writer copies every buffer of 64 KiB or more once into the store. A reader on the same machine uses it in place; for
another machine Ray transfers it with the message. Arrays arrive read-only. Torch CPU tensors arrive as a writable copy,
because torch knows no read-only tensors and the store's pages are shared. Tensors from a GPU arrive on the reader's own
GPU, or on the CPU if it has none.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import mmap
import os
import pickle
import queue
import shlex
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from embodied.runtime.heartbeat import BEAT_S, PROGRESS_BYTES, Progress
from embodied.runtime.host import DRIVER, Host, HostPlan, Links, ranges
from embodied.runtime.payload import OUT_OF_BAND_BYTES, Payload, join, split
from embodied.runtime.processes import (
    KILL_S,
    NOTICE_S,
    START_S,
    WRITE_STACKS,
    HostProcess,
    Processes,
    boot_order,
    check_cores,
    describe_exit,
    find_main_lazily,
    keep_log_short,
    print_to_log,
    progress_memory,
    show_title,
)
from embodied.runtime.ray import guard
from embodied.runtime.ray.nodes import Connection, RayNode, Reservation, last_words, move, run_on
from embodied.runtime.shared_leases import SOCKET

if TYPE_CHECKING:
    from embodied.runtime.backend import Events

_EXIT_BYTES = 16  # after the progress: how the process ended
_LAST_WORDS_S = 10.0  # how long it may take to fetch the log of a host on another machine
_LOST_S = 45.0  # how long Ray may take to say that a node is lost
_DELIVERY_S = 5.0  # how long an ended call may wait for the arrival of its puts
_ONE_THREAD_EACH = {"control": 1, "channels": 1, "reports": 1}

# Ray hides all GPUs from actors that request none, but the plan decides which GPUs a host sees.
_LEAVE_DEVICES = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@dataclass
class RayProcess(HostProcess):
    life: int
    at: RayNode
    actor: Any
    memory_fd: int
    printed_to: str | None  # its log, or a file on another machine that is fetched when the host ends
    exit_file: str
    listener: threading.Thread | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.node = self.at.name
        self.here = self.at.here
        self.end_s = KILL_S + _LAST_WORDS_S * (not self.here)

    def free(self) -> None:
        self.listener.join(KILL_S)
        super().free()
        os.close(self.memory_fd)


class RayBackend(Processes):
    name = "ray"
    notice_s = _LOST_S + NOTICE_S  # ranks hear of a lost node at once, Ray later

    def __init__(
        self,
        run: str,
        log_dir: Path | None,
        timeout_s: float,
        events: Events,
        address: str | None = None,
        modules: Sequence[str] = (),
        start_s: float = START_S,
        plans: Sequence[HostPlan] = (),
    ) -> None:
        self._lives = itertools.count(1)
        self._stopping = False
        self._connection = Connection(address, modules, start_s)
        self._reservation: Reservation | None = None
        # The run's own cluster has no other programs, and devices that several runs share are reserved for all of them.
        if address is not None and SOCKET not in os.environ:
            try:
                self._reservation = Reservation(plans, self._connection.node)
            except BaseException:
                self._connection.close()
                raise
        super().__init__(run, log_dir and log_dir.absolute(), timeout_s, events, encode, decode)
        once = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
        self._actor_class = ray.remote(**once, concurrency_groups=_ONE_THREAD_EACH)(RayHost)

    def spawn(self, plan: HostPlan) -> None:
        before = self._processes.get(plan.name)
        plan = plan if before is None else self._plan_of_next(before)
        node, life = self._connection.node(plan.node), next(self._lives)
        check_cores(plan, node.cores, f"node {node.name}" if plan.node else "this process")
        memory_fd, memory = progress_memory(_EXIT_BYTES)
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
        process = RayProcess(plan, log, memory, life, node, actor, memory_fd, printed_to, exit_file)
        process.listener = threading.Thread(target=self._listen, args=(process,), name=f"ray-{plan.name}", daemon=True)
        self._processes[plan.name] = process
        for other in self._processes.values():
            if other is not process:
                other.actor.meet.remote(plan.name, life, actor)
                actor.meet.remote(other.plan.name, other.life, other.actor)
        if before is not None:
            before.free()
        process.listener.start()

    def call(self, host: str, message: tuple, packed: Stored | None = None) -> None:
        arguments = packed.arguments() if packed is not None else ()
        self._processes[host].actor.control.remote(pack_message(message), *arguments)

    def kill(self, host: str) -> None:
        process = self._processes[host]
        if process.pid is not None and process.here and not process.ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        else:
            with suppress(RayError):
                ray.kill(process.actor)

    def stop(self, seconds: float) -> None:
        self._stopping = True
        super().stop(seconds)

    # Inside

    def _close(self) -> None:
        if self._reservation is not None:
            with suppress(RayError):
                self._reservation.free()
        self._connection.close()

    def _boot(self, plan: HostPlan, life: int, log: str | None, progress_file: str | None) -> dict[str, Any]:
        order = boot_order(self._run, plan, self._timeout_s)
        order["path"] = order["path"] if progress_file else None  # on this machine
        driver = os.getpid() if progress_file else None
        here = {"life": life, "log": log, "folder": os.getcwd(), "progress_file": progress_file, "driver": driver}
        return {**order, **here}

    def _plan_of_next(self, before: RayProcess) -> HostPlan:
        """The plan of a host that is started again: the same, or moved if its node is lost."""
        if not self._connection.lost(before.at):
            return before.plan
        cores = [(process.node, core) for process in self._processes.values() for core in process.plan.cores]
        return move(before.plan, self._connection.others(before.at), Counter(cores))

    def _post(self, host: str, message: tuple, payload: Stored | None = None) -> None:
        self.call(host, ("channel", message), payload)  # in order with calls and news of deaths

    def _listen(self, process: RayProcess) -> None:
        """A thread per host: receives its messages, until its end."""
        failed = ""
        try:
            for sent in process.actor.listen.remote():
                self._take(process, *ray.get(sent))
        except RayError as error:
            failed = str(error)
        code = self._exit_code(process)
        cause = describe_exit(code) if code is not None else self._why_it_vanished(process, failed)
        process.stopped.set()
        process.ended.set()
        if not self._stopping:
            self._events.on_death(process.plan.name, cause)

    def _why_it_vanished(self, process: RayProcess, failed: str) -> str:
        if not process.here and self._connection.lost(process.at):
            return f"was lost with node {process.at.name} of the cluster, which Ray no longer reaches"
        return f"could not run: {failed.strip()}"

    def _take(self, process: RayProcess, kind: str, message: bytes, *payload: Any) -> None:
        content = unpack_message(message)
        packed = Stored(*payload[:2], ref=payload[2] if len(payload) > 2 else None) if payload else None
        if packed is not None and packed.ref is not None:
            packed.parts = ray.get(packed.ref)  # now: its writer may die
        if kind == "report":
            self._events.on_report(process.plan.name, content, packed)
        elif kind == "channel":
            self.host.serve_channel(process.plan.name, content, packed)
        elif kind == "progress":
            process.progress.note(content)
        elif kind == "up":
            process.pid = content
            self._events.on_start(process.plan.name, content)
        elif kind == "stopped":
            process.stopped.set()

    def _exit_code(self, process: RayProcess) -> int | None:
        """Returns the exit code that the guard wrote, also for a process that never reported its id; None if it wrote
        nothing."""
        if not process.here:
            return self._last_words(process) if process.pid is not None else None
        until = time.monotonic() + KILL_S
        while time.monotonic() < until:
            line = os.pread(process.memory_fd, _EXIT_BYTES, PROGRESS_BYTES).rstrip(b"\0")
            if line.endswith(b"\n"):
                return int(line)
            time.sleep(0.01)
        return None

    def _last_words(self, process: RayProcess) -> int | None:
        asked = run_on(process.at.id, last_words, process.exit_file, process.printed_to)
        try:
            code, printed = ray.get(asked, timeout=_LAST_WORDS_S)
        except RayError:  # the machine is gone, which Ray takes its time to notice
            until = time.monotonic() + _LOST_S
            while not (self._stopping or self._connection.lost(process.at)) and time.monotonic() < until:
                time.sleep(0.5)
            return None
        if process.log is not None:
            Path(process.log).parent.mkdir(parents=True, exist_ok=True)
            with open(process.log, "ab") as log:
                log.write(printed)
        return code


def _guarded(plan: HostPlan, node: RayNode, exit_file: str) -> str:
    """Returns what Ray puts before the arguments of a host's process."""
    order = {"cores": list(plan.cores), "driver": os.getpid() if node.here else None, "exit_file": exit_file}
    order["exit_at"] = PROGRESS_BYTES if node.here else 0
    source = Path(guard.__file__).read_text()
    return shlex.join([node.python, "-I", "-S", "-c", source, json.dumps(order), node.python])


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
        keep_log_short(boot["log"])
        _check_cores(boot["cores"])
        if boot["path"]:  # the driver is on this machine
            sys.path[:] = boot["path"]
            os.chdir(boot["folder"])
        ray._raylet.setproctitle = lambda *_: None  # Ray would show the running method instead
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
        with _ending_the_process_on_error():
            content = unpack_message(message)
            if content[0] == "stop":
                self._host.stop(content[1])
                self._tell("stopped")
            else:
                self._host.control(content, _received(payload))

    @ray.method(concurrency_group="reports", num_returns="streaming")
    def listen(self) -> Iterator[tuple]:
        """Yields this host's messages to the driver, in order."""
        while True:
            yield self._reports.get()

    # Called by other hosts

    @ray.method(concurrency_group="channels")
    def serve_channel(self, peer: str, life: int, message: bytes, *payload: Any) -> None:
        with _ending_the_process_on_error():
            if life >= self._peers.get(peer, (0, None))[0]:  # not from an earlier life
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
        """A call is done when its puts have arrived: if this process dies, they are not lost."""
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
        """Sends signs of life to a driver on another machine."""
        seen: dict[int, tuple[int, int]] = {}
        while True:
            time.sleep(BEAT_S)
            if news := progress.news(seen):
                seen |= news
                self._tell("progress", news)


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
    print_to_log()


def _die_of_what_kills() -> None:
    """Makes a fatal signal end the process at once, with a Python traceback. Ray's own handler takes seconds and may
    end in SIGABRT."""
    faulthandler.disable()
    for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable()
    faulthandler.register(WRITE_STACKS)


def _check_cores(cores: list[int]) -> None:
    """Checks that every thread started by Ray runs on the cores of the plan."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            allowed = os.sched_getaffinity(int(thread))
        if cores and allowed != set(cores):
            raise RuntimeError(
                f"this host was to run on cores {ranges(tuple(cores))}, but is on {ranges(tuple(allowed))}"
            )


@contextmanager
def _ending_the_process_on_error() -> Iterator[None]:
    """End the process when a thread of the host stops serving, so that it does not look alive."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)


class Stored(Payload):
    """An encoded object. The sender has a reference to the large parts, a receiver the parts themselves."""

    __slots__ = ("parts", "ref", "tensors")

    def __init__(
        self, body: bytes | None, tensors: frozenset[int] = frozenset(), parts: list | None = None, ref: Any = None
    ) -> None:
        super().__init__(body)  # None: a long body is the last of the parts
        self.tensors = tensors
        self.parts = parts
        self.ref = ref

    def arguments(self) -> tuple:
        """Returns arguments for a remote call, where `Stored(*arguments)` restores the object: Ray replaces the
        reference, if any, by the parts."""
        if self.parts is not None and self.ref is None:  # passed on
            self.ref = _put(self.parts)
        return (self.body, self.tensors) if self.ref is None else (self.body, self.tensors, self.ref)


def encode(item: Any, reader: str = "") -> Stored:
    """Tensors on GPUs go through the host's memory, whatever the `reader`'s GPU."""
    body, buffers, tensors = split(item)
    if len(body) >= OUT_OF_BAND_BYTES:
        return Stored(None, tensors, ref=_put([*buffers, body]))
    return Stored(bytes(body), tensors, ref=_put(buffers) if buffers else None)


def decode(payload: Stored) -> Any:
    parts = payload.parts
    if parts is None and payload.ref is not None:
        parts = payload.parts = ray.get(payload.ref)
    if parts is None:
        return join(payload.body)
    parts = [bytearray(part) if i in payload.tensors else part for i, part in enumerate(parts)]
    return join(parts.pop() if payload.body is None else payload.body, parts)


def _put(parts: list) -> Any:
    return ray.put([pickle.PickleBuffer(part) for part in parts])


def pack_message(message: tuple) -> bytes:
    """Pickles messages here: a message that Ray cannot unpickle would be lost without an error."""
    return pickle.dumps(message, protocol=5)


def unpack_message(data: bytes) -> tuple:
    return pickle.loads(data)  # noqa: S301  (sent by a process of this run)
