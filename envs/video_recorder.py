"""Filming some episodes of an evaluation while they are played, one mp4 each, frame by frame, so that memory stays
flat.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embodied.core.types import EpisodeResult, EpisodeSpec, Recording
from embodied.envs.base import VectorEnv
from embodied.envs.own_modules import file_name

if TYPE_CHECKING:
    from embodied.envs.episode_player import EpisodeTracker

if TYPE_CHECKING:
    from embodied.reporting.videos import VideoWriter


class VideoRecorder:
    """Open recordings by env row; episodes whose index is in `recording.film` are recorded from reset to end."""

    def __init__(self, env: VectorEnv, rows: EpisodeTracker, recording: Recording) -> None:
        self.env, self.rows, self.recording = env, rows, recording
        problem = env.film_problem() or no_encoder() if recording.film else ""
        self.film = frozenset() if problem else recording.film
        if problem:
            print(f"no videos: {problem}", file=sys.stderr)
        self.open: dict[int, VideoWriter] = {}
        self.told: dict[int, Told] = {}

    def __enter__(self) -> VideoRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.open.values():
            writer.discard()

    def begin(self, rows: np.ndarray, specs: list[EpisodeSpec], instructions: np.ndarray | None) -> None:
        wanted = [(int(row), spec) for row, spec in zip(rows, specs, strict=True) if spec.index in self.film]
        if wanted:
            from embodied.reporting.videos import VideoWriter
        for row, spec in wanted:
            self.open[row] = VideoWriter(self.recording.videos, fps=self.env.env_spec.control_hz)
            self.told[row] = Told(spec.task if instructions is None else instructions[row])
        self._shoot([row for row, _ in wanted])

    def decided(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Who plays has decided for these rows."""
        for row, value in zip(rows, values, strict=False):  # an expert gives none
            if int(row) in self.told:
                self.told[int(row)].value = float(value)

    def on_frame(self, active: np.ndarray) -> None:
        """Called by the env after each env step with the rows that took it."""
        rewards, success = self.env.last_step()
        rows = [row for row in self.open if active[row]]
        for row in rows:
            self.told[row].stepped(float(rewards[row]), bool(success[row]))
        self._shoot(rows)

    def finish(self, rows: np.ndarray, outcomes: list[EpisodeResult]) -> None:
        for row, outcome in zip(rows, outcomes, strict=True):
            writer = self.open.pop(int(row), None)
            if not writer:
                continue
            if self.recording.failures_only and outcome.success_once is not False:
                writer.discard()
            else:
                writer.finish(video_name(outcome))

    def _shoot(self, rows: list[int]) -> None:
        """A frame of each of these rows, with what else is to be seen in it."""
        if not rows:
            return
        from embodied.reporting.videos import beside, captioned

        frames = self.env.render_rows(np.array(rows))
        images = self.env.observe(np.array(rows)).get("images", {}) if self.recording.cameras else {}
        for row, frame in zip(rows, frames, strict=True):
            if images:
                frame = beside(frame, [camera[row] for camera in images.values()])
            if self.recording.overlay:
                frame = captioned(frame, self.told[row].lines())
            self.open[row].add(frame)


def no_encoder() -> str:
    from embodied.reporting.videos import encoder_problem

    return encoder_problem()


class Told:
    """What the caption of a frame says of an episode."""

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
