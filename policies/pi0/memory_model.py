"""A Pi0 without files, whose memory is counted on shapes alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.policies.base import Scores
from embodied.policies.pi0.policy import Pi0Policy
from embodied.policies.pi0.text import Tokenizer, WordTokenizer


class CountedPi0(Pi0Policy):
    def choose_tokenizer(self) -> Tokenizer:
        return WordTokenizer(self.settings)

    def forward(self, inputs: dict[str, Any]) -> Scores:
        """With a chain of the right shape."""
        rows, points = len(inputs["actions"]), self._noisy_steps() + 1
        chain = torch.empty(rows, points, self.horizon, self.settings.action_dim, device=self.device)
        return super().forward({**inputs, "chain": chain, "first": torch.empty(rows, device=self.device)})

    def _told(self, state: Tensor) -> np.ndarray:
        return np.zeros(state.shape)
