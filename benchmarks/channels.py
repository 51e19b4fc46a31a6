"""What it costs to hand something to another process and hear back, on every backend, next to what else one could use.

    python -m benchmarks.channels [--rounds 9]

Three things travel: a small message, 50 MB of images, 100 MB of weights (25 arrays). The receiver touches every page.
The yardsticks: a multiprocessing queue, Ray's own queue, and one copy of the same bytes within a process, which is the
least that sending by copy can cost. Rounds of all contestants take turns; the fastest round counts, since other load on
the machine can only slow a round down, and medians stand beside it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, code_commit, machine, markdown, write_json
from embodied.runtime import Cluster, HostPlan, Worker

BACKENDS = ("inline", "local", "ray")
COPY, MULTIPROCESSING, RAY_QUEUE = "copy in a process", "multiprocessing.Queue", "ray.util.queue.Queue"
HOSTS = [HostPlan("left", ("ping",)), HostPlan("right", ("pong",))]
STORE_BYTES = 1_500_000_000
STOP = "stop"

Send = Callable[[str], float]  # what -> seconds until it was there and answered


@dataclass(frozen=True)
class Row:
    what: str
    way: str
    best_s: float
    median_s: float
    of_copy: float | None  # best, as a multiple of copying the same bytes once


def things() -> dict[str, Any]:
    return {
        "small message": np.zeros(16),
        "50 MB of images": np.ones((254, 256, 256, 3), np.uint8),
        "100 MB of weights": {f"layer-{i}": np.ones(1_000_000, np.float32) for i in range(25)},
    }


def touch(item: Any) -> float:
    """Reads a byte of every page."""
    parts = item.values() if isinstance(item, dict) else [item]
    return float(sum(part.reshape(-1).view(np.uint8)[::4096].sum() for part in parts))


class Player(Worker):
    """Sends, or answers."""

    def __init__(self) -> None:
        self.things = things()

    def ping(self, what: str, out, back) -> float:
        start = time.perf_counter()
        out.put(self.things[what])
        back.get()
        return time.perf_counter() - start

    def pong(self, inbox, out) -> None:
        while not isinstance(item := inbox.get(), str):
            out.put(touch(item))

    def stop(self, out) -> None:
        out.put(STOP)


@contextmanager
def channels(backend: str) -> Iterator[Send]:
    with Cluster(backend, HOSTS) as cluster:
        ping, pong = cluster.launch(Player, "ping"), cluster.launch(Player, "pong")
        out, back = cluster.channel("out", home=pong), cluster.channel("back", home=ping)
        answering = pong.pong(out, back)
        yield lambda what: ping.ping(what, out, back).wait()[0]
        ping.stop(out).wait()
        answering.wait()


def answer(inbox: Any, out: Any) -> None:
    while not isinstance(item := inbox.get(), str):
        out.put(touch(item))


def through(out: Any, back: Any, mine: dict[str, Any], what: str) -> float:
    start = time.perf_counter()
    out.put(mine[what])
    back.get()
    return time.perf_counter() - start


@contextmanager
def multiprocessing_queue() -> Iterator[Send]:
    context, mine = multiprocessing.get_context("spawn"), things()
    out, back = context.Queue(), context.Queue()
    process = context.Process(target=answer, args=(out, back))
    process.start()
    yield lambda what: through(out, back, mine, what)
    out.put(STOP)
    process.join()


@contextmanager
def ray_queue() -> Iterator[Send]:
    import ray
    from ray.util.queue import Queue

    mine, options = things(), {"num_cpus": 0}
    out, back = Queue(actor_options=options), Queue(actor_options=options)
    answering = ray.remote(num_cpus=0)(answer).remote(out, back)
    yield lambda what: through(out, back, mine, what)
    out.put(STOP)
    ray.get(answering)
    for queue in (out, back):
        queue.shutdown()


@contextmanager
def copying() -> Iterator[Send]:
    mine, targets = things(), things()

    def copy(what: str) -> float:
        start = time.perf_counter()
        if isinstance(mine[what], dict):
            for name, array in mine[what].items():
                np.copyto(targets[what][name], array)
        else:
            np.copyto(targets[what], mine[what])
        return time.perf_counter() - start

    yield copy


@contextmanager
def ray_cluster() -> Iterator[None]:
    """One for the ray backend and for Ray's queue."""
    import ray

    from embodied.runtime.ray.nodes import connect_to_private
    from embodied.runtime.ray.private_cluster import PrivateCluster

    with PrivateCluster(object_store_bytes=STORE_BYTES) as cluster:
        connect_to_private(cluster)
        yield
        ray.shutdown()


def race(rounds: int, small_rounds: int) -> list[Row]:
    with ExitStack() as stack:
        stack.enter_context(ray_cluster())
        ways: dict[str, Send] = {COPY: stack.enter_context(copying())}
        ways |= {f"channel, {backend}": stack.enter_context(channels(backend)) for backend in BACKENDS}
        ways[MULTIPROCESSING] = stack.enter_context(multiprocessing_queue())
        ways[RAY_QUEUE] = stack.enter_context(ray_queue())
        taken: dict[tuple[str, str], list[float]] = {}
        for what in things():
            for number in range(1 + (small_rounds if what.startswith("small") else rounds)):
                for way, send in ways.items():
                    seconds = send(what)
                    if number:  # the first round warms up
                        taken.setdefault((what, way), []).append(seconds)
    rows = []
    for (what, way), seconds in taken.items():
        copied = min(taken[what, COPY])
        ratio = None if what.startswith("small") else min(seconds) / copied
        rows.append(Row(what, way, min(seconds), median(seconds), ratio))
    return [row for row in rows if not (row.what.startswith("small") and row.way == COPY)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small-rounds", type=int, default=300)
    parser.add_argument("--out", type=Path, default=RESULTS / "channels.json")
    chosen = parser.parse_args()
    about = {"machine": machine(), "commit": code_commit(), "rounds": chosen.rounds}
    rows = race(chosen.rounds, chosen.small_rounds)
    write_json(chosen.out, {**about, "rows": [asdict(row) for row in rows]})
    cells = [
        [row.what, row.way, f"{row.best_s * 1e3:.2f}", f"{row.median_s * 1e3:.2f}", f"{row.of_copy or 0:.1f}"]
        for row in rows
    ]
    print(markdown(["what", "way", "best ms", "median ms", "best / copy"], cells))


if __name__ == "__main__":
    main()
