"""Estimates a measured quantity (seconds, bytes) at sizes that were not measured.

A curve is piecewise linear through the measured points and never falls. Beyond the last point it keeps its slope; below
the first point it falls at most in proportion to the size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

AFFINE_ERROR = 0.05  # a floor and a line within this relative error are preferred to a piecewise linear curve


@dataclass(frozen=True)
class Curve:
    """`error`: the largest relative error if each inner measurement is predicted from the other ones. `spread`: the
    largest interquartile range of the repetitions at one size, relative to their median."""

    sizes: tuple[float, ...]
    values: tuple[float, ...]
    error: float = 0.0
    spread: float = 0.0
    measured: tuple[tuple[float, float], ...] = ()  # (size, median) behind the fit

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.values):
            raise ValueError(f"a curve needs as many sizes as values, at least one; got {self.sizes} and {self.values}")
        if any(b <= a for a, b in zip(self.sizes, self.sizes[1:])) or self.sizes[0] < 0:
            raise ValueError(f"the sizes of a curve must rise from 0 or more; got {self.sizes}")
        if any(b < a for a, b in zip(self.values, self.values[1:])) or self.values[0] < 0:
            raise ValueError(f"the values of a curve must not fall or be negative; got {self.values}; use fit()")

    def at(self, size: Any) -> Any:
        """The value at a size, or an array of values at an array of sizes."""
        s, v = self.sizes, self.values
        size = np.asarray(size, float)
        inside = np.interp(size, s, v)
        if len(s) > 1:
            inside = inside + np.maximum(size - s[-1], 0) * ((v[-1] - v[-2]) / (s[-1] - s[-2]))
            slope = (v[1] - v[0]) / (s[1] - s[0])
            below = np.maximum(v[0] - slope * (s[0] - size), v[0] * size / s[0] if s[0] else 0.0)
            inside = np.where(size < s[0], below, inside)
        return inside if inside.ndim else float(inside)

    def scaled(self, factor: float) -> Curve:
        """The curve with all values multiplied by `factor`."""
        points = tuple((size, value * factor) for size, value in self.measured)
        return Curve(self.sizes, tuple(v * factor for v in self.values), self.error, self.spread, points)

    def plus(self, amount: float) -> Curve:
        """The curve with `amount` added to all values."""
        points = tuple((size, value + amount) for size, value in self.measured)
        return replace(self, values=tuple(value + amount for value in self.values), measured=points)

    def to_json(self) -> Any:
        if self == constant(self.values[0]):
            return self.values[0]
        plain = {"sizes": list(self.sizes), "values": list(self.values)}
        fit = {"error": self.error, "spread": self.spread, "measured": [list(point) for point in self.measured]}
        return plain | {key: value for key, value in fit.items() if value}


def constant(value: float) -> Curve:
    return Curve((1.0,), (float(value),))


def curve_from_json(content: Any) -> Curve:
    """A number is a constant."""
    if isinstance(content, int | float):
        return constant(content)
    measured = tuple((float(size), float(value)) for size, value in content.get("measured", ()))
    sizes, values = (tuple(map(float, content[key])) for key in ("sizes", "values"))
    return Curve(sizes, values, float(content.get("error", 0)), float(content.get("spread", 0)), measured)


def fit(samples: Mapping[float, Sequence[float]]) -> Curve:
    """Fits a curve to repeated measurements at several sizes: a floor and a line if these fit well, else straight lines
    between the medians. Neighbouring medians that fall with size are replaced by their mean."""
    if not samples or not all(samples.values()):
        raise ValueError("a fit needs at least one measurement at every size")
    sizes = sorted(samples)
    medians = [median(samples[size]) for size in sizes]
    points = simplest(sizes, medians)
    error = max((miss_without(i, sizes, medians) for i in range(1, len(sizes) - 1)), default=0.0)
    spread = max(relative_range(samples[size]) for size in sizes)
    return Curve(*zip(*points), error=error, spread=spread, measured=tuple(zip(map(float, sizes), medians)))


def simplest(sizes: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """Points of the curve: (size, value), rising."""
    level = rising(values)
    if len(sizes) >= 4:
        points = floor_and_line(sizes, level)
        if points is not None:
            return points
    return [(float(size), value) for size, value in zip(sizes, level)]


def rising(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls: neighbours in the wrong order become their mean."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([float(value)])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return [float(np.mean(block)) for block in blocks for _ in block]


def floor_and_line(sizes: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]] | None:
    """max(floor, a + b * size) if its relative error is at most AFFINE_ERROR at every size, else None."""
    best, least = None, AFFINE_ERROR
    x, y = np.array(sizes, float), np.array(values, float)
    if not y.any():
        return None
    weights = 1 / np.maximum(y, 1e-6 * y.max())
    for flat in range(len(x) - 2):  # how many of the first sizes lie on the floor
        slope, start = np.polyfit(x[flat:], y[flat:], 1, w=weights[flat:])
        floor = float(y[:flat].mean()) if flat else max(float(start), 0.0)
        if slope <= 0 or start + slope * x[-1] <= floor:
            continue
        knee = max((floor - start) / slope, 0.0)
        line = np.maximum(floor, start + slope * x)
        miss = float(np.max(np.abs(line - y) / np.maximum(y, 1e-12)))
        if miss < least:
            least = miss
            best = [(0.0, floor)] if knee > 0 else []
            best += [(knee, floor), (float(x[-1]), float(start + slope * x[-1]))]
    return best


def miss_without(left_out: int, sizes: Sequence[float], values: Sequence[float]) -> float:
    kept = [i for i in range(len(sizes)) if i != left_out]
    points = simplest([sizes[i] for i in kept], [values[i] for i in kept])
    guess = Curve(*zip(*points)).at(sizes[left_out])
    return abs(guess - values[left_out]) / max(values[left_out], 1e-12)


def relative_range(values: Sequence[float]) -> float:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return float((high - low) / max(middle, 1e-12))
