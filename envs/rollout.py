"""One stage of a sim worker: a vector env that plays for training, its policy worker, and what is recorded.

The cycle of a decision is ask -> take -> ask: `ask` sends the current observation to the policy, `take` receives its
actions, plays and records them, and begins new episodes on the rows that are done. Two stages let the policy answer one
while the other is simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from embodied.core.arrays import host, is_tensor
from embodied.core.episodes import EpisodeList, head_start
from embodied.core.observations import Observation, map_obs, take_rows
from embodied.core.types import (
    ActReply,
    ActRequest,
    Array,
    AskAgain,
    ChunkResult,
    EpisodeResult,
    EpisodeSpec,
    Note,
    Trajectory,
    in_sequences,
)
from embodied.envs.base import VectorEnv
from embodied.envs.episode_player import EpisodePlayer, spread
from embodied.runtime import Channel, Timers


class PolicyClient:
    """Asks a stage's policy worker, and takes the answer to the last question from whichever worker gives it.

    A policy worker may die between question and answer, or another one may take its place. That one knows of no
    question, so the stage is sent `AskAgain`; the answer is the same, since it depends on the question alone, and a
    second one is ignored.
    """

    def __init__(self, source: str, requests: Channel, replies: Channel) -> None:
        self.source = source
        self.requests = requests
        self.replies = replies
        self.question = ActRequest(source)

    def ask(self, same_as: tuple[str, int] | None = None, **what: Any) -> tuple[str, int]:
        """-> what this question can be referred to by. Where its `obs` is the `same_as` that of an earlier one, it goes
        without, unless it has to be asked again."""
        self.question = ActRequest(self.source, self.question.number + 1, **what)
        short = replace(self.question, obs=None, same_as=same_as)
        self.requests.put(self.question if same_as is None else short)
        return self.question.source, self.question.number

    def answer(self) -> ActReply:
        while True:
            reply: ActReply | AskAgain = self.replies.get()
            if reply.source != self.source:
                continue
            if isinstance(reply, AskAgain):
                if reply.requests is not None:
                    self.requests = reply.requests
                self.requests.put(self.question)
            elif reply.number == self.question.number:
                return reply


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

    def refill(self, free: np.ndarray, _: ChunkResult | None = None, *, waiting: deque[EpisodeSpec]) -> None:
        """Begin waiting episodes on free rows."""
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


def take_turns(
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
    """What one stage plays, decision by decision, until it is handed on as a trajectory."""

    def __init__(self, source: str, horizon: int = 0) -> None:
        """Of so many decisions of every env row, with values; or of whole episodes without."""
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
        """What was seen after the last decision is worth this."""
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
        self.open: dict[int, list[tuple[np.ndarray, Observation]]] = {}  # by episode, its decisions

    def add(self, ids: np.ndarray, arrays: Observation) -> None:
        for row, episode in enumerate(ids.tolist()):  # copies: what others played need not stay as long
            self.open.setdefault(episode, []).append((ids[[row]], take_rows(arrays, [row])))

    def end(self, outcomes: Sequence[EpisodeResult]) -> None:
        super().end(outcomes)
        for result in outcomes:
            ids, lengths, arrays = in_sequences(self.open.pop(result.index))
            self.store[result.index] = Trajectory(ids=ids, lengths=lengths, **arrays)
        if outcomes:
            self.journal.put(Note(self.source, finished=tuple(outcomes)))


def owned(array: Array) -> Array:
    """A copy of what lies in a message's memory, which is used again when nobody holds it."""
    return array if is_tensor(array) else np.array(array)
