"""Brings each published version of the weights to all workers that read it (the driver's side of `weights.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

from embodied.core.errors import StaleWeights
from embodied.runtime.channel import Channel
from embodied.runtime.cluster import Cluster
from embodied.runtime.device_sharing import DeviceSharing
from embodied.runtime.published_weights import Blob, Publication
from embodied.runtime.weights import NONE, WeightStore
from embodied.runtime.worker import Handle, WorkerGroup

Ask = Callable[[Callable[[], Handle]], list]  # the results of a call, repeated after a worker was replaced
Send = Callable[[tuple[Channel, ...], bool, int, bool], object]  # puts buckets: of all tensors, or changed ones


@dataclass(frozen=True)
class Weights:
    """A version from a checkpoint instead of a trainer."""

    version: int
    blobs: dict[str, Blob]


class WeightSync:
    """Driver side: every worker of a group loads the published version; restarted workers, and workers without their
    devices, get it later.

    A worker's first answer says how it gets weights; a replacement on the same host gets them in the same way.
    `deliver` makes a version the current one. When rollouts lag behind, `announce` begins to send it while the previous
    version acts.
    """

    def __init__(
        self,
        cluster: Cluster,
        readers: WorkerGroup,
        device_sharing: DeviceSharing,
        build: Callable[[WorkerGroup], Handle],
    ) -> None:
        """`build` builds a worker that was started again while it did not hold its device."""
        self.readers, self.device_sharing, self.build = readers, device_sharing, build
        self.cluster = cluster
        self.channels = [self._channels_to(readers[rank]) for rank in range(len(readers))]
        self.routes: list[str] = []
        self.loads: dict[int, Handle] = {}  # the last load of each worker
        self.brought: dict[int, int] = {}  # the version of that load
        self.fetching: set[int] = set()  # workers that fetch the next version
        self.current: Publication | None = None
        self.learned = NONE  # version of the trainer's weights: newer than the current version if rollouts lag
        self.send: Send | None = None
        self.store: WeightStore | None = None  # store of adopted weights
        self.times = (0.0, 0.0)  # start and end of the transfer of the current weights

    def _channels_to(self, reader: WorkerGroup) -> list[Channel]:
        """One per area of a version: a worker that reloads the current version does not read the next one."""
        (name,) = reader.workers
        return [self.cluster.channel(f"weights-{name}/{area}", home=reader, capacity=1) for area in range(2)]

    def add(self, route: str) -> None:
        """The group has one more reader, the last, which gets weights in this way."""
        self.channels.append(self._channels_to(self.readers[-1]))
        self.routes.append(route)

    def remove(self) -> None:
        """The last reader is leaving its group."""
        self.channels.pop()
        self.routes.pop()
        last = len(self.readers) - 1
        self.forget([last])
        self.fetching.discard(last)

    @property
    def version(self) -> int:
        if self.current is None:
            raise StaleWeights("no weights have been published yet")
        return self.current.version

    def announce(self, publication: Publication, send: Send) -> None:
        """Begin to send the next version to all workers that have the previous one, while they act with that."""
        self.fetching = {rank for rank in range(len(self.readers)) if self._holds(rank, publication.follows)}
        self._send(self.fetching, publication, send, whole=False)
        for rank, route, channel in self._places(self.fetching, publication):
            self.readers[rank].fetch_weights(publication, route, channel)

    def deliver(self, publication: Publication, send: Send, ask: Ask) -> list[Handle]:
        """Send a version to the workers, which use it from now on; workers without their devices get it in
        `catch_up`."""
        if not self.routes:
            self.routes = ask(lambda: self.readers.route(publication))
        self.current, self.send = publication, send
        self.times = (perf_counter(),) * 2
        ranks = [rank for rank, worker in enumerate(self.readers.workers) if self.device_sharing.takes_part(worker)]
        behind = [rank for rank in ranks if not self._holds(rank, publication.follows)]
        return self._load([r for r in ranks if r not in behind], whole=False) + self._load(behind, whole=True)

    def reload(self, ranks: Iterable[int]) -> list[Handle]:
        """Send all tensors of the current version to workers that have just been built."""
        return [] if self.current is None else self._load(list(ranks), whole=True)

    def forget(self, ranks: Iterable[int]) -> None:
        """Restarted workers that are not built yet have no version."""
        for rank in ranks:
            self.loads.pop(rank, None)
            self.brought.pop(rank, None)

    def catch_up(self, ranks: Iterable[int]) -> list[Handle]:
        """Send the current version to the workers among `ranks` that lack it."""
        return self.reload([rank for rank in ranks if self.brought.get(rank) != self.version])

    def adopt(self, weights: Weights, ask: Ask) -> list[Handle]:
        """Deliver weights of this process."""
        self.store = WeightStore({name: blob.spec for name, blob in weights.blobs.items()})
        return self.deliver(self.store.publish(weights.version, weights.blobs.items()), self.store.send_aside, ask)

    def load_s(self, rank: int) -> float:
        """Seconds of a worker's last load; 0 if it has not ended."""
        load = self.loads.get(rank)
        return load.seconds() if load and load.succeeded() else 0.0

    def _holds(self, rank: int, version: int) -> bool:
        """True if a worker is known to have this version; a worker that was still building may have missed it."""
        load = self.loads.get(rank)
        return load is not None and load.succeeded() and load.wait()[0] == version

    def _load(self, ranks: Iterable[int], whole: bool) -> list[Handle]:
        assert self.current is not None
        assert self.send is not None
        ranks, version = list(ranks), self.current.version
        fetching = set() if whole else self.fetching & {*ranks}
        self.fetching = self.fetching - {*ranks}
        self._send([rank for rank in ranks if rank not in fetching], self.current, self.send, whole)
        places = self._places(ranks, self.current)
        unbuilt = [rank for rank in ranks if self.readers.workers[rank] in self.device_sharing.unbuilt]
        builds = [self.build(self.readers[rank]) for rank in unbuilt]
        self.device_sharing.unbuilt -= {self.readers.workers[rank] for rank in unbuilt}
        new = {r: self.readers[r].load_weights(self.current, route, channel, whole) for r, route, channel in places}
        self.loads |= new
        self.brought |= dict.fromkeys(new, version)
        return [*builds, *new.values()]

    def _send(self, ranks: Iterable[int], publication: Publication, send: Send, whole: bool) -> None:
        """Begin to send to the workers among `ranks` that get weights through a channel."""
        places = self._places(ranks, publication)
        for way in ("buckets", "handles"):
            if channels := tuple(channel for _, route, channel in places if route == way):
                send(channels, whole, publication.version, way == "handles")

    def _places(self, ranks: Iterable[int], publication: Publication) -> list[tuple[int, str, Channel]]:
        return [(rank, self.routes[rank], self.channels[rank][publication.area]) for rank in ranks]
