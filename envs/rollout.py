"""One stage of a sim worker: a vector env, its open episodes, and the trajectory being recorded.

The cycle of a decision is ask -> take -> ask: `ask` sends the current observation to the policy, `take` receives its
actions, plays them, records everything and resets what finished. Two stages let the policy answer one while the other
is simulated.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from embodied.core.arrays import room_for_many
from embodied.core.episodes import EpisodeList, head_start
from embodied.core.observations import Observation, room_for, take_rows, text_arrays, write
from embodied.core.types import ActReply, EpisodeResult, Note, Trajectory
from embodied.envs.base import VectorEnv
from embodied.envs.episode_tracker import EpisodeTracker
from embodied.envs.policy_client import PolicyClient
from embodied.runtime import Channel, Timers


class Stage:
    def __init__(
        self,
        env: VectorEnv,
        name: str,
        env_ids: np.ndarray,
        num_envs_total: int,
        timers: Timers,
        journal: Channel | None = None,
    ) -> None:
        self.env = env
        self.name = name
        self.env_ids = env_ids
        self.num_envs_total = num_envs_total
        self.timers = timers
        self.journal = journal
        self.rows = EpisodeTracker(env.num_envs, env.env_spec.has_success)
        self.obs: Observation | None = None
        self.final_obs: Observation | None = None
        self.final_rows = np.empty(0, np.int64)
        self.line: PolicyClient | None = None
        self.valued: tuple[Observation | None, tuple[str, int] | None] = (None, None)  # the last, and in which question
        self.step_s = self.reset_s = self.wait_s = 0.0

    def reset(self, rows: np.ndarray, episodes: EpisodeList) -> None:
        """Begin the next episode of these rows: env e plays episodes e, e + E, e + 2E, ..."""
        started = perf_counter()
        next_index = (self.env_ids[rows] + self.rows.started[rows] * self.num_envs_total).tolist()
        if self.journal is not None:
            self.journal.put(Note(self.name, begun=tuple(next_index)))
        specs = [episodes[index] for index in next_index]
        by_row: list = [None] * self.env.num_envs
        for row, spec in zip(rows, specs, strict=True):
            by_row[row] = spec
        mask = np.zeros(self.env.num_envs, bool)
        mask[rows] = True
        options = {"reset_mask": mask, "episodes": by_row, "elapsed": self._head_start()}
        obs, info = self.env.reset(options=options)
        self.obs = text_arrays(obs)
        self.rows.begin(rows, specs, info.get("success"))
        self.reset_s += self.timers.add("reset", started)

    def _head_start(self) -> np.ndarray:
        """How much of the step limit counts as used: with `env.stagger` a part of every env's first episode."""
        first = (self.rows.started == 0) & self.env.config.stagger
        return first * head_start(self.env_ids, self.env.env_spec.max_episode_steps)

    def ask(self, value_only: bool = False) -> None:
        """The observation that ends a rollout begins the next one; it is sent once."""
        (valued, question), self.valued = self.valued, (None, None)
        asked = self.line.ask(
            same_as=question if valued is self.obs else None,
            obs=self.obs,
            episodes=self.rows.episode.copy(),
            decisions=self.rows.decision.copy(),
            final_obs=self.final_obs,
            value_only=value_only,
        )
        if value_only:
            self.valued = self.obs, asked

    def receive(self) -> ActReply:
        started = perf_counter()
        reply = self.line.answer()
        self.wait_s += self.timers.add("wait", started)
        return reply

    def take(self, record: Record, t: int, episodes: EpisodeList) -> None:
        """Play the policy's answer to the last `ask` and record it as decision t."""
        reply = self.receive()
        record.finals(t - 1, self.final_rows, reply.final_values)
        started = perf_counter()
        result = self.env.step_chunk(reply.output.actions)
        self.step_s += self.timers.add("step", started)
        record.decision(t, self.obs, reply, result, self.rows.episode)
        self.rows.record(result)
        self.obs, self.final_obs, self.final_rows = text_arrays(result.obs), None, np.empty(0, np.int64)
        done = np.flatnonzero(result.done)
        if len(done):
            record.finished += self.rows.results(done)
            self.final_rows = np.flatnonzero(result.truncated.any(axis=1))
            if len(self.final_rows):
                self.final_obs = take_rows(self.obs, self.final_rows)
            self.reset(done, episodes)

    def close(self, record: Record) -> None:
        """Receive the values that the end of a rollout needs; the last request was `ask(value_only=True)`."""
        reply = self.receive()
        record.finals(record.horizon - 1, self.final_rows, reply.final_values)
        record.values[record.horizon] = reply.values
        self.final_obs, self.final_rows = None, np.empty(0, np.int64)


class Record:
    """The arrays of one trajectory, filled decision by decision (allocated when the first shows its shapes)."""

    def __init__(self, source: str, horizon: int, env_ids: np.ndarray) -> None:
        self.source = source
        self.horizon = horizon
        self.env_ids = env_ids
        self.handed = 0  # decisions that have been handed on
        self.finished: list[EpisodeResult] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.obs: dict[str, object] = {}
        self.replay: dict[str, np.ndarray] = {}
        self.values: np.ndarray | None = None
        self.final_values: np.ndarray | None = None

    def decision(self, t: int, obs: Observation, reply: ActReply, result, episode: np.ndarray) -> None:
        num = len(self.env_ids)
        parts = {
            "actions": reply.output.actions,
            "logprobs": reply.output.logprobs,
            "rewards": result.rewards,
            "terminated": result.terminated,
            "truncated": result.truncated,
            "mask": result.mask,
            "versions": np.full(num, reply.version, np.int64),
            "episodes": episode,
        }
        if self.values is None:
            self.arrays = {name: room_for_many(part, self.horizon) for name, part in parts.items()}
            self.replay = {name: room_for_many(part, self.horizon) for name, part in reply.output.replay.items()}
            self.obs = room_for(obs, self.horizon)
            self.values = np.zeros((self.horizon + 1, num), reply.values.dtype)
            self.final_values = np.zeros((self.horizon, num), reply.values.dtype)
        for name, part in parts.items():
            self.arrays[name][t] = part
        for name, part in reply.output.replay.items():
            self.replay[name][t] = part
        write(self.obs, t, obs)
        self.values[t] = reply.values

    def finals(self, t: int, rows: np.ndarray, final_values: np.ndarray | None) -> None:
        if len(rows):
            self.final_values[t, rows] = final_values

    def trajectory(self, columns: slice, end: int) -> Trajectory:
        """The part of the record that belongs to these env rows: the decisions before `end` that have not been handed
        on. None of them is written to any more when the answer to the question after them has been taken."""
        piece = slice(self.handed, end)
        cut = {name: array[piece, columns] for name, array in self.arrays.items()}
        return Trajectory(
            env_ids=self.env_ids[columns],
            obs=take_rows(self.obs, (piece, columns)),
            values=self.values[self.handed : end + 1, columns],
            final_values=self.final_values[piece, columns],
            replay={name: array[piece, columns] for name, array in self.replay.items()},
            source=self.source,
            first=self.handed,
            last=end == self.horizon,
            **cut,
        )
