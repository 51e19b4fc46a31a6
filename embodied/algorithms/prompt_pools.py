"""Which prompt a group tries: a new one, or again one that was hard, normal or easy when it was last tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np

from embodied.core.rng import generator

POOLS = ("hard", "normal", "easy")  # of prompts, by how often they were solved when last tried
HARD, EASY = 0.25, 0.75  # solved at most, and more often
UNSEEN = 1.0  # the weight of a prompt that was never tried


class PromptPools:
    """Draws prompts for groups: from one of the pools that are not empty, or a new one, with odds by weight.

    A prompt has the number of the group that tried it first; a later group may repeat it. With weights 0.2, 1, 0.2 and
    one prompt solved by a half of its group, the next group repeats it with odds 1 : 1. `counts` are those of groups
    since it was last emptied, by pool.
    """

    def __init__(self, weights: tuple[float, float, float], seed: int, group_size: int) -> None:
        self.weights, self.seed, self.group_size = weights, seed, group_size
        self.rates: dict[int, float] = {}  # prompt -> how many of the group that tried it last solved it
        self.drawn: dict[int, int] = {}  # group that is being played -> its prompt
        self.solved: dict[int, dict[int, bool]] = {}  # group -> its finished episodes, and whether they solved it
        self.counts: Counter[str] = Counter()

    def draw(self, group: int) -> int:
        """The prompt of a group: the same until all of the group has ended. None is drawn by two groups at a time."""
        if group not in self.drawn:
            pools: dict[str, list[int]] = {name: [] for name in POOLS}
            busy = set(self.drawn.values())
            for prompt in sorted(self.rates.keys() - busy):
                pools[pool_of(self.rates[prompt])].append(prompt)
            weights = [weight * bool(pools[name]) for name, weight in zip(POOLS, self.weights, strict=True)]
            odds = np.cumsum([*weights, UNSEEN])
            draw = generator(self.seed, "pools", group)
            name = (*POOLS, "unseen")[int(np.searchsorted(odds, draw.random() * odds[-1], side="right"))]
            self.drawn[group] = int(draw.choice(pools[name])) if name in pools else group
            self.counts[name] += 1
        return self.drawn[group]

    def add(self, solved: dict[int, bool]) -> None:
        """Notes which episodes solved their prompts; a prompt's rate is known when all of a group have ended."""
        for episode, success in solved.items():
            group = episode // self.group_size
            found = self.solved.setdefault(group, {})
            found[episode] = success
            if len(found) == self.group_size:
                self.rates[self.drawn.pop(group)] = sum(found.values()) / self.group_size
                del self.solved[group]

    def keep(self, groups: Collection[int]) -> None:
        """Forget other groups that are not over: they never will be."""
        self.drawn = {group: prompt for group, prompt in self.drawn.items() if group in groups}
        self.solved = {group: found for group, found in self.solved.items() if group in groups}

    def state(self) -> dict[str, np.ndarray]:
        """Its state, as arrays for a checkpoint."""
        solved = {episode: success for found in self.solved.values() for episode, success in found.items()}
        return {
            "prompts": np.array(list(self.rates), np.int64),
            "rates": np.array(list(self.rates.values()), np.float64),
            "drawn": np.array(list(self.drawn.items()), np.int64).reshape(-1, 2),
            "solved": np.array(list(solved.items()), np.int64).reshape(-1, 2),
        }

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Go on from `state`."""
        self.rates = dict(zip(state["prompts"].tolist(), state["rates"].tolist(), strict=True))
        self.drawn = dict(state["drawn"].tolist())
        self.solved = {}
        self.add({episode: bool(success) for episode, success in state["solved"].tolist()})


def pool_of(rate: float) -> str:
    """The pool of a prompt that was solved so often."""
    return "hard" if rate <= HARD else "easy" if rate > EASY else "normal"
