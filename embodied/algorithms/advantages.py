"""Advantages: generalised advantage estimation (PPO), comparison within groups (GRPO), and normalisation.

In numpy and float64: trajectories arrive as numpy arrays, an iteration has only a few thousand numbers, and every
placement gets the same advantages for any dtype of the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ROUNDING = 1e-6  # of scores that a network computed in float32, relative to the largest one
EPS = 1e-6


def gae(
    rewards: np.ndarray,  # [T, N, C]
    terminated: np.ndarray,  # bool [T, N, C]
    truncated: np.ndarray,  # bool [T, N, C]
    mask: np.ndarray,  # bool [T, N, C]
    values: np.ndarray,  # [T+1, N]
    final_values: np.ndarray,  # [T, N]
    gamma: float,
    lam: float,
    level: str = "decision",
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns (value targets), float64 [T, N]: T decisions of N sequences side by side, as
    `learners/train_batch.py` lays them out (`gae_of`); a shorter sequence is padded with decisions that were not
    played.

    The value after a decision is 0 if its episode terminated, `final_values` if it was truncated, otherwise
    `values[t+1]`, and the recursion continues. With level "step" gamma and lambda act once per env step instead of once
    per decision: rewards inside a chunk are discounted too, and k played steps count gamma^k and lambda^k. A decision
    without a played step is not an item: its advantage is 0 and nothing passes through it.

    Three decisions of one env step (C=1), two envs, gamma = lambda = 1/2, all values 4, all rewards 1. Env 0 is
    truncated at t=1 with a final value of 8, env 1 terminates at t=1:

        delta[2] = 1 + 4/2 - 4 = -1     for both
        delta[1] = 1 + 8/2 - 4 =  1     for env 0: the final value, not values[2]
                   1       - 4 = -3     for env 1: nothing follows
        delta[0] = 1 + 4/2 - 4 = -1     for both
        advantages[2] = delta[2]                          = [-1,    -1   ]
        advantages[1] = delta[1]: t=2 is another episode  = [ 1,    -3   ]
        advantages[0] = delta[0] + 1/4 * advantages[1]    = [-0.75, -1.75]
        returns = advantages + values
    """
    mask = np.asarray(mask, bool)
    rewards = np.where(mask, rewards, 0.0).astype(np.float64)
    values = np.asarray(values, np.float64)
    terminated, truncated = (np.any(done & mask, axis=2) for done in (terminated, truncated))
    played = mask.any(axis=2)
    if level == "step":
        steps = mask.sum(axis=2)
        discount, decay = gamma**steps, lam**steps
        rewards = rewards * gamma ** (np.cumsum(mask, axis=2) - mask)
    else:
        discount = np.full(played.shape, float(gamma))
        decay = np.full(played.shape, float(lam))

    # The value after each decision, and the factor of the next advantage
    following = np.where(truncated, final_values, values[1:])
    following = np.where(terminated, 0.0, following)
    delta = rewards.sum(axis=2) + discount * following - values[:-1]
    carry = np.where(terminated | truncated, 0.0, discount * decay)

    advantages = np.zeros_like(delta)
    later = np.zeros(delta.shape[1])
    for t in reversed(range(len(delta))):
        later = np.where(played[t], delta[t] + carry[t] * later, 0.0)
        advantages[t] = later
    return advantages, advantages + values[:-1]


