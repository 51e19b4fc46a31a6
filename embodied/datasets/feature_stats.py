"""Minimum, maximum, mean, deviation and quantiles of every feature, as in stats.json and in every episode's entry.

The figures of images are counted by pixel value and therefore exact; they are in [0, 1] per colour, [3, 1, 1]. Over
several episodes a quantile is the mean of the episodes' quantiles weighted by length, as in LeRobot's own datasets; the
other figures are exact.
"""

from __future__ import annotations

import numpy as np

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
PIXELS = 128  # largest number of counted rows and columns of an image
Stats = dict[str, np.ndarray]


def of_values(values: np.ndarray) -> Stats:
    """The figures of values [T, D]: each [D], and "count" [1]."""
    values = values.astype(np.float64)
    stats = {
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "mean": values.mean(axis=0),
        "std": values.std(axis=0),
        "count": np.array([len(values)]),
    }
    return stats | dict(zip(QUANTILES, np.quantile(values, list(QUANTILES.values()), axis=0), strict=True))


class PixelCounts:
    """Counts how often each value of each colour occurs in the frames of an episode."""

    def __init__(self) -> None:
        self.num_frames = 0
        self.counts = np.zeros((3, 256), np.int64)

    def add(self, frame: np.ndarray) -> None:
        step = [-(-size // PIXELS) for size in frame.shape[:2]]
        few = frame[:: step[0], :: step[1]]
        for colour in range(3):
            self.counts[colour] += np.bincount(few[..., colour].ravel(), minlength=256)
        self.num_frames += 1

    def stats(self) -> Stats:
        values = np.arange(256) / 255
        shares = self.counts / self.counts.sum(axis=1, keepdims=True)
        mean = shares @ values
        cumulated = np.cumsum(shares, axis=1)

        def quantile(q: float) -> np.ndarray:
            return values[np.minimum((cumulated < q - 1e-12).sum(axis=1), 255)]

        figures = {
            "min": np.array([values[np.flatnonzero(row)[0]] for row in self.counts]),
            "max": np.array([values[np.flatnonzero(row)[-1]] for row in self.counts]),
            "mean": mean,
            "std": np.sqrt(np.maximum(shares @ values**2 - mean**2, 0.0)),
            **{name: quantile(q) for name, q in QUANTILES.items()},
        }
        return {name: array.reshape(3, 1, 1) for name, array in figures.items()} | {
            "count": np.array([self.num_frames])
        }


def merge(stats: Stats, other: Stats) -> Stats:
    """The figures of two sets of frames together."""
    n, m = stats["count"][0], other["count"][0]
    share = m / (n + m)
    mean = stats["mean"] + (other["mean"] - stats["mean"]) * share
    spread = (stats["std"] ** 2 + (stats["mean"] - mean) ** 2) * (1 - share)
    spread = spread + (other["std"] ** 2 + (other["mean"] - mean) ** 2) * share
    return {
        "min": np.minimum(stats["min"], other["min"]),
        "max": np.maximum(stats["max"], other["max"]),
        "mean": mean,
        "std": np.sqrt(spread),
        "count": np.array([n + m]),
        **{name: stats[name] * (1 - share) + other[name] * share for name in QUANTILES},
    }
