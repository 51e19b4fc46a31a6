"""A named queue between workers, with optional keys and weights; channels may form cycles.

The queue itself lives in one host, its home: put it where the items are consumed. Within a host the object itself is
handed over, so the producer must not change it afterwards. From another host a copy arrives, whose large arrays are
read-only.

`capacity` limits the waiting items of one producer: its next put blocks until the consumer takes an item.

Besides the named channels there is one channel for each pair of workers, made at its first use by `Worker.send`,
`Worker.broadcast` or `Worker.recv`. It ends when one of the two workers ends.

The end of a channel in its home: a `Queue`, which serves gets in the order they came.

The messages between it and the ends that other hosts hold are listed in `Host.serve_channel`.

The end of a channel in a host that is not its home: a `Remote`, which asks the `Queue` there.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from embodied.core.errors import ChannelClosed, DeadlineExceeded
from embodied.runtime.heartbeat import wait_awake
from embodied.runtime.payload import Payload

if TYPE_CHECKING:
    from embodied.runtime.host import Host

DEFAULT_CAPACITY = 64

hosts_of_runs: dict[str, Host] = {}  # the host of each running cluster in this process


@dataclass(frozen=True)
class Pair:
    """The worker that puts and the worker that gets."""

    source: str
    source_host: str
    receiver: str


class Channel:
    """The handle that programs use; passing it to a worker costs a few bytes. Made by `cluster.channel`."""

    def __init__(
        self,
        run: str,
        name: str,
        home: str,
        capacity: int | None,
        gpu: str = "",
        pair: Pair | None = None,
    ) -> None:
        """`gpu` is the home's GPU, if it has one."""
        self.run = run
        self.name = name
        self.home = home
        self.capacity = capacity
        self.gpu = gpu
        self.pair = pair
        self._end: Queue | Remote | None = None

    def __reduce__(self) -> tuple:
        return Channel, (self.run, self.name, self.home, self.capacity, self.gpu, self.pair)

    def __repr__(self) -> str:
        return f"Channel({self.name!r}, home={self.home!r})"

    @property
    def end(self) -> Queue | Remote:
        if self._end is None:
            host = hosts_of_runs.get(self.run)
            if host is None:
                raise ChannelClosed(self.name, "the driver", "its cluster is closed")
            self._end = host.end_of(self)
        return self._end

    def put(self, item: Any, key: Any = None, weight: float = 1, timeout_s: float | None = None) -> None:
        """Adds an item; blocks while this producer has `capacity` items waiting."""
        self.end.put(item, key, weight, timeout_s)

    def get(self, key: Any = None, timeout_s: float | None = None) -> Any:
        """Takes the next item, or the next of those put under `key`."""
        return self.end.get(key, None, timeout_s)[0]

    def get_batch(self, weight: float, key: Any = None, timeout_s: float | None = None) -> list[Any]:
        """Takes items in order until their weights add up to at least `weight`."""
        return self.end.get(key, weight, timeout_s)

    def qsize(self) -> int:
        return self.end.qsize()

    def close(self, error: str | Exception | None = None) -> None:
        """Ends the channel. Without an error consumers still get the waiting items; with an error everybody gets the
        error at once."""
        self.end.close(self.end.host.caller(), "no more items" if error is None else str(error), drain=error is None)


def put_all(channels: Sequence[Channel], item: Any, key: Any = None, timeout_s: float | None = None) -> None:
    """Puts one item into several channels; for other processes it is packed once."""
    packed = None
    for channel in channels:
        host = channel.end.host
        if channel.home in host.names:
            channel.put(item, key, timeout_s=timeout_s)
            continue
        if packed is None:
            packed = host.pack(item)
        channel.put(packed, key, timeout_s=timeout_s)


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
        self.entries: list[Any] = []  # entries; for another host their payloads
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
    assert end.capacity is not None
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


_CANCEL_S = 5.0  # limit for a home's answer to a cancelled get


