"""Filming some episodes of an evaluation while they are played, one mp4 each, frame by frame, so that memory stays
flat.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embodied.data import EpisodeResult, EpisodeSpec
from embodied.envs.base import VectorEnv
from embodied.envs.rows import Rows

if TYPE_CHECKING:
    from embodied.reporting.videos import VideoWriter


class Films:
    """Open recordings by env row; episodes whose index is in `film` are recorded from reset to end."""

    def __init__(self, env: VectorEnv, rows: Rows, film: frozenset[int], folder: Path | None) -> None:
        self.env, self.rows, self.folder = env, rows, folder
        problem = env.film_problem() if film else ""
        self.film = frozenset() if problem else film
        if problem:
            print(f"no videos: {problem}", file=sys.stderr)
        self.open: dict[int, VideoWriter] = {}

    def __enter__(self) -> Films:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.open.values():
            writer.discard()

    def begin(self, rows: np.ndarray, specs: list[EpisodeSpec]) -> None:
        wanted = [(row, spec) for row, spec in zip(rows, specs, strict=True) if spec.index in self.film]
        if wanted:
            from embodied.reporting.videos import VideoWriter
        for row, _ in wanted:
            self.open[int(row)] = VideoWriter(self.folder, fps=self.env.env_spec.control_hz)
        self._shoot([int(row) for row, _ in wanted])

    def on_frame(self, active: np.ndarray) -> None:
        """Called by the env after each env step with the rows that took it."""
        self._shoot([row for row in self.open if active[row]])

    def finish(self, rows: np.ndarray, outcomes: list[EpisodeResult]) -> None:
        for row, outcome in zip(rows, outcomes, strict=True):
            writer = self.open.pop(int(row), None)
            if writer:
                writer.finish(video_name(outcome))

    def _shoot(self, rows: list[int]) -> None:
        if rows:
            for row, frame in zip(rows, self.env.render_rows(np.array(rows)), strict=True):
                self.open[row].add(frame)


def video_name(outcome: EpisodeResult) -> str:
    """episode-000_success_PushCube-v1_seed7.mp4"""
    word = {True: "success", False: "failure", None: "played"}[outcome.success_once]
    task = "".join(c if c.isalnum() or c in "-." else "-" for c in outcome.task)
    return f"episode-{outcome.index:03d}_{word}_{task}_seed{outcome.seed}.mp4"
