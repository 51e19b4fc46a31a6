"""A learner rank's part of a rollout: pieces, put together and encoded by frozen parts of the policy as they come; and
how its items are dealt: one permutation per epoch, cut into minibatches, of which each rank does its share.

Where learners have devices of their own, this is done while the rollout is in progress. Frozen features depend on no
weights that change and are computed in fixed microbatches, so where pieces end cannot change what is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from embodied.algorithms.config import AlgoConfig
from embodied.core.arrays import Observation, is_tensor, is_text, map_obs, room_for, take_rows, text_lists
from embodied.core.errors import DeadlineExceeded
from embodied.core.rng import generator
from embodied.core.types import Array, BatchEnd, Trajectory, Unit, join, map_decisions
from embodied.learners.model import FrozenFeatures, Model
from embodied.runtime import Channel, Timers

NO_DEADLINE = float("inf")  # episodes take their time; a channel closes where the run fails


@dataclass(frozen=True)
class ItemBatch:
    """Items of a block of sequences: tensors [items, ...] on this rank; `first` is the global id of item 0.

    An item is one decision. Global ids count the decisions of all ranks' sequences in the order of their ids: which
    worker delivered first makes no difference. Minibatches deal units, here items (conversations: `ConversationBatch`).
    """

    first: int
    obs: Observation
    actions: Tensor
    logprobs: Tensor
    mask: Tensor
    current: Tensor  # bool [items], taken with the weights that the update starts from
    replay: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.mask)

    def inputs(self, items: Tensor) -> dict:
        """The inputs of `Policy.forward` for these items."""
        replay = {name: take(tensor, items) for name, tensor in self.replay.items()}
        return {"obs": self.observed(items), "actions": take(self.actions, items)} | replay

    def observed(self, items: Tensor) -> Observation:
        """The observations of these items, as policies take them."""
        return text_lists(map_obs(lambda part: take(part, items), self.obs))

    def owned(self, minibatch: np.ndarray) -> Tensor:
        """Local ids of the units of a minibatch that are in this block."""
        return torch.from_numpy(owned(minibatch, self.first, len(self)))

    def passes(self, model: Model, units: Tensor) -> int:
        """The number of times that the network runs for these units."""
        return model.passes(len(units))

    def micro_batches(self, model: Model, units: Tensor, passes: int) -> list[tuple[Tensor, bool]]:
        """Items of these units, part by part, and whether they count: padding, which does not, makes up for missing
        passes."""
        return model.micro_batches(units, passes)

    def every(self, model: Model, size: int) -> list[Tensor]:
        """All items, part by part; `size` at a time where the learner's options leave that open."""
        return list(torch.arange(len(self)).split(model.config.micro_batch_size or size))

    @property
    def padding(self) -> Tensor:
        """Items of one unit, for a pass that counts nothing."""
        return torch.zeros(1, dtype=torch.int64)


def flatten(trajectory: Trajectory, first: int, version: int, device: str) -> ItemBatch:
    """The trajectory's decisions as items; `first` is the global id of the first. What losses are made of goes to the
    device; observations stay where they are, pixels as bytes, until they are encoded."""
    return ItemBatch(
        first=first,
        obs=map_obs(own, trajectory.obs),
        actions=own(trajectory.actions).to(device),
        logprobs=own(trajectory.logprobs).to(device),
        mask=own(trajectory.mask).to(device),
        current=torch.from_numpy(trajectory.versions == version).to(device),
        replay={name: own(array) for name, array in trajectory.replay.items()},
    )


def own(array: Array) -> Array:
    """A tensor with contiguous memory of its own, on the device where the array is; texts stay an array."""
    if is_tensor(array):
        return array.clone(memory_format=torch.contiguous_format)
    copy = np.array(array, order="C")
    return copy if is_text(copy) else torch.from_numpy(copy)


def take(array: Array, items: Tensor) -> Array:
    return array.index_select(0, items.to(array.device)) if is_tensor(array) else array[items.numpy()]


@dataclass
class PendingRollout:
    """A source's rollout: its decisions before `have` have come, those before `encoded` are encoded."""

    whole: Trajectory
    have: int = 0
    encoded: int = 0


