"""Which PPO options are refused, and with what arithmetic."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from embodied.algorithms.config import PPOConfig


@pytest.mark.parametrize(
    "wrong",
    [
        {"dual_clip": 1.0},
        {"clip_low": 0.0},
        {"clip_low": 1.0},
        {"clip_high": -0.1},
        {"value_clip": 0.0},
        {"huber_delta": 0.0},
        {"max_grad_norm": 0.0},
        {"target_kl": 0.0},
        {"gamma": 1.01},
        {"gae_lambda": -0.01},
        {"lr": float("nan")},
        {"value_lr": -1e-4},
        {"entropy_coef": -1.0},
        {"epochs": 0},
        {"minibatch_size": 0},
        {"rollout_decisions": 0},
        {"advantage_level": "token"},
        {"logprob_level": "step"},
        {"clip_range": 0.2},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_values_without_a_meaning_are_refused(wrong):
    with pytest.raises(ValidationError):
        PPOConfig(**wrong)
