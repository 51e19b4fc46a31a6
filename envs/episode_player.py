"""A vector env and the episodes that its rows play.

Rows without an episode stay frozen and are shown to no policy. Which episodes are played, and what happens in each,
does not depend on how many rows there are. Training (`rollout`) and evaluation (`play_episodes`) differ in who chooses
actions, what begins on a free row, what is recorded and when it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from embodied.core.arrays import Observation, room_for, take_rows, text_arrays
from embodied.core.rng import normal
from embodied.core.types import Array, ChunkResult, EpisodeResult, EpisodeSpec, Note, Recording
from embodied.envs.action_source import ActionSource
from embodied.envs.base import VectorEnv
from embodied.envs.recorders import EpisodeRecorder, VideoRecorder
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

    ARRAYS = (
        "episode started decision length total_reward success_once success_now success_at_reset".split()
    )  # what a checkpoint keeps; the specs follow from the episode numbers

    def get_state(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name).copy() for name in self.ARRAYS}

    def set_state(self, state: dict[str, np.ndarray], specs: list[EpisodeSpec]) -> None:
        for name in self.ARRAYS:
            getattr(self, name)[:] = state[name]
        self.specs = list(specs)


class EpisodePlayer:
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


def play_episodes(
    env: VectorEnv,
    episodes: list[EpisodeSpec],
    action_source: ActionSource,
    recording: Recording,
    notes: Channel,
    alone: frozenset[int],
    timers: Timers,
    stop: Callable[[], bool] = lambda: False,
) -> list[EpisodeResult]:
    """Play a fixed list of episodes to the end, a free row taking the next one. `alone` are the last of the episodes;
    each is played with no other beside it. Once `stop` says so the decision in progress is the last one, and what is
    not over is given up."""
    player, waiting = EpisodePlayer(env, timers), deque(episodes)
    results: list[EpisodeResult] = []

    def refill(free: np.ndarray) -> None:
        """Begin waiting episodes on free rows."""
        free = free[: num_startable(waiting, player.playing, alone)]
        if not len(free):
            return
        specs = [waiting.popleft() for _ in free]
        notes.put(Note(action_source.source, begun=tuple(spec.index for spec in specs)))
        player.begin(free, specs)
        action_source.begin(free)
        for recorder in (videos, records):
            recorder.begin(free, specs, player.obs.get("instruction"))

    def on_frame(moved: np.ndarray) -> None:
        for recorder in (videos, records):
            recorder.on_frame(moved)

    with VideoRecorder(env, player.rows, recording) as videos, EpisodeRecorder(env, recording.buffers) as records:
        refill(np.arange(env.num_envs))
        while player.playing.any() and not stop():
            at, seen = player.seen()
            with timers.measure("wait"):
                decisions, values = action_source.act(seen, player.rows, at)
            actions = spread(decisions, at, env.num_envs)
            videos.decided(at, values)
            records.decided(player.obs, actions)
            result = player.play(disturbed(actions, player.rows, recording), on_frame)
            records.record(result)
            done, outcomes = player.end(result)
            if len(done):
                results += outcomes
                for recorder in (videos, records):
                    recorder.finish(done, outcomes)
                notes.put(Note(action_source.source, finished=tuple(outcomes)))
                refill(np.flatnonzero(~player.playing) if waiting and waiting[0].index in alone else done)
    return results


def disturbed(actions: np.ndarray, rows: EpisodeTracker, recording: Recording) -> np.ndarray:
    """The actions [N, C, A] with the noise that was asked for, which follows from episode and decision."""
    if not recording.noise:
        return actions
    width = actions[0].size
    noise = normal(recording.seed, "disturbance", rows.episode, rows.decision, width).reshape(actions.shape)
    return (actions + recording.noise * noise).astype(actions.dtype)


def num_startable(waiting: deque[EpisodeSpec], playing: np.ndarray, alone: frozenset[int]) -> int:
    """How many of the waiting episodes may begin now."""
    if waiting and waiting[0].index in alone:
        return int(not playing.any())
    return sum(spec.index not in alone for spec in waiting)
