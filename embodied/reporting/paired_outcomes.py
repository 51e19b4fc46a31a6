"""Several policies on the same episodes: the difference of every two of them, written to comparison.json."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

from embodied.core.types import EpisodeResult
from embodied.reporting.success_stats import compare
from embodied.run.checkpoints import replace_text

COMPARISON = "comparison.json"
METHODS = {
    "success": "difference of paired rates: Newcombe's 95% interval (1998, method 10), exact McNemar test",
    "return": "mean of paired differences, normal 95% interval",
}


def write_comparison(folder: Path, played: dict[str, list[EpisodeResult]]) -> dict[str, Any]:
    """Every pair of policies, in the order they were named: the second against the first."""
    pairs = [{"first": a, "second": b, **compare(played[a], played[b])} for a, b in combinations(played, 2)]
    told = {"policies": list(played), "methods": METHODS, "pairs": pairs}
    replace_text(folder / COMPARISON, json.dumps(told, indent=2, allow_nan=False) + "\n")
    return told


def describe_comparison(comparison: dict[str, Any]) -> str:
    return "\n".join(describe_pair(pair) for pair in comparison["pairs"])


def describe_pair(pair: dict[str, Any]) -> str:
    """`b - a on the same 200 episodes: success_once +4.5% [0.2%, 8.9%], p 0.049; return ...`"""
    parts = []
    for name in ("success_once", "success_at_end"):
        if (found := pair[name]) is not None:
            low, high = found["interval"]
            parts.append(f"{name} {found['difference']:+.1%} [{low:+.1%}, {high:+.1%}], p {found['p_value']:.2g}")
    if (found := pair["return"]) is not None:
        low, high = found["interval"]
        parts.append(f"return {found['difference']:+.2f} [{low:+.2f}, {high:+.2f}]")
    told = "; ".join(parts) or "nothing to compare"
    return f"{pair['second']} - {pair['first']} on the same {pair['episodes']} episodes: {told}"
