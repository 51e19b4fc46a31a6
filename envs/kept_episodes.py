"""Whole episodes, the parts of groups. The worker that played or changed them keeps them until learners want them,
hands them over or forgets them, and writes them into checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from embodied.core.arrays import flat_dict, gather, host, is_text, nested_dict
from embodied.core.types import Trajectory, choose, decisions_of, join
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


def parts_of(kept: dict[int, Trajectory]) -> list[Trajectory]:
    """The trajectories of `kept`, with these episodes only."""
    wanted = gather((id(part), episode) for episode, part in kept.items()).values()
    return [choose(kept[ids[0]], sorted(ids)) for ids in wanted]


def arrays_of(trajectory: Trajectory) -> dict[str, np.ndarray]:
    """A trajectory as flat arrays, for a checkpoint."""
    flat = {"ids": trajectory.ids, "lengths": trajectory.lengths, **flat_dict(decisions_of(trajectory))}
    return {name: part.astype(str) if is_text(part) else host(part) for name, part in flat.items()}


def trajectory_from(arrays: dict[str, np.ndarray]) -> Trajectory:
    """The trajectory that `arrays_of` was made of."""
    tree = nested_dict({name: part.astype(object) if part.dtype.kind == "U" else part for name, part in arrays.items()})
    return Trajectory(**{"replay": {}, **tree})