class RolloutBuffer:
    """The pieces of one iteration that have arrived."""

    def __init__(self, batch_size: int, horizon: int = 0) -> None:
        """`batch_size` is about how many items are encoded together; rollouts in pieces have `horizon` decisions."""
        self.horizon = horizon
        self.batch_size = batch_size
        self.coming: dict[str, PendingRollout] = {}  # by source
        self.features: FrozenFeatures | None = None
        self.rows = np.empty(0, np.int64)  # env rows whose observations are encoded, sorted

    def add(self, piece: Trajectory) -> None:
        whole = piece
        if not piece.last or piece.first:
            whole = room_for_all(piece, self.horizon) if piece.first == 0 else self.coming[piece.source].whole
            rows = items_of(
                range(len(whole.ids)), range(piece.first, piece.first + int(piece.lengths[0])), self.horizon
            )
            map_decisions(lambda room, array: room.__setitem__(rows, array), whole, piece)
        if piece.first == 0:
            self.coming[piece.source] = PendingRollout(whole)
        self.coming[piece.source].have = piece.first + int(piece.lengths.max())

    def has(self, sources: Iterable[str]) -> bool:
        """True if all that these sources have played has come."""
        there = self.coming
        return all(s in there and there[s].have == there[s].whole.lengths.max() for s in sources)

    def parts(self, sources: Iterable[str]) -> list[Trajectory]:
        """The trajectory of each of these sources."""
        return [self.coming[source].whole for source in sources]

    def trajectory(self, sources: Iterable[str]) -> Trajectory:
        """The trajectories of these sources, joined."""
        return join(self.parts(sources))

    def take(self, sources: Iterable[str]) -> Trajectory:
        """The same; they are forgotten."""
        return join([self.coming.pop(source).whole for source in sources])

    def encode(self, model: Model, rows: np.ndarray) -> None:
        """Frozen features of all whole microbatches that have come, of the rank's env rows `rows` (sorted)."""
        for coming in self.coming.values():
            whole, horizon = coming.whole, int(coming.whole.lengths[0])
            if self.features is None:
                self.rows, self.features = rows, FrozenFeatures(model, len(rows) * horizon)
            size = max(1, self.batch_size // len(whole.ids))
            while self.features.wanted and coming.encoded < horizon:
                part = range(coming.encoded, min(coming.encoded + size, horizon))
                if part.stop > coming.have:
                    break
                seen = take_rows(whole.obs, items_of(range(len(whole.ids)), part, horizon))
                items = items_of(np.searchsorted(self.rows, whole.ids), part, horizon)
                self.features.add(text_lists(map_obs(own, seen)), torch.from_numpy(items))
                coming.encoded = part.stop

    def encoded(self, ids: np.ndarray) -> dict[str, Tensor]:
        """Frozen features of these rows: others were lost with their sim worker."""
        if len(ids) == len(self.rows):
            return self.features.kept
        horizon = self.features.num_items // len(self.rows)
        items = torch.from_numpy(items_of(np.searchsorted(self.rows, ids), range(horizon), horizon))
        return {name: tensor[items] for name, tensor in self.features.kept.items()}


class Arrivals:
    """The units of one batch that come to a learner rank, in the order in which each has come whole."""

    def __init__(
        self, channel: Channel, batch: int, buffer: RolloutBuffer, timers: Timers, piece_came: Callable[[], None]
    ) -> None:
        """`piece_came` is called when one is in the buffer."""
        self.channel, self.batch, self.buffer = channel, batch, buffer
        self.timers, self.piece_came = timers, piece_came
        self.end: BatchEnd | None = None  # when no more follow
        self.expected: list[Unit] = []  # of which something has not come

    def next(self) -> Unit | None:
        """Wait for a unit; None after the last one."""
        while True:
            for unit in self.expected:
                if self.buffer.has(unit.sources):
                    self.expected.remove(unit)
                    return unit
            if self.end is not None and not self.expected:
                self._forget_what_is_left()
                return None
            with self.timers.measure("wait"):
                item = self.channel.get(key=self.batch, timeout_s=None if self.expected else NO_DEADLINE)
            if isinstance(item, Trajectory):
                self.buffer.add(item)
                self.piece_came()
            elif isinstance(item, Unit):
                self.expected.append(item)
            else:
                self.end = item

    def _forget_what_is_left(self) -> None:
        """What sims have sent that died before it was whole."""
        with suppress(DeadlineExceeded):
            while True:
                self.channel.get(key=self.batch, timeout_s=0.0)


def items_of(rows: Sequence[int] | np.ndarray, decisions: range, horizon: int) -> np.ndarray:
    """These decisions of these rows, where every row has `horizon` of them."""
    return (np.array(rows)[:, None] * horizon + np.array(decisions)).ravel()


def room_for_all(piece: Trajectory, horizon: int) -> Trajectory:
    """Room for a rollout that begins with this piece."""
    count = len(piece.ids) * horizon
    room = map_decisions(lambda array: room_for(array, count), piece)
    return replace(piece, lengths=np.full_like(piece.lengths, horizon), last=True, **room)


def permutation(seed: int, iteration: int, epoch: int, num_items: int) -> np.ndarray:
    """All item ids, shuffled by the run's seed, the iteration and the epoch alone."""
    return generator(seed, "shuffle", iteration, epoch).permutation(num_items)


def minibatches(order: np.ndarray, size: int) -> list[np.ndarray]:
    """Consecutive slices of `size` items; the last one is smaller where they do not divide."""
    return [order[start : start + size] for start in range(0, len(order), size)]


def owned(minibatch: np.ndarray, first: int, count: int) -> np.ndarray:
    """Local ids (id - first) of a minibatch's items in a rank's block [first, first + count), in the same order."""
    local = minibatch - first
    return local[(local >= 0) & (local < count)]


def step_items(config: AlgoConfig, items: int) -> int:
    """Items per gradient step, of so many in an iteration."""
    return min(config.minibatch_size or items, items)
