"""Learner ranks on threads of one process, as tests of what they agree on need them."""

from concurrent.futures import ThreadPoolExecutor

from embodied.runtime.collective import Alone, Threads
from embodied.runtime.rendezvous import InProcessRendezvous


def on_ranks(ranks, work):
    """What `work(rank, collective)` returns on each of so many ranks."""
    room = InProcessRendezvous(ranks, 60.0)
    with ThreadPoolExecutor(ranks) as pool:
        jobs = [pool.submit(work, rank, Threads(room, rank) if ranks > 1 else Alone()) for rank in range(ranks)]
        return [job.result(120) for job in jobs]
