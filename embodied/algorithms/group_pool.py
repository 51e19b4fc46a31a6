"""Groups of episodes: chooses the groups to play, their prompts (new prompts, or repeated hard, normal or easy ones),
and the groups of an update; and computes an episode's score.

Episode i belongs to group i // group_size. The episodes of a group have the same initial state and different noise. A
score is an episode's return. Nothing here depends on workers: the order of episodes is the same for any assignment to
workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from embodied.algorithms.advantages import are_equal
from embodied.algorithms.config import GRPOConfig, PPOConfig
from embodied.core.rng import generator
from embodied.core.types import EpisodeResult

POOLS = ("hard", "normal", "easy")  # of prompts, by their solved share when last tried
HARD, EASY = 0.25, 0.75  # largest solved share of hard prompts, of normal prompts
UNSEEN = 1.0  # the weight of a new prompt


class Group(NamedTuple):
    episodes: tuple[int, ...]
    scores: tuple[float, ...]


class GroupPool:
    """Takes scores of finished episodes and returns groups for updates, the oldest first.

    Complete groups that are not needed (the surplus) and incomplete groups stay for later iterations, or are discarded.
    `counts`: numbers of groups since it was last cleared, by outcome: kept, equal, out_of_bounds, incomplete.
    """

    def __init__(self, config: PPOConfig | GRPOConfig, discards: bool = False) -> None:
        self.config, self.discards = config, discards
        self.dealt = 0  # episodes since the beginning of the run
        self.discarded = 0  # episodes in the surplus of the last iteration
        self.playing: set[int] = set()  # dealt episodes that are neither added nor lost
        self.sent: set[int] = set()  # groups already sent to this iteration's learners
        self.open: dict[int, dict[int, float]] = {}  # group -> scores of its finished episodes
        self.ready: dict[int, Group] = {}
        self.counts: Counter[str] = Counter()
        self.solved: dict[int, bool] = {}  # success of the held episodes, if the filter needs it

    @property
    def held(self) -> tuple[int, ...]:
        """Episodes with trajectories that are still needed."""
        waiting = [episode for scores in self.open.values() for episode in scores]
        return tuple(sorted(waiting + [episode for group in self.ready.values() for episode in group.episodes]))

    @property
    def present(self) -> int:
        """The number of groups that the iteration has; dropped groups count unless others replace them."""
        if self.config.filter == "resample":
            return len(self.ready) + len(self.sent)
        return sum(self.counts[verdict] for verdict in ("kept", "equal", "out_of_bounds"))

    def wanted(self, rounds: int, num_envs: int) -> int:
        """The number of episodes to play in the next round, after `rounds` rounds of an iteration; 0: none.

        The first round plays the missing episodes and no more. Further rounds replace groups that the filter dropped;
        they use every env row, so their last group may stay incomplete. A further round also follows if half or more of
        the groups were lost to faults.
        """
        groups, resample = self.config.groups, self.config.filter == "resample"
        missing = groups - self.present
        if missing <= 0 or rounds >= self.config.max_rounds or (rounds and not resample and 2 * missing < groups):
            return 0
        episodes = missing * self.config.group_size - sum(map(len, self.open.values()))
        return -(-episodes // num_envs) * num_envs if rounds and resample else episodes

    def deal(self, count: int) -> range:
        """The next episodes to play."""
        self.dealt += count
        dealt = range(self.dealt - count, self.dealt)
        self.playing.update(dealt)
        return dealt

    def add(self, scores: dict[int, float], solved: dict[int, bool] | None = None) -> None:
        """Takes scores of finished episodes; complete groups are kept or dropped. `solved`: their success, for
        algo.filter_metric=success."""
        self.solved |= solved or {}
        self.playing.difference_update(scores)
        for episode in sorted(scores):
            number, size = episode // self.config.group_size, self.config.group_size
            scores_of_group = self.open.setdefault(number, {})
            scores_of_group[episode] = scores[episode]
            if len(scores_of_group) == size:
                del self.open[number]
                group = Group(
                    tuple(sorted(scores_of_group)), tuple(scores_of_group[e] for e in sorted(scores_of_group))
                )
                verdict = verdict_on(group.scores, self.config, [self.solved.get(e, False) for e in group.episodes])
                self.counts[verdict] += 1
                if verdict == "kept":
                    self.ready[number] = group
        held = set(self.held)
        self.solved = {episode: success for episode, success in self.solved.items() if episode in held}

    def drop_groups_of(self, episodes: Collection[int]) -> None:
        """Drop the groups of lost episodes. Call it after adding all surviving episodes: the rest of a partly dealt
        group is skipped."""
        self.playing.difference_update(episodes)
        for number in {episode // self.config.group_size for episode in episodes}:
            self.counts["kept"] -= self.ready.pop(number, None) is not None or number in self.sent
            self.sent.discard(number)
            self.counts["incomplete"] += 1
            self.open.pop(number, None)
            if number == self.dealt // self.config.group_size:
                self.dealt = (number + 1) * self.config.group_size

    def certain(self) -> list[Group]:
        """The ready groups that `take` will return, independent of the remaining episodes of this iteration.

        A group is certain if fewer than `groups` groups with a lower number are kept or may still be kept. Of two
        groups to learn from, with 0 and 3 kept, 1 dropped and 2 being played, 0 is certain and 3 only if 2 is dropped.
        """
        undecided = {episode // self.config.group_size for episode in self.playing}
        rivals = sorted({*self.sent, *self.ready, *self.open, *undecided})
        return [self.ready[number] for number in rivals[: self.config.groups] if number in self.ready]

    def mark_sent(self, group: Group) -> None:
        """Record that a group was sent to learners before `take`."""
        number = group.episodes[0] // self.config.group_size
        del self.ready[number]
        self.sent.add(number)

    def take(self) -> list[Group]:
        """Returns the groups of this iteration that were not yet sent to learners."""
        left = self.config.groups - len(self.sent)
        taken = [self.ready.pop(number) for number in sorted(self.ready)[:left]]
        self.sent.clear()
        if self.discards:  # the rest of a partly dealt group is skipped
            self.discarded = len(self.held)
            self.open, self.ready, self.solved = {}, {}, {}
            self.dealt = -(-self.dealt // self.config.group_size) * self.config.group_size
        return taken

    def state(self) -> dict[str, np.ndarray]:
        """Its state, as arrays for a checkpoint."""
        scores = {episode: score for scores in self.open.values() for episode, score in scores.items()}
        for group in self.ready.values():
            scores |= zip(group.episodes, group.scores, strict=True)
        episodes = sorted(scores)
        return {
            "dealt": np.array(self.dealt),
            "episodes": np.array(episodes, np.int64),
            "scores": np.array([scores[episode] for episode in episodes], np.float64),
            "solved": np.array([self.solved.get(episode, False) for episode in episodes], bool),
        }

    def restore(self, state: dict[str, np.ndarray]) -> None:
        self.dealt = int(state["dealt"])
        self.open, self.ready = {}, {}
        episodes = state["episodes"].tolist()
        self.add(*(dict(zip(episodes, state[name].tolist(), strict=True)) for name in ("scores", "solved")))
        self.counts.clear()


def verdict_on(scores: tuple[float, ...], config: PPOConfig | GRPOConfig, solved: Sequence[bool] = ()) -> str:
    """Returns kept, equal or out_of_bounds, by the scores, or with algo.filter_metric=success by the successes."""
    if config.filter == "none":
        return "kept"
    if are_equal(scores):
        return "equal"
    bounded = solved if config.filter_metric == "success" else scores
    mean = sum(bounded) / len(scores)
    low, high = config.filter_low, config.filter_high
    return "out_of_bounds" if (low is not None and mean < low) or (high is not None and mean > high) else "kept"


def score_of(result: EpisodeResult, config: PPOConfig | GRPOConfig, max_tokens: int = 0) -> float:
    """The score of an episode: its return. A truncated answer has 0 with algo.truncated=punish. With algo.overlong a
    long answer loses up to 1: for overlong 4 of 10 tokens, nothing at 6 tokens, 0.25 at 7, and 1 at 10."""
    score = 0.0 if result.truncated and config.truncated == "punish" else result.total_reward
    if config.overlong is None:
        return score
    return score - min(1.0, max(0.0, (result.tokens - max_tokens + config.overlong) / config.overlong))


class PromptPools:
    """Draws prompts for groups: a new prompt or a prompt from a non-empty pool, in proportion to the weights.

    A prompt has the number of the first group that tried it; a later group may repeat it. With weights 0.2, 1, 0.2 and
    one prompt solved by half of its group, the next group repeats it with odds 1 : 1. `counts`: numbers of groups since
    it was last cleared, by pool.
    """

    def __init__(self, weights: tuple[float, float, float], seed: int, group_size: int) -> None:
        self.weights, self.seed, self.group_size = weights, seed, group_size
        self.rates: dict[int, float] = {}  # prompt -> solved share of its last group
        self.drawn: dict[int, int] = {}  # current group -> its prompt
        self.solved: dict[int, dict[int, bool]] = {}  # group -> success of its finished episodes
        self.counts: Counter[str] = Counter()

    def draw(self, group: int) -> int:
        """The prompt of a group: the same until the whole group has ended. Two groups never have the same prompt at the
        same time."""
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
        """Record the success of episodes; a prompt's rate is known when its whole group has ended."""
        for episode, success in solved.items():
            group = episode // self.group_size
            solved_of_group = self.solved.setdefault(group, {})
            solved_of_group[episode] = success
            if len(solved_of_group) == self.group_size:
                self.rates[self.drawn.pop(group)] = sum(solved_of_group.values()) / self.group_size
                del self.solved[group]

    def forget_all_but(self, groups: Collection[int]) -> None:
        """Forget other unfinished groups, which will never end."""
        self.drawn = {group: prompt for group, prompt in self.drawn.items() if group in groups}
        self.solved = {group: episodes for group, episodes in self.solved.items() if group in groups}

    def state(self) -> dict[str, np.ndarray]:
        """Its state, as arrays for a checkpoint."""
        solved = {episode: success for episodes in self.solved.values() for episode, success in episodes.items()}
        return {
            "prompts": np.array(list(self.rates), np.int64),
            "rates": np.array(list(self.rates.values()), np.float64),
            "drawn": np.array(list(self.drawn.items()), np.int64).reshape(-1, 2),
            "solved": np.array(list(solved.items()), np.int64).reshape(-1, 2),
        }

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Restore `state`."""
        self.rates = dict(zip(state["prompts"].tolist(), state["rates"].tolist(), strict=True))
        self.drawn = dict(state["drawn"].tolist())
        self.solved = {}
        self.add({episode: bool(success) for episode, success in state["solved"].tolist()})


def pool_of(rate: float) -> str:
    """The pool of a prompt with this solved share."""
    return "hard" if rate <= HARD else "easy" if rate > EASY else "normal"
