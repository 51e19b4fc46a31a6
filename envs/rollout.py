"""One stage of a sim worker: a vector env that plays for training, its policy worker, and what is recorded.

The cycle of a decision is ask -> take -> ask: `ask` sends the current observation to the policy, `take` receives its
actions, plays and records them, and begins new episodes on the rows that are done. Two stages let the policy answer one
while the other is simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from embodied.core.arrays import host, room_for_many
from embodied.core.episodes import EpisodeList, head_start
from embodied.core.observations import Observation, join_rows, room_for, take_rows, write
from embodied.core.types import ActReply, ChunkResult, EpisodeResult, EpisodeSpec, Note, PlayedEpisodes, Trajectory
from embodied.envs.base import VectorEnv
from embodied.envs.episode_player import EpisodePlayer, spread
from embodied.envs.policy_client import PolicyClient
from embodied.runtime import Channel, Timers


class Stage(EpisodePlayer):
    def __init__(
        self,
        env: VectorEnv,
        name: str,
        env_ids: np.ndarray,
        num_envs_total: int,
        timers: Timers,
        journal: Channel | None = None,
    ) -> None:
        super().__init__(env, timers)
        self.name = name
        self.env_ids = env_ids
        self.num_envs_total = num_envs_total
        self.journal = journal
        self.client: PolicyClient | None = None
        self.final_obs: Observation | None = None  # of the rows `final_rows`, truncated in the last decision
        self.final_rows = np.empty(0, np.int64)
        self.valued: tuple[Observation | None, tuple[str, int] | None] = (None, None)  # the last, and in which question

    # Where rollouts are of a fixed number of decisions, every row goes on to its own next episode

    def reset(self, rows: np.ndarray, episodes: EpisodeList) -> None:
        """Begin the next episode of these rows: env e plays episodes e, e + E, e + 2E, ..."""
        next_index = (self.env_ids[rows] + self.rows.started[rows] * self.num_envs_total).tolist()
        if self.journal is not None:
            self.journal.put(Note(self.name, begun=tuple(next_index)))
        self.begin(rows, [episodes[index] for index in next_index], self._head_start())

    def _head_start(self) -> np.ndarray:
        """How much of the step limit counts as used: with `env.stagger` a part of every env's first episode."""
        first = (self.rows.started == 0) & self.env.config.stagger
        return first * head_start(self.env_ids, self.env.env_spec.max_episode_steps)

    def go_on(self, done: np.ndarray, result: ChunkResult, episodes: EpisodeList) -> None:
        """Keep what truncated episodes showed last, whose value is asked for next, and begin the next ones."""
        self.final_rows = np.flatnonzero(result.truncated.any(axis=1))
        self.final_obs = take_rows(self.obs, self.final_rows) if len(self.final_rows) else None
        if len(done):
            self.reset(done, episodes)

    # Where whole episodes are played, a free row takes the next one that waits

    def refill(self, free: np.ndarray, waiting: deque[EpisodeSpec]) -> None:
        if len(free) and waiting:
            specs = [waiting.popleft() for _ in free[: len(waiting)]]
            self.begin(free[: len(specs)], specs)

    # Both

    def ask(self, value_only: bool = False) -> None:
        """Show the policy the rows that play. What ends a rollout begins the next one, and is sent once."""
        (valued, question), self.valued = self.valued, (None, None)
        self.at, self.shown = self.seen()
        asked = self.client.ask(
            same_as=question if valued is self.obs else None,
            obs=self.shown,
            episodes=self.rows.episode[self.at],
            decisions=self.rows.decision[self.at],
            final_obs=self.final_obs,
            value_only=value_only,
        )
        if value_only:
            self.valued = self.obs, asked

    def receive(self) -> ActReply:
        with self.timers.measure("wait"):
            return self.client.answer()

    def take(self, record: Record | EpisodeRecord, refill: Callable[[np.ndarray, ChunkResult], None]) -> None:
        """Play and record the policy's answer to the last `ask`; `refill` begins episodes on the rows that are done."""
        reply = self.receive()
        episodes = self.rows.episode[self.at]
        result = self.play(spread(reply.output.actions, self.at, self.env.num_envs))
        record.decision(self, episodes, reply, result)
        done, outcomes = self.end(result)
        record.finished += outcomes
        refill(done, result)

    def close(self, record: Record) -> None:
        """Receive the values that the end of a rollout needs; the last request was `ask(value_only=True)`."""
        record.values_after(self, self.receive())
        self.final_obs, self.final_rows = None, np.empty(0, np.int64)


