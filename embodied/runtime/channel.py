"""A named queue between workers, with optional keys; channels may form cycles.

The queue itself lives in one host, its home (`Queue`): put it where the items are consumed. Other hosts have a
`Remote`, which asks the home. Within a host the object itself is handed over, so the producer must not change it
afterwards. From another host a copy arrives, whose large arrays are read-only.

`capacity` limits the waiting items of one producer: its next put blocks until the consumer takes an item.

Besides the named channels there is one channel for each pair of workers, made at its first use by `Worker.send`,
`Worker.broadcast` or `Worker.recv`. It ends when one of the two workers ends.

Ends send each other messages (kind, name of the channel, ...), and a method `on_<kind>` serves each:

    to the home       open, put, get, cancel (a get that waits no longer), size, close
    from the home     room (for more puts), answer (to a get or a size), closed
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, Protocol

from embodied.core.errors import ChannelClosed, DeadlineExceeded
from embodied.runtime.heartbeat import wait_awake
from embodied.runtime.payload import Payload

DEFAULT_CAPACITY = 64
CLOSING = ("the driver", "the cluster is closing")
CANCEL_S = 5.0  # limit for a home's answer to a cancelled get


class ChannelHost(Protocol):
    """What channels need of a `Host`."""

    name: str
    timeout_s: float
    driver: int | None

    def end_of(self, channel: Channel) -> Queue | Remote: ...

    def caller(self) -> str: ...

    def tick(self) -> str: ...

    def waiting(self) -> AbstractContextManager[None]: ...

    def note(self, producer: str, consumer: str) -> None: ...

    @property
    def pack(self) -> Callable[..., Any]: ...

    @property
    def unpack(self) -> Callable[[Any], Any]: ...

    @property
    def post(self) -> Callable[..., None]: ...


hosts_of_runs: dict[str, Any] = {}  # the host of each running cluster in this process


class Pair(NamedTuple):
    """The workers that a direct channel connects."""

    source: str
    source_host: str
    receiver: str


class Channel:
    """The handle that programs use; passing it to a worker costs a few bytes. Made by `cluster.channel`."""

    def __init__(
        self, run: str, name: str, home: str, capacity: int | None, gpu: str = "", pair: Pair | None = None
    ) -> None:
        """`gpu` is the home's GPU, if it has one."""
        self.run, self.name, self.home = run, name, home
        self.capacity, self.gpu, self.pair = capacity, gpu, pair
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

    def put(self, item: Any, key: Any = None, timeout_s: float | None = None) -> None:
        """Adds an item; blocks while this producer has `capacity` items waiting."""
        self.end.put(item, key, timeout_s)

    def get(self, key: Any = None, timeout_s: float | None = None) -> Any:
        """Takes the next item, or the next of those put under `key`."""
        return self.end.get(key, timeout_s)

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
        host, remote = channel.end.host, isinstance(channel.end, Remote)
        if remote and packed is None:
            packed = host.pack(item)
        channel.put(packed if remote else item, key, timeout_s)


def channels_in(item: Any) -> Iterable[Channel]:
    """The channels in arguments: as such, or inside lists, tuples, dicts and dataclasses."""
    if isinstance(item, Channel):
        yield item
    elif isinstance(item, (list, tuple)):
        for inner in item:
            if not isinstance(inner, (str, int, float)):  # skip these quickly: items may have thousands
                yield from channels_in(inner)
    elif isinstance(item, dict):
        yield from channels_in(list(item.values()))
    elif is_dataclass(item) and not isinstance(item, type):
        yield from channels_in([getattr(item, f.name) for f in fields(item)])


class Request:
    """A get, or a question for the size, in progress."""

    def __init__(self, key: Any = None, consumer: str = "", peer: str | None = None, number: int = 0) -> None:
        """`consumer` is the worker that asks, or its host `peer` if that is another one."""
        self.key, self.consumer, self.peer, self.number = key, consumer, peer, number
        self.answers: list[Any] = []  # at most one
        self.closed: tuple[str, str] | None = None
        self._ready = threading.Lock()
        self._ready.acquire()

    def finish(self) -> None:
        self._ready.release()

    def wait(self, seconds: float, driver: int | None = None) -> bool:
        return wait_awake(lambda part_s: self._ready.acquire(timeout=part_s), seconds, driver)


