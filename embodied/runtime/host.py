"""A host: one process that runs workers, and the home of the channels consumed there.

Each worker has a thread for its work. Messages of the driver (`control`) and of other hosts (`serve_channel`) are
handled in separate threads, so calls and puts arrive while a worker is busy. The backend transports messages.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from embodied.core.errors import ChannelClosed, EmbodiedError, Unusable, WorkerFailed, printable, printable_error
from embodied.runtime.channel import Channel, Queue, Remote, hosts_of_runs
from embodied.runtime.heartbeat import Progress, readable, resident_bytes
from embodied.runtime.payload import Payload
from embodied.runtime.worker import Timers, Worker

DRIVER = "driver"
GIVEN = ("EMBODIED_DEVICE", "EMBODIED_RENDER", "EMBODIED_RENDER_FILE")  # set by the plan alone
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "LP_NUM_THREADS")
_MAX_CAUSE_CHARS = 2000
_import_lock = threading.RLock()


@dataclass(frozen=True)
class HostPlan:
    """One process: its name, its workers (one per role), and its devices. No cores means all."""

    name: str
    roles: tuple[str, ...]
    cores: tuple[int, ...] = ()
    threads: int = 1  # threads of OpenMP, BLAS and the software renderer
    env: dict[str, str] = field(default_factory=dict)
    node: str = ""  # node of a Ray cluster; "" is the driver's machine
    devices: tuple[str, ...] = ()  # devices that its workers hold while they work
    device_bytes: float = float("inf")  # memory limit of each device
    imports: tuple[str, ...] = ()  # slow imports of its workers

    @property
    def gpu(self) -> str:
        """The name of its GPU in the plan, or ""."""
        return next((name for name in self.devices if name.startswith("gpu:")), "")

    def environment(self) -> dict[str, str]:
        return {**dict.fromkeys(GIVEN, ""), **dict.fromkeys(THREAD_VARIABLES, str(self.threads)), **self.env}


@dataclass(frozen=True)
class WorkerSpec:
    """Names a worker and its class. `slot` is its place in the progress memory."""

    name: str
    rank: int
    world_size: int
    slot: int
    module: str
    file: str | None  # where to find the module if it cannot be imported by name


@dataclass(frozen=True)
class Links:
    """A host's connections, made by its backend: `pack` and `unpack` serialise an object, `post` sends a message to
    another host's `serve_channel`, `report` to the driver."""

    pack: Callable[..., Any]  # (item, reader's GPU="")
    unpack: Callable[[Any], Any]
    post: Callable[..., None]  # (host name, message, payload=None)
    report: Callable[..., None]  # (message, packed result=None)


@dataclass(frozen=True)
class Events:
    """What the parent of hosts is told about them, from any thread."""

    on_report: Callable[[str, tuple, Any], None]  # (host name, message, packed result): a host answers
    on_start: Callable[[str, int], None]  # (host name, process id): the host has started
    on_death: Callable[[str, str], None]  # (host name, cause): its process ended, after all its messages were delivered


