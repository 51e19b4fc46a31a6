"""What a channel costs: round trips and large arrays, next to a multiprocessing queue and a plain copy of memory.

python benchmarks/channels.py
"""

import multiprocessing
import os
import time
from statistics import median

import numpy as np

from embodied.runtime import Cluster, HostPlan, Worker

ROUND_TRIPS, LARGE_BYTES, LARGE_COUNT = 2000, 50_000_000, 15
CORES = sorted(os.sched_getaffinity(0))
HOSTS = [HostPlan("left", ("ping", "mate"), cores=(CORES[0],)), HostPlan("right", ("pong",), cores=(CORES[-1],))]


class Player(Worker):
    def ping(self, out, back, item, count):
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            out.put(item)
            back.get()
            seconds.append(time.perf_counter() - start)
        return seconds

    def pong(self, inbox, out, count):
        for _ in range(count):
            out.put(float(np.sum(inbox.get()[::512])))  # touches every page


def queue_pong(inbox, out, count):
    for _ in range(count):
        out.put(float(np.sum(inbox.get()[::512])))


def through_channels(cluster, name, ping, pong, item, count):
    out, back = cluster.channel(f"{name} out", home=pong), cluster.channel(f"{name} back", home=ping)
    echo = pong.pong(out, back, count)
    (seconds,) = ping.ping(out, back, item, count).wait()
    echo.wait()
    return median(seconds)


def through_queues(item, count):
    context = multiprocessing.get_context("spawn")
    out, back = context.Queue(), context.Queue()
    process = context.Process(target=queue_pong, args=(out, back, count))
    process.start()
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        out.put(item)
        back.get()
        seconds.append(time.perf_counter() - start)
    process.join()
    return median(seconds)


def copy_of_memory(item):
    seconds = []
    for _ in range(LARGE_COUNT):
        start = time.perf_counter()
        item.copy()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def main():
    small, large = np.zeros(16), np.ones(LARGE_BYTES // 8)
    start = time.perf_counter()
    with Cluster("local", HOSTS) as cluster:
        ping, mate, pong = (cluster.launch(Player, role) for role in ("ping", "mate", "pong"))
        for group in (ping, mate, pong):
            group.onload().wait()
        started = time.perf_counter() - start
        rows = [
            ("round trip, small, same host", through_channels(cluster, "near", ping, mate, small, ROUND_TRIPS)),
            ("round trip, small, two processes", through_channels(cluster, "far", ping, pong, small, ROUND_TRIPS)),
            ("round trip, small, multiprocessing.Queue", through_queues(small, ROUND_TRIPS)),
            ("50 MB one way, two processes", through_channels(cluster, "large", ping, pong, large, LARGE_COUNT)),
            ("50 MB one way, multiprocessing.Queue", through_queues(large, LARGE_COUNT)),
            ("50 MB copied within a process", copy_of_memory(large)),
        ]
    for name, seconds in rows:
        print(f"{name:42s} {seconds * 1e6:10.0f} us")
    print(f"{'two hosts up, workers ready':42s} {started * 1e6:10.0f} us")


if __name__ == "__main__":
    main()
