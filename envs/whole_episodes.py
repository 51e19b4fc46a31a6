"""Whole episodes, the parts of groups: the sim worker that played them keeps them until learners want them, hands them
over or forgets them, and writes them into checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from embodied.core.arrays import Observation, concatenate, flat_dict, gather, host, is_text, map_obs, nested_dict
from embodied.core.types import Array, EpisodeResult, Note, Trajectory, choose, decisions_of, join
from embodied.envs.episode_player import Record
from embodied.runtime import Channel, Worker, served_while_busy


class EpisodeKeeper(Worker):
    """Keeps whole episodes until learners want them."""

    @cached_property
    def kept_episodes(self) -> dict[int, Trajectory]:
        """By episode, the trajectory that contains it, perhaps with other episodes."""
        return {}

    @served_while_busy
    def hand_in(self, episodes: list[int], source: str, channel: Channel, batch: int, keep: bool = False) -> bool:
        """Send these ended episodes, and forget them unless `keep` is true; False if not all are here."""
        if not self.kept_episodes.keys() >= {*episodes}:
            return False
        parts = parts_of(
            {episode: self.kept_episodes[episode] if keep else self.kept_episodes.pop(episode) for episode in episodes}
        )
        channel.put(replace(join(parts), source=source), key=batch)
        return True

    def forget_all_but(self, episodes: tuple[int, ...]) -> None:
        """Forget all kept episodes but these."""
        left = parts_of({episode: part for episode, part in self.kept_episodes.items() if episode in episodes})
        self.kept_episodes = {episode: part for part in left for episode in part.ids.tolist()}

    def get_kept(self) -> dict[str, np.ndarray]:
        """The whole episodes that are kept, as arrays for a checkpoint; empty if there are none."""
        return arrays_of(join(parts_of(self.kept_episodes))) if self.kept_episodes else {}

    def set_kept(self, arrays: dict[str, np.ndarray]) -> list[int]:
        """Keep this worker's part of the episodes that all workers kept; returns their numbers."""
        kept = trajectory_from(arrays)
        self.kept_episodes = dict.fromkeys(kept.ids[self.rank :: self.world_size].tolist(), kept)
        self.forget_all_but(tuple(self.kept_episodes))
        return [*self.kept_episodes]


class PlayerWorker(EpisodeKeeper):
    """A sim worker of any kind."""

    def __init__(
        self,
        config,
        stages: int = 1,
        journal: Channel | None = None,
        eval_config=None,
        eval_rows: int = 1,
        whole_episodes: bool = False,
    ) -> None:
        """`journal` records every training episode, or its end. Evaluations use `eval_rows` separate envs of
        `eval_config`; with no stages there are no training envs. With `whole_episodes` no episode is open between
        rollouts."""
        self.config, self.num_stages, self.journal = config, stages, journal
        self.eval_config, self.eval_rows = eval_config or config, eval_rows
        self.whole_episodes = whole_episodes
        self.stopped = False

    @served_while_busy
    def stop_playing(self) -> None:
        """Give up the evaluation in progress, and any later one."""
        self.stopped = True


def parts_of(kept: dict[int, Trajectory]) -> list[Trajectory]:
    """The trajectories of `kept`, with these episodes only."""
    wanted = gather((id(part), episode) for episode, part in kept.items()).values()
    return [choose(kept[ids[0]], sorted(ids)) for ids in wanted]


class EpisodeStream(Record):
    """Puts each whole episode into `store` when it ends, and then notes it in the journal."""

    def __init__(self, source: str, store: dict[int, Trajectory], journal: Channel) -> None:
        super().__init__(source)
        self.store, self.journal = store, journal
        # By episode, its decisions: the arrays of a joint step, and the episode's row in them.
        self.open: dict[int, list[tuple[Observation, int]]] = {}

    def add(self, ids: np.ndarray, arrays: Observation) -> None:
        for row, episode in enumerate(ids.tolist()):
            self.open.setdefault(episode, []).append((arrays, row))

    def end(self, outcomes: Sequence[EpisodeResult]) -> None:
        super().end(outcomes)
        for result in outcomes:
            decisions, rows = zip(*self.open.pop(result.index), strict=True)
            whole = map_obs(partial(rows_of, rows), *decisions)
            ids, lengths = np.array([result.index]), np.array([len(rows)])
            self.store[result.index] = Trajectory(ids=ids, lengths=lengths, **whole)
        if outcomes:
            self.journal.put(Note(self.source, finished=tuple(outcomes)))


def rows_of(rows: Sequence[int], *arrays: Array) -> Array:
    """One row of each of these arrays, as one array."""
    return concatenate([array[row : row + 1] for array, row in zip(arrays, rows, strict=True)])


def arrays_of(trajectory: Trajectory) -> dict[str, np.ndarray]:
    """A trajectory as flat arrays, for a checkpoint."""
    flat = {"ids": trajectory.ids, "lengths": trajectory.lengths, **flat_dict(decisions_of(trajectory))}
    return {name: part.astype(str) if is_text(part) else host(part) for name, part in flat.items()}


def trajectory_from(arrays: dict[str, np.ndarray]) -> Trajectory:
    """The trajectory that `arrays_of` was made of."""
    tree = nested_dict({name: part.astype(object) if part.dtype.kind == "U" else part for name, part in arrays.items()})
    return Trajectory(**{"replay": {}, **tree})