class Host:
    def __init__(
        self,
        run: str,
        names: Sequence[str],
        links: Links,
        progress: Progress,
        timeout_s: float,
        driver: int | None = None,
    ) -> None:
        """`driver` is the driver's process id, if it is another process of this machine."""
        self.run = run
        self.driver = driver
        self.name = names[0]
        self.names = set(names)  # the host's name; with the inline backend all hosts' names
        self.pack, self.unpack = links.pack, links.unpack
        self.post, self.report = links.post, links.report
        self.timeout_s = timeout_s
        self._progress = progress
        self._workers: dict[str, _WorkerThread] = {}
        self._ends: dict[str, Queue | Remote] = {}
        self._dead: dict[str, tuple[str, str, bool]] = {}  # host -> (worker, cause, True if it will be restarted)
        self._failed: dict[str, str] = {}  # worker -> cause
        self._lock = threading.RLock()
        self._current = threading.local()
        self.flows: dict[tuple[str, str], tuple[float, float]] = {}  # (producer, consumer) -> (first time, last time)
        hosts_of_runs[run] = self

    # Calls of the driver

    def control(self, message: tuple, packed: Any = None) -> None:
        kind, *rest = message
        if kind == "make":
            spec, call_id = rest
            self._workers[spec.name] = _WorkerThread(self, spec, call_id, packed)
        elif kind == "call":
            worker, method, call_id = rest
            self._workers[worker].submit(call_id, method, packed)
        elif kind == "channel":
            self.serve_channel(*rest, packed)
        elif kind == "died":
            self._host_died(*rest)
        elif kind == "revived":
            self._host_revived(*rest)
        elif kind == "failed":
            self._worker_failed(*rest)

    def stop(self, seconds: float) -> list[str]:
        """Closes the workers; returns the names of workers that are still busy after `seconds`."""
        until = time.monotonic() + seconds
        self._tell_ends("cluster_closes")
        for thread in self._workers.values():
            thread.stop()
        for thread in self._workers.values():
            thread.join(max(until - time.monotonic(), 0))
        hosts_of_runs.pop(self.run, None)
        return [name for name, thread in self._workers.items() if thread.is_alive()]

    # Channels

    def end_of(self, channel: Channel) -> Queue | Remote:
        with self._lock:
            if channel.name not in self._ends:
                end = self._ends[channel.name] = (Queue if channel.home in self.names else Remote)(channel, self)
                if isinstance(end, Remote) and channel.home not in self._dead:
                    end.open()  # the channel's end must exist before the answer comes
                for host, news in self._dead.items():
                    end.host_died(host, *news)
                for worker, cause in self._failed.items():
                    end.worker_failed(worker, cause)
            return self._ends[channel.name]

    def serve_channel(self, peer: str, message: tuple, payload: Payload | None = None) -> None:
        """Serves another host's message about a channel (`channel.py`)."""
        kind, name, *rest = message
        end = self.end_of(rest.pop()) if kind == "open" else self._ends.get(name)
        if end is None:  # between machines a message for a dead host may reach its replacement
            return
        try:
            getattr(end, f"on_{kind}")(peer, payload, *rest)
        except Exception as error:  # an item that cannot be serialised: every waiting call must get the error
            traceback.print_exc()
            end.close(self.name, f"{type(error).__name__}: {error}")

    def _host_died(self, host: str, worker: str, cause: str, restarts: bool) -> None:
        with self._lock:
            self._dead[host] = (worker, cause, restarts)
        self._tell_ends("host_died", host, worker, cause, restarts)

    def _host_revived(self, host: str) -> None:
        """A dead host was restarted: the channels whose home it is begin anew, empty."""
        with self._lock:
            self._dead.pop(host, None)
        self._tell_ends("host_revived", host)

    def _worker_failed(self, worker: str, cause: str) -> None:
        """A worker has failed, but not its host. The driver closes the worker's named channels."""
        with self._lock:
            self._failed[worker] = cause
        self._tell_ends("worker_failed", worker, cause)

    def _tell_ends(self, event: str, *about: Any) -> None:
        with self._lock:
            ends = list(self._ends.values())
        for end in ends:
            getattr(end, event)(*about)

    def note(self, producer: str, consumer: str) -> None:
        """Records that an item went from one worker to another through a channel of this host."""
        now = time.perf_counter()
        first, _ = self.flows.get((producer, consumer), (now, now))
        self.flows[producer, consumer] = first, now

    # The calling worker

    def enter(self, spec: WorkerSpec) -> None:
        self._current.spec = spec

    @contextmanager
    def speaking(self, spec: WorkerSpec) -> Iterator[None]:
        """Inside, this thread acts for a worker that is busy in its own thread."""
        before = getattr(self._current, "spec", None)
        self._current.spec = spec
        try:
            yield
        finally:
            self._current.spec = before

    def caller(self) -> str:
        """The worker of this thread, otherwise the host."""
        spec = getattr(self._current, "spec", None)
        return spec.name if spec is not None else self.name

    def waiting(self) -> AbstractContextManager[None]:
        """Inside, the worker of this thread may be silent while it waits on a channel."""
        spec = getattr(self._current, "spec", None)
        return nullcontext() if spec is None else self._progress.waiting(spec.slot)

    def tick(self) -> str:
        """Records a sign of life; returns the caller."""
        spec = getattr(self._current, "spec", None)
        if spec is None:
            return self.name
        self._progress.tick(spec.slot)
        return spec.name

    def tick_slot(self, slot: int) -> None:
        self._progress.tick(slot)


