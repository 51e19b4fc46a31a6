"""Which episodes are played by which env row, and which learner rank owns which row: pure functions the driver and the
workers share.

Training in slices: env e plays episodes e, e + E, e + 2E, ... for E envs in total, so neither the number of sim workers
nor the order in which envs finish changes any episode. Training in groups: every initial state is played by as many
episodes in a row as a group has, by whatever env is free. Evaluation: a fixed list, disjoint from training by its
stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from embodied.core.rng import generator
from embodied.core.types import EpisodeSpec

GOLDEN_RATIO = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class EpisodeList:
    """An endless list of episodes, whose tasks take turns; `stream` separates training from evaluation.

    The k-th episode of a task has the same seed, and the same stored initial state, whatever the other tasks are.
    """

    seed: int
    stream: str  # "train" or "eval"
    tasks: tuple[str, ...]
    stored_states: int = 0  # stored initial states of every task, taken in order; 0: none are used
    group_size: int = 1  # episodes in a row that begin alike

    def __getitem__(self, index: int) -> EpisodeSpec:
        turn, task = divmod(index // self.group_size, len(self.tasks))
        seed = int(generator(self.seed, "episode", self.stream, turn).integers(2**31 - 1))
        return EpisodeSpec(self.tasks[task], turn % self.stored_states if self.stored_states else -1, seed, index)

    def first(self, count: int) -> list[EpisodeSpec]:
        return [self[index] for index in range(count)]


def head_start(env_ids: np.ndarray, max_episode_steps: int) -> np.ndarray:
    """How much of its step limit an env has used up when a staggered run begins.

    Multiples of the golden ratio spread evenly over the envs of each sim worker, however many there are.
    """
    return (env_ids * GOLDEN_RATIO % 1 * max_episode_steps).astype(np.int64)


def env_blocks(num_envs: int, ranks: int) -> list[range]:
    """Which global env ids each learner rank owns: contiguous, as equal as possible."""
    borders = [num_envs * rank // ranks for rank in range(ranks + 1)]
    return [range(a, b) for a, b in pairwise(borders)]
