"""Collects a learner rank's batch from pieces of rollouts and whole episodes. Pieces are joined by source, and frozen
parts of the policy encode them as they arrive.

Learners on separate devices do this during the rollout. Frozen features do not depend on trained weights and are
computed in fixed micro-batches, so the division into pieces cannot change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from embodied.core.arrays import is_tensor, is_text, map_obs, room_for, take_rows, text_lists
from embodied.core.errors import DeadlineExceeded
from embodied.core.types import Array, BatchEnd, ForLearner, Trajectory, Unit, join, map_decisions
from embodied.learners.model import FrozenFeatures, Model
from embodied.runtime import Channel, Timers

NO_DEADLINE = float("inf")  # episodes may be long; if the run fails, the channel closes


class RolloutBuffer:
    """The received pieces of one batch."""

    def __init__(self, batch_size: int = 1, horizon: int = 0) -> None:
        """`batch_size`: approximate number of items encoded together; `horizon`: decisions of a rollout in pieces."""
        self.horizon = horizon
        self.batch_size = batch_size
        self.whole: dict[str, Trajectory] = {}  # by source: its trajectory, or memory for it
        self.have: dict[str, int] = {}  # by source: number of received decisions
        self.seen: dict[str, int] = {}  # by source: number of encoded decisions
        self.features: FrozenFeatures | None = None
        self.rows = np.empty(0, np.int64)  # env rows whose observations are encoded, sorted
        self.end: BatchEnd | None = None  # set when no more units follow

    def add(self, piece: Trajectory) -> None:
        source, end = piece.source, piece.first + int(piece.lengths.max())
        if piece.first == 0:
            self.whole[source], self.seen[source] = piece if piece.last else room_for_all(piece, self.horizon), 0
        if not piece.last or piece.first:
            whole = self.whole[source]
            rows = items_of(range(len(whole.ids)), range(piece.first, end), self.horizon)
            map_decisions(lambda room, array: room.__setitem__(rows, array), whole, piece)
        self.have[source] = end

    def has(self, sources: Iterable[str]) -> bool:
        """True if all data of these sources have arrived."""
        return all(s in self.whole and self.have[s] == self.whole[s].lengths.max() for s in sources)

    def take(self, sources: Iterable[str]) -> Trajectory:
        """Remove and return the joined trajectories of these sources."""
        return join([self.whole.pop(source) for source in sources])

    def units(
        self, channel: Channel, batch: int, timers: Timers, piece_came: Callable[[], None] = lambda: None
    ) -> Iterator[Unit]:
        """Yields each unit of a batch when all its data have arrived, until the batch's `end`. `piece_came` is called
        after every piece. Remaining pieces are dropped: their sims died before sending all of them."""
        expected: list[Unit] = []
        while self.end is None or expected:
            with timers.measure("wait"):
                item: ForLearner = channel.get(key=batch, timeout_s=None if expected else NO_DEADLINE)
            if isinstance(item, BatchEnd):
                self.end = item
            elif isinstance(item, Unit):
                expected.append(item)
            else:
                self.add(item)
                piece_came()
            for unit in [unit for unit in expected if self.has(unit.sources)]:
                expected.remove(unit)
                yield unit
        with suppress(DeadlineExceeded):
            while True:
                channel.get(key=batch, timeout_s=0.0)

    def encode(self, model: Model, rows: np.ndarray) -> None:
        """Encode all complete micro-batches of the rank's env rows `rows` (sorted)."""
        for source, whole in self.whole.items():
            horizon = int(whole.lengths[0])
            if self.features is None:
                self.rows, self.features = rows, FrozenFeatures(model, len(rows) * horizon)
            size = max(1, self.batch_size // len(whole.ids))
            while self.features.wanted and self.seen[source] < horizon:
                part = range(self.seen[source], min(self.seen[source] + size, horizon))
                if part.stop > self.have[source]:
                    break
                obs = take_rows(whole.obs, items_of(range(len(whole.ids)), part, horizon))
                items = items_of(np.searchsorted(self.rows, whole.ids), part, horizon)
                self.features.add(text_lists(map_obs(copied, obs)), torch.from_numpy(items))
                self.seen[source] = part.stop

    def encoded(self, ids: np.ndarray) -> dict[str, Tensor]:
        """Frozen features of these rows; rows of a dead sim worker are missing."""
        assert self.features is not None
        if len(ids) == len(self.rows):
            return self.features.kept
        horizon = self.features.num_items // len(self.rows)
        items = torch.from_numpy(items_of(np.searchsorted(self.rows, ids), range(horizon), horizon))
        return {name: tensor[items] for name, tensor in self.features.kept.items()}


def items_of(rows: Sequence[int] | np.ndarray, decisions: range, horizon: int) -> np.ndarray:
    """The items of these decisions and rows, if every row has `horizon` decisions."""
    return (np.array(rows)[:, None] * horizon + np.array(decisions)).ravel()


def room_for_all(piece: Trajectory, horizon: int) -> Trajectory:
    """Memory for a rollout that begins with this piece."""
    count = len(piece.ids) * horizon
    room = map_decisions(lambda array: room_for(array, count), piece)
    return replace(piece, lengths=np.full_like(piece.lengths, horizon), last=True, **room)


def copied(array: Array) -> Array:
    """A contiguous copy as a tensor on the array's device; texts stay an array."""
    if is_tensor(array):
        return array.clone(memory_format=torch.contiguous_format)
    copy = np.array(array, order="C")
    return copy if is_text(copy) else torch.from_numpy(copy)


def sent(arrays: Mapping[str, Array], device: str) -> dict[str, Tensor]:
    """Copies of the arrays as tensors on this device. Each transfer to a GPU waits for it, so all numpy arrays are sent
    in one transfer, in a type that holds every number."""
    tensors = {name: copied(array) for name, array in arrays.items()}
    small = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cpu"}
    if device != "cpu" and small:
        together = torch.cat([tensor.reshape(-1).double() for tensor in small.values()]).to(device)
        parts = together.split([tensor.numel() for tensor in small.values()])
        for (name, tensor), part in zip(small.items(), parts, strict=True):
            tensors[name] = part.view(tensor.shape).to(tensor.dtype)
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def take(array: Array, items: Tensor) -> Array:
    """These items of an array. For an array in host memory `items` must be there, too. Items for a device are sent
    without waiting."""
    if not is_tensor(array):
        return array[items.numpy()]
    return array.index_select(0, items.to(array.device, non_blocking=True))
