"""What is recorded of an evaluation while it is played, besides its outcomes: videos of some episodes, one mp4 each,
frame by frame, so that memory stays flat; and for a dataset every env step with what was seen before it.

Where a policy decides several env steps at once, the steps inside a decision are observed as well, for the record only.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embodied.core.types import ChunkResult, EpisodeResult, EpisodeSpec, Observation, Recording
from embodied.envs.base import VectorEnv
from embodied.envs.own_modules import file_name

if TYPE_CHECKING:
    from embodied.datasets import EpisodeBuffer
    from embodied.envs.episode_player import EpisodeTracker
    from embodied.reporting.videos import VideoWriter


class VideoRecorder:
    """Open videos by env row: episodes whose index is in `recording.video_episodes`, from reset to end."""

    def __init__(self, env: VectorEnv, rows: EpisodeTracker, recording: Recording) -> None:
        self.env, self.rows, self.recording = env, rows, recording
        problem = env.video_problem() or no_encoder() if recording.video_episodes else ""
        self.episodes = frozenset() if problem else recording.video_episodes
        if problem:
            print(f"no videos: {problem}", file=sys.stderr)
        self.open: dict[int, VideoWriter] = {}
        self.captions: dict[int, Caption] = {}

    def __enter__(self) -> VideoRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.open.values():
            writer.discard()

    def begin(self, rows: np.ndarray, specs: list[EpisodeSpec], instructions: np.ndarray | None) -> None:
        wanted = [(int(row), spec) for row, spec in zip(rows, specs, strict=True) if spec.index in self.episodes]
        if wanted:
            from embodied.reporting.videos import VideoWriter
        for row, spec in wanted:
            self.open[row] = VideoWriter(self.recording.videos, fps=self.env.env_spec.control_hz)
            self.captions[row] = Caption(spec.task if instructions is None else instructions[row])
        self._add_frames([row for row, _ in wanted])

    def decided(self, rows: np.ndarray, values: np.ndarray) -> None:
        """The policy or expert has decided for these rows."""
        for row, value in zip(rows, values, strict=False):  # an expert gives none
            if int(row) in self.captions:
                self.captions[int(row)].value = float(value)

    def on_frame(self, active: np.ndarray) -> None:
        """Called by the env after each env step with the rows that took it."""
        rewards, success = self.env.last_step()
        rows = [row for row in self.open if active[row]]
        for row in rows:
            self.captions[row].stepped(float(rewards[row]), bool(success[row]))
        self._add_frames(rows)

    def finish(self, rows: np.ndarray, outcomes: list[EpisodeResult]) -> None:
        for row, outcome in zip(rows, outcomes, strict=True):
            writer = self.open.pop(int(row), None)
            if not writer:
                continue
            if self.recording.failures_only and outcome.success_once is not False:
                writer.discard()
            else:
                writer.finish(video_name(outcome))

    def _add_frames(self, rows: list[int]) -> None:
        """Add a frame of each of these rows, with the cameras and the caption that were asked for."""
        if not rows:
            return
        from embodied.reporting.videos import beside, captioned

        frames = self.env.render_rows(np.array(rows))
        images = self.env.observe(np.array(rows)).get("images", {}) if self.recording.cameras else {}
        for row, frame in zip(rows, frames, strict=True):
            if images:
                frame = beside(frame, [camera[row] for camera in images.values()])
            if self.recording.overlay:
                frame = captioned(frame, self.captions[row].lines())
            self.open[row].add(frame)


def no_encoder() -> str:
    from embodied.reporting.videos import encoder_problem

    return encoder_problem()


class Caption:
    """What is written under a frame: the instruction, and how the episode has gone so far."""

    def __init__(self, instruction: str) -> None:
        self.instruction = instruction
        self.step, self.reward, self.total = 0, 0.0, 0.0
        self.value: float | None = None
        self.success = False

    def stepped(self, reward: float, success: bool) -> None:
        self.step += 1
        self.reward, self.success = reward, success
        self.total += reward

    def lines(self) -> list[str]:
        value = "" if self.value is None else f"  value {self.value:.2f}"
        numbers = f"step {self.step}  reward {self.reward:.2f}  return {self.total:.2f}{value}"
        return [self.instruction, numbers + ("  SUCCESS" if self.success else "")]


def video_name(outcome: EpisodeResult) -> str:
    """episode-000_success_PushCube-v1_seed7.mp4"""
    word = {True: "success", False: "failure", None: "played"}[outcome.success_once]
    called = Path(outcome.task).stem if outcome.task.endswith(".bddl") else outcome.task
    return f"episode-{outcome.index:03d}_{word}_{file_name(called)}_seed{outcome.seed}.mp4"


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
        for buffer in self.open.values():
            buffer.discard()

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
        for row, buffer in self.open.items():
            for c in np.flatnonzero(result.mask[row]):
                success = None if result.success is None else bool(result.success[row, c])
                action, reward = actions[row, c], result.rewards[row, c]
                buffer.add(frame_of(self.seen[c], row, action, reward, bool(done[row, c]), success))

    def finish(self, rows: np.ndarray, outcomes: list[EpisodeResult]) -> None:
        for row, outcome in zip(rows.tolist(), outcomes, strict=True):
            if buffer := self.open.pop(row, None):
                buffer.finish(self.words[row], outcome.success_once)