class End:
    """One host's end of a channel."""

    def __init__(self, channel: Channel, host: ChannelHost) -> None:
        self.channel, self.host = channel, host
        self.name, self.capacity, self.pair = channel.name, channel.capacity, channel.pair
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._unread: dict[str, int] = defaultdict(int)  # per producer of this host: items put and not yet taken
        self._closed: tuple[str, str] | None = None
        self._dead: tuple[str, str] | None = None  # the worker and the cause, while the other side is dead

    def _await_room(self, producer: str, timeout_s: float | None) -> None:
        """Called with the lock: waits while this producer has `capacity` items waiting. Raises if it is closed."""
        seconds = self.host.timeout_s if timeout_s is None else timeout_s
        while self.capacity and self._unread[producer] >= self.capacity and not (self._closed or self._drops_puts()):
            with self.host.waiting():
                came = wait_awake(self._room.wait, seconds, self.host.driver)
            if not came:
                raise DeadlineExceeded(
                    f"channel {self.name!r}: {producer} has {self._unread[producer]} items waiting there and nobody "
                    f"took one for {seconds:g} s"
                )
        if self._closed is not None:
            raise ChannelClosed(self.name, *self._closed)

    def get(self, key: Any, timeout_s: float | None) -> Any:
        request = self._ask("get", key)
        seconds = self.host.timeout_s if timeout_s is None else timeout_s
        try:
            with self.host.waiting():
                came = request.wait(seconds, self.host.driver)
        except BaseException:  # Ctrl-C
            self._cancel(request)
            raise
        if not came and self._withdraw(request):
            wanted = f"nothing came under key {key!r}" if key is not None else "nothing came"
            raise DeadlineExceeded(f"channel {self.name!r}: {wanted} for {seconds:g} s{self._describe_others()}")
        if request.closed is not None:
            raise ChannelClosed(self.name, *request.closed)
        (item,) = request.answers
        return self.host.unpack(item) if isinstance(item, Payload) else item

    # What the two ends do in different ways

    def _drops_puts(self) -> bool:
        return False

    def _ask(self, kind: str, key: Any = None) -> Request:
        """Begins a get, or a question for the size."""
        raise NotImplementedError

    def _cancel(self, request: Request) -> object:
        """Lets a get end without an item."""
        raise NotImplementedError

    def _withdraw(self, request: Request) -> bool:
        """The same; False if the get was served meanwhile."""
        raise NotImplementedError

    def _describe_others(self) -> str:
        """What an error says about other items."""
        return ""


class Entry(NamedTuple):
    value: Any  # the object, or a Payload as it came from another host
    key: Any
    producer: str
    peer: str | None  # the host that sent it; None: the home itself, or a host that has died since


