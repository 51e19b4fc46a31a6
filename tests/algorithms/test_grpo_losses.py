"""The loss of GRPO by hand and against a scalar reference, and what the KL estimators are right about."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.algorithms.config import GRPOConfig
from embodied.algorithms.losses import LossItems, loss_sum, reference_kl_sum

F64 = torch.float64
LEVELS = ["action_dim", "action", "chunk"]
ESTIMATORS = ["k1", "k2", "k3"]


def example(seed, size=5, chunk=3, dims=2, spread=0.5):
    draw = torch.Generator().manual_seed(seed)
    new, old, reference = spread * torch.randn(3, size, chunk, dims, dtype=F64, generator=draw) - 1
    steps = torch.randint(1, chunk + 1, (size,), generator=draw)
    mask = torch.arange(chunk)[None] < steps[:, None]
    advantages = torch.randn(size, dtype=F64, generator=draw)
    weights = torch.rand(size, dtype=F64, generator=draw) + 0.5
    entropy = torch.rand(size, chunk, dims, dtype=F64, generator=draw)
    return new, entropy, LossItems(old, advantages, mask, weights, reference=reference)


def test_the_estimators_by_hand():
    # d = ln 2 and a ratio of 1: k1 0.6931, k2 0.6931^2 / 2 = 0.2402, k3 1/2 - 1 + 0.6931 = 0.1931
    one = torch.full((1, 1, 1), math.log(0.5), dtype=F64)
    reference = torch.full((1, 1, 1), math.log(0.25), dtype=F64)
    mask, weight = torch.ones(1, 1, dtype=torch.bool), torch.ones(1, dtype=F64)
    found = [reference_kl_sum(one, one, reference, mask, weight, k, "chunk").item() for k in ESTIMATORS]
    assert found == pytest.approx([0.693147, 0.240227, 0.193147], rel=1e-5)
    # with a ratio of 1/2, only k1 weighs the sample
    old = torch.zeros(1, 1, 1, dtype=F64)
    found = [reference_kl_sum(one, old, reference, mask, weight, k, "chunk").item() for k in ESTIMATORS]
    assert found == pytest.approx([0.693147 / 2, 0.240227, 0.193147], rel=1e-5)


def expectation(estimator, logits, behaviour, reference):
    """Mean of an estimator over all actions of a distribution, as the behaviour would take them."""
    logprobs = logits.log_softmax(-1)
    shape = (len(logits), 1, 1)
    weights = behaviour.exp()
    return reference_kl_sum(
        logprobs.view(shape),
        behaviour.view(shape),
        reference.view(shape),
        torch.ones(shape[:2], dtype=torch.bool),
        weights,
        estimator,
        "chunk",
    )


@pytest.mark.parametrize(("estimator", "value_right", "slope_right"), [("k1", 1, 1), ("k2", 0, 1), ("k3", 1, 0)])
def test_on_policy_each_estimator_is_right_about_what_it_says(estimator, value_right, slope_right):
    logits = torch.tensor([0.3, -0.2, 0.9, 0.0], dtype=F64, requires_grad=True)
    reference = torch.tensor([-0.5, 0.4, 0.2, 0.7], dtype=F64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    (slope,) = torch.autograd.grad(exact, logits, retain_graph=True)
    found = expectation(estimator, logits, logprobs.detach(), reference)
    (found_slope,) = torch.autograd.grad(found, logits)
    assert (found.item() == pytest.approx(exact.item(), rel=1e-9)) == bool(value_right)
    assert torch.allclose(found_slope, slope, rtol=1e-9) == bool(slope_right)
    if estimator == "k3":  # the gradient of the other direction
        other = (reference.exp() * (reference - logits.log_softmax(-1))).sum()
        torch.testing.assert_close(found_slope, torch.autograd.grad(other, logits)[0])


def slow_loss(new, entropy, items, config):
    total = 0.0
    for b in range(len(new)):
        steps = [c for c in range(new.shape[1]) if items.mask[b, c]]
        cells = {
            "action_dim": [[(c, a)] for c in steps for a in range(new.shape[2])],
            "action": [[(c, a) for a in range(new.shape[2])] for c in steps],
            "chunk": [[(c, a) for c in steps for a in range(new.shape[2])]],
        }[config.logprob_level]
        advantage = items.advantages[b].item()
        for unit in cells:
            log_ratio = sum((new[b, c, a] - items.logprobs[b, c, a]).item() for c, a in unit)
            d = sum((new[b, c, a] - items.reference[b, c, a]).item() for c, a in unit)
            ratio = math.exp(log_ratio)
            gain = min(ratio * advantage, min(max(ratio, 1 - config.clip_low), 1 + config.clip_high) * advantage)
            kl = {"k1": ratio * d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[config.kl_estimator]
            bonus = config.entropy_coef * sum(entropy[b, c, a].item() for c, a in unit)
            total -= items.weights[b].item() * (gain - config.kl_coef * kl + bonus) / len(cells)
    return total


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.sampled_from(LEVELS), st.sampled_from(ESTIMATORS))
def test_the_loss_equals_a_scalar_reference(seed, chunk, level, estimator):
    config = GRPOConfig(name="dapo", logprob_level=level, kl_estimator=estimator, kl_coef=0.3, entropy_coef=0.1)
    new, entropy, items = example(seed, chunk=chunk)
    loss, parts = loss_sum(new, entropy, None, items, config)
    assert loss.item() == pytest.approx(slow_loss(new, entropy, items, config), rel=1e-10)
    assert parts["reference_kl"].item() != 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_are_those_of_finite_differences_and_skip_what_was_not_played(level, estimator):
    config = GRPOConfig(name="grpo", logprob_level=level, kl_estimator=estimator, kl_coef=0.3, entropy_coef=0.1)
    new, entropy, items = example(seed=3)
    new.requires_grad_()
    assert torch.autograd.gradcheck(lambda new: loss_sum(new, entropy, None, items, config)[0], new, atol=1e-6)
    loss_sum(new, entropy, None, items, config)[0].backward()
    assert not new.grad[~items.mask].any() and new.grad[items.mask].all()


def test_relatives_are_presets_of_the_same_options():
    assert GRPOConfig(name="dapo").clip_high == 0.28 and GRPOConfig(name="dapo").filter == "resample"
    assert GRPOConfig(name="dapo", clip_high=0.3).clip_high == 0.3
    assert (GRPOConfig(name="rloo").baseline, GRPOConfig(name="rloo").scale) == ("leave_one_out", "none")
    assert GRPOConfig(name="reinforce++", group_size=1).filter == "none"
