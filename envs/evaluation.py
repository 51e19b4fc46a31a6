"""Plays a fixed list of episodes to the end, with a policy worker or an expert that chooses the actions, and records
them.

Some episodes are kept as videos, one mp4 each, written frame by frame so that memory stays flat; below each frame
stands how its episode goes (`EpisodeStatus`; it is drawn in `reporting/videos.py`). For a dataset, every env step is
kept with what was seen before it. Where a policy decides several env steps at once, the steps inside a decision are
observed as well, for the record only.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from embodied.core.rng import normal
from embodied.core.types import ChunkResult, EpisodeResult, EpisodeSpec, Note, Observation, Recording
from embodied.envs.capabilities import Expert
from embodied.envs.episode_player import EpisodePlayer, EpisodeTracker, PolicyClient, spread
from embodied.envs.own_modules import file_name
from embodied.envs.vector_env import VectorEnv
from embodied.reporting.videos import video_name
from embodied.runtime import Channel, Timers

if TYPE_CHECKING:
    from embodied.datasets import EpisodeBuffer
    from embodied.reporting.videos import Caption, VideoWriter


class VideoRecorder:
    """Open videos by env row: episodes whose index is in `recording.video_episodes`, from reset to end."""

    def __init__(self, env: VectorEnv, rows: EpisodeTracker, recording: Recording) -> None:
        self.env, self.rows, self.recording = env, rows, recording
        problem = env.video_problem() or no_encoder() if recording.video_episodes else ""
        self.episodes = frozenset() if problem else recording.video_episodes
        if problem:
            print(f"no videos: {problem}", file=sys.stderr)
        self.open: dict[int, VideoWriter] = {}
        self.statuses: dict[int, EpisodeStatus] = {}
        self.newest: dict[int, np.ndarray] = {}  # the last frame, which waits for the outcome to be written below it

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
            words = spec.task if instructions is None else instructions[row]
            self.statuses[row] = EpisodeStatus(words, self.env.env_spec.has_success)
        self._add_frames([row for row, _ in wanted])

    def decided(self, rows: np.ndarray, values: np.ndarray) -> None:
        """The policy or expert has decided for these rows."""
        for row, value in zip(rows, values, strict=False):  # an expert gives none
            if int(row) in self.statuses:
                self.statuses[int(row)].value = float(value)

    def on_frame(self, active: np.ndarray) -> None:
        """Called by the env after each env step with the rows that took it."""
        rewards, success = self.env.last_step()
        rows = [row for row in self.open if active[row]]
        self._write(rows)
        for row in rows:
            self.statuses[row].stepped(float(rewards[row]), bool(success[row]))
        self._add_frames(rows)

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
                writer.finish(name_of_video(outcome))

    def _write(self, rows: list[int]) -> None:
        """Write the newest frame of these rows: another comes."""
        for row in rows:
            self.open[row].add(self._captioned(row, self.newest[row]))

    def _captioned(self, row: int, frame: np.ndarray) -> np.ndarray:
        if not self.recording.overlay:
            return frame
        from embodied.reporting.videos import captioned

        return captioned(frame, self.statuses[row].caption())

    def _add_frames(self, rows: list[int]) -> None:
        """Draw a frame of each of these rows, with the cameras that were asked for."""
        if not rows:
            return
        from embodied.reporting.videos import beside

        frames = self.env.render_rows(np.array(rows))
        images = self.env.observe(np.array(rows)).get("images", {}) if self.recording.cameras else {}
        for row, frame in zip(rows, frames, strict=True):
            self.newest[row] = beside(frame, [camera[row] for camera in images.values()]) if images else frame.copy()


def no_encoder() -> str:
    from embodied.reporting.videos import encoder_problem

    return encoder_problem()


class EpisodeStatus:
    """The progress of an episode, for what is written under its frames."""

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
        from embodied.reporting.videos import Caption

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


def name_of_video(outcome: EpisodeResult) -> str:
    """episode-000_success_PushCube-v1_seed7.mp4"""
    called = Path(outcome.task).stem if outcome.task.endswith(".bddl") else outcome.task
    return video_name(outcome.index, outcome.success_once, file_name(called), outcome.seed)


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
        """Records what came of the decision."""
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


class ActionSource(Protocol):
    """Chooses the actions of the rows that play."""

    source: str  # its name in notes to the driver

    def begin(self, rows: np.ndarray) -> None:
        """Episodes begin on these rows."""

    def act(self, obs: Observation, rows: EpisodeTracker, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The next decisions of the rows `at` [len(at), C, A], which see `obs`, and what these are worth [len(at)],
        empty if unknown."""


class PolicyActions:
    """The actions of a policy worker."""

    def __init__(self, client: PolicyClient) -> None:
        self.client = client
        self.source = client.source

    def begin(self, rows: np.ndarray) -> None:
        """A policy remembers nothing."""

    def act(self, obs: Observation, rows: EpisodeTracker, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.client.ask(obs=obs, episodes=rows.episode[at], decisions=rows.decision[at])
        reply = self.client.answer()
        return reply.output.actions, reply.values


class ExpertActions:
    """The actions of an expert of the task."""

    def __init__(self, expert: Expert, source: str) -> None:
        self.expert = expert
        self.source = source

    def begin(self, rows: np.ndarray) -> None:
        self.expert.begin(rows)

    def act(self, obs: Observation, rows: EpisodeTracker, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.expert.act()[at, None], np.empty(0)


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
    """The number of waiting episodes that may begin now."""
    if waiting and waiting[0].index in alone:
        return int(not playing.any())
    return sum(spec.index not in alone for spec in waiting)
