"""Where the actions of recorded or evaluated episodes come from: a policy worker, or an expert of the task.

An expert's actions may be executed with noise. Recorders get the expert's action, the env the noisy one, so
demonstrations also show how to recover.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from embodied.core.conversations import SamplingRule
from embodied.core.rng import normal
from embodied.core.types import Observation, Recording
from embodied.envs.capabilities import Expert
from embodied.envs.episode_player import EpisodeTracker
from embodied.envs.request_client import PolicyClient


class ActionSource(Protocol):
    """Chooses the actions of the rows that play."""

    source: str  # its name in notes to the driver

    def begin(self, rows: np.ndarray) -> None:
        """Episodes begin on these rows."""

    def ask(self, obs: Observation, rows: EpisodeTracker, at: np.ndarray) -> None:
        """Request the next decisions of the rows `at`, which see `obs`."""

    def answer(self) -> tuple[np.ndarray, np.ndarray]:
        """These decisions [len(at), C, A], and their values [len(at)], empty if unknown."""


class PolicyActions:
    """The actions of a policy worker, drawn by this rule (None: the round's rule)."""

    def __init__(self, client: PolicyClient, rule: SamplingRule | None = None) -> None:
        self.client, self.rule = client, rule
        self.source = client.source

    def begin(self, rows: np.ndarray) -> None:
        """Do nothing: a policy has no memory."""

    def ask(self, obs: Observation, rows: EpisodeTracker, at: np.ndarray) -> None:
        self.client.ask(obs, rows.episode[at], rows.decision[at], rule=self.rule)

    def answer(self) -> tuple[np.ndarray, np.ndarray]:
        reply = self.client.answer()
        return reply.output.actions, reply.values


class ExpertActions:
    """The actions of an expert of the task."""

    def __init__(self, expert: Expert, source: str) -> None:
        self.expert = expert
        self.source = source

    def begin(self, rows: np.ndarray) -> None:
        self.expert.begin(rows)

    def ask(self, obs: Observation, rows: EpisodeTracker, at: np.ndarray) -> None:
        self.at = at

    def answer(self) -> tuple[np.ndarray, np.ndarray]:
        return self.expert.act()[self.at, None], np.empty(0)


def disturbed(actions: np.ndarray, rows: EpisodeTracker, recording: Recording) -> np.ndarray:
    """The actions [N, C, A] with the requested noise, which follows from episode and decision."""
    if not recording.noise:
        return actions
    width = actions[0].size
    noise = normal(recording.seed, "disturbance", rows.episode, rows.decision, width).reshape(actions.shape)
    return (actions + recording.noise * noise).astype(actions.dtype)
