"""Which training episodes each env row has begun, and of which of them the outcome is known.

Sim workers note every episode before it begins, so a successor of one that died begins the next: no episode is played
twice, and those whose outcome was lost are counted.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from embodied.core.types import EpisodeResult


class EpisodeCounter:
    def __init__(self, num_envs: int) -> None:
        self.begun = np.zeros(num_envs, np.int64)  # episodes that each env row has begun
        self.settled = np.zeros(num_envs, np.int64)  # those of them that ended or were given up

    def begin(self, indices: Iterable[int]) -> None:
        """Env row e plays episodes e, e + E, e + 2E, ..."""
        for index in indices:
            count, env = divmod(index, len(self.begun))
            self.begun[env] = max(self.begun[env], count + 1)

    def finish(self, results: Iterable[EpisodeResult]) -> None:
        for result in results:
            self.settled[result.index % len(self.begun)] += 1

    def abandon(self, envs: range) -> int:
        """Give up what these rows have begun; -> how many episodes."""
        rows = slice(envs.start, envs.stop)
        lost = int((self.begun[rows] - self.settled[rows]).sum())
        self.settled[rows] = self.begun[rows]
        return lost

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Continue from the state of all env rows: each has one open episode, a new one where it was abandoned."""
        envs, started = state["env_ids"], state["rows.started"]
        goes_on = any(name.startswith("env.") for name in state)
        self.begun[envs] = started if goes_on else started + (state["rows.length"] > 0)
        self.settled[envs] = self.begun[envs] - 1
