"""Publishing weights until every policy worker can act with them, on each way, next to copying the memory once.

The yardsticks: a copy of the bytes within a process, the same weights as one item through a plain channel per policy
worker, and through a multiprocessing queue. Rounds of all contestants are interleaved; medians count.

    python -m benchmarks.weight_sync
    python -m benchmarks.weight_sync --megabytes 400 --policies 4 --rounds 9
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from benchmarks.common import RESULTS, code_commit, machine, markdown, write_json
from embodied.runtime import Cluster, HostPlan, Worker
from embodied.runtime.tensor_bytes import Blob, Spec
from embodied.runtime.weights import IN_FLIGHT_BYTES, Publication, WeightReader, WeightStore

TENSOR_BYTES = 4_000_000
SUBSET = 0.05  # of the tensors: a LoRA's worth
WAYS = ("shared", "snapshot", "buckets")


class Trainer(Worker):
    """Owns weights that differ from version to version."""

    def __init__(self, megabytes: int) -> None:
        self.count = max(1, megabytes * 1_000_000 // TENSOR_BYTES)
        self.specs = {f"layer-{i}": Spec("uint8", (TENSOR_BYTES,)) for i in range(self.count)}
        self.weights = {name: np.random.default_rng(0).bytes(TENSOR_BYTES) for name in self.specs}
        self.weights = {name: np.frombuffer(raw, np.uint8).copy() for name, raw in self.weights.items()}
        self.stores = {way: WeightStore(self.specs, way != "shared", self.live(way)) for way in WAYS}

    def live(self, way: str) -> dict[str, np.ndarray] | None:
        return self.weights if way == "shared" else None

    def train(self, version: int) -> None:
        for array in self.weights.values():
            array[:8] = version % 256

    def publish(self, way: str, version: int, share: float = 1.0) -> Publication:
        names = list(self.specs)[: max(1, round(share * self.count))]
        return self.stores[way].publish(version, ((n, Blob(self.specs[n], self.weights[n])) for n in names))

    def send(self, channels) -> None:
        self.stores["buckets"].send(channels)

    def put_plain(self, channels) -> None:
        for channel in channels:
            channel.put(self.weights)


class Actor(Worker):
    """Takes versions; its own weights are kept across them, as a policy's are."""

    def __init__(self) -> None:
        self.readers = {way: WeightReader() for way in WAYS}
        self.found: dict[str, dict] = {way: {} for way in WAYS}
        self.own: dict[str, np.ndarray] = {}

    def load(self, publication: Publication, way: str, channel) -> int:
        found = self.readers[way].load(publication, way, channel)
        self.found[way] |= {name: getattr(weight, "data", weight) for name, weight in found.items()}
        return first_number({name: self.found[way][name] for name in publication.changed})

    def take_plain(self, channel) -> int:
        copy_into(self.own, channel.get())
        return first_number(self.own)


def first_number(weights: dict[str, np.ndarray]) -> int:
    (number,) = {int(np.frombuffer(weight, np.uint8)[0]) for weight in weights.values()}
    return number


