"""What a learner rank gets of a rollout: pieces, put together as they come and looked at with frozen parts of a policy.

Where learners have devices of their own, this is done while the rollout goes on. What frozen parts make of a piece
depends on no weights that change, and is looked at in lots that do not depend on where pieces end; so neither does
what is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from embodied.core.arrays import room_for_many
from embodied.core.observations import Observation, map_obs, take_rows, text_lists, write
from embodied.core.types import Trajectory
from embodied.learners.batch import items_of
from embodied.learners.update import KEPT_BYTES

OTHERS = ("env_ids", "obs", "replay", "values", "source", "first", "last")
PER_DECISION = [field.name for field in fields(Trajectory) if field.name not in OTHERS]


class Frozen:
    """What frozen parts of the policy make of the observations of some env rows: items row by row, `horizon` decisions
    each."""

    def __init__(self, look: Callable[[Observation], dict[str, Tensor]], rows: np.ndarray, horizon: int) -> None:
        """`rows` are sorted."""
        self.look = look
        self.rows = rows
        self.horizon = horizon
        self.wanted = True
        self.known: dict[str, Tensor] = {}

    def see(self, obs: Observation, env_ids: np.ndarray, decisions: range) -> None:
        """Some decisions of some rows: arrays [t, n, ...]."""
        found = self.look(text_lists(map_obs(items_of, obs)))
        if not self.known:
            count = len(self.rows) * self.horizon
            each = sum(tensor[0].nbytes for tensor in found.values())
            self.wanted = 0 < each * count <= KEPT_BYTES
            if not self.wanted:
                return
            self.known = {name: tensor.new_empty(count, *tensor.shape[1:]) for name, tensor in found.items()}
        items = self._items(env_ids, decisions)
        for name, tensor in found.items():
            self.known[name][items] = tensor

    def of(self, env_ids: np.ndarray) -> dict[str, Tensor]:
        """Of these rows: others were lost with their sim worker."""
        if len(env_ids) == len(self.rows):
            return self.known
        items = self._items(env_ids, range(self.horizon))
        return {name: tensor[items] for name, tensor in self.known.items()}

    def _items(self, env_ids: np.ndarray, decisions: range) -> Tensor:
        rows = np.searchsorted(self.rows, env_ids)
        return torch.from_numpy((rows[:, None] * self.horizon + np.array(decisions)).ravel())


@dataclass
class Coming:
    """A source's rollout: its decisions before `have` have come, those before `seen` have been looked at."""

    whole: Trajectory
    have: int = 0
    seen: int = 0


class RolloutBuffer:
    """Of one iteration."""

    def __init__(self, horizon: int, lot: int) -> None:
        """Of `horizon` decisions, where they come in pieces; about `lot` items are looked at together."""
        self.horizon = horizon
        self.lot = lot
        self.coming: dict[str, Coming] = {}  # by stage of a sim worker: of one that was replaced, what came last
        self.frozen: Frozen | None = None

    def add(self, piece: Trajectory) -> None:
        stage = stage_of(piece.source)
        if piece.first == 0:
            self.coming[stage] = Coming(piece if piece.last else whole_room(piece, self.horizon))
        coming = self.coming[stage]
        if coming.whole is not piece:
            fill(coming.whole, piece)
        coming.have = piece.first + len(piece.rewards)

    def has(self, sources: Iterable[str]) -> bool:
        """All that these sources have played."""
        there = {coming.whole.source: coming for coming in self.coming.values()}
        return all(s in there and there[s].have == len(there[s].whole.rewards) for s in sources)

    def trajectories(self, sources: Iterable[str]) -> list[Trajectory]:
        return [self.coming[stage_of(source)].whole for source in sources]

    def look(self) -> None:
        """At all whole lots that have come and were not looked at."""
        for coming in self.coming.values():
            whole, frozen = coming.whole, self.frozen
            rows, horizon = whole.env_ids, len(whole.rewards)
            size = max(1, self.lot // len(rows))
            while frozen.wanted and coming.seen < horizon and (end := min(coming.seen + size, horizon)) <= coming.have:
                frozen.see(take_rows(whole.obs, slice(coming.seen, end)), rows, range(coming.seen, end))
                coming.seen = end


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
