"""What a sim worker remembers of each env row between env steps: its episode, how far it is, how it went."""

from __future__ import annotations

import numpy as np

from embodied.core.types import ChunkResult, EpisodeResult, EpisodeSpec


class EpisodeTracker:
    """The open episodes of N env rows. An episode is a success at the end if its last live step was a success."""

    def __init__(self, num_envs: int, has_success: bool) -> None:
        self.has_success = has_success
        self.specs: list[EpisodeSpec | None] = [None] * num_envs
        self.episode = np.full(num_envs, -1, np.int64)
        self.started = np.zeros(num_envs, np.int64)  # episodes begun by each row
        self.decision = np.zeros(num_envs, np.int64)
        self.length = np.zeros(num_envs, np.int64)
        self.total_reward = np.zeros(num_envs)
        self.success_once = np.zeros(num_envs, bool)
        self.success_now = np.zeros(num_envs, bool)
        self.success_at_reset = np.zeros(num_envs, bool)

    def begin(self, rows: np.ndarray, specs: list[EpisodeSpec], success: np.ndarray | None) -> None:
        """These rows were just reset to these episodes."""
        for row, spec in zip(rows, specs, strict=True):
            self.specs[row] = spec
            self.episode[row] = spec.index
        self.started[rows] += 1
        for counter in (self.decision, self.length, self.total_reward):
            counter[rows] = 0
        at_reset = np.zeros(len(self.episode), bool) if success is None else success
        self.success_at_reset[rows] = at_reset[rows]
        self.success_once[rows] = at_reset[rows]
        self.success_now[rows] = at_reset[rows]

    def record(self, result: ChunkResult) -> None:
        """Count one decision's env steps."""
        mask = result.mask
        live = mask.any(axis=1)
        self.decision[live] += 1
        self.length += mask.sum(axis=1)
        self.total_reward += (result.rewards * mask).sum(axis=1)
        if result.success is not None:
            self.success_once |= (result.success & mask).any(axis=1)
            last = np.maximum(mask.sum(axis=1) - 1, 0)
            now = result.success[np.arange(len(mask)), last]
            self.success_now = np.where(live, now, self.success_now)

    def results(self, rows: np.ndarray) -> list[EpisodeResult]:
        """The outcome of rows whose episode just ended."""
        return [self._result(row) for row in rows]

    def _result(self, row: int) -> EpisodeResult:
        spec = self.specs[row]
        flags = (self.success_once, self.success_now, self.success_at_reset)
        once, at_end, at_reset = (bool(flag[row]) if self.has_success else None for flag in flags)
        return EpisodeResult(
            index=spec.index,
            task=spec.task,
            init_state_id=spec.init_state_id,
            seed=spec.seed,
            length=int(self.length[row]),
            total_reward=float(self.total_reward[row]),
            success_once=once,
            success_at_end=at_end,
            success_at_reset=at_reset,
        )

    ARRAYS = (
        "episode started decision length total_reward success_once success_now success_at_reset".split()
    )  # what a checkpoint keeps; the specs follow from the episode numbers

    def get_state(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name).copy() for name in self.ARRAYS}

    def set_state(self, state: dict[str, np.ndarray], specs: list[EpisodeSpec]) -> None:
        for name in self.ARRAYS:
            getattr(self, name)[:] = state[name]
        self.specs = list(specs)
