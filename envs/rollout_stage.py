"""One stage of a sim worker: a vector env that plays rollouts for training, and the record of what it plays.

The cycle of a decision is ask -> take -> ask: `ask` sends the current observation to the policy, `take` receives its
actions, plays and records them, and begins new episodes on the rows that are done. Two stages let the policy answer one
while the other is simulated (`step_stages`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from embodied.core.arrays import Observation, concatenate, host, is_tensor, map_obs, take_rows
from embodied.core.types import (
    ActReply,
    Array,
    ChunkResult,
    EpisodeList,
    EpisodeResult,
    EpisodeSpec,
    Note,
    Trajectory,
    head_start,
    in_sequences,
)
from embodied.envs.episode_player import EpisodePlayer, PolicyClient, spread
from embodied.envs.vector_env import VectorEnv
from embodied.runtime import Channel, Timers

Refill = Callable[[np.ndarray, ChunkResult], None]  # begins episodes on rows that are done


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
        self.valued: tuple[Observation | None, tuple[str, int] | None] = (None, None)  # the last, and in which request

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

    def refill(self, free: np.ndarray, _: ChunkResult | None = None, *, waiting: deque[EpisodeSpec]) -> None:
        """Begin waiting episodes on free rows."""
        if len(free) and waiting:
            specs = [waiting.popleft() for _ in free[: len(waiting)]]
            self.begin(free[: len(specs)], specs)

    # Both

    def ask(self, value_only: bool = False) -> None:
        """Send the policy what the playing rows see. The observation that ends a rollout begins the next one, and is
        sent once."""
        (valued, request_id), self.valued = self.valued, (None, None)
        self.at, self.shown = self.seen()
        asked = self.client.ask(
            same_as=request_id if valued is self.obs else None,
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

    def take(self, record: Record, refill: Refill) -> None:
        """Play and record the policy's answer to the last `ask`; `refill` begins episodes on the rows that are done."""
        reply = self.receive()
        episodes = self.rows.episode[self.at]
        result = self.play(spread(reply.output.actions, self.at, self.env.num_envs))
        record.decision(self, episodes, reply, result)
        done, outcomes = self.end(result)
        record.end(outcomes)
        refill(done, result)

    def close(self, record: Record) -> None:
        """Receive the values that the end of a rollout needs; the last request was `ask(value_only=True)`."""
        record.value(self, self.receive())
        self.final_obs, self.final_rows = None, np.empty(0, np.int64)


def step_stages(
    stages: Sequence[Stage], records: Sequence[Record], refills: Sequence[Refill], horizon: int = 0
) -> Iterator[int]:
    """Play until no row does, or `horizon` decisions. Stages take turns, so that the policy works for one while another
    is simulated; yields the number of decisions after each round."""
    for stage in stages:
        if stage.playing.any():
            stage.ask()
    decisions = 0
    while any(stage.playing.any() for stage in stages) and (not horizon or decisions < horizon):
        decisions += 1
        for stage, record, refill in zip(stages, records, refills, strict=True):
            if stage.playing.any():
                stage.take(record, refill)
                if stage.playing.any():
                    stage.ask(value_only=decisions == horizon)
        yield decisions


class Record:
    """Records what one stage plays, decision by decision, until it is handed on as a trajectory."""

    def __init__(self, source: str, horizon: int = 0) -> None:
        """Holds `horizon` decisions of every env row, with values; without a horizon whole episodes, without values."""
        self.source, self.horizon = source, horizon
        self.handed = 0  # decisions that have been handed on
        self.env_steps = 0
        self.finished: list[EpisodeResult] = []
        self.decisions: list[tuple[np.ndarray, Observation]] = []  # ids of the sequences, and arrays of their decisions

    def decision(self, stage: Stage, episodes: np.ndarray, reply: ActReply, result: ChunkResult) -> None:
        at, output = stage.at, map_obs(owned, {**vars(reply.output), "values": host(reply.values)})
        if self.horizon:
            self.value(stage, reply)
        arrays = {
            "obs": stage.shown,
            "replay": output["replay"],
            "actions": output["actions"],
            "logprobs": output["logprobs"],
            "rewards": result.rewards[at],
            "terminated": result.terminated[at],
            "truncated": result.truncated[at],
            "mask": result.mask[at],
            "versions": np.full(len(at), reply.version, np.int64),
            "episodes": episodes,
        }
        if self.horizon:
            arrays |= {"values": output["values"], "next_values": np.zeros_like(output["values"])}
        self.add(stage.env_ids[at] if self.horizon else episodes, arrays)
        self.env_steps += int(arrays["mask"].sum())

    def add(self, ids: np.ndarray, arrays: Observation) -> None:
        """A decision of these sequences."""
        self.decisions.append((ids, arrays))

    def end(self, outcomes: Sequence[EpisodeResult]) -> None:
        """These episodes ended in the last decision."""
        self.finished += outcomes

    def value(self, stage: Stage, reply: ActReply) -> None:
        """Note the values of what was seen after the last decision."""
        if self.decisions:
            _, arrays = self.decisions[-1]
            arrays["next_values"][:] = reply.values
            if len(stage.final_rows):
                arrays["next_values"][stage.final_rows] = reply.final_values

    def trajectory(self, end: int | None = None) -> Trajectory:
        """The decisions before `end` (None: all) that have not been handed on."""
        count = len(self.decisions) if end is None else end - self.handed
        taken, self.decisions = self.decisions[:count], self.decisions[count:]
        ids, lengths, arrays = in_sequences(taken)
        first, self.handed = self.handed, self.handed + count
        last = not self.horizon or self.handed == self.horizon
        return Trajectory(ids=ids, lengths=lengths, source=self.source, first=first, last=last, **arrays)


class EpisodeStream(Record):
    """Each whole episode is put into `store` as it ends, and then noted in the journal."""

    def __init__(self, source: str, store: dict[int, Trajectory], journal: Channel) -> None:
        super().__init__(source)
        self.store, self.journal = store, journal
        # By episode, its decisions: the arrays of all that were taken together, and its row in them.
        self.open: dict[int, list[tuple[Observation, int]]] = {}

    def add(self, ids: np.ndarray, arrays: Observation) -> None:
        for row, episode in enumerate(ids.tolist()):
            self.open.setdefault(episode, []).append((arrays, row))

    def end(self, outcomes: Sequence[EpisodeResult]) -> None:
        super().end(outcomes)
        for result in outcomes:
            decisions, rows = zip(*self.open.pop(result.index), strict=True)
            whole = map_obs(partial(rows_of, rows), *decisions)
            ids, lengths = np.array([result.index]), np.array([len(rows)])
            self.store[result.index] = Trajectory(ids=ids, lengths=lengths, **whole)
        if outcomes:
            self.journal.put(Note(self.source, finished=tuple(outcomes)))


def rows_of(rows: Sequence[int], *arrays: Array) -> Array:
    """A row of each of these arrays, as one array."""
    return concatenate([array[row : row + 1] for array, row in zip(arrays, rows, strict=True)])


def owned(array: Array) -> Array:
    """A copy, since the memory of a message is used again."""
    return array if is_tensor(array) else np.array(array)
