"""The actions of an expert that demonstrates a task, and the noise that they are executed with.

A recorder is shown what the expert wanted, the env what the noise made of it: so demonstrations also show how one finds
back.
"""

from __future__ import annotations

import numpy as np

from embodied.core.rng import normal
from embodied.core.types import Observation, Recording
from embodied.envs.capabilities import Expert
from embodied.envs.episode_player import EpisodeTracker


class ExpertActions:
    """The actions of an expert of the task."""

    def __init__(self, expert: Expert, source: str) -> None:
        self.expert = expert
        self.source = source

    def begin(self, rows: np.ndarray) -> None:
        self.expert.begin(rows)

    def act(self, obs: Observation, rows: EpisodeTracker, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.expert.act()[at, None], np.empty(0)


def disturbed(actions: np.ndarray, rows: EpisodeTracker, recording: Recording) -> np.ndarray:
    """The actions [N, C, A] with the noise that was asked for, which follows from episode and decision."""
    if not recording.noise:
        return actions
    width = actions[0].size
    noise = normal(recording.seed, "disturbance", rows.episode, rows.decision, width).reshape(actions.shape)
    return (actions + recording.noise * noise).astype(actions.dtype)