class Remote:
    """A channel whose queue is in another process. While its dead home is restarted, puts are lost, as are the items
    that waited there, and gets raise. Messages are sent under the lock, so none reaches a later process of the home."""

    def __init__(self, channel: Channel, host: Host) -> None:
        self.channel = channel
        self.name = channel.name
        self.home = channel.home
        self.capacity = channel.capacity
        self.pair = channel.pair
        self.host = host
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._unread: dict[str, int] = defaultdict(int)  # per producer of this host: sent, not known to be taken
        self._gets: dict[int, Getter] = {}
        self._requests = itertools.count()
        self._closed: tuple[str, str] | None = None
        self._dead: tuple[str, str] | None = None  # the worker and the cause, while the home is dead

    def open(self) -> None:
        """The home is ready, for the first time or after a restart."""
        with self._lock:
            self._dead = None
            self._unread.clear()
            self._room.notify_all()
            self.host.post(self.home, ("open", self.name, self.channel))

    def put(self, item: Any, key: Any, weight: float, timeout_s: float | None) -> None:
        producer = self.host.tick()
        payload = item if isinstance(item, Payload) else self.host.pack(item, self.channel.gpu)
        with self._lock:
            if self.capacity is not None:
                wait_for_room(self, producer, self._room, self._unread, lambda: self._closed or self._dead, timeout_s)
            if self._closed is not None:
                raise ChannelClosed(self.name, *self._closed)
            if self._dead is None:
                self._unread[producer] += 1
                self.host.post(self.home, ("put", self.name, key, weight, producer), payload)

    def get(self, key: Any, need: float | None, timeout_s: float | None) -> list[Any]:
        seconds = self.host.timeout_s if timeout_s is None else timeout_s
        getter = self._ask("get", key, need)
        try:
            with self.host.waiting():
                arrived = getter.wait(seconds, self.host.driver)
        except BaseException:  # Ctrl-C
            self.host.post(self.home, ("cancel", self.name, getter.request))
            raise
        if not arrived:
            # The item may be on its way: the home decides between item and cancellation, so no item is lost.
            self.host.post(self.home, ("cancel", self.name, getter.request))
            if not getter.wait(_CANCEL_S) or not (getter.entries or getter.closed):
                raise nothing_came(self.name, key, seconds, None)
        if getter.closed is not None:
            raise ChannelClosed(self.name, *getter.closed)
        return [self.host.unpack(payload) for payload in getter.entries]

    def qsize(self) -> int:
        getter = self._ask("size")
        if not getter.wait(self.host.timeout_s):
            raise DeadlineExceeded(f"channel {self.name!r}: its home {self.home} did not answer")
        if getter.closed is not None:
            raise ChannelClosed(self.name, *getter.closed)
        return int(getter.total)

    def close(self, peer: str, cause: str, drain: bool = False) -> None:
        self.closed_by(peer, cause)
        self.host.post(self.home, ("close", self.name, peer, cause, drain))

    def _ask(self, kind: str, key: Any = None, need: float | None = None) -> Getter:
        getter = Getter(key, need, self.host.caller(), self.home, next(self._requests))
        with self._lock:
            if self._dead is not None:
                raise ChannelClosed(self.name, *self._dead)
            self._gets[getter.request] = getter
            self.host.post(self.home, (kind, self.name, getter.request, *((key, need) if kind == "get" else ())))
        return getter

    # For the messages of the home

    def closed_by(self, peer: str, cause: str) -> None:
        with self._lock:
            self._closed = self._closed or (peer, cause)
            self._room.notify_all()

    def room_for(self, producer: str, count: int) -> None:
        with self._room:
            self._unread[producer] -= count
            self._room.notify_all()

    def answer(
        self,
        request: int,
        payload: Payload | None = None,
        last: bool = True,
        size: int = 0,
        closed: tuple[str, str] | None = None,
    ) -> None:
        getter = self._gets.get(request)
        if getter is None:
            return
        if payload is not None:
            getter.entries.append(payload)
        getter.total, getter.closed = size, closed
        if last:
            del self._gets[request]
            getter.finish()

    # For the driver's news of other hosts and of workers

    def host_died(self, host: str, worker: str, cause: str, restarts: bool) -> None:
        if host == self.home:
            self._home_died(worker, cause, restarts)

    def host_revived(self, host: str) -> None:
        if host == self.home:
            self.open()

    def worker_failed(self, worker: str, cause: str) -> None:
        """Ends the worker's direct channels."""
        if self.pair and worker in (self.pair.source, self.pair.receiver):
            self.closed_by(worker, cause)

    def cluster_closes(self) -> None:
        """The home is closing, too, and may end before it answers."""
        self._home_died(*CLOSING, restarts=False)

    def _home_died(self, peer: str, cause: str, restarts: bool) -> None:
        if not restarts:
            self.closed_by(peer, cause)
        with self._lock:
            self._dead = (peer, cause)
            gets, self._gets = self._gets, {}
            self._room.notify_all()
        for getter in gets.values():
            getter.closed = self._dead
            getter.finish()
