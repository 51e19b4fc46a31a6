"""The error of an impossible placement, and helpers for its text."""

from __future__ import annotations

from collections.abc import Iterable


class PlacementError(ValueError):
    """An impossible placement. The text shows the arithmetic and a placement that works."""


def number(count: int, noun: str) -> str:
    """1 core, 2 cores."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def span(numbers: tuple[int, ...]) -> str:
    """0-3,6 for (0, 1, 2, 3, 6)."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def spans(devices: Iterable[str]) -> str:
    """gpu:0-7 for eight."""
    by_kind: dict[str, set[int]] = {}
    for device in devices:
        kind, _, place = device.partition(":")
        by_kind.setdefault(kind, set()).add(int(place))
    return ", ".join(f"{kind}:{span(tuple(places))}" for kind, places in by_kind.items())
