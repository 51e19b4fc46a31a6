"""Records videos of env rows' episodes, one mp4 each, frame by frame in constant memory. The text below a frame shows
the episode's progress.

It works in the sim worker's process, so no frame is sent. `workflows/evaluator.py` chooses the episodes; `videos.py`
writes the mp4 files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embodied.core.arrays import Observation
from embodied.core.types import ChunkResult, EpisodeResult, EpisodeSpec, Recording
from embodied.envs.own_modules import file_name
from embodied.reporting.videos import Caption, VideoWriter, beside, captioned, encoder_problem, video_name

if TYPE_CHECKING:
    from embodied.envs.vector_env import VectorEnv


class VideoRecorder:
    """Open videos by env row: episodes whose index is in `recording.video_episodes`, from reset to end."""

    def __init__(self, env: VectorEnv, recording: Recording, warn: Callable[[str], object]) -> None:
        self.env, self.recording, self.warn = env, recording, warn
        problem = env.video_problem() or encoder_problem() if recording.video_episodes else ""
        self.episodes = frozenset() if problem else recording.video_episodes
        if problem:
            warn(f"no videos: {problem}")
        self.open: dict[int, VideoWriter] = {}
        self.statuses: dict[int, EpisodeStatus] = {}
        self.newest: dict[int, np.ndarray] = {}  # the last frame, until the outcome below it is known

    def __enter__(self) -> VideoRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.open.values():
            writer.discard()

    def begin(self, rows: np.ndarray, specs: list[EpisodeSpec], instructions: np.ndarray | None) -> None:
        wanted = [(int(row), spec) for row, spec in zip(rows, specs, strict=True) if spec.index in self.episodes]
        for row, spec in wanted:
            self.open[row] = VideoWriter(self.recording.videos, fps=self.env.env_spec.control_hz)
            words = spec.task if instructions is None else instructions[row]
            self.statuses[row] = EpisodeStatus(words, self.env.env_spec.has_success)
        self._add_frames([row for row, _ in wanted])

    def decided(self, obs: Observation, actions: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
        for row, value in zip(at, values, strict=False):  # an expert has no value estimates
            if int(row) in self.statuses:
                self.statuses[int(row)].value = float(value)

    def on_frame(self, active: np.ndarray) -> None:
        rewards, success = self.env.last_step()
        rows = [row for row in self.open if active[row]]
        for row in rows:
            self.open[row].add(self._captioned(row, self.newest[row]))  # another frame follows
            self.statuses[row].stepped(float(rewards[row]), bool(success[row]))
        self._add_frames(rows)

    def played(self, result: ChunkResult) -> None:
        """Nothing to do: the frames were drawn step by step."""

    def finish(self, rows: np.ndarray, outcomes: list[EpisodeResult]) -> None:
        for row, outcome in zip(rows, outcomes, strict=True):
            writer = self.open.pop(int(row), None)
            if not writer:
                continue
            frame = self.newest.pop(int(row))
            if self.recording.failures_only and outcome.success_once is not False:
                writer.discard()
            else:
                self.statuses[int(row)].over = True
                writer.add(self._captioned(int(row), frame))
                task = Path(outcome.task).stem if outcome.task.endswith(".bddl") else outcome.task
                writer.finish(video_name(outcome.index, outcome.success_once, file_name(task), outcome.seed))

    def _captioned(self, row: int, frame: np.ndarray) -> np.ndarray:
        return captioned(frame, self.statuses[row].caption()) if self.recording.overlay else frame

    def _add_frames(self, rows: list[int]) -> None:
        """Draw a frame of each of these rows, with the cameras that were asked for."""
        if not rows:
            return
        try:
            frames = self.env.render_rows(np.array(rows))
        except Exception as err:
            return self._give_up(f"render_rows raised {type(err).__name__}: {err}")
        images = self.env.observe(np.array(rows)).get("images", {}) if self.recording.cameras else {}
        for row, frame in zip(rows, frames, strict=True):
            self.newest[row] = beside(frame, [camera[row] for camera in images.values()]) if images else frame.copy()

    def _give_up(self, problem: str) -> None:
        """Record no more videos; the episodes continue and count."""
        self.warn(f"no videos: {problem}")
        self.episodes = frozenset()
        for writer in self.open.values():
            writer.discard()
        self.open.clear()


class EpisodeStatus:
    """The progress of an episode, for the text under its frames."""

    def __init__(self, words: str, has_success: bool) -> None:
        self.words, self.has_success = words, has_success
        self.step, self.reward, self.total = 0, 0.0, 0.0
        self.value: float | None = None
        self.first_success: int | None = None  # the env step
        self.success = False
        self.over = False

    def stepped(self, reward: float, success: bool) -> None:
        self.step += 1
        self.reward, self.success = reward, success
        self.total += reward
        if success and self.first_success is None:
            self.first_success = self.step

    def caption(self) -> Caption:
        known = {"step": self.step, "reward": self.reward, "return": self.total, "value": self.value}
        numbers = ["" if number is None else f"{name} {short(number)}" for name, number in known.items()]
        return Caption(self.outcome() if self.has_success else "", tuple(numbers), self.words)

    def outcome(self) -> str:
        if self.first_success is None:
            return "FAILURE" if self.over else "no success yet"
        lost = "" if self.success else ", lost"
        return f"SUCCESS at step {self.first_success}{lost}"


def short(number: float) -> str:
    """12, 0.25, -3.10, 1234"""
    return f"{number:.2f}" if isinstance(number, float) and abs(number) < 100 else f"{number:.0f}"
