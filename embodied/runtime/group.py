"""All replicas of a role, and the handle of a call to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from embodied.runtime.worker import Worker

if TYPE_CHECKING:
    from embodied.runtime.cluster import Cluster, Failure

_REDUCE: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "mean": lambda s: sum(s) / len(s)}


class Handle:
    """A call that may still run. Results are in rank order."""

    def __init__(self, cluster: Cluster, what: str, workers: Sequence[str]) -> None:
        self.what = what  # "critic.score"
        self.workers = tuple(workers)
        self._cluster = cluster
        self._results: dict[str, Any] = {}
        self._seconds: dict[str, float] = {}
        self.failed: dict[str, Failure] = {}  # worker -> why

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """Blocks until every rank is done. Raises the first failure of the cluster, and DeadlineExceeded after
        `timeout_s` (default: when no rank has shown a sign of life for the cluster's timeout)."""
        self._cluster.wait_for(self, timeout_s)
        return [self._cluster.unpack(self._results[worker]) for worker in self.workers]

    def survivors(self) -> dict[str, Any]:
        """Like `wait`, but returns results by worker, without ranks whose host died and will be replaced."""
        self._cluster.wait_for(self, None, without_losses=True)
        return {worker: self._cluster.unpack(result) for worker, result in self._results.items()}

    def done(self) -> bool:
        """True if no rank is running; `wait` then returns or raises at once."""
        return not self.running()

    def succeeded(self) -> bool:
        return all(worker in self._results for worker in self.workers)

    def seconds(self, reduce: str = "max") -> float:
        """Returns how long the call took on its ranks, after `wait`: "max", "min" or "mean"."""
        return _REDUCE[reduce]([self._seconds[worker] for worker in self.workers])

    def running(self) -> list[str]:
        return [w for w in self.workers if w not in self._results and w not in self.failed]

    def finish(self, worker: str, seconds: float, result: Any) -> None:
        self._seconds[worker] = seconds
        self._results[worker] = result


class WorkerGroup:
    """`group.method(*args)` calls every replica and returns a Handle at once; `group[0]` is a group of one replica."""

    def __init__(
        self, cluster: Cluster, cls: type[Worker] | str, role: str, workers: Sequence[str], hosts: Sequence[str]
    ) -> None:
        self.role = role
        self.workers = tuple(workers)  # "critic-0", "critic-1", ...
        self.hosts = tuple(hosts)  # the host of each
        self._cluster = cluster
        self.cls = cls

    def __len__(self) -> int:
        return len(self.workers)

    def __getitem__(self, rank: int | slice) -> WorkerGroup:
        ranks = rank if isinstance(rank, slice) else slice(rank, rank + 1 or None)
        part = WorkerGroup(self._cluster, self.cls, self.role, self.workers[ranks], self.hosts[ranks])
        if not part.workers:
            raise IndexError(f"{self.role} has {len(self)} workers; there is no rank {rank}")
        return part

    def __repr__(self) -> str:
        return f"WorkerGroup({', '.join(self.workers)})"

    def __getattr__(self, method: str) -> Method:
        if method.startswith("_"):
            raise AttributeError(method)
        if not isinstance(self.cls, str) and not callable(getattr(self.cls, method, None)):
            known = [n for n in dir(self.cls) if not n.startswith("_") and callable(getattr(self.cls, n))]
            raise AttributeError(f"{self.cls.__name__} has no method {method!r}; it has: {', '.join(known)}")
        return Method(self, method)

    def call(self, method: str, per_rank: Sequence[tuple[tuple, dict]]) -> Handle:
        """Calls the method with separate (args, kwargs) for each rank."""
        if len(per_rank) != len(self):
            raise ValueError(f"{self.role}.{method}: arguments for {len(per_rank)} ranks, but there are {len(self)}")
        getattr(self, method)
        return self._cluster.call(self, method, per_rank)


class Method:
    """`group.collect`: call it, or call it with `each` for arguments that differ by rank."""

    def __init__(self, group: WorkerGroup, name: str) -> None:
        self._group = group
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Handle:
        return self._group.call(self._name, [(args, kwargs)] * len(self._group))

    def each(self, per_rank: Sequence[tuple | dict]) -> Handle:
        """One entry per rank: a tuple of positional or a dict of keyword arguments."""
        return self._group.call(self._name, [((), a) if isinstance(a, dict) else (tuple(a), {}) for a in per_rank])