class Queue(End):
    """A channel at home. It serves gets in the order they came.

    What a host sends before it opens the channel was meant for an earlier process of the home, and is ignored. Of a
    dead host the items still count that it had sent, its gets do not.
    """

    def __init__(self, channel: Channel, host: ChannelHost) -> None:
        super().__init__(channel, host)
        self._users: dict[str, bool] = {}  # other hosts that have opened the channel -> False once they are dead
        self._entries: deque[Entry] = deque()
        self._requests: deque[Request] = deque()
        self._taken: dict[tuple[str, str], int] = defaultdict(int)  # freed capacity not yet reported to other hosts
        self.on_put_done: Callable[[], None] = lambda: None  # called after every put

    # Called by this host's own threads

    def put(self, item: Any, key: Any, timeout_s: float | None) -> None:
        producer = self.host.tick()
        with self._lock:
            self._await_room(producer, timeout_s)
            self._unread[producer] += 1
            served = self._add(Entry(item, key, producer, self.host.name))
        self._deliver(served)
        self.on_put_done()

    def qsize(self) -> int:
        return len(self._entries)

    def close(self, peer: str, cause: str, drain: bool = False) -> None:
        with self._lock:
            if self._closed is not None:
                return
            self._closed = (peer, cause)
            failed = self._fail_all(self._closed)
            if not drain:
                self._entries.clear()
            self._room.notify_all()
            users = [user for user, lives in self._users.items() if lives]
        self._deliver(failed)
        for user in users:
            self.host.post(user, ("closed", self.name, peer, cause))

    # Messages of other hosts

    def on_open(self, peer: str, _: None) -> None:
        with self._lock:
            self._users[peer] = True
        if self._closed is not None:
            self.host.post(peer, ("closed", self.name, *self._closed))

    def on_put(self, peer: str, payload: Payload, key: Any, producer: str) -> None:
        with self._lock:
            lives = self._users.get(peer)
            if self._closed is not None or lives is None:
                return
            served = self._add(Entry(payload, key, producer, peer if lives else None))
        self._deliver(served)
        self.on_put_done()

    def on_get(self, peer: str, _: None, number: int, key: Any) -> None:
        if self._users.get(peer):
            self._start(Request(key, peer, peer, number))

    def on_size(self, peer: str, _: None, number: int, key: Any) -> None:
        self.host.post(peer, ("answer", self.name, number, self.qsize(), None))

    def on_cancel(self, peer: str, _: None, number: int) -> None:
        for request in list(self._requests):
            if (request.peer, request.number) == (peer, number) and self._cancel(request):
                self.host.post(peer, ("answer", self.name, number, None, None))

    def on_close(self, peer: str, _: None, closer: str, cause: str, drain: bool) -> None:
        self.close(closer, cause, drain)

    # The driver's news of other hosts and workers

    def host_died(self, host: str, worker: str, cause: str, restarts: bool) -> None:
        """Forget the dead host: its requests end, and its items stay without counting for its replacement. Gets that
        wait for it as the only producer fail."""
        with self._lock:
            self._users = {user: lives and user != host for user, lives in self._users.items()}
            self._requests = deque(request for request in self._requests if request.peer != host)
            self._entries = deque(entry._replace(peer=None) if entry.peer == host else entry for entry in self._entries)
            self._taken = defaultdict(int, {at: count for at, count in self._taken.items() if at[0] != host})
        if self.pair is None or self.pair.source_host != host:
            return
        if not restarts:
            self.close(worker, cause, drain=True)
            return
        with self._lock:
            self._dead = (worker, cause)
            failed = self._fail_all(self._dead)
        self._deliver(failed)

    def host_revived(self, host: str) -> None:
        if self.pair and self.pair.source_host == host:
            self._dead = None

    def worker_failed(self, worker: str, cause: str) -> None:
        """Ends the worker's direct channels; items that it has sent can still be taken."""
        if self.pair and worker in (self.pair.source, self.pair.receiver):
            self.close(worker, cause, drain=worker == self.pair.source)

    def cluster_closes(self) -> None:
        if self.pair:  # the driver closes named channels
            self.close(*CLOSING)

    # Inside

    def _ask(self, kind: str, key: Any = None) -> Request:
        request = Request(key, self.host.caller())
        self._start(request)
        return request

    def _start(self, request: Request) -> None:
        with self._lock:
            if not self._serve(request):
                request.closed = self._closed or self._dead
                if request.closed is None:
                    self._requests.append(request)
                    return
        self._deliver([request])

    def _cancel(self, request: Request) -> bool:
        with self._lock:
            waits = request in self._requests
            if waits:
                self._requests.remove(request)
        return waits

    def _withdraw(self, request: Request) -> bool:
        return self._cancel(request)

    def _describe_others(self) -> str:
        return f" ({len(self._entries)} items wait that do not match)" if self._entries else ""

    # Called with the lock held

    def _add(self, entry: Entry) -> list[Request]:
        """Adds an entry; returns the request that it serves, if one waits for it."""
        self._entries.append(entry)
        served = next((request for request in self._requests if self._serve(request)), None)
        if served is None:
            return []
        self._requests.remove(served)
        return [served]

    def _serve(self, request: Request) -> bool:
        """Gives a request the first entry under its key, and the producer its room back: other hosts hear of room in
        portions of half the capacity."""
        if not self._entries:
            return False
        at = 0
        if request.key is not None:
            at = next((i for i, entry in enumerate(self._entries) if entry.key == request.key), -1)
            if at < 0:
                return False
        entry = self._entries[at]
        del self._entries[at]
        request.answers.append(entry.value)
        self.host.note(entry.producer, request.consumer)
        if entry.peer == self.host.name:
            self._unread[entry.producer] -= 1
            self._room.notify_all()
        elif entry.peer is not None and self.capacity is not None:
            origin = (entry.peer, entry.producer)
            self._taken[origin] += 1
            if 2 * self._taken[origin] >= self.capacity:
                self.host.post(entry.peer, ("room", self.name, entry.producer, self._taken.pop(origin)))
        return True

    def _fail_all(self, closed: tuple[str, str]) -> list[Request]:
        failed, self._requests = list(self._requests), deque()
        for request in failed:
            request.closed = closed
        return failed

    # Called without the lock

    def _deliver(self, requests: list[Request]) -> None:
        for request in requests:
            if request.peer is None:
                request.finish()
                continue
            payload = None
            if request.closed is None:
                (value,) = request.answers
                try:
                    payload = value if isinstance(value, Payload) else self.host.pack(value)
                except Exception as error:  # the item cannot be serialised
                    request.closed = self.host.name, f"{type(error).__name__}: {error}"
                    self._deliver([request])
                    raise
            self.host.post(request.peer, ("answer", self.name, request.number, None, request.closed), payload)


