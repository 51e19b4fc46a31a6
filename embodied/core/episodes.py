"""Which episodes are played by which env row, and which learner rank owns which row: pure functions the driver and the
workers share.

Training in slices: env e plays episodes e, e + E, e + 2E, ... for E envs in total, so neither the number of sim workers
nor the order in which envs finish changes any episode. Training in groups: every initial state is played by as many
episodes in a row as a group has, by whatever env is free. Evaluation: a fixed list, disjoint from training by its
stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from embodied.core.observations import Observation, is_text, join_rows, take_rows
from embodied.core.rng import generator
from embodied.core.types import EpisodeSpec, PlayedEpisodes

PER_EPISODE = ("episodes", "lengths")
PER_DECISION = ("actions", "logprobs", "rewards", "mask", "versions")
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


# Whole episodes


def join_episodes(parts: Sequence[PlayedEpisodes]) -> PlayedEpisodes:
    """Those of all parts, in the order of their indices."""
    joined = PlayedEpisodes(
        obs=join_rows([part.obs for part in parts]),
        replay={name: np.concatenate([part.replay[name] for part in parts]) for name in parts[0].replay},
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in (*PER_EPISODE, *PER_DECISION)},
    )
    return choose_episodes(joined, np.sort(joined.episodes))


def choose_episodes(played: PlayedEpisodes, episodes: Sequence[int] | np.ndarray, source: str = "") -> PlayedEpisodes:
    """Some of them, in this order."""
    place = {int(episode): at for at, episode in enumerate(played.episodes)}
    at = np.array([place[int(episode)] for episode in episodes], np.int64)
    ends = np.cumsum(played.lengths)
    ranges = [np.arange(ends[i] - played.lengths[i], ends[i]) for i in at]
    rows = np.concatenate([np.empty(0, np.int64), *ranges])
    return PlayedEpisodes(
        obs=take_rows(played.obs, rows),
        replay={name: array[rows] for name, array in played.replay.items()},
        source=source,
        **{name: getattr(played, name)[at] for name in PER_EPISODE},
        **{name: getattr(played, name)[rows] for name in PER_DECISION},
    )


def arrays_of(played: PlayedEpisodes) -> dict[str, np.ndarray]:
    """Everything as flat arrays, for a checkpoint."""
    arrays = {name: getattr(played, name) for name in (*PER_EPISODE, *PER_DECISION)}
    for name, part in played.obs.items():
        if isinstance(part, dict):
            arrays |= {f"obs.{name}.{key}": array for key, array in part.items()}
        else:
            arrays[f"obs.{name}"] = part.astype(str) if is_text(part) else part
    return arrays | {f"replay.{name}": array for name, array in played.replay.items()}


def episodes_from(arrays: dict[str, np.ndarray]) -> PlayedEpisodes:
    """What `arrays_of` was made of."""
    obs: Observation = {}
    for name, array in arrays.items():
        kind, _, rest = name.partition(".")
        if kind == "obs" and "." in rest:
            group, _, key = rest.partition(".")
            obs.setdefault(group, {})[key] = array
        elif kind == "obs":
            obs[rest] = array.astype(object) if array.dtype.kind == "U" else array
    replay = {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith("replay.")}
    return PlayedEpisodes(obs=obs, replay=replay, **{name: arrays[name] for name in (*PER_EPISODE, *PER_DECISION)})
