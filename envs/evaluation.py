"""Plays a fixed list of episodes to the end; a policy worker or an expert chooses the actions.

`EpisodeTracker` in `episode_player.py` notes success, once and at the end. The caller chooses what else is kept: a
`Recording` names recorders, which work in the sim worker's process (`reporting/video_recorder.py`,
`datasets/episode_buffer.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Protocol

import numpy as np

from embodied.core.types import ChunkResult, EpisodeResult, EpisodeSpec, Note, Observation, Recording
from embodied.envs.action_sources import ActionSource, disturbed
from embodied.envs.episode_player import EpisodePlayer, spread
from embodied.envs.vector_env import VectorEnv
from embodied.runtime import Channel, Timers


class Recorder(Protocol):
    """Records the episodes of env rows. A context manager that discards unfinished episodes at the end. It is
    constructed with the env, the recording, and a function that shows the user a line, for a recorder that gives up."""

    def begin(self, rows: np.ndarray, specs: list[EpisodeSpec], instructions: np.ndarray | None) -> None:
        """Episodes begin on these rows."""

    def decided(self, obs: Observation, actions: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
        """The next decision of all rows, which observe `obs`; `values` are of the rows `at`, empty if unknown."""

    def on_frame(self, active: np.ndarray) -> None:
        """These rows, a mask, have taken an env step."""

    def played(self, result: ChunkResult) -> None:
        """Record the result of the decision."""

    def finish(self, rows: np.ndarray, outcomes: list[EpisodeResult]) -> None:
        """The episodes of these rows are over."""

    def __enter__(self) -> Recorder: ...

    def __exit__(self, *raised: object) -> None: ...


def play_episodes(
    env: VectorEnv,
    episodes: list[EpisodeSpec],
    action_source: ActionSource,
    recording: Recording,
    notes: Channel,
    alone: frozenset[int],
    timers: Timers,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[list[EpisodeResult]]:
    """Play a fixed list of episodes to the end; a free row takes the next one. After every decision yields the newly
    ended episodes, when the next decisions are requested but not yet awaited. `alone` are the last episodes; they are
    played one at a time. When `stop()` is true, the decision in progress is the last one, and open episodes are given
    up."""
    player, waiting = EpisodePlayer(env, timers), deque(episodes)
    outcomes: list[EpisodeResult] = []

    def warn(text: str) -> None:
        notes.put(Note(action_source.source, warning=text))

    def refill(free: np.ndarray) -> None:
        """Begin waiting episodes on free rows."""
        free = free[: num_startable(waiting, player.playing, alone)]
        if not len(free):
            return
        specs = [waiting.popleft() for _ in free]
        notes.put(Note(action_source.source, begun=tuple(spec.index for spec in specs)))
        player.begin(free, specs)
        action_source.begin(free)
        for recorder in recorders:
            recorder.begin(free, specs, player.obs.get("instruction"))

    def on_frame(moved: np.ndarray) -> None:
        for recorder in recorders:
            recorder.on_frame(moved)

    with ExitStack() as stack:
        recorders = [stack.enter_context(record(env, recording, warn)) for record in recording.recorders]
        refill(np.arange(env.num_envs))
        while player.playing.any() and not stop():
            at, seen = player.seen()
            action_source.ask(seen, player.rows, at)
            yield outcomes
            with timers.measure("wait"):
                decisions, values = action_source.answer()
            actions = spread(decisions, at, env.num_envs)
            for recorder in recorders:
                recorder.decided(player.obs, actions, at, values)
            result = player.play(disturbed(actions, player.rows, recording), on_frame)
            for recorder in recorders:
                recorder.played(result)
            done, outcomes = player.end(result)
            if len(done):
                for recorder in recorders:
                    recorder.finish(done, outcomes)
                notes.put(Note(action_source.source, finished=tuple(outcomes)))
                refill(np.flatnonzero(~player.playing) if waiting and waiting[0].index in alone else done)
        yield outcomes


def num_startable(waiting: deque[EpisodeSpec], playing: np.ndarray, alone: frozenset[int]) -> int:
    """The number of waiting episodes that may begin now."""
    if waiting and waiting[0].index in alone:
        return int(not playing.any())
    return sum(spec.index not in alone for spec in waiting)
