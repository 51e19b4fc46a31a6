"""Success rates with their uncertainty. An episode that ended in an error is neither a success nor a failure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from embodied.data import EpisodeResult

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
    """What results.json says of a list of episodes: `overall` and `per_task`, tasks by name."""
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


def measure(outcomes: list[bool | None]) -> dict[str, Any] | None:
    """Count, rate and interval of the outcomes that are known; None where none is."""
    known = [outcome for outcome in outcomes if outcome is not None]
    if not known:
        return None
    count = sum(map(bool, known))
    return {"count": count, "of": len(known), "rate": count / len(known), "interval": list(wilson(count, len(known)))}


def mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
