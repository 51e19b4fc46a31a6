"""The base of every role, those that a user's program adds included.

Each replica lives in one host and does its work in a thread of its own there: constructor, methods and `close` all run
in that thread, one call after the other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from embodied.runtime.channel import DEFAULT_CAPACITY, Channel, Pair, hosts_of_runs, put_all
from embodied.runtime.timers import RecordedSpans, Timers, Total

SIGN_S = 5.0


def served_while_busy(method: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a short method that answers from the host's control thread even while the worker is at work."""
    method.served_while_busy = True  # type: ignore[attr-defined]
    return method


@dataclass(frozen=True)
class Needs:
    """Bytes of device memory: at work, and still there when the rest was given back."""

    num_bytes: int = 0
    kept_bytes: int = 0


class Worker:
    """Public methods are callable on the group and timed per rank. The attributes are set before the constructor."""

    name: str  # role and rank, like "critic-0"
    rank: int
    world_size: int
    timers: Timers
    peers: Peers
    tick: Callable[[], None] = staticmethod(lambda: None)
    """Shows from inside long work that the worker is alive; every call and channel operation ticks too."""
    waiting: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    """Inside, the worker waits for another one and may be silent; channel operations do that themselves."""

    def send(self, item: Any, to: tuple[str, int], tag: Any = None, timeout_s: float | None = None) -> None:
        """Sends an item straight to a worker, by role and rank; blocks while many that it sent there wait."""
        self.peers.to(*to).put(item, tag, timeout_s=timeout_s)

    def recv(self, source: tuple[str, int], tag: Any = None, timeout_s: float | None = None) -> Any:
        """Takes the next item that a worker sent here under this tag, or the next of all without one. Raises
        ChannelClosed where the worker failed or died, DeadlineExceeded after `timeout_s`."""
        return self.peers.source(*source).get(tag, timeout_s)

    def broadcast(self, item: Any, to: str, tag: Any = None, timeout_s: float | None = None) -> None:
        """Sends an item to all workers of a role, but for this one; for other processes it is encoded once."""
        put_all(self.peers.all_of(to), item, tag, timeout_s)

    def all_reduce(self, array: Any) -> Any:
        """The sum of what every worker of this role gives to the same call, added in the order of their ranks."""
        role = self.name.rpartition("-")[0]
        self.broadcast(copy(array), role, "all_reduce")  # others may read it after this worker has changed its own
        ranks = range(self.world_size)
        return sum(array if rank == self.rank else self.recv((role, rank), "all_reduce") for rank in ranks)

    @contextmanager
    def alive(self, at_most_s: float) -> Iterator[None]:
        """Ticks every few seconds inside one long call of a library, which cannot."""
        over = threading.Event()

        def live() -> None:
            for _ in range(round(at_most_s / SIGN_S)):
                if over.wait(SIGN_S):
                    return
                self.tick()

        thread = threading.Thread(target=live, name="alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def needs(self, shared: bool = False) -> Needs:
        """Returns its device memory; `shared`: another role in this process uses the same weights."""
        return Needs()

    def onload(self) -> None:
        """Takes device memory; nothing happens where it has it."""

    def offload(self) -> None:
        """Gives device memory back; nothing happens where it has done so."""

    def close(self) -> None:
        """Runs once when the cluster closes, unless the process died before."""

    @served_while_busy
    def timings(self) -> dict[str, Total]:
        """Seconds per public method, and per section the worker measured with `self.timers.measure(name)`."""
        return self.timers.totals()

    @served_while_busy
    def record(self, on: bool) -> RecordedSpans:
        """Begins (or ends) keeping every measured piece of work; returns those kept since the last call."""
        return self.timers.record(on)

    @served_while_busy
    def clock(self) -> float:
        """`time.perf_counter` there: the same for all processes of a machine."""
        return perf_counter()

    @served_while_busy
    def flows(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Returns which worker gave items to which through the channels at home in this process, and from when to when,
        since the last call."""
        found: dict[tuple[str, str], tuple[float, float]] = {}
        for host in list(hosts_of_runs.values()):
            flows, host.flows = host.flows, {}
            found |= flows
        return found

    @served_while_busy
    def process(self) -> tuple[str, int]:
        """Returns the machine and the process it runs in."""
        return machine(), os.getpid()

    @served_while_busy
    def peak_bytes(self) -> int:
        """Returns the most memory of the machine that its process has held."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def machine() -> str:
    """Names this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Peers:
    """The channels between one worker and others."""

    def __init__(self, run: str, name: str, homes: Mapping[str, Sequence[tuple[str, str]]]) -> None:
        """`homes`: of every role, the hosts of its ranks and the GPU that each holds, or ""."""
        self.run, self.name, self.homes = run, name, homes
        self._channels: dict[str, Channel] = {}

    def to(self, role: str, rank: int) -> Channel:
        return self._between(self.name, f"{role}-{rank}")

    def source(self, role: str, rank: int) -> Channel:
        return self._between(f"{role}-{rank}", self.name)

    def all_of(self, role: str) -> list[Channel]:
        """The channels to all ranks of a role, but for this worker itself."""
        self._home(f"{role}-0")
        ranks = range(len(self.homes[role]))
        return [self.to(role, rank) for rank in ranks if f"{role}-{rank}" != self.name]

    def _between(self, source: str, receiver: str) -> Channel:
        name = f"{source} -> {receiver}"
        if name not in self._channels:
            (source_host, _), (home, gpu) = self._home(source), self._home(receiver)
            pair = Pair(source, source_host, receiver)
            self._channels[name] = Channel(self.run, name, home, DEFAULT_CAPACITY, gpu, pair)
        return self._channels[name]

    def _home(self, worker: str) -> tuple[str, str]:
        role, _, rank = worker.rpartition("-")
        if not 0 <= int(rank or -1) < len(self.homes.get(role, ())):
            known = ", ".join(f"{role} ({len(hosts)})" for role, hosts in self.homes.items())
            raise ValueError(f"the plan has no worker {worker}; it has by role: {known}")
        return self.homes[role][int(rank)]
