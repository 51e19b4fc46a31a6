"""A named queue between workers, with optional keys and weights; channels may form cycles.

The queue itself lives in one host, its home: put it where the items are consumed. Within a host the object itself is
handed over, so the producer must not change it afterwards. From another host a copy arrives, whose large arrays are
read-only.

`capacity` limits the waiting items of one producer: its next put blocks until the consumer takes an item.

Besides the named channels there is one channel for each pair of workers, made at its first use by `Worker.send`,
`Worker.broadcast` or `Worker.recv`. It ends when one of the two workers ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from embodied.core.errors import ChannelClosed

if TYPE_CHECKING:
    from embodied.runtime.channel_queue import Queue
    from embodied.runtime.host import Host
    from embodied.runtime.remote_channel import Remote

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
