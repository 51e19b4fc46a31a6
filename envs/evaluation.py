"""Playing a fixed list of episodes to the end.

Every row takes the next episode of the list when its own is over; rows without one stay frozen. Which episodes are
played, and what happens in each, does not depend on how many rows there are.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np

from embodied.data import ActReply, ActRequest, EpisodeResult, EpisodeSpec
from embodied.envs.base import VectorEnv
from embodied.envs.film import Films
from embodied.envs.rows import Rows
from embodied.runtime import Channel, Timers


def play_episodes(
    env: VectorEnv,
    episodes: list[EpisodeSpec],
    source: str,
    requests: Channel,
    replies: Channel,
    film: frozenset[int],
    folder: Path | None,
    timers: Timers,
) -> list[EpisodeResult]:
    waiting = deque(episodes)
    rows = Rows(env.num_envs, env.env_spec.has_success)
    playing = np.zeros(env.num_envs, bool)
    results: list[EpisodeResult] = []
    with Films(env, rows, film, folder) as films:
        obs = refill(env, rows, playing, np.arange(env.num_envs), waiting, films)
        while playing.any():
            requests.put(ActRequest(source, obs, rows.episode.copy(), rows.decision.copy()))
            with timers.measure("wait"):
                reply: ActReply = replies.get()
            with timers.measure("step"):
                result = env.step_chunk(reply.output.actions, on_frame=films.on_frame)
            rows.record(result)
            obs = result.obs
            done = np.flatnonzero(result.done & playing)
            if len(done):
                outcomes = rows.results(done)
                results += outcomes
                films.finish(done, outcomes)
                playing[done] = False
                with timers.measure("reset"):
                    fresh = refill(env, rows, playing, done, waiting, films)
                obs = obs if fresh is None else fresh
    return results


def refill(env, rows: Rows, playing: np.ndarray, free: np.ndarray, waiting: deque, films: Films):
    """Start waiting episodes on free rows; None if there were none."""
    free = free[: len(waiting)]
    if not len(free):
        return None
    specs = [waiting.popleft() for _ in free]
    by_row: list = [None] * env.num_envs
    mask = np.zeros(env.num_envs, bool)
    mask[free] = True
    for row, spec in zip(free, specs, strict=True):
        by_row[row] = spec
    obs, info = env.reset(options={"reset_mask": mask, "episodes": by_row})
    rows.begin(free, specs, info.get("success"))
    playing[free] = True
    films.begin(free, specs)
    return obs
