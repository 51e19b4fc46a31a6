"""Which PPO options are refused, and with what arithmetic."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from embodied.algorithms.config import GRPOConfig, PPOConfig


def test_every_option_explains_itself():
    for name, field in PPOConfig.model_fields.items():
        assert (field.description or "").endswith("."), name


def test_a_dual_clip_inside_the_trusted_interval_is_refused():
    with pytest.raises(
        ValidationError, match=r"dual_clip=1.1 is not above 1 \+ algo.clip_high = 1.2,.*try algo.dual_clip=3"
    ):
        PPOConfig(dual_clip=1.1)
    assert PPOConfig(dual_clip=3.0).dual_clip == 3.0


def test_a_target_kl_without_further_epochs_is_refused():
    with pytest.raises(ValidationError, match=r"algo.target_kl=0.02 .* algo.epochs=1; try algo.target_kl=null"):
        PPOConfig(target_kl=0.02, epochs=1)
    assert PPOConfig(target_kl=0.02, epochs=2).target_kl == 0.02


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


def test_a_minibatch_larger_than_the_iteration_is_refused():
    config = PPOConfig(rollout_decisions=16, minibatch_size=256)
    with pytest.raises(ValueError, match=r"=256 is more than env.num_envs=8 \* .*=16 = 128 items.*; try .*=128"):
        config.check_num_envs(8)
    config.check_num_envs(16)


@pytest.mark.parametrize(
    "options", [{"scale": "none"}, {"kl_in": "reward", "kl_coef": 0.1, "scale": "batch", "baseline": "batch"}]
)
def test_a_deviation_that_nobody_divides_by_is_refused(options):
    with pytest.raises(ValueError, match=r"algo\.deviation=sample has no effect"):
        GRPOConfig(name="grpo", deviation="sample", **options)


def test_one_advantage_cannot_be_normalised():
    with pytest.raises(ValueError, match=r"try algo.rollout_decisions=2"):
        PPOConfig(rollout_decisions=1, minibatch_size=1).check_num_envs(1)
    PPOConfig(rollout_decisions=1, minibatch_size=1, normalize_advantages=False).check_num_envs(1)
