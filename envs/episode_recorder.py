"""Recording the episodes of an evaluation for a dataset: every env step with what was seen before it.

Where a policy decides several env steps at once, the steps inside a decision are observed as well, for the record only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embodied.core.types import ChunkResult, EpisodeResult, EpisodeSpec, Observation
from embodied.envs.base import VectorEnv

if TYPE_CHECKING:
    from embodied.datasets import EpisodeBuffer


class EpisodeRecorder:
    """Open records by env row; none without a folder."""

    def __init__(self, env: VectorEnv, folder: Path | None) -> None:
        self.env, self.folder = env, folder
        self.open: dict[int, EpisodeBuffer] = {}
        self.words: dict[int, str] = {}
        self.seen: list[Observation] = []  # before each env step of the decision that is played
        self.actions: np.ndarray | None = None

    def __enter__(self) -> EpisodeRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        for draft in self.open.values():
            draft.discard()

    def begin(self, rows: np.ndarray, specs: list[EpisodeSpec], instructions: np.ndarray | None) -> None:
        if self.folder is None:
            return
        from embodied.datasets import EpisodeBuffer, buffer_name, features_of, fps_of

        spec = self.env.env_spec
        for row, episode in zip(rows.tolist(), specs, strict=True):
            self.open[row] = EpisodeBuffer(self.folder / buffer_name(episode.index), fps_of(spec), features_of(spec))
            self.words[row] = episode.task if instructions is None else instructions[row]

    def decided(self, obs: Observation, actions: np.ndarray) -> None:
        """The next decision of all rows."""
        self.seen, self.actions = [obs], actions

    def on_frame(self, active: np.ndarray) -> None:
        """Called by the env after each env step with the rows that took it."""
        if self.open and len(self.seen) < self.actions.shape[1]:
            self.seen.append(self.env.observe())

    def record(self, result: ChunkResult) -> None:
        """What came of the decision."""
        if not self.open:
            return
        from embodied.datasets import frame_of

        discrete = self.env.env_spec.action.discrete
        actions = self.actions if discrete else np.clip(self.actions, -1.0, 1.0)  # as they were carried out
        done = result.terminated | result.truncated
        for row, draft in self.open.items():
            for c in np.flatnonzero(result.mask[row]):
                success = None if result.success is None else bool(result.success[row, c])
                action, reward = actions[row, c], result.rewards[row, c]
                draft.add(frame_of(self.seen[c], row, action, reward, bool(done[row, c]), success))

    def finish(self, rows: np.ndarray, outcomes: list[EpisodeResult]) -> None:
        for row, outcome in zip(rows.tolist(), outcomes, strict=True):
            if draft := self.open.pop(row, None):
                draft.finish(self.words[row], outcome.success_once)
