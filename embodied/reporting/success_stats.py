"""Success rates with their intervals, and paired comparisons of two policies.

An episode that ended in an error is neither a success nor a failure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from embodied.core.types import EpisodeResult

Z95 = 1.959963984540054  # the 97.5% point of the normal distribution


def wilson(count: int, total: int) -> tuple[float, float]:
    """The 95% Wilson score interval of a rate: wilson(9, 10) is 59.6% to 98.2%."""
    if not 0 <= count <= total or total == 0:
        raise ValueError(f"there is no rate of {count} in {total}")
    rate, z2 = count / total, Z95**2
    centre = (rate + z2 / (2 * total)) / (1 + z2 / total)
    half = Z95 * math.sqrt(rate * (1 - rate) / total + z2 / (4 * total**2)) / (1 + z2 / total)
    low = 0.0 if count == 0 else centre - half
    high = 1.0 if count == total else centre + half
    return low, high


def summarize(episodes: Iterable[EpisodeResult]) -> dict[str, Any]:
    """The figures of a list of episodes, `overall` and `per_task`, as results.json holds them."""
    episodes = list(episodes)
    tasks = sorted({episode.task for episode in episodes})
    return {
        "overall": figures(episodes),
        "per_task": {task: figures([episode for episode in episodes if episode.task == task]) for task in tasks},
    }


def figures(episodes: list[EpisodeResult]) -> dict[str, Any]:
    """Counts, rates and means of some episodes. `episodes` counts those without an error."""
    played = [episode for episode in episodes if not episode.error]
    return {
        "episodes": len(played),
        "errors": len(episodes) - len(played),
        "success_once": measure([episode.success_once for episode in played]),
        "success_at_end": measure([episode.success_at_end for episode in played]),
        "success_at_reset": measure([episode.success_at_reset for episode in played]),
        "return": mean([episode.total_reward for episode in played]),
        "length": mean([episode.length for episode in played]),
    }


def causes(episodes: Iterable[EpisodeResult]) -> dict[str, int]:
    """How many episodes each error ended, the most frequent first."""
    return dict(Counter(episode.error for episode in episodes if episode.error).most_common())


def measure(outcomes: list[bool | None]) -> dict[str, Any] | None:
    """Count, rate and interval of the known outcomes; None where none is known."""
    known = [outcome for outcome in outcomes if outcome is not None]
    if not known:
        return None
    count = sum(map(bool, known))
    return {"count": count, "of": len(known), "rate": count / len(known), "interval": list(wilson(count, len(known)))}


def mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def compare(first: Iterable[EpisodeResult], second: Iterable[EpisodeResult]) -> dict[str, Any]:
    """The second policy's figures minus the first's, on the episodes that both played without an error.

    `episodes` counts these. Differences of rates and means come with 95% intervals, and are None where unknown.
    """
    known = {episode_id(episode): episode for episode in first if not episode.error}
    pairs = [(known[episode_id(one)], one) for one in second if not one.error and episode_id(one) in known]
    return {
        "episodes": len(pairs),
        "success_once": compare_outcomes([(a.success_once, b.success_once) for a, b in pairs]),
        "success_at_end": compare_outcomes([(a.success_at_end, b.success_at_end) for a, b in pairs]),
        "return": compare_means([b.total_reward - a.total_reward for a, b in pairs]),
    }


def episode_id(episode: EpisodeResult) -> tuple[str, int, int]:
    """The key by which episodes of two evaluations are paired."""
    return episode.task, episode.init_state_id, episode.seed


def compare_outcomes(pairs: list[tuple[bool | None, bool | None]]) -> dict[str, Any] | None:
    """Difference of two rates on the same episodes, where both are known."""
    known = [(bool(a), bool(b)) for a, b in pairs if a is not None and b is not None]
    if not known:
        return None
    both, only_second, only_first, neither = (
        known.count(kind) for kind in ((True, True), (False, True), (True, False), (False, False))
    )
    difference, low, high = paired_difference(both, only_second, only_first, neither)
    counts = {"both": both, "only_first": only_first, "only_second": only_second, "neither": neither}
    p_value = exact_mcnemar(only_first, only_second)
    return {**counts, "difference": difference, "interval": [low, high], "p_value": p_value}


def exact_mcnemar(one: int, other: int) -> float:
    """Two-sided p-value of the split of the episodes on which two policies differ, under equal success rates."""
    total, fewer = one + other, min(one, other)
    return min(1.0, 2 * sum(math.comb(total, count) for count in range(fewer + 1)) / 2**total)


def paired_difference(both: int, one: int, other: int, neither: int) -> tuple[float, float, float]:
    """Rate of (both + one) minus rate of (both + other) in paired trials, and Newcombe's 95% interval (1998, method
    10): Wilson intervals of the two rates, combined with their correlation.
    """
    total = both + one + other + neither
    p, q = (both + one) / total, (both + other) / total
    (p_low, p_high), (q_low, q_high) = wilson(both + one, total), wilson(both + other, total)
    product = (both + one) * (other + neither) * (both + other) * (one + neither)
    excess = both * neither - one * other
    excess = max(excess - total / 2, 0.0) if excess > 0 else excess
    phi = excess / math.sqrt(product) if product else 0.0
    below = (p - p_low) ** 2 - 2 * phi * (p - p_low) * (q_high - q) + (q_high - q) ** 2
    above = (q - q_low) ** 2 - 2 * phi * (q - q_low) * (p_high - p) + (p_high - p) ** 2
    return p - q, p - q - math.sqrt(max(below, 0.0)), p - q + math.sqrt(max(above, 0.0))


def compare_means(differences: list[float]) -> dict[str, Any] | None:
    """Mean of paired differences, with the normal 95% interval."""
    if len(differences) < 2:
        return None
    centre = math.fsum(differences) / len(differences)
    variance = math.fsum((one - centre) ** 2 for one in differences) / (len(differences) - 1)
    half = Z95 * math.sqrt(variance / len(differences))
    return {"difference": centre, "interval": [centre - half, centre + half]}
