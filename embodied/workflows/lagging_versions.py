"""The acting version when rollouts lag behind updates (pipeline.schedule=async), so that rollout, update and transfer
overlap.

With a lag of k, rollout n uses version max(start, n - k). Learners copy a version, and the copy is sent to the policies
during a rollout with the previous version:

    k = 1   rollout n + 1 with version n beside update n; version n + 1 is copied after update n and travels at once
    k > 1   rollout n + k - 1 with version n - 1 beside update n, while version n travels

With R, U and P seconds of rollout, update and transfer, an iteration takes max(R, U, P, (R + U + P) / (k + 1)). There
are two copies of the weights (`WeightStore`): the acting copy and the copy in transfer.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from embodied.runtime import Handle
from embodied.runtime.published_weights import Publication
from embodied.workflows.contract import ROLLOUT, UPDATE, Batch

if TYPE_CHECKING:
    from embodied.workflows.rl_loop import EmbodiedLoop


class LaggingVersions:
    """Decides for an `EmbodiedLoop` when a batch is collected, with which version, and when a version is copied."""

    def __init__(self, loop: EmbodiedLoop) -> None:
        self.loop, self.weight_sync, self.ahead = loop, loop.weight_sync, loop.ahead
        self.lag = loop.config.pipeline.lag
        self.depth = max(1, self.lag - 1)  # batches that wait for their update
        self.updating = False
        self.rollouts_left = 0  # remaining rollouts of the run
        self.start = self.copied = 0  # first version of the run; newest copied version
        self.copying: Handle | None = None  # the last copy, until it is announced to the policies
        self.copy_s = 0.0  # seconds of the previous copy
        self.waiting: deque[Publication] = deque()  # versions for rollouts to come
        loop.rollouts.background.append(self)

    def begin(self, version: int) -> None:
        """Begin: policies and learners have this version."""
        self.start = self.copied = version
        self.waiting.clear()

    def collect_ahead(self, batches_left: int) -> None:
        """Collect batches until enough are waiting; beside earlier updates most are already collected."""
        self.rollouts_left = batches_left - len(self.ahead)
        while self.rollouts_left and len(self.ahead) < self.depth:
            self._collect()

    def update(self, batch: Batch, iteration: int, total: int) -> Handle | None:
        """Begin the update on this batch, and collect the next one meanwhile."""
        if self.lag > 1 and self.rollouts_left:
            self._copy(self.weight_sync.learned)
        last = updating = self.loop.begin_update(batch, iteration, total)
        if self.lag == 1 and self.rollouts_left > 1:
            last = self._copy(self.weight_sync.learned + 1)  # the learners copy after the update
        if self.rollouts_left and (len(self.ahead) < self.depth or self.loop.beside):
            self.loop.device_sharing.ends_with(UPDATE, last or self.copying)
            self.updating = True
            self._collect()
            self.updating = False
        if self.copying:
            self.loop.rollouts.settle(self.copying)
        return updating

    def updated(self) -> float:
        """The learners have the next version. Returns the seconds of their last copy."""
        self.weight_sync.learned += 1
        if self.copying:
            self.go_on()
        return self.copy_s

    def choose_version(self) -> None:
        """Let policies act with the version of the next rollout, which they have received by now."""
        next_batch = len(self.ahead) + self.updating  # after the batch of the next or current update
        self._act_with(max(self.start, self.weight_sync.learned + next_batch - self.lag))

    def act_with_newest(self) -> None:
        """Collect the rollouts with older versions; then let policies act with the learners' version."""
        while self.rollouts_left and len(self.ahead) < self.lag:
            self._collect()
        if self.weight_sync.version != self.weight_sync.learned:
            with self.loop.device_sharing.phase(UPDATE):
                self._copy(self.weight_sync.learned)
                if self.copying:
                    self.loop.rollouts.settle(self.copying)
                    self.go_on()
            with self.loop.device_sharing.phase(ROLLOUT):
                self._act_with(self.weight_sync.learned)

    # During a rollout

    def due(self) -> bool:
        """True if a copied version is not yet announced to policies."""
        return self.copying is not None and self.copying.done()

    def go_on(self) -> None:
        """Begin to send the copied version to the policies."""
        assert self.copying is not None
        publication, self.copy_s, self.copying = self.copying.wait()[0], self.copying.seconds("max"), None
        self.waiting.append(publication)
        self.weight_sync.announce(publication, self.loop.learners[0].send_weights)

    # Inside

    def _collect(self) -> None:
        self.ahead.append(self.loop.collect())
        self.rollouts_left -= 1

    def _copy(self, version: int) -> Handle | None:
        """Let the learners copy their weights as this version, once. It replaces the copy two versions older, which no
        rollout uses."""
        if version > self.copied:
            self.copied = version
            self.copying = self.loop.learners.publish(version)
        return self.copying

    def _act_with(self, version: int) -> None:
        while self.weight_sync.version < version:
            publication = self.waiting.popleft()
            if publication.version == version:
                self.loop.deliver(publication)