def copy_into(own: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> None:
    for name, array in new.items():
        own.setdefault(name, np.empty_like(array))[:] = array


def queue_actor(inbox, out) -> None:
    own: dict[str, np.ndarray] = {}
    while (weights := inbox.get()) is not None:
        copy_into(own, weights)
        out.put(first_number(own))


class Contest:
    """One set of processes; `ways` are functions that bring one version to all actors."""

    def __init__(self, backend: str, megabytes: int, policies: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        hosts = [HostPlan("learner", ("trainer", "near"), cores=(cores[0],))]
        hosts += [HostPlan(f"policy-{i}", ("actor",), cores=(cores[-1 - i % len(cores)],)) for i in range(policies)]
        self.cluster = Cluster(backend, hosts)
        self.trainer = self.cluster.launch(Trainer, "trainer", megabytes)
        self.near, self.actors = self.cluster.launch(Actor, "near"), self.cluster.launch(Actor, "actor")
        ranks = range(policies)
        self.buckets = tuple(self.cluster.channel(f"buckets-{i}", self.actors[i], capacity=1) for i in ranks)
        self.plain = tuple(self.cluster.channel(f"plain-{i}", self.actors[i]) for i in ranks)
        self.version = -1

    def ways(self) -> dict[str, Callable[[], None]]:
        return {
            "shared storage, one policy in the learner's process": lambda: self.store("shared", self.near),
            "snapshot": lambda: self.store("snapshot", self.actors),
            f"snapshot, {SUBSET:.0%} changed": lambda: self.store("snapshot", self.actors, SUBSET),
            "buckets": lambda: self.store("buckets", self.actors),
            f"buckets, {SUBSET:.0%} changed": lambda: self.store("buckets", self.actors, SUBSET),
            "one item through a plain channel": self.plain_channel,
        }

    def store(self, way: str, actors, share: float = 1.0) -> None:
        (publication,) = self.trainer.publish(way, self.version, share).wait()
        sending = self.trainer.send(self.buckets) if way == "buckets" else None
        channels = self.buckets if way == "buckets" else [None] * len(actors)
        loaded = actors.load.each([(publication, way, channel) for channel in channels]).wait()
        if sending:
            sending.wait()
        assert set(loaded) == {self.version % 256}, loaded

    def plain_channel(self) -> None:
        taking = self.actors.take_plain.each([(channel,) for channel in self.plain])
        self.trainer.put_plain(self.plain).wait()
        assert set(taking.wait()) == {self.version % 256}

    def round(self, way: Callable[[], None]) -> float:
        self.version += 1
        self.trainer.train(self.version).wait()
        started = time.perf_counter()
        way()
        return time.perf_counter() - started


class QueueContest:
    """The same weights through a multiprocessing queue per policy worker."""

    def __init__(self, megabytes: int, policies: int) -> None:
        context = multiprocessing.get_context("spawn")
        trainer = Trainer(megabytes)
        self.weights = trainer.weights
        self.pairs = [(context.Queue(), context.Queue()) for _ in range(policies)]
        self.processes = [context.Process(target=queue_actor, args=pair) for pair in self.pairs]
        for process in self.processes:
            process.start()

    def round(self) -> float:
        started = time.perf_counter()
        for inbox, _ in self.pairs:
            inbox.put(self.weights)
        for _, out in self.pairs:
            out.get()
        return time.perf_counter() - started

    def close(self) -> None:
        for inbox, _ in self.pairs:
            inbox.put(None)
        for process in self.processes:
            process.join(30)


def copy_of_memory(source: np.ndarray, target: np.ndarray) -> float:
    started = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--megabytes", type=int, default=100)
    arguments.add_argument("--policies", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=11)
    arguments.add_argument("--backends", nargs="+", default=["inline", "local"])
    given = arguments.parse_args()
    seconds = measure(given.megabytes, given.policies, given.rounds, given.backends)
    middle = {name: median(measured) for name, measured in seconds.items()}
    yardstick = middle["copy of the memory"]
    rows = [[name, f"{s * 1e3:.1f}", f"{s / yardstick:.2f}"] for name, s in middle.items()]
    print(
        f"{given.megabytes} MB to {given.policies} policy workers; buckets keep {IN_FLIGHT_BYTES >> 20} MiB in flight"
    )
    print(markdown(["way", "median ms", "copies of the memory"], rows))
    found = {"given": vars(given), "seconds": seconds, "median_s": middle, "machine": machine()}
    write_json(RESULTS / "weight_sync.json", found | {"commit": code_commit()})


def measure(megabytes: int, policies: int, rounds: int, backends: list[str]) -> dict[str, list[float]]:
    """Seconds of every contestant in every round but the first, which allocates."""
    source = np.random.default_rng(0).integers(0, 256, megabytes * 1_000_000, np.uint8)
    target = np.zeros_like(source)
    contests = {backend: Contest(backend, megabytes, policies) for backend in backends}
    queues = QueueContest(megabytes, policies)
    runs: dict[str, Callable[[], float]] = {"copy of the memory": lambda: copy_of_memory(source, target)}
    for backend, contest in contests.items():
        for name, way in contest.ways().items():
            runs[f"{backend}: {name}"] = lambda contest=contest, way=way: contest.round(way)
    runs["multiprocessing queue"] = queues.round
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    try:
        for number in range(rounds + 1):
            for name, run in runs.items():
                took = run()
                if number:
                    seconds[name].append(took)
    finally:
        queues.close()
        for contest in contests.values():
            contest.cluster.close()
    return seconds


if __name__ == "__main__":
    main()
