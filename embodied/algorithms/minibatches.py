"""Which items make up a gradient step: one permutation per epoch, of which each learner rank does its share.

Global item ids are env * T + t (envs counted without those whose slice was lost), so the order knows nothing of arrival
or placement.
"""

from __future__ import annotations

import numpy as np

from embodied.core.rng import generator


def permutation(seed: int, iteration: int, epoch: int, num_items: int) -> np.ndarray:
    """All item ids, shuffled by the run's seed, the iteration and the epoch alone."""
    return generator(seed, "shuffle", iteration, epoch).permutation(num_items)


def minibatches(order: np.ndarray, size: int) -> list[np.ndarray]:
    """Consecutive slices of `size` items; the last one is smaller where they do not divide."""
    return [order[start : start + size] for start in range(0, len(order), size)]


def owned(minibatch: np.ndarray, first: int, count: int) -> np.ndarray:
    """Local ids (id - first) of a minibatch's items in a rank's block [first, first + count), in the same order."""
    local = minibatch - first
    return local[(local >= 0) & (local < count)]