def play_whole(
    stages: Sequence[Stage], shares: Sequence[Sequence[EpisodeSpec]]
) -> tuple[PlayedEpisodes, list[EpisodeResult]]:
    """Play each stage's share of episodes to the end. Stages take turns, so that the policy works for one while another
    is simulated."""
    records = [EpisodeRecord() for _ in stages]
    waiting = [deque(share) for share in shares]
    for stage, queue in zip(stages, waiting, strict=True):
        stage.playing[:] = False
        stage.refill(np.arange(stage.env.num_envs), queue)
        if stage.playing.any():
            stage.ask()
    while any(stage.playing.any() for stage in stages):
        for stage, record, queue in zip(stages, records, waiting, strict=True):
            if stage.playing.any():
                stage.take(record, lambda done, _, stage=stage, queue=queue: stage.refill(done, queue))
                if stage.playing.any():
                    stage.ask()
    finished = [result for record in records for result in record.finished]
    return put_together([decision for record in records for decision in record.decisions]), finished


class Record:
    """The arrays of one trajectory, filled decision by decision (allocated when the first shows its shapes)."""

    def __init__(self, source: str, horizon: int, env_ids: np.ndarray) -> None:
        self.source = source
        self.horizon = horizon
        self.env_ids = env_ids
        self.taken = 0  # decisions that are recorded
        self.handed = 0  # decisions that have been handed on
        self.finished: list[EpisodeResult] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.obs: dict[str, object] = {}
        self.replay: dict[str, np.ndarray] = {}
        self.values: np.ndarray | None = None
        self.final_values: np.ndarray | None = None

    def decision(self, stage: Stage, episodes: np.ndarray, reply: ActReply, result: ChunkResult) -> None:
        num, t = len(self.env_ids), self.taken
        parts = {
            "actions": reply.output.actions,
            "logprobs": reply.output.logprobs,
            "rewards": result.rewards,
            "terminated": result.terminated,
            "truncated": result.truncated,
            "mask": result.mask,
            "versions": np.full(num, reply.version, np.int64),
            "episodes": episodes,
        }
        if self.values is None:
            self.arrays = {name: room_for_many(part, self.horizon) for name, part in parts.items()}
            self.replay = {name: room_for_many(part, self.horizon) for name, part in reply.output.replay.items()}
            self.obs = room_for(stage.shown, self.horizon)
            self.values = np.zeros((self.horizon + 1, num), reply.values.dtype)
            self.final_values = np.zeros((self.horizon, num), reply.values.dtype)
        for name, part in parts.items():
            self.arrays[name][t] = part
        for name, part in reply.output.replay.items():
            self.replay[name][t] = part
        write(self.obs, t, stage.shown)
        self.values_after(stage, reply)
        self.taken += 1

    def values_after(self, stage: Stage, reply: ActReply) -> None:
        """The values of what is seen after the last decision that is recorded."""
        self.values[self.taken] = reply.values
        if len(stage.final_rows):
            self.final_values[self.taken - 1, stage.final_rows] = reply.final_values

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


class EpisodeRecord:
    """What happened in whole episodes, decision by decision."""

    def __init__(self) -> None:
        self.finished: list[EpisodeResult] = []
        self.decisions: list[tuple[Observation, dict[str, np.ndarray], dict[str, np.ndarray]]] = []

    def decision(self, stage: Stage, episodes: np.ndarray, reply: ActReply, result: ChunkResult) -> None:
        arrays = {
            "episodes": episodes,
            "actions": reply.output.actions,
            "logprobs": reply.output.logprobs,
            "rewards": result.rewards[stage.at],
            "mask": result.mask[stage.at],
            "versions": np.full(len(stage.at), reply.version, np.int64),
        }
        self.decisions.append((stage.shown, arrays, reply.output.replay))


def put_together(decisions: list[tuple[Observation, dict, dict]]) -> PlayedEpisodes:
    """Sorted by episode; within one, decisions are in the order in which they were taken."""
    joined = {name: np.concatenate([host(arrays[name]) for _, arrays, _ in decisions]) for name in decisions[0][1]}
    replay = {name: np.concatenate([host(extra[name]) for _, _, extra in decisions]) for name in decisions[0][2]}
    of = joined.pop("episodes")
    order = np.argsort(of, kind="stable")
    episodes, lengths = np.unique(of, return_counts=True)
    return PlayedEpisodes(
        episodes=episodes,
        lengths=lengths,
        obs=take_rows(join_rows([obs for obs, _, _ in decisions]), order),
        replay={name: array[order] for name, array in replay.items()},
        **{name: array[order] for name, array in joined.items()},
    )