class _WorkerThread(threading.Thread):
    """Runs one worker: constructs it, then serves its calls in order. Some methods are served while it is busy."""

    def __init__(self, host: Host, spec: WorkerSpec, call_id: int, packed: Any) -> None:
        super().__init__(name=spec.name, daemon=True)
        self.host = host
        self.spec = spec
        self._construction = partial(self._call, call_id, "__init__", packed)
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker: Worker | None = None
        self._stopped = False
        self._lock = threading.Lock()
        self._early: list[tuple[str, Callable[[], None]]] | None = []  # (method, call) of calls before its construction
        self.start()

    def submit(self, call_id: int, method: str, packed: Any) -> None:
        task = partial(self._call, call_id, method, packed)
        with self._lock:
            if self._early is not None:
                self._early.append((method, task))
                return
            if not self._served_while_busy(method):
                self._tasks.put(task)
                return
        task()

    def stop(self) -> None:
        """Ends after the current call; waiting calls are dropped."""
        self._stopped = True
        self._tasks.put(None)

    def run(self) -> None:
        self.host.enter(self.spec)
        self._construction()
        del self._construction  # frees the arguments, which may hold shared memory
        self._sort_early()
        while (task := self._tasks.get()) is not None and not self._stopped:
            task()
            del task
        if self._worker is not None:
            try:
                self._worker.close()
            except Exception:
                traceback.print_exc()

    def _sort_early(self) -> None:
        """After construction: serves early calls of methods that are served while the worker is busy."""
        with self._lock:
            early, self._early = self._early, None
            at_once = [task for method, task in early if self._served_while_busy(method)]
            for method, task in early:
                if not self._served_while_busy(method):
                    self._tasks.put(task)
        for task in at_once:
            task()

    def _served_while_busy(self, method: str) -> bool:
        return getattr(getattr(self._worker, method, None), "served_while_busy", False)

    def _call(self, call_id: int, method: str, packed: Any) -> None:
        self.host.tick_slot(self.spec.slot)
        start = time.perf_counter()
        try:
            result = self._construct(packed) if method == "__init__" else self._run_method(method, packed)
            seconds = time.perf_counter() - start
            message, packed_result = ("done", call_id, seconds), self.host.pack(result)
        except BaseException as error:  # SystemExit too: a worker that calls exit() must not vanish silently
            if rank_is_lost(error):
                role = self.spec.name.rpartition("-")[0]
                lost = ChannelClosed(f"between the {role}s", role, "another one is gone or does not answer")
                lost.__cause__, error = error, lost.with_traceback(error.__traceback__)
            message, packed_result = self._failure(call_id, error), None
        self.host.tick_slot(self.spec.slot)
        self.host.report(message, packed_result)

    def _construct(self, packed: Any) -> None:
        import_from(self.spec.module, self.spec.file)
        cls, args, kwargs, homes = self.host.unpack(packed)
        if isinstance(cls, str):
            cls = getattr(sys.modules[self.spec.module], cls.partition(":")[2])
        worker = cls.__new__(cls)
        worker.name, worker.rank, worker.world_size = self.spec.name, self.spec.rank, self.spec.world_size
        worker.run, worker.homes = self.host.run, homes
        worker.timers = Timers()
        worker.tick = lambda: self.host.tick_slot(self.spec.slot)
        worker.waiting = self.host.waiting
        worker.__init__(*args, **kwargs)
        self._worker = worker

    def _run_method(self, method: str, packed: Any) -> Any:
        if self._worker is None:
            raise EmbodiedError("its constructor failed")
        args, kwargs = self.host.unpack(packed)
        call = getattr(self._worker, method)
        if self._served_while_busy(method):  # a query, no work of the worker
            with self.host.speaking(self.spec):
                return call(*args, **kwargs)
        with self._worker.timers.measure(method):
            return call(*args, **kwargs)

    def _failure(self, call_id: int, error: BaseException) -> tuple:
        error.__traceback__ = _below_us(error.__traceback__)
        text = printable("".join(traceback.format_exception(error)))
        name = "" if isinstance(error, EmbodiedError) else f"{type(error).__name__}: "
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
        memory = f" (this process held {readable(resident_bytes())})" if isinstance(error, MemoryError) else ""
        cause = printable_error(" ".join(f"{name}{error}".split()))[:_MAX_CAUSE_CHARS] + memory + where
        follows = (error.peer, error.cause) if isinstance(error, ChannelClosed) else None
        retry = isinstance(error, Unusable) or not isinstance(error, EmbodiedError)
        code = error.exit_code if isinstance(error, EmbodiedError) else WorkerFailed.exit_code
        return "failed", call_id, cause, text[-_MAX_CAUSE_CHARS * 8 :], follows, retry, code


OF_THIS_RANK = ("ncclInvalidUsage", "ncclInvalidArgument", "ncclUnhandledCudaError")  # two ranks on a GPU, no memory


def rank_is_lost(error: BaseException) -> bool:
    """True if torch reports lost connections between ranks, a consequence of another rank's failure."""
    if any(name in str(error) for name in OF_THIS_RANK):
        return False
    dist = sys.modules.get("torch.distributed")
    expected_errors: Any = (RuntimeError,) if "gloo/" in str(error) else ()
    return isinstance(error, expected_errors if dist is None else (*expected_errors, dist.DistError))


def _below_us(trace: TracebackType | None) -> TracebackType | None:
    """The worker's part of a traceback."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def import_from(module: str, file: str | None) -> None:
    """Makes a module importable under its name even if it is not on the path (a test file, a script)."""
    import importlib.util

    with _import_lock:  # otherwise another worker could find it half loaded
        if module in sys.modules or module == "__main__":
            return
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if file is None or not module.startswith(str(error.name)):
                raise
            spec = importlib.util.spec_from_file_location(module, file)
            sys.modules[module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[module])


def ranges(cores: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) -> "0-2,5"."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