class Remote(End):
    """A channel whose queue is in another process. While its dead home is restarted, puts are lost, as are the items
    that waited there, and gets raise. Messages are sent under the lock, and a later process of the home ignores them
    until it is opened."""

    def __init__(self, channel: Channel, host: ChannelHost) -> None:
        super().__init__(channel, host)
        self.home = channel.home
        self._requests: dict[int, Request] = {}
        self._numbers = itertools.count(time.monotonic_ns())  # none of an earlier process of this host

    def open(self) -> None:
        """The home is ready, for the first time or after a restart."""
        with self._lock:
            self._dead = None
            self._unread.clear()
            self._room.notify_all()
            self.host.post(self.home, ("open", self.name, self.channel))

    def put(self, item: Any, key: Any, timeout_s: float | None) -> None:
        producer = self.host.tick()
        payload = item if isinstance(item, Payload) else self.host.pack(item, self.channel.gpu)
        with self._lock:
            self._await_room(producer, timeout_s)
            if self._dead is None:
                self._unread[producer] += 1
                self.host.post(self.home, ("put", self.name, key, producer), payload)

    def qsize(self) -> int:
        request = self._ask("size")
        if not request.wait(self.host.timeout_s):
            raise DeadlineExceeded(f"channel {self.name!r}: its home {self.home} did not answer")
        if request.closed is not None:
            raise ChannelClosed(self.name, *request.closed)
        return request.answers[0]

    def close(self, peer: str, cause: str, drain: bool = False) -> None:
        self.on_closed(self.home, None, peer, cause)
        self.host.post(self.home, ("close", self.name, peer, cause, drain))

    # Messages of the home

    def on_closed(self, _: str, __: None, closer: str, cause: str) -> None:
        with self._lock:
            self._closed = self._closed or (closer, cause)
            self._room.notify_all()

    def on_room(self, _: str, __: None, producer: str, count: int) -> None:
        with self._room:
            self._unread[producer] -= count
            self._room.notify_all()

    def on_answer(
        self, _: str, payload: Payload | None, number: int, size: int | None, closed: tuple[str, str] | None
    ) -> None:
        with self._lock:  # the home may be declared dead meanwhile
            request = self._requests.pop(number, None)
        if request is not None:
            request.answers += [answer for answer in (payload, size) if answer is not None]
            request.closed = closed
            request.finish()

    # The driver's news of other hosts and workers

    def host_died(self, host: str, worker: str, cause: str, restarts: bool) -> None:
        if host == self.home:
            self._home_died(worker, cause, restarts)

    def host_revived(self, host: str) -> None:
        if host == self.home:
            self.open()

    def worker_failed(self, worker: str, cause: str) -> None:
        """Ends the worker's direct channels."""
        if self.pair and worker in (self.pair.source, self.pair.receiver):
            self.on_closed(self.home, None, worker, cause)

    def cluster_closes(self) -> None:
        """The home is closing, too, and may end before it answers."""
        self._home_died(*CLOSING, restarts=False)

    # Inside

    def _drops_puts(self) -> bool:
        return self._dead is not None

    def _ask(self, kind: str, key: Any = None) -> Request:
        request = Request(key, number=next(self._numbers))
        with self._lock:
            if self._dead is not None:
                raise ChannelClosed(self.name, *self._dead)
            self._requests[request.number] = request
            self.host.post(self.home, (kind, self.name, request.number, key))
        return request

    def _cancel(self, request: Request) -> None:
        self.host.post(self.home, ("cancel", self.name, request.number))

    def _withdraw(self, request: Request) -> bool:
        """The item may be on its way: the home decides between item and cancellation, so no item is lost."""
        self._cancel(request)
        return not request.wait(CANCEL_S) or not (request.answers or request.closed)

    def _home_died(self, peer: str, cause: str, restarts: bool) -> None:
        if not restarts:
            self.on_closed(self.home, None, peer, cause)
        with self._lock:
            self._dead = (peer, cause)
            requests, self._requests = self._requests, {}
            self._room.notify_all()
        for request in requests.values():
            request.closed = self._dead
            request.finish()
