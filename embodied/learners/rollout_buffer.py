"""What a learner rank gets of a rollout: pieces, put together and encoded by frozen parts of the policy as they come.

Where learners have devices of their own, this is done while the rollout goes on. Frozen features depend on no weights
that change and are computed in fixed microbatches, so where pieces end cannot change what is learned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from embodied.core.arrays import room_for_many
from embodied.core.observations import map_obs, take_rows, text_lists, write
from embodied.core.types import Trajectory
from embodied.learners.batch import items_of
from embodied.learners.model import FrozenFeatures, Model

OTHERS = ("env_ids", "obs", "replay", "values", "source", "first", "last")
PER_DECISION = [field.name for field in fields(Trajectory) if field.name not in OTHERS]


@dataclass
class Coming:
    """A source's rollout: its decisions before `have` have come, those before `encoded` are encoded."""

    whole: Trajectory
    have: int = 0
    encoded: int = 0


class RolloutBuffer:
    """What has come of one iteration."""

    def __init__(self, horizon: int, batch_size: int) -> None:
        """Rollouts that come in pieces have `horizon` decisions; about `batch_size` items are encoded together."""
        self.horizon = horizon
        self.batch_size = batch_size
        self.coming: dict[str, Coming] = {}  # by stage of a sim worker: of one that was replaced, what came last
        self.features: FrozenFeatures | None = None
        self.rows = np.empty(0, np.int64)  # env rows whose observations are encoded, sorted

    def add(self, piece: Trajectory) -> None:
        stage = stage_of(piece.source)
        if piece.first == 0:
            self.coming[stage] = Coming(piece if piece.last else whole_room(piece, self.horizon))
        coming = self.coming[stage]
        if coming.whole is not piece:
            fill(coming.whole, piece)
        coming.have = piece.first + len(piece.rewards)

    def has(self, sources: Iterable[str]) -> bool:
        """Whether all that these sources have played has come."""
        there = {coming.whole.source: coming for coming in self.coming.values()}
        return all(s in there and there[s].have == len(there[s].whole.rewards) for s in sources)

    def trajectories(self, sources: Iterable[str]) -> list[Trajectory]:
        return [self.coming[stage_of(source)].whole for source in sources]

    def encode(self, model: Model, rows: np.ndarray) -> None:
        """Frozen features of all whole microbatches that have come, of the rank's env rows `rows` (sorted)."""
        for coming in self.coming.values():
            whole, horizon = coming.whole, len(coming.whole.rewards)
            if self.features is None:
                self.rows, self.features = rows, FrozenFeatures(model, len(rows) * horizon)
            size = max(1, self.batch_size // len(whole.env_ids))
            while self.features.wanted and coming.encoded < horizon:
                part = slice(coming.encoded, min(coming.encoded + size, horizon))
                if part.stop > coming.have:
                    break
                obs = text_lists(map_obs(items_of, take_rows(whole.obs, part)))
                self.features.add(obs, self._items(whole.env_ids, part, horizon))
                coming.encoded = part.stop

    def encoded(self, env_ids: np.ndarray, horizon: int) -> dict[str, Tensor]:
        """Frozen features of these rows: others were lost with their sim worker."""
        if len(env_ids) == len(self.rows):
            return self.features.kept
        items = self._items(env_ids, slice(0, horizon), horizon)
        return {name: tensor[items] for name, tensor in self.features.kept.items()}

    def _items(self, env_ids: np.ndarray, part: slice, horizon: int) -> Tensor:
        rows = np.searchsorted(self.rows, env_ids)
        return torch.from_numpy((rows[:, None] * horizon + np.arange(part.start, part.stop)).ravel())


def stage_of(source: str) -> str:
    return source.partition("#")[0]


def whole_room(piece: Trajectory, horizon: int) -> Trajectory:
    """For a rollout that begins with this piece."""

    def room(array):
        return room_for_many(array[0], horizon)

    return replace(
        piece,
        obs=map_obs(room, piece.obs),
        replay={name: room(array) for name, array in piece.replay.items()},
        values=room_for_many(piece.values[0], horizon + 1),
        last=True,
        **{name: room(getattr(piece, name)) for name in PER_DECISION},
    )


def fill(whole: Trajectory, piece: Trajectory) -> None:
    """At its place; the value after its last decision is also the first of the next piece."""
    part = slice(piece.first, piece.first + len(piece.rewards))
    whole.values[part.start : part.stop + 1] = piece.values
    for name in PER_DECISION:
        getattr(whole, name)[part] = getattr(piece, name)
    for name, array in piece.replay.items():
        whole.replay[name][part] = array
    write(whole.obs, part, piece.obs)
