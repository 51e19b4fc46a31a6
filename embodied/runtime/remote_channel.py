"""The end of a channel in a host that is not its home: a `Remote`, which asks the `Queue` there."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from embodied.core.errors import ChannelClosed, DeadlineExceeded
from embodied.runtime.channel import Channel
from embodied.runtime.channel_queue import CLOSING, Getter, nothing_came, wait_for_room
from embodied.runtime.payload import Payload

if TYPE_CHECKING:
    from embodied.runtime.host import Host

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
