"""One store for whole episodes: their data stay with the worker that played or changed them until others fetch them.

Every worker that plays or changes episodes has a store (`StoringWorker`). The driver has a ref of every episode in any
store (`Stores`), and never the data:

    stores.put("sim-0", [3, 7])                   # sim-0 will play these: the driver has their refs
    transfer = stores.send([3, 7], channel, key)  # sim-0 puts both into a learner's or a role's channel
    transfer.sent_episodes()                      # [3, 7] if the call has succeeded; sim-0 may have died before
    stores.worker_died("sim-0")                   # the refs of the dead worker's episodes are lost
    stores.forget_all_but([7])                    # frees memory

Checkpoints hold the stored episodes; after a resume workers store them again, and the driver has new refs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from embodied.core.arrays import flat_dict, gather, host, is_text, nested_dict
from embodied.core.types import EpisodeResult, Trajectory, choose, decisions_of, join
from embodied.runtime import Channel, Handle, Worker, WorkerGroup, served_while_busy


class StoringWorker(Worker):
    """A worker with a store of whole episodes."""

    @cached_property
    def store(self) -> dict[int, Trajectory]:
        """By episode, the trajectory that contains it, perhaps with other episodes."""
        return {}

    @served_while_busy
    def send_stored(self, episodes: list[int], source: str, channel: Channel, key: int, keep: bool = False) -> bool:
        """Send these ended episodes, and forget them unless `keep` is true; False if not all are here."""
        if not self.store.keys() >= {*episodes}:
            return False
        parts = parts_of({episode: self.store[episode] if keep else self.store.pop(episode) for episode in episodes})
        channel.put(replace(join(parts), source=source), key=key)
        return True

    def forget_all_but(self, episodes: tuple[int, ...]) -> None:
        """Forget all stored episodes but these."""
        left = parts_of({episode: trajectory for episode, trajectory in self.store.items() if episode in episodes})
        self.store = {episode: trajectory for trajectory in left for episode in trajectory.ids.tolist()}

    def get_stored(self) -> dict[str, np.ndarray]:
        """The stored episodes, as arrays for a checkpoint; empty if there are none."""
        return arrays_of(join(parts_of(self.store))) if self.store else {}

    def set_stored(self, arrays: dict[str, np.ndarray]) -> list[int]:
        """Store this worker's share of the episodes that all workers stored; returns their numbers."""
        whole = trajectory_from(arrays)
        self.store = dict.fromkeys(whole.ids[self.rank :: self.world_size].tolist(), whole)
        self.forget_all_but(tuple(self.store))
        return [*self.store]


@dataclass
class EpisodeRef:
    """What the driver knows of a whole episode, from its beginning until the update on it."""

    worker: str  # whose store has it, or will have it when it ends
    is_lost: bool = False  # this worker has died since
    result: EpisodeResult | None = None  # when it has ended
    length: tuple[int, ...] = ()  # the numbers of items, of its prompt's items, and of picture tokens

    def end(self, result: EpisodeResult, chunk: int, text: bool) -> None:
        """The episode has ended; its items are tokens of `text`, or decisions of `chunk` env steps."""
        items = result.all_tokens if text else -(-result.length // chunk)
        self.result, self.length = result, (items, result.prompt_tokens, result.places)


@dataclass(frozen=True)
class Transfer:
    """Episodes on their way from their stores into a channel."""

    number: int
    episodes: dict[str, list[int]]  # by source, as in `Trajectory.source`
    calls: dict[str, Handle]  # by source

    def done(self) -> bool:
        return all(call.done() for call in self.calls.values())

    def succeeded(self) -> list[str]:
        """The sources that have sent their episodes; a worker that died, or had forgotten one, has not."""
        return [source for source, call in self.calls.items() if call.succeeded() and call.wait()[0]]

    def sent_episodes(self) -> list[int]:
        """The episodes that were sent."""
        return [episode for source in self.succeeded() for episode in self.episodes[source]]


class Stores:
    """The driver's refs of all episodes in the stores of these groups of workers."""

    def __init__(self, *groups: WorkerGroup) -> None:
        self.groups = groups
        self.workers = {name: group[rank] for group in groups for rank, name in enumerate(group.workers)}
        self.refs: dict[int, EpisodeRef] = {}
        self.sent = 0  # transfers, in all

    def put(self, worker: str, episodes: Iterable[int]) -> None:
        """A worker will play, or has stored, these episodes."""
        for episode in episodes:
            ref = self.refs.setdefault(episode, EpisodeRef(worker))
            ref.worker, ref.is_lost = worker, False

    def send(self, episodes: Sequence[int], channel: Channel, key: int | None = None, keep: bool = False) -> Transfer:
        """Let the workers that store these episodes put them into a channel, under this key or the transfer's number;
        they are forgotten afterwards unless `keep` is true."""
        self.sent += 1
        stored = gather((self.refs[episode].worker, episode) for episode in episodes)
        by_source = {f"{worker}#{self.sent}": numbers for worker, numbers in stored.items()}
        how = channel, self.sent if key is None else key
        calls = {
            source: self.workers[worker].send_stored(numbers, source, *how, keep=keep)
            for (source, numbers), worker in zip(by_source.items(), stored, strict=True)
        }
        return Transfer(self.sent, by_source, calls)

    def worker_died(self, worker: str) -> None:
        """Mark the refs of all episodes that this dead worker stored as lost."""
        for ref in self.refs.values():
            ref.is_lost |= ref.worker == worker

    def lost_among(self, episodes: Collection[int]) -> list[int]:
        """The episodes whose worker has died since."""
        return [episode for episode in episodes if self.refs[episode].is_lost]

    def forget_all_but(self, episodes: Collection[int]) -> list[Handle]:
        """Begin to free the memory of all other episodes; returns the calls."""
        return [group.forget_all_but(episodes) for group in self.groups]


def parts_of(kept: dict[int, Trajectory]) -> list[Trajectory]:
    """The trajectories of `kept`, with these episodes only."""
    wanted = gather((id(trajectory), episode) for episode, trajectory in kept.items()).values()
    return [choose(kept[ids[0]], sorted(ids)) for ids in wanted]


def arrays_of(trajectory: Trajectory) -> dict[str, np.ndarray]:
    """A trajectory as flat arrays, for a checkpoint."""
    flat = {"ids": trajectory.ids, "lengths": trajectory.lengths, **flat_dict(decisions_of(trajectory))}
    return {name: array.astype(str) if is_text(array) else host(array) for name, array in flat.items()}


def trajectory_from(arrays: dict[str, np.ndarray]) -> Trajectory:
    """The trajectory that `arrays_of` was made of."""
    tree = nested_dict(
        {name: array.astype(object) if array.dtype.kind == "U" else array for name, array in arrays.items()}
    )
    return Trajectory(**{"replay": {}, **tree})
