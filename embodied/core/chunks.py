"""Chunks of actions that are played while the next chunk is computed.

With a delay of d env steps a robot goes on with its present chunk for d steps after an observation; then the new
chunk takes over, with its action for that step. A chunk of L actions ends with the d actions that bridge the next delay
and the `overlap` o actions that the next chunk predicts as well: a decision plays L - d - o env steps.

L = 8, d = 2, o = 1: observed at step 5, and again at step 10. An answer's first action is for the observed step.

    env step               5    6    7      8    9   | 10   11   12
    the chunk before     old  old  old               |
    the answer                     new    new  new   | new  new  new
    played               old  old  mixed  new  new   | the next chunk's "old"
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied.core.arrays import host
from embodied.core.errors import ConfigError


@dataclass(frozen=True)
class ChunkRule:
    """How chunks follow each other."""

    delay: int = 0  # env steps from an observation to the first action from it
    overlap: int = 0  # actions after these that both chunks predict
    real_time: bool = False  # the policy makes a chunk that continues the one before; else both are mixed

    @property
    def num_continued(self) -> int:
        """Actions of a chunk that are played, or mixed, after the next observation."""
        return self.delay + self.overlap

    def check(self, length: int, what: str) -> None:
        """Refuse chunks of `length` actions if they are too short."""
        if length == 1 and not self.overlap:
            return  # single actions are played late, one after the other
        least = self.num_continued + max(self.delay, 1)
        if length < least:
            raise ConfigError(
                f"{what} is too short for eval.delay={self.delay} and policy.chunks.overlap={self.overlap}: it takes "
                f"twice the delay and the overlap; try policy.chunk={least}, or a shorter delay"
            )

    def weights_of_old(self) -> np.ndarray:
        """The weights [K] of the last actions of the old chunk in the mixed actions."""
        mixed = np.zeros(self.overlap) if self.real_time else self._falling()
        return np.concatenate([np.ones(self.delay), mixed]).astype(np.float32)

    def weights(self) -> np.ndarray:
        """The weights [K] of the `num_continued` actions by which a policy keeps to the old chunk: 1 for actions that
        are played before the answer comes, then falling as in "Real-Time Execution of Action Chunking Flow Policies"
        (2025)."""
        falling = self._falling()
        return np.concatenate([np.ones(self.delay), falling * np.expm1(falling) / np.expm1(1)]).astype(np.float32)

    def _falling(self) -> np.ndarray:
        return 1 - np.arange(1, self.overlap + 1) / (self.overlap + 1)

    def join(self, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        """The actions [N, L, A] from an observation on: the rest of the old chunk [N, K, A], then the new one."""
        if not self.num_continued:
            return new
        weights = self.weights_of_old()[:, None]
        whole = np.isin(weights, (0, 1)).all()
        if not whole and new.dtype.kind not in "f":
            raise ConfigError("policy.chunks.overlap mixes two actions, and this env's are choices; leave it out")
        first = new[:, : self.num_continued]
        mixed = np.where(weights == 1, old, first) if whole else weights * old + (1 - weights) * first
        return np.concatenate([mixed.astype(new.dtype), new[:, self.num_continued :]], axis=1)


class LateActions:
    """What env rows play under such a rule. The world stands still for the first answer of an episode."""

    def __init__(self, rule: ChunkRule, num_rows: int, action_dim: int) -> None:
        self.rule = rule
        self.old = np.zeros((num_rows, rule.num_continued, action_dim), np.float32)  # the rest of each row's chunk
        self.is_known = np.zeros(num_rows, bool)

    def begin(self, rows: np.ndarray) -> None:
        """Episodes begin on these rows."""
        self.is_known[rows] = False

    def shown(self, obs: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
        """The rows' observation for the policy, with the actions that it should continue."""
        if not self.rule.real_time:
            return obs
        weights = self.is_known[rows, None] * self.rule.weights()
        return obs | {"previous": {"actions": self.old[rows], "weights": weights.astype(np.float32)}}

    def play(self, answers: Any) -> np.ndarray:
        """The actions to be played now, of all rows' answers [N, L, A]."""
        new, kept = host(answers), self.rule.num_continued
        self.rule.check(new.shape[1], f"a chunk of {new.shape[1]} actions")
        fresh = ~self.is_known
        self.is_known[:] = True
        if new.shape[1] == 1:  # each is played `delay` steps after its observation
            self.old[fresh] = new[fresh]
            queue = np.concatenate([self.old.astype(new.dtype), new], axis=1)
            played, self.old = queue[:, :1], queue[:, 1:]
            return played
        joined = self.rule.join(self.old, new)
        joined[fresh] = new[fresh]
        played, self.old = joined[:, : joined.shape[1] - kept], joined[:, joined.shape[1] - kept :]
        return played
