"""Actions as tokens: 256 bins of [-1, 1] on the last ids of the vocabulary.

What surprises: 256 ids share 255 bin centres (the two lowest ids mean the same), and ids fall as actions grow.
"""

from __future__ import annotations

import numpy as np


class ActionTokens:
    """Tokens count from 0: `Settings.first_action_id` is added for the vocabulary."""

    def __init__(self, bins: int) -> None:
        self.edges = np.linspace(-1, 1, bins)
        self.centers = (self.edges[:-1] + self.edges[1:]) / 2
        self.bins = bins

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Numbers in [-1, 1]."""
        return self.centers[np.minimum(self.bins - 1 - tokens, self.bins - 2)]

    def encode(self, actions: np.ndarray) -> np.ndarray:
        return self.bins - np.digitize(np.clip(actions, -1, 1), self.edges)
