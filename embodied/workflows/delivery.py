"""Brings published weights to the policy workers, to each on its own way, and knows the current version for those that
start again.

How a policy worker gets at weights (`runtime/weights.py`) follows from where its process is; it says so itself when it
is asked first, and a successor on the same host gets at them in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

from embodied.errors import StaleWeights
from embodied.runtime import Channel, Cluster, Handle, WorkerGroup
from embodied.runtime.blobs import Blob
from embodied.runtime.weights import Publication, WeightStore

Send = Callable[[tuple[Channel, ...], bool], object]  # puts the current version's buckets there: all, or what changed


@dataclass(frozen=True)
class Weights:
    """A version that comes from a checkpoint instead of a learner."""

    version: int
    blobs: dict[str, Blob]


class Delivery:
    def __init__(self, cluster: Cluster, policies: WorkerGroup) -> None:
        self.policies = policies
        ranks = range(len(policies))
        self.channels = [cluster.channel(f"weights-{p}", home=policies[p], capacity=1) for p in ranks]
        self.routes: list[str] = []
        self.current: Publication | None = None
        self.send: Send | None = None
        self.store: WeightStore | None = None  # of adopted weights
        self.times = (0.0, 0.0)  # between which the current weights were on their way

    @property
    def version(self) -> int:
        if self.current is None:
            raise StaleWeights("no weights have been published yet")
        return self.current.version

    def deliver(self, publication: Publication, send: Send) -> list[Handle]:
        """To all policy workers. They act with nothing else from now on."""
        if not self.routes:
            self.routes = self.policies.route(publication).wait()
        self.current, self.send = publication, send
        self.times = (perf_counter(),) * 2
        return self._load(range(len(self.policies)), whole=False)

    def reload(self, ranks: Iterable[int]) -> list[Handle]:
        """To policy workers that have just been built, all of the current version; nobody publishes for that."""
        return [] if self.current is None else self._load(list(ranks), whole=True)

    def adopt(self, weights: Weights) -> list[Handle]:
        """Deliver weights that this process has."""
        self.store = WeightStore({name: blob.spec for name, blob in weights.blobs.items()})
        return self.deliver(self.store.publish(weights.version, weights.blobs.items()), self.store.send_aside)

    def _load(self, ranks: Iterable[int], whole: bool) -> list[Handle]:
        places = [(rank, self.routes[rank], self.channels[rank]) for rank in ranks]
        far = tuple(channel for _, route, channel in places if route == "buckets")
        if far:
            self.send(far, whole)
        return [self.policies[rank].load_weights(self.current, route, channel) for rank, route, channel in places]
