"""How published weights reach the policy workers, and which version each of them acts with.

A version is published once, by the learners; bringing it to a policy worker is done again where the worker was replaced
or did not hold its devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

from embodied.core.errors import StaleWeights
from embodied.runtime import Channel, Cluster, DeviceSharing, Handle, WorkerGroup
from embodied.runtime.tensor_bytes import Blob
from embodied.runtime.weights import Publication, WeightStore

Ask = Callable[[Callable[[], Handle]], list]  # the results of a call, made again if a worker had to be replaced
Send = Callable[[tuple[Channel, ...], bool], object]  # puts the current version's buckets there: all, or what changed


@dataclass(frozen=True)
class Weights:
    """A version that comes from a checkpoint instead of a learner."""

    version: int
    blobs: dict[str, Blob]


class WeightSync:
    """Brings published weights to the policy workers, and knows the current version for those that start again.

    How a policy worker gets at weights (`runtime/weights.py`) follows from where its process is; its first answer says
    so, and a successor on the same host gets at them in the same way.
    """

    def __init__(self, cluster: Cluster, policies: WorkerGroup, device_sharing: DeviceSharing) -> None:
        self.policies, self.device_sharing = policies, device_sharing
        ranks = range(len(policies))
        self.channels = [cluster.channel(f"weights-{p}", home=policies[p], capacity=1) for p in ranks]
        self.routes: list[str] = []
        self.loads: dict[int, Handle] = {}  # the last of each policy worker
        self.brought: dict[int, int] = {}  # the version that this was of
        self.current: Publication | None = None
        self.send: Send | None = None
        self.store: WeightStore | None = None  # of adopted weights
        self.times = (0.0, 0.0)  # between which the current weights were on their way

    @property
    def version(self) -> int:
        if self.current is None:
            raise StaleWeights("no weights have been published yet")
        return self.current.version

    def deliver(self, publication: Publication, send: Send, ask: Ask) -> list[Handle]:
        """Bring a version to the policy workers, which act with nothing else from now on; to those that do not hold
        their devices when they do (`catch_up`)."""
        if not self.routes:
            self.routes = ask(lambda: self.policies.route(publication))
        self.current, self.send = publication, send
        self.times = (perf_counter(),) * 2
        ranks = [rank for rank, worker in enumerate(self.policies.workers) if self.device_sharing.takes_part(worker)]
        behind = [rank for rank in ranks if not self._holds(rank, publication.follows)]
        return self._load([r for r in ranks if r not in behind], whole=False) + self._load(behind, whole=True)

    def reload(self, ranks: Iterable[int]) -> list[Handle]:
        """Bring all of the current version to policy workers that have just been built, without publishing again."""
        return [] if self.current is None else self._load(list(ranks), whole=True)

    def catch_up(self, ranks: Iterable[int]) -> list[Handle]:
        """Bring the current version to those of these policy workers to which it was not brought."""
        return self.reload([rank for rank in ranks if self.brought.get(rank) != self.version])

    def adopt(self, weights: Weights, ask: Ask) -> list[Handle]:
        """Deliver weights that this process holds."""
        self.store = WeightStore({name: blob.spec for name, blob in weights.blobs.items()})
        return self.deliver(self.store.publish(weights.version, weights.blobs.items()), self.store.send_aside, ask)

    def _holds(self, rank: int, version: int) -> bool:
        """True if a policy worker is known to have this version; one that was still building then may have missed
        it."""
        load = self.loads.get(rank)
        return load is not None and load.succeeded() and load.wait()[0] == version

    def _load(self, ranks: Iterable[int], whole: bool) -> list[Handle]:
        assert self.current is not None
        places = [(rank, self.routes[rank], self.channels[rank]) for rank in ranks]
        far = tuple(channel for _, route, channel in places if route == "buckets")
        if far:
            assert self.send is not None
            self.send(far, whole)
        new = {r: self.policies[r].load_weights(self.current, route, channel, whole) for r, route, channel in places}
        self.loads |= new
        self.brought |= dict.fromkeys(new, self.current.version)
        return list(new.values())
