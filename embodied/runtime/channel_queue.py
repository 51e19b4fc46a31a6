"""The end of a channel in its home: a `Queue`, which serves gets in the order they came.

The messages between it and the ends that other hosts hold (`remote_channel.py`) are listed in `Host.serve_channel`.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from embodied.core.errors import ChannelClosed, DeadlineExceeded
from embodied.runtime.awake_clock import wait_awake
from embodied.runtime.channel import Channel
from embodied.runtime.payload import Payload

if TYPE_CHECKING:
    from embodied.runtime.host import Host
    from embodied.runtime.remote_channel import Remote

CLOSING = ("the driver", "the cluster is closing")


class Entry(NamedTuple):
    value: Any  # the object, or a Payload as it came from another host
    key: Any
    weight: float
    producer: str
    peer: str | None  # the host that sent it; None: the home itself
    put_back: bool = False  # its producer's capacity is already freed


class Getter:
    """A get in progress. It takes matching items as they arrive, so that producers of a large batch regain capacity."""

    __slots__ = ("_ready", "closed", "consumer", "entries", "key", "need", "peer", "request", "total")

    def __init__(self, key: Any, need: float | None, consumer: str, peer: str | None = None, request: int = 0) -> None:
        self.consumer = consumer  # a worker; of another host, the host
        self.key = key
        self.need = need
        self.peer = peer
        self.request = request
        self.entries: list[Entry] = []
        self.total = 0.0
        self.closed: tuple[str, str] | None = None
        self._ready = threading.Lock()
        self._ready.acquire()

    def complete(self) -> bool:
        return bool(self.entries) and (self.need is None or self.total >= self.need)

    def finish(self) -> None:
        self._ready.release()

    def wait(self, seconds: float, driver: int | None = None) -> bool:
        return wait_awake(lambda part_s: self._ready.acquire(timeout=part_s), seconds, driver)


class Queue:
    """A channel at home."""

    def __init__(self, channel: Channel, host: Host) -> None:
        self.name = channel.name
        self.capacity = channel.capacity
        self.pair = channel.pair
        self.host = host
        self.users: set[str] = set()  # other hosts that hold the channel
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._entries: deque[Entry] = deque()
        self._getters: deque[Getter] = deque()
        self._unread: dict[str, int] = defaultdict(int)  # items waiting per producer of this host
        self._taken: dict[tuple[str, str], int] = defaultdict(int)  # freed capacity not yet reported to other hosts
        self._closed: tuple[str, str] | None = None
        self._source_dead: tuple[str, str] | None = None  # the worker and the cause, while the only producer is dead
        self.heard: Callable[[], None] = lambda: None  # called after every put

    # Called by this host's own threads

    def put(self, item: Any, key: Any, weight: float, timeout_s: float | None) -> None:
        producer = self.host.tick()
        with self._lock:
            if self.capacity is not None:
                wait_for_room(self, producer, self._room, self._unread, lambda: self._closed, timeout_s)
            self._check_open()
            ready = self._add(item, key, weight, producer, None)
        self._deliver(ready)
        self.heard()

    def get(self, key: Any, need: float | None, timeout_s: float | None) -> list[Any]:
        getter = Getter(key, need, self.host.caller())
        self._start(getter)
        seconds = self.host.timeout_s if timeout_s is None else timeout_s
        try:
            with self.host.waiting():
                arrived = getter.wait(seconds, self.host.driver)
        except BaseException:  # Ctrl-C
            self._give_up(getter)
            raise
        if not arrived and self._give_up(getter):
            raise nothing_came(self.name, key, seconds, len(self._entries))
        if getter.closed is not None:
            raise ChannelClosed(self.name, *getter.closed)
        return [self.host.unpack(e.value) if isinstance(e.value, Payload) else e.value for e in getter.entries]

    def qsize(self) -> int:
        return len(self._entries)

    def close(self, peer: str, cause: str, drain: bool = False) -> None:
        with self._lock:
            if self._closed is not None:
                return
            self._closed = (peer, cause)
            failed = self._fail_all()
            if not drain:
                self._entries.clear()
            self._room.notify_all()
            users = list(self.users)
        self._deliver(failed)
        for user in users:
            self.host.post(user, ("closed", self.name, peer, cause))

    # Called for messages of other hosts

    def opened_by(self, peer: str) -> None:
        with self._lock:
            self.users.add(peer)
        if self._closed is not None:
            self.host.post(peer, ("closed", self.name, *self._closed))

    def put_from(self, peer: str, payload: Payload, key: Any, weight: float, producer: str) -> None:
        with self._lock:
            if self._closed is not None:
                return
            ready = self._add(payload, key, weight, producer, peer)
        self._deliver(ready)
        self.heard()

    def get_from(self, peer: str, request: int, key: Any, need: float | None) -> None:
        self._start(Getter(key, need, peer, peer, request))

    def cancel_from(self, peer: str, request: int) -> None:
        for getter in list(self._getters):
            if (getter.peer, getter.request) == (peer, request) and self._give_up(getter):
                self.host.post(peer, ("given_up", self.name, request))

    # Called for the driver's news of other hosts and workers

    def host_died(self, host: str, worker: str, cause: str, restarts: bool) -> None:
        """Forget the dead host. Its items stay; gets that wait for it as the only producer fail."""
        self._forget(host)
        if self.pair is None or self.pair.source_host != host:
            return
        if not restarts:
            self.close(worker, cause, drain=True)
            return
        with self._lock:
            self._source_dead = (worker, cause)
            failed = self._fail_all()
        self._deliver(failed)

    def host_revived(self, host: str) -> None:
        if self.pair and self.pair.source_host == host:
            self._source_dead = None

    def worker_failed(self, worker: str, cause: str) -> None:
        """Ends the worker's direct channels; items that it has sent can still be taken."""
        if self.pair and worker in (self.pair.source, self.pair.receiver):
            self.close(worker, cause, drain=worker == self.pair.source)

    def cluster_closes(self) -> None:
        if self.pair:  # the driver closes named channels
            self.close(*CLOSING)

    def _forget(self, peer: str) -> None:
        """Drop a dead host's gets and free the capacity of its unread items: the replacement starts afresh."""
        for getter in list(self._getters):
            if getter.peer == peer:
                self._give_up(getter)
        with self._lock:
            self.users.discard(peer)
            self._entries = deque(e._replace(put_back=True) if e.peer == peer else e for e in self._entries)
            for origin in [origin for origin in self._taken if origin[0] == peer]:
                del self._taken[origin]

    # Internals; called with the lock held, except _start, _give_up and _deliver

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ChannelClosed(self.name, *self._closed)

    def _add(self, value: Any, key: Any, weight: float, producer: str, peer: str | None) -> list[Getter]:
        if peer is None and self.capacity is not None:
            self._unread[producer] += 1
        self._entries.append(Entry(value, key, weight, producer, peer))
        return self._match() if self._getters else []

    def _match(self) -> list[Getter]:
        """Fills the gets in order of arrival; removes and returns the complete ones."""
        ready = []
        for getter in list(self._getters):
            if not self._entries:
                break
            if self._fill(getter):
                self._getters.remove(getter)
                ready.append(getter)
        return ready

    def _start(self, getter: Getter) -> None:
        with self._lock:
            if not self._fill(getter):
                if self._closed is None and self._source_dead is None:
                    self._getters.append(getter)
                    return
                self._fail(getter)
        self._deliver([getter])

    def _fail_all(self) -> list[Getter]:
        failed = list(self._getters)
        self._getters.clear()
        for getter in failed:
            self._fail(getter)
        return failed

    def _fail(self, getter: Getter) -> None:
        getter.closed = self._closed or self._source_dead
        self._put_back(getter)

    def _put_back(self, getter: Getter) -> None:
        self._entries.extendleft(entry._replace(put_back=True) for entry in reversed(getter.entries))

    def _fill(self, getter: Getter) -> bool:
        while not getter.complete():
            entry = self._take(getter.key)
            if entry is None:
                return False
            getter.entries.append(entry)
            getter.total += entry.weight
            self.host.note(entry.producer, getter.consumer)
        return True

    def _take(self, key: Any) -> Entry | None:
        if not self._entries:
            return None
        if key is None:
            return self._gone(self._entries.popleft())
        index = next((i for i, entry in enumerate(self._entries) if entry.key == key), None)
        if index is None:
            return None
        entry = self._entries[index]
        del self._entries[index]
        return self._gone(entry)

    def _gone(self, entry: Entry) -> Entry:
        """Frees the producer's capacity; producers on other hosts are told in portions of half the capacity."""
        if self.capacity is None or entry.put_back:
            return entry
        if entry.peer is None:
            self._unread[entry.producer] -= 1
            self._room.notify_all()
            return entry
        origin = (entry.peer, entry.producer)
        self._taken[origin] += 1
        if 2 * self._taken[origin] >= self.capacity:
            self.host.post(entry.peer, ("room", self.name, entry.producer, self._taken.pop(origin)))
        return entry

    def _give_up(self, getter: Getter) -> bool:
        """Puts back the items that a get has taken so far. False if it was served meanwhile."""
        with self._lock:
            if getter not in self._getters:
                return False
            self._getters.remove(getter)
            self._put_back(getter)
            ready = self._match()
        self._deliver(ready)
        return True

    def _deliver(self, getters: list[Getter]) -> None:
        for getter in getters:
            if getter.peer is None:
                getter.finish()
            elif getter.closed is not None:
                self.host.post(getter.peer, ("shut", self.name, getter.request, *getter.closed))
            else:
                for i, entry in enumerate(getter.entries):
                    payload = entry.value if isinstance(entry.value, Payload) else self.host.pack(entry.value)
                    last = i == len(getter.entries) - 1
                    self.host.post(getter.peer, ("got", self.name, getter.request, last), payload)


def wait_for_room(
    end: Queue | Remote,
    producer: str,
    room: threading.Condition,
    unread: dict[str, int],
    closed: Callable[[], Any],
    timeout_s: float | None,
) -> None:
    seconds = end.host.timeout_s if timeout_s is None else timeout_s
    while unread[producer] >= end.capacity and closed() is None:
        with end.host.waiting():
            came = wait_awake(room.wait, seconds, end.host.driver)
        if not came:
            raise DeadlineExceeded(
                f"channel {end.name!r}: {producer} has {unread[producer]} items waiting there and nobody took one "
                f"for {seconds:g} s"
            )


def nothing_came(name: str, key: Any, seconds: float, others: int | None) -> DeadlineExceeded:
    wanted = f"nothing came under key {key!r}" if key is not None else "nothing came"
    beside = f" ({others} items wait that do not match)" if others else ""
    return DeadlineExceeded(f"channel {name!r}: {wanted} for {seconds:g} s{beside}")
