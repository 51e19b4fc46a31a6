"""Playing a fixed list of episodes to the end.

Every row takes the next episode of the list when its own is over; rows without one stay frozen and are shown to no
policy. Which episodes are played, and what happens in each, does not depend on how many rows there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from embodied.core.observations import take_rows, text_arrays
from embodied.core.rng import normal
from embodied.core.types import EpisodeResult, EpisodeSpec, Note, Recording
from embodied.envs.action_source import ActionSource
from embodied.envs.base import VectorEnv
from embodied.envs.episode_recorder import EpisodeRecorder
from embodied.envs.episode_tracker import EpisodeTracker
from embodied.envs.video_recorder import VideoRecorder
from embodied.runtime import Channel, Timers


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
    """`alone` are the last of the episodes; each is played with no other beside it. Once `stop` says so the decision in
    progress is the last one, and what is not over is given up."""
    waiting = deque(episodes)
    rows = EpisodeTracker(env.num_envs, env.env_spec.has_success)
    playing = np.zeros(env.num_envs, bool)
    results: list[EpisodeResult] = []

    def refill(free: np.ndarray):
        """Start waiting episodes on free rows; None if there were none."""
        free = free[: num_startable(waiting, playing, alone)]
        if not len(free):
            return None
        specs = [waiting.popleft() for _ in free]
        notes.put(Note(action_source.source, begun=tuple(spec.index for spec in specs)))
        by_row: list = [None] * env.num_envs
        mask = np.zeros(env.num_envs, bool)
        mask[free] = True
        for row, spec in zip(free, specs, strict=True):
            by_row[row] = spec
        with timers.measure("reset"):
            obs, info = env.reset(options={"reset_mask": mask, "episodes": by_row})
        rows.begin(free, specs, info.get("success"))
        action_source.begin(free)
        playing[free] = True
        films.begin(free, specs, obs.get("instruction"))
        drafts.begin(free, specs, obs.get("instruction"))
        return obs

    def on_frame(moved: np.ndarray) -> None:
        films.on_frame(moved)
        drafts.on_frame(moved)

    with VideoRecorder(env, rows, recording) as films, EpisodeRecorder(env, recording.drafts) as drafts:
        obs = refill(np.arange(env.num_envs))
        while playing.any() and not stop():
            at = np.flatnonzero(playing)
            with timers.measure("wait"):
                decisions, values = action_source.act(take_rows(text_arrays(obs), at), rows, at)
            actions = spread(decisions, at, env.num_envs)
            films.decided(at, values)
            drafts.decided(obs, actions)
            with timers.measure("step"):
                result = env.step_chunk(disturbed(actions, rows, recording), on_frame=on_frame)
            rows.record(result)
            drafts.record(result)
            obs = result.obs
            done = np.flatnonzero(result.done & playing)
            if len(done):
                outcomes = rows.results(done)
                results += outcomes
                films.finish(done, outcomes)
                drafts.finish(done, outcomes)
                notes.put(Note(action_source.source, finished=tuple(outcomes)))
                playing[done] = False
                fresh = refill(np.flatnonzero(~playing) if waiting and waiting[0].index in alone else done)
                obs = obs if fresh is None else fresh
    return results


def spread(actions: np.ndarray, at: np.ndarray, num_rows: int) -> np.ndarray:
    """These rows' actions among those of all rows; the others stand still."""
    everywhere = np.zeros((num_rows, *actions.shape[1:]), actions.dtype)
    everywhere[at] = actions
    return everywhere


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
