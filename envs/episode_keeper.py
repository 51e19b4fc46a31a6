"""Keeps whole episodes where they were played until learners want them, for sim workers of every kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from embodied.core.types import EpisodeResult, RolloutStats, Trajectory, arrays_of, choose, join, trajectory_from
from embodied.runtime import Channel, Worker, served_while_busy
from embodied.runtime.timers import Total


class EpisodeKeeper(Worker):
    def __init__(self) -> None:
        self.whole: Trajectory | None = None  # whole episodes that the learners may still want
        self.ended: dict[int, Trajectory] = {}  # the same one by one, where they are handed on while others are played

    def stats(
        self,
        before: dict[str, Total],
        env_steps: int,
        finished: Iterable[EpisodeResult],
        problems: Iterable[str] = (),
    ) -> RolloutStats:
        """What was done, and where the time went since the timers were at `before`."""
        now, nothing = self.timers.totals(), Total(0, 0.0, 0.0)
        spent = (
            now.get(part, nothing).seconds - before.get(part, nothing).seconds for part in ("step", "reset", "wait")
        )
        return RolloutStats(env_steps, tuple(finished), *spent, tuple(problems))

    def kept(self) -> list[int]:
        """The whole episodes that are kept."""
        return [*self.ended, *([] if self.whole is None else self.whole.ids.tolist())]

    def hand_over(self, wanted: list[np.ndarray], source: str, out: tuple[Channel, ...]) -> list[int]:
        """Send every learner rank those of its wanted episodes that are kept here; -> the ranks that got something."""
        kept, ranks = set(self.kept()), []
        for rank, (episodes, channel) in enumerate(zip(wanted, out, strict=True)):
            if mine := [episode for episode in episodes.tolist() if episode in kept]:
                part = choose(self.whole, mine, source)
                channel.put(part, weight=int(part.mask.sum()))
                ranks.append(rank)
        return ranks

    @served_while_busy
    def hand_on(self, episodes: list[int], source: str, channel: Channel) -> bool:
        """Send these episodes, which have ended, and forget them; False where not all are here."""
        if not self.ended.keys() >= {*episodes}:
            return False
        part = join([self.ended.pop(episode) for episode in episodes])
        channel.put(replace(part, source=source), weight=part.num_steps)
        return True

    def keep(self, episodes: tuple[int, ...]) -> None:
        """Forget all kept episodes but these."""
        self.ended = {episode: part for episode, part in self.ended.items() if episode in episodes}
        mine = [] if self.whole is None else [one for one in self.whole.ids.tolist() if one in episodes]
        self.whole = choose(self.whole, mine) if mine else None

    def get_kept(self) -> dict[str, np.ndarray]:
        """The whole episodes that are kept, as arrays for a checkpoint; empty if there are none."""
        return {} if self.whole is None else arrays_of(self.whole)

    def set_kept(self, arrays: dict[str, np.ndarray]) -> None:
        """This worker's part of what all workers kept."""
        kept = trajectory_from(arrays)
        mine = kept.ids[self.rank :: self.world_size]
        self.whole = choose(kept, mine) if len(mine) else None
