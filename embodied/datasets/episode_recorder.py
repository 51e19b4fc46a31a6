"""Records the episodes that env rows play for a dataset: every env step, with what was seen before it.

It works in the sim worker's process, so that no frame leaves it. Where a policy decides several env steps at once, the
steps inside a decision are observed as well, for the record only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from embodied.core.arrays import Observation
from embodied.core.types import ChunkResult, EpisodeResult, EpisodeSpec, Recording
from embodied.datasets.episode_buffer import EpisodeBuffer, buffer_name
from embodied.datasets.lerobot_layout import features_of, fps_of, frame_of

if TYPE_CHECKING:
    from embodied.envs.vector_env import VectorEnv


class EpisodeRecorder:
    """Open buffers by env row; none where the recording has no folder for them."""

    def __init__(self, env: VectorEnv, recording: Recording) -> None:
        self.env, self.folder = env, recording.buffers
        self.open: dict[int, EpisodeBuffer] = {}
        self.words: dict[int, str] = {}
        self.seen: list[Observation] = []  # before each env step of the decision that is played
        self.actions: np.ndarray | None = None

    def __enter__(self) -> EpisodeRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        for buffer in self.open.values():
            buffer.discard()

    def begin(self, rows: np.ndarray, specs: list[EpisodeSpec], instructions: np.ndarray | None) -> None:
        if self.folder is None:
            return
        spec = self.env.env_spec
        for row, episode in zip(rows.tolist(), specs, strict=True):
            self.open[row] = EpisodeBuffer(self.folder / buffer_name(episode.index), fps_of(spec), features_of(spec))
            self.words[row] = episode.task if instructions is None else instructions[row]

    def decided(self, obs: Observation, actions: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
        self.seen, self.actions = [obs], actions

    def on_frame(self, active: np.ndarray) -> None:
        if self.open and len(self.seen) < self.actions.shape[1]:
            self.seen.append(self.env.observe())

    def played(self, result: ChunkResult) -> None:
        if not self.open:
            return
        discrete = self.env.env_spec.action.discrete
        actions = self.actions if discrete else np.clip(self.actions, -1.0, 1.0)  # as they were carried out
        done = result.terminated | result.truncated
        for row, buffer in self.open.items():
            for c in np.flatnonzero(result.mask[row]):
                success = None if result.success is None else bool(result.success[row, c])
                action, reward = actions[row, c], result.rewards[row, c]
                buffer.add(frame_of(self.seen[c], row, action, reward, bool(done[row, c]), success))

    def finish(self, rows: np.ndarray, outcomes: list[EpisodeResult]) -> None:
        for row, outcome in zip(rows.tolist(), outcomes, strict=True):
            if buffer := self.open.pop(row, None):
                buffer.finish(self.words[row], outcome.success_once)
