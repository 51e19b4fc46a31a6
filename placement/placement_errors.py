"""The refusal of a placement, and how its text counts things and writes down the numbers of devices."""

from __future__ import annotations


class PlacementError(ValueError):
    """This placement cannot be; the text holds the arithmetic and one that can."""


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