def token_gae(
    rewards: np.ndarray,  # [K]
    values: np.ndarray,  # [K]
    sampled: np.ndarray,  # bool [K], sampled tokens
    lengths: np.ndarray,  # int [R], tokens of each conversation
    gamma: float,
    lam: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns (value targets), float64 [K], of conversations, one after the other; 0 for the env's
    tokens, which are no steps: the recursion goes from one sampled token to the next. The value after the last one is
    0, also for a cut-off answer.

    Prompt, answer, env, answer, with gamma = lambda = 1/2, all values 4, and a reward of 1 and of 2 at the ends:

        sampled     F F T T F T        delta of the last: 2 - 4 = -2, of the middle one: 1 + 4/2 - 4 = -1,
        rewards     0 0 0 1 0 2        of the first: 0 + 4/2 - 4 = -2
        advantages  0 0 -2.375 -1.5 0 -2
    """
    of = np.repeat(np.arange(len(lengths)), lengths)[sampled]
    counts = np.bincount(of, minlength=len(lengths))
    at = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts), of
    steps, rows = int(counts.max(initial=0)), len(lengths)
    terminated = np.zeros((steps + 1, rows, 1), bool)  # of rows without tokens: an unread step
    terminated[counts - 1, np.arange(rows)] = True

    def side_by_side(numbers: np.ndarray) -> np.ndarray:
        room = np.zeros((steps + 1, rows))
        room[at] = numbers
        return room

    played = side_by_side(np.ones(len(of)))[:-1, :, None] > 0
    guess, nothing = side_by_side(values[sampled]), np.zeros((steps, rows))
    paid = side_by_side(rewards[sampled])[:-1, :, None]
    results = gae(paid, terminated[:-1], np.zeros_like(played), played, guess, nothing, gamma, lam)
    advantages, returns = np.zeros(len(sampled)), np.zeros(len(sampled))
    advantages[sampled], returns[sampled] = (result[at] for result in results)
    return advantages, returns


def are_equal(scores: Sequence[float] | np.ndarray) -> bool:
    """True if the scores of a group differ by no more than rounding, which another processor or batch changes."""
    return bool(np.ptp(scores) <= max(1e-9, ROUNDING * np.abs(scores).max()))


def group_advantages(
    scores: np.ndarray, baseline: str = "group", scale: str = "group", deviation: str = "population"
) -> np.ndarray:
    """Advantages [G, S] of scores [G, S]: G groups of S episodes.

    Two groups of two, scores [[1, 0], [1, 1]]:
        baseline group          [[ 0.5, -0.5 ], [0, 0]], divided by each group's deviation 0.5: [[1, -1], [0, 0]]
        baseline leave_one_out  [[ 1,   -1   ], [0, 0]]
        baseline batch          [[ 0.25, -0.75], [0.25, 0.25]], the mean of all being 0.75; their deviation is 0.433
        deviation sample        0.707 in each group instead of 0.5, of all 0.5 instead of 0.433
    """
    scores = np.asarray(scores, np.float64)
    if baseline == "batch":
        compared = scores - scores.mean()
    else:
        compared = scores - scores.mean(axis=1, keepdims=True)
        compared[[are_equal(group) for group in scores]] = 0.0
    if baseline == "leave_one_out":  # score - mean of the other scores = (score - mean of all) * S / (S - 1)
        compared *= scores.shape[1] / (scores.shape[1] - 1)
    left_out = 1 if deviation == "sample" else 0
    if scale == "group":
        return compared / (scores.std(axis=1, keepdims=True, ddof=left_out) + EPS)
    return compared / (compared.std(ddof=left_out) + EPS) if scale == "batch" else compared


def returns_to_go(scores: np.ndarray, divergences: np.ndarray, lengths: np.ndarray, kl_coef: float) -> np.ndarray:
    """[K], for each decision its episode's score less `kl_coef` times the divergences from it to the episode's end.

    Scores [1, 0] of episodes of two decisions and one, divergences [0.5, 0.25, 1], kl_coef 2: [1 - 1.5, 1 - 0.5, -2].
    """
    ends = np.cumsum(lengths)
    behind = np.cumsum(divergences)
    upto = behind[ends - 1]  # of all episodes up to this one, it included
    left = np.repeat(upto, lengths) - behind + divergences
    return np.repeat(np.asarray(scores, np.float64), lengths) - kl_coef * left


class Moments(NamedTuple):
    """Count, mean and sum of squared distances from the mean: parts can be merged without losing digits."""

    count: float
    mean: float
    m2: float

    @property
    def std(self) -> float:
        """The standard deviation of the population: divided by the count."""
        return float(np.sqrt(self.m2 / self.count)) if self.count else 0.0


def moments(numbers: np.ndarray, weights: np.ndarray) -> Moments:
    """The moments of all numbers with weights; weight 0 leaves a number out. Both arrays have the same shape."""
    numbers, weights = np.asarray(numbers, np.float64), np.asarray(weights, np.float64)
    count = float(weights.sum())
    if not count:
        return Moments(0.0, 0.0, 0.0)
    mean = float((weights * numbers).sum()) / count
    return Moments(count, mean, float((weights * (numbers - mean) ** 2).sum()))


def merge_moments(parts: Sequence[Sequence[float]]) -> Moments:
    """The moments of all parts, e.g. one per learner rank (rows of an array are fine). Same order, same bits."""
    count, mean, m2 = 0.0, 0.0, 0.0
    for n, part_mean, part_m2 in (map(float, moments) for moments in parts):
        if not n:
            continue
        shift, total = part_mean - mean, count + n
        m2 += part_m2 + shift * shift * count * n / total
        mean += shift * n / total
        count = total
    return Moments(count, mean, m2)


def normalize(advantages: np.ndarray, over: Moments) -> np.ndarray:
    """Shifted and scaled by the moments `over` the whole iteration (of all ranks)."""
    return (advantages - over.mean) / (over.std + 1e-8)
