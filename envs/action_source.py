"""Who chooses the actions of a fixed list of episodes: a policy worker at the other end of a line, or a script.

A pilot is told of every beginning and sees only the rows that play.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from embodied.core.types import Observation

if TYPE_CHECKING:
    from embodied.envs.episode_player import EpisodeTracker
    from embodied.envs.rollout import PolicyClient


class Expert(Protocol):
    """A script that solves a task, for all rows of one env."""

    def begin(self, rows: np.ndarray) -> None:
        """These rows were just reset."""

    def act(self) -> np.ndarray:
        """[N, A]: the next action of every row; those of rows without an open episode are ignored."""


class ActionSource(Protocol):
    source: str  # who it is, in notes to the driver

    def begin(self, rows: np.ndarray) -> None: ...

    def act(self, obs: Observation, rows: EpisodeTracker, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The next decisions of the rows `at` [len(at), C, A], which see `obs`, and what these are worth [len(at)],
        or nothing where nobody says."""


class PolicyActions:
    def __init__(self, line: PolicyClient) -> None:
        self.line = line
        self.source = line.source

    def begin(self, rows: np.ndarray) -> None:
        """A policy remembers nothing."""

    def act(self, obs: Observation, rows: EpisodeTracker, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.line.ask(obs=obs, episodes=rows.episode[at], decisions=rows.decision[at])
        reply = self.line.answer()
        return reply.output.actions, reply.values


class ExpertActions:
    def __init__(self, expert: Expert, source: str) -> None:
        self.expert = expert
        self.source = source

    def begin(self, rows: np.ndarray) -> None:
        self.expert.begin(rows)

    def act(self, obs: Observation, rows: EpisodeTracker, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.expert.act()[at, None], np.empty(0)
