"""A vector env and the episodes that its rows play: in rollouts for training (`rollout_stage.py`) and in evaluations
(`evaluation.py`).

Rows without an episode stay frozen and are shown to no policy. Which episodes are played, and what happens in each,
does not depend on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from embodied.core.arrays import Observation, room_for, take_rows, text_arrays
from embodied.core.types import (
    ActReply,
    ActRequest,
    Array,
    AskAgain,
    ChunkResult,
    EpisodeResult,
    EpisodeSpec,
)
from embodied.envs.vector_env import VectorEnv
from embodied.runtime import Channel, Timers


class EpisodeTracker:
    """The open episodes of N env rows. An episode is a success at the end if its last live step was a success."""

    def __init__(self, num_envs: int, has_success: bool) -> None:
        self.has_success = has_success
        self.specs: list[EpisodeSpec | None] = [None] * num_envs
        self.episode = np.full(num_envs, -1, np.int64)
        self.started = np.zeros(num_envs, np.int64)  # episodes begun by each row
        self.decision = np.zeros(num_envs, np.int64)
        self.length = np.zeros(num_envs, np.int64)
        self.total_reward = np.zeros(num_envs)
        self.success_once = np.zeros(num_envs, bool)
        self.success_now = np.zeros(num_envs, bool)
        self.success_at_reset = np.zeros(num_envs, bool)

    def begin(self, rows: np.ndarray, specs: list[EpisodeSpec], success: np.ndarray | None) -> None:
        """These rows were just reset to these episodes."""
        for row, spec in zip(rows, specs, strict=True):
            self.specs[row] = spec
            self.episode[row] = spec.index
        self.started[rows] += 1
        for counter in (self.decision, self.length, self.total_reward):
            counter[rows] = 0
        at_reset = np.zeros(len(self.episode), bool) if success is None else success
        self.success_at_reset[rows] = at_reset[rows]
        self.success_once[rows] = at_reset[rows]
        self.success_now[rows] = at_reset[rows]

    def record(self, result: ChunkResult) -> None:
        """Count one decision's env steps."""
        mask = result.mask
        live = mask.any(axis=1)
        self.decision[live] += 1
        self.length += mask.sum(axis=1)
        self.total_reward += (result.rewards * mask).sum(axis=1)
        if result.success is not None:
            self.success_once |= (result.success & mask).any(axis=1)
            last = np.maximum(mask.sum(axis=1) - 1, 0)
            now = result.success[np.arange(len(mask)), last]
            self.success_now = np.where(live, now, self.success_now)

    def results(self, rows: np.ndarray) -> list[EpisodeResult]:
        """The outcome of rows whose episode just ended."""
        return [self._result(row) for row in rows]

    def _result(self, row: int) -> EpisodeResult:
        spec = self.specs[row]
        flags = (self.success_once, self.success_now, self.success_at_reset)
        once, at_end, at_reset = (bool(flag[row]) if self.has_success else None for flag in flags)
        return EpisodeResult(
            index=spec.index,
            task=spec.task,
            init_state_id=spec.init_state_id,
            seed=spec.seed,
            length=int(self.length[row]),
            total_reward=float(self.total_reward[row]),
            success_once=once,
            success_at_end=at_end,
            success_at_reset=at_reset,
        )

    # What a checkpoint keeps; the specs follow from the episode numbers.
    ARRAYS = "episode started decision length total_reward success_once success_now success_at_reset".split()

    def get_state(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name).copy() for name in self.ARRAYS}

    def set_state(self, state: dict[str, np.ndarray], specs: list[EpisodeSpec]) -> None:
        for name in self.ARRAYS:
            getattr(self, name)[:] = state[name]
        self.specs = list(specs)


class EpisodePlayer:
    """A vector env, which of its rows play, and what they see."""

    def __init__(self, env: VectorEnv, timers: Timers) -> None:
        self.env = env
        self.timers = timers
        self.rows = EpisodeTracker(env.num_envs, env.env_spec.has_success)
        self.playing = np.zeros(env.num_envs, bool)
        self.obs: Observation | None = None

    def begin(self, rows: np.ndarray, specs: Sequence[EpisodeSpec], elapsed: np.ndarray | None = None) -> None:
        """Begin these episodes on these rows, in one batch; `elapsed` env steps [N] of their limit count as used."""
        by_row: list[EpisodeSpec | None] = [None] * self.env.num_envs
        for row, spec in zip(rows, specs, strict=True):
            by_row[row] = spec
        mask = np.zeros(self.env.num_envs, bool)
        mask[rows] = True
        with self.timers.measure("reset"):
            obs, info = self.env.reset(options={"reset_mask": mask, "episodes": by_row, "elapsed": elapsed})
        self.obs = text_arrays(obs)
        self.rows.begin(rows, specs, info.get("success"))
        self.playing[rows] = True

    def seen(self) -> tuple[np.ndarray, Observation]:
        """The rows that play, and what they see."""
        at = np.flatnonzero(self.playing)
        return at, self.obs if self.playing.all() else take_rows(self.obs, at)

    def play(self, actions: Array, on_frame: Callable[[np.ndarray], None] | None = None) -> ChunkResult:
        """Play one decision of every row, actions [N, C, A]."""
        with self.timers.measure("step"):
            result = self.env.step_chunk(actions, on_frame=on_frame)
        self.rows.record(result)
        self.obs = text_arrays(result.obs)
        return result

    def end(self, result: ChunkResult) -> tuple[np.ndarray, list[EpisodeResult]]:
        """The rows whose episodes ended in this decision, and how; they play no more."""
        done = np.flatnonzero(result.done & self.playing)
        self.playing[done] = False
        return done, self.rows.results(done)


def spread(actions: Array, at: np.ndarray, num_rows: int) -> Array:
    """These rows' actions among those of all rows; the others stand still."""
    if len(at) == num_rows:
        return actions
    everywhere = room_for(actions, num_rows)
    everywhere[at] = actions
    return everywhere


class PolicyClient:
    """Asks a stage's policy worker, and takes the answer to the last request from whichever worker gives it.

    A policy worker may die between request and answer, or another one may take its place. That one knows of no
    request, so the stage is sent `AskAgain`; the answer is the same, since it depends on the request alone, and a
    second one is ignored.
    """

    def __init__(self, source: str, requests: Channel, replies: Channel) -> None:
        self.source = source
        self.requests = requests
        self.replies = replies
        self.request = ActRequest(source)

    def ask(self, same_as: tuple[str, int] | None = None, **what: Any) -> tuple[str, int]:
        """Send a request; returns its id. If `obs` repeats that of an earlier request (`same_as`), only that id is
        sent."""
        self.request = ActRequest(self.source, self.request.number + 1, **what)
        short = replace(self.request, obs=None, same_as=same_as)
        self.requests.put(self.request if same_as is None else short)
        return self.request.source, self.request.number

    def answer(self) -> ActReply:
        while True:
            reply: ActReply | AskAgain = self.replies.get()
            if reply.source != self.source:
                continue
            if isinstance(reply, AskAgain):
                if reply.requests is not None:
                    self.requests = reply.requests
                self.requests.put(self.request)
            elif reply.number == self.request.number:
                return reply
