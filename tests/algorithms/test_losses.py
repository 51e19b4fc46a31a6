"""The losses by hand and against a scalar reference, what KL estimators are right about, and what stale items do."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.algorithms.config import GRPOConfig, PPOConfig
from embodied.algorithms.losses import (
    LossItems,
    entropy_sum,
    loss_sum,
    out_of_bounds,
    policy_loss_sum,
    reference_kl_sum,
    value_loss_sum,
)

F64 = torch.float64
LEVELS = ["action_dim", "action", "chunk"]
ESTIMATORS = ["k1", "k2", "k3"]
PPO_CLIP = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}


def tensor(numbers, grad=False):
    return torch.tensor(numbers, dtype=F64, requires_grad=grad)


def one_unit(ratio, advantage, dtype=F64, importance=None, **options):
    """Loss, d loss / d log-prob and stats of one unit; with `importance`, the proximal policy's ratio to the old one,
    `ratio` is to the proximal policy."""
    old = torch.tensor([[[-1.0]]], dtype=dtype)
    anchor = old if importance is None else old + math.log(importance)
    logprobs = (anchor + math.log(ratio)).requires_grad_()
    loss, stats = policy_loss_sum(
        logprobs,
        old,
        torch.tensor([advantage], dtype=dtype),
        torch.ones(1, 1, dtype=torch.bool),
        torch.ones(1, dtype=dtype),
        **PPO_CLIP | {"level": "chunk", "proximal": None if importance is None else anchor} | options,
    )
    loss.backward()
    return loss.item(), logprobs.grad.item(), {name: number.item() for name, number in stats.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.1, 2.0, -2.2, -2.2, 0),  # inside: -ratio * A, whose gradient by the log-prob is -ratio * A
        (1.5, 2.0, -2.4, 0.0, 1),  # good action, already likelier than 1.2: -1.2 * 2 and no gradient
        (0.5, 2.0, -1.0, -1.0, 1),  # good action, become unlikely: pulled back in full, -0.5 * 2
        (0.5, -2.0, 1.6, 0.0, 1),  # bad action, already rarer than 0.8: 0.8 * 2 and no gradient
        (1.5, -2.0, 3.0, 3.0, 1),  # bad action, become likely: pushed back in full, 1.5 * 2
        (5.0, -2.0, 10.0, 10.0, 1),  # ... without bound, as there is no dual clip
    ],
)
def test_the_clipped_loss_and_its_gradient_equal_hand_computed_numbers(ratio, advantage, loss, gradient, clipped):
    found, slope, stats = one_unit(ratio, advantage)
    assert (found, slope) == (pytest.approx(loss), pytest.approx(gradient))
    assert stats["clip_fraction"] == clipped
    assert "dual_clip_fraction" not in stats
    assert stats["approx_kl"] == pytest.approx(ratio - 1 - math.log(ratio))


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    loss, slope, stats = one_unit(5.0, -2.0, dual_clip=3.0)
    assert (loss, slope, stats["dual_clip_fraction"]) == (pytest.approx(6.0), 0.0, 1.0)  # 3 * 2
    assert one_unit(2.0, -2.0, dual_clip=3.0)[0] == pytest.approx(4.0)  # below 3: as without
    assert one_unit(5.0, 2.0, dual_clip=3.0)[0] == pytest.approx(-2.4)  # A > 0: as without


def test_each_log_prob_level_clips_its_own_ratio():
    # One item of two steps with two dimensions; log-ratios log [[2, 1/4], [1/2, 2]], A = 1, clip 0.2:
    #   action_dim: ratios 2, .25, .5, 2 -> min(r, 1.2) -> (1.2 + .25 + .5 + 1.2) / 4 = 0.7875
    #   action: ratios .5, 1 -> (.5 + 1) / 2 = 0.75        chunk: ratio .5 -> 0.5
    logp = tensor([[[2.0, 0.25], [0.5, 2.0]]]).log()
    losses = [policy_loss(logp, level=level)[0].item() for level in LEVELS]
    assert losses == pytest.approx([-0.7875, -0.75, -0.5])


def test_the_kl_counts_whole_decisions_at_every_level():
    # ratios 2, 1/4, 1/2, 2: sum of r - 1 - log r, and the logs cancel to log 2 + log 1/4 + log 1/2 + log 2 = -log 2
    logp = tensor([[[2.0, 0.25], [0.5, 2.0]]]).log()
    for level in LEVELS:
        stats = policy_loss(logp, level=level)[1]
        assert stats["approx_kl"].item() == pytest.approx(4.75 - 4 + math.log(2))


def policy_loss(logp, level="chunk", mask=None, weights=None, old=None, advantages=None, **options):
    return policy_loss_sum(
        logp,
        torch.zeros_like(logp) if old is None else old,
        torch.ones(len(logp), dtype=F64) if advantages is None else advantages,
        torch.ones(logp.shape[:2], dtype=torch.bool) if mask is None else mask,
        torch.ones(len(logp), dtype=F64) if weights is None else weights,
        **{"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "level": level} | options,
    )


@pytest.mark.parametrize("level", LEVELS)
def test_masked_steps_are_in_no_ratio(level):
    # Only the first step was played: ratio 1.1 in one dimension, 1 in the other
    played = tensor([[[math.log(1.1), 0.0]]])
    for rubbish in (50.0, float("nan"), float("inf")):
        logp = torch.cat([played, torch.full((1, 1, 2), rubbish, dtype=F64)], dim=1).requires_grad_()
        loss, stats = policy_loss(logp, level, mask=torch.tensor([[True, False]]))
        expected, expected_stats = policy_loss(played, level)
        assert loss.item() == expected.item()
        assert {k: v.item() for k, v in stats.items()} == {k: v.item() for k, v in expected_stats.items()}
        loss.backward()
        assert logp.grad[0, 1].tolist() == [0, 0]
        assert logp.grad[0, 0].isfinite().all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_decision_without_a_played_step_adds_nothing(level):
    logp = torch.full((1, 2, 2), 3.0, dtype=F64, requires_grad=True)
    nobody = torch.zeros(1, 2, dtype=torch.bool)
    loss, stats = policy_loss(logp, level, mask=nobody)
    loss.backward()
    assert loss.item() == 0
    assert not logp.grad.any()
    assert not any(value.item() for value in stats.values())
    assert entropy_sum(logp, nobody, torch.ones(1, dtype=F64), level).item() == 0


@pytest.mark.parametrize(
    ("value", "value_clip", "huber_delta", "loss", "gradient"),
    [  # the old value is 1
        (2.0, None, None, 2.0, -2.0),  # return 4: (2 - 4)^2 / 2
        (2.0, 0.5, None, 3.125, 0.0),  # clipped to 1.5: (1.5 - 4)^2 / 2 is worse, and moving further earns nothing
        (1.25, 0.5, None, 3.78125, -2.75),  # within the clip: (1.25 - 4)^2 / 2
        (0.0, 0.5, None, 8.0, -4.0),  # moved the wrong way: its own error is the worse one
        (2.0, None, 0.5, 0.875, -0.5),  # Huber: 0.5 * (2 - 0.25)
        (2.0, None, 3.0, 2.0, -2.0),  # within Huber's delta: squared
        (2.0, 0.5, 0.5, 1.125, 0.0),  # both: 0.5 * (2.5 - 0.25)
    ],
)
def test_the_value_loss_and_its_gradient_equal_hand_computed_numbers(value, value_clip, huber_delta, loss, gradient):
    values = tensor([value], grad=True)
    found, stats = value_loss_sum(
        values, tensor([1.0]), tensor([4.0]), tensor([1.0]), value_clip=value_clip, huber_delta=huber_delta
    )
    found.backward()
    assert (found.item(), values.grad.item()) == (pytest.approx(loss), pytest.approx(gradient))
    assert stats.get("value_clip_fraction", 0) == (value_clip is not None and abs(value - 1) > value_clip)


def test_the_entropy_of_a_unit_equals_hand_computed_numbers():
    # one item, second step not played: entropies 1 and 3 -> per dimension (1 + 3) / 2, per step and decision 1 + 3
    entropy = tensor([[[1.0, 3.0], [100.0, 100.0]]])
    mask = torch.tensor([[True, False]])
    found = {level: entropy_sum(entropy, mask, tensor([2.0]), level).item() for level in LEVELS}
    assert found == {"action_dim": 4.0, "action": 8.0, "chunk": 8.0}  # twice, by the weight of 2
    # two played steps: per step the mean, per decision the sum
    both = torch.ones(1, 2, dtype=torch.bool)
    found = [entropy_sum(tensor([[[1.0, 3.0], [2.0, 4.0]]]), both, tensor([1.0]), level).item() for level in LEVELS]
    assert found == [2.5, 5.0, 10.0]


def example(seed=0, size=6, chunk=3, dims=2, spread=0.5, parts=()):
    """Random new log-probs, entropies and values, and their items, with these parts besides."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: torch.from_numpy(rng.normal(size=shape))  # noqa: E731
    mask = torch.from_numpy(rng.random((size, chunk)) < 0.8)
    mask[:, 0] = True
    old = draw(size, chunk, dims)
    near = lambda: old + spread * draw(size, chunk, dims)  # noqa: E731
    new = (near(), draw(size, chunk, dims), draw(size))
    numbers = {name: draw(size) for name in ("values", "advantages", "returns")} | {name: near() for name in parts}
    return new, LossItems(old, mask=mask, weights=torch.ones(size, dtype=F64), **numbers)


def there(items):
    """Without a reference, which nobody asked for."""
    return {name: part for name, part in vars(items).items() if part is not None}


def select(new, items, ids):
    return [x[ids] for x in new], LossItems(**{name: part[ids] for name, part in there(items).items()})


EVERYTHING_ON = {"dual_clip": 2.0, "value_clip": 0.5, "huber_delta": 0.7, "entropy_coef": 0.1}


def slow_loss(new, items, config):
    """The same, one unit at a time, in plain floats."""
    total = 0.0
    logprobs, entropy, values = new
    for b, weight in enumerate(items.weights.tolist()):
        advantage = items.advantages[b].item()
        played = [c for c in range(items.mask.shape[1]) if items.mask[b, c]]
        dims = range(logprobs.shape[2])
        cells = {
            "action_dim": [[(c, a)] for c in played for a in dims],
            "action": [[(c, a) for a in dims] for c in played],
            "chunk": [[(c, a) for c in played for a in dims]],
        }[config.logprob_level]
        for unit in cells:
            now, acted, start, reference, random = (
                None if part is None else sum(part[b, c, a].item() for c, a in unit)
                for part in (logprobs, items.logprobs, items.proximal, items.reference, entropy)
            )
            start = acted if start is None else start
            ratio = math.exp(now - start)
            gain = min(ratio, config.ratio_cap) * advantage
            if config.clip == "two_sided":
                clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
                gain = min(ratio * advantage, clipped * advantage)
                if config.dual_clip is not None and advantage < 0:
                    gain = max(gain, config.dual_clip * advantage)
            gain *= min(math.exp(start - acted), config.importance_cap or math.inf)
            if reference is not None:
                d = now - reference
                kl = {"k1": math.exp(now - acted) * d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}
                gain -= config.kl_coef * kl[config.kl_estimator]
            total -= weight * (gain + config.entropy_coef * random) / len(cells)
        if config.name != "ppo":
            continue
        value, old, target = values[b].item(), items.values[b].item(), items.returns[b].item()
        errors = [value - target]
        if config.value_clip is not None:
            errors.append(old + min(max(value - old, -config.value_clip), config.value_clip) - target)
        delta = config.huber_delta
        penalties = [
            e * e / 2 if delta is None or abs(e) <= delta else delta * (abs(e) - delta / 2) for e in map(float, errors)
        ]
        total += config.value_coef * weight * max(penalties)
    return total


VALUED = product([None, 1.5, 3.0], [None, 0.2], [None, 0.5])
ALGOS = [
    *({"name": "ppo", "dual_clip": dual, "value_clip": clip, "huber_delta": huber} for dual, clip, huber in VALUED),
    *({"name": "dapo", "kl_estimator": estimator, "kl_coef": 0.3} for estimator in ESTIMATORS),
    *({"name": "grpo", "clip": clip, "ratio_cap": 1.5} for clip in ("aipo", "tis")),
    {"name": "grpo", "decoupled": True},
    {"name": "grpo", "decoupled": True, "importance_cap": 1.2, "dual_clip": 2.0},
]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.1, 1.0, 3.0]),
    st.sampled_from(LEVELS),
    st.sampled_from(ALGOS),
)
def test_the_loss_equals_a_scalar_reference(seed, size, chunk, dims, spread, level, options):
    kind = PPOConfig if options["name"] == "ppo" else GRPOConfig
    bound = {} if "clip" in options else {"clip_high": 0.3}
    config = kind(**options, **bound, logprob_level=level, entropy_coef=0.1)
    parts = ["reference"] * bool(config.kl_coef) + ["proximal"] * config.decoupled
    new, items = example(seed, size, chunk, dims, spread, parts)
    items = LossItems(**there(items) | {"weights": items.weights + torch.arange(size) / 4})
    found, _ = loss_sum(*new, items, config)
    assert found.item() == pytest.approx(slow_loss(new, items, config), rel=1e-10, abs=1e-12)
    whole = replace(items, mask=torch.ones_like(items.mask))
    unmasked, stats = loss_sum(*new, replace(whole, mask=None), config)
    expected, expected_stats = loss_sum(*new, whole, config)
    close(stats | {"loss": unmasked}, expected_stats | {"loss": expected})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "config",
    [
        PPOConfig(),
        PPOConfig(**EVERYTHING_ON),
        *(GRPOConfig(name="grpo", kl_estimator=k, kl_coef=0.3) for k in ESTIMATORS),
    ],
    ids=["plain", "everything on", *ESTIMATORS],
)
def test_gradients_are_those_of_finite_differences_and_skip_what_was_not_played(level, config):
    config = config.model_copy(update={"logprob_level": level})
    new, items = example(seed=1, parts=["reference"] * bool(config.kl_coef))
    new = [x.clone().requires_grad_() for x in new]
    assert torch.autograd.gradcheck(lambda *new: loss_sum(*new, items, config)[0], new, eps=1e-7, atol=1e-6)
    loss_sum(*new, items, config)[0].backward()
    assert not new[0].grad[~items.mask].any()
    assert not config.kl_coef or new[0].grad[items.mask].all()


def close(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        assert found[name].item() == pytest.approx(expected[name].item(), rel=1e-12, abs=1e-12), name


@pytest.mark.parametrize("level", LEVELS)
def test_losses_and_stats_of_ranks_add_up_to_the_whole(level):
    config = PPOConfig(logprob_level=level, **EVERYTHING_ON)
    new, items = example()
    loss, whole = loss_sum(*new, items, config)
    whole["loss"] = loss
    parts = []
    for ids in (torch.arange(4), torch.arange(4, 6)):
        part, few = select(new, items, ids)
        loss, stats = loss_sum(*part, few, config)
        parts.append(stats | {"loss": loss})
    close({name: sum(part[name] for part in parts) for name in whole}, whole)


def test_items_without_weight_are_padding():
    config = PPOConfig(**EVERYTHING_ON)
    new, items = example()
    new = (new[0] + tensor([0, 0, 0, 0, 5, 5])[:, None, None], *new[1:])  # the largest ratios are padding
    some, few = select(new, items, torch.arange(4))
    weightless = LossItems(**there(items) | {"weights": tensor([1, 1, 1, 1, 0, 0])})
    loss, stats = loss_sum(*new, weightless, config)
    expected, expected_stats = loss_sum(*some, few, config)
    close(stats | {"loss": loss}, expected_stats | {"loss": expected})


def test_float32_stays_float32_and_stats_carry_no_gradient():
    new, items = example()
    items = LossItems(**{k: v if v.dtype == torch.bool else v.float() for k, v in there(items).items()})
    loss, stats = loss_sum(*(x.float().requires_grad_() for x in new), items, PPOConfig(**EVERYTHING_ON))
    assert loss.dtype == torch.float32
    assert not any(value.requires_grad for value in stats.values())


# The divergence from the reference


def test_estimators_of_the_divergence_equal_hand_computed_numbers():
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
def test_on_policy_k1_has_the_right_value_and_gradient_k2_the_gradient_and_k3_the_value(
    estimator, value_right, slope_right
):
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


def test_relatives_are_presets_of_the_same_options():
    assert GRPOConfig(name="dapo").clip_high == 0.28 and GRPOConfig(name="dapo").filter == "resample"
    assert GRPOConfig(name="dapo", clip_high=0.3).clip_high == 0.3
    assert (GRPOConfig(name="rloo").baseline, GRPOConfig(name="rloo").scale) == ("leave_one_out", "none")
    assert GRPOConfig(name="reinforce++", group_size=1).filter == "none"


# Stale items


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "aipo", "tis", "above"),
    [
        (1.5, 2.0, -3.0, -3.0, -3.0, 0),  # -ratio * A, above what PPO would clip
        (0.1, 2.0, -0.2, -0.2, -0.2, 0),
        (0.1, -2.0, 0.2, 0.2, 0.2, 0),  # no lower clip: a bad action that is rare is still pushed down
        (10.0, 2.0, -16.0, 0.0, -16.0, 1),  # -8 * 2: cut, or still of weight 8
        (10.0, -2.0, 16.0, 0.0, 16.0, 1),  # also for A < 0, where PPO would push without bound
    ],
)
def test_losses_with_one_sided_caps_equal_hand_computed_numbers(ratio, advantage, loss, aipo, tis, above):
    for clip, slope in (("aipo", aipo), ("tis", tis)):
        found, gradient, stats = one_unit(ratio, advantage, clip=clip)
        assert (found, gradient) == (pytest.approx(loss), pytest.approx(slope)), clip
        assert stats["clip_fraction"] == above and "dual_clip_fraction" not in stats
    assert one_unit(ratio, advantage, clip="aipo", ratio_cap=1.2)[0] == pytest.approx(-min(ratio, 1.2) * advantage)


@pytest.mark.parametrize("clip", ["aipo", "tis"])
def test_a_ratio_beyond_all_numbers_is_capped_like_any_other(clip):
    # e^100 is infinite in float32
    loss, slope, _ = one_unit(math.exp(100), -1.0, torch.float32, clip=clip)
    assert (loss, slope) == (pytest.approx(8.0), pytest.approx(0.0 if clip == "aipo" else 8.0))


@pytest.mark.parametrize(
    ("importance", "cap", "ratio", "advantage", "loss", "slope"),
    [
        (2.0, None, 1.5, 1.0, -2.4, 0.0),  # clipped against the proximal policy at 1.2, times 2
        (2.0, None, 1.5, -1.0, 3.0, 3.0),  # bad and likelier: pushed back in full, 1.5 times 2
        (2.0, None, 1.0, 1.0, -2.0, -2.0),  # where an update begins: nothing is clipped, however stale
        (2.0, 1.5, 1.0, 1.0, -1.5, -1.5),  # truncated: min(2, 1.5)
        (0.5, 1.5, 1.0, 1.0, -0.5, -0.5),  # there is no lower bound
        (0.5, None, 0.7, -1.0, 0.4, 0.0),  # bad and rarer than 0.8: 0.8 times 0.5
    ],
)
def test_the_decoupled_loss_and_its_gradient_equal_hand_computed_numbers(
    importance, cap, ratio, advantage, loss, slope
):
    found, gradient, stats = one_unit(ratio, advantage, importance=importance, importance_cap=cap)
    assert (found, gradient) == (pytest.approx(loss), pytest.approx(slope))
    assert stats["importance_weight"] == pytest.approx(min(importance, cap or importance))
    assert stats["approx_kl"] == pytest.approx(ratio - 1 - math.log(ratio))  # from the proximal policy


def test_the_importance_weight_is_per_unit_and_ignores_masked_steps():
    # Two dimensions; the second step was not played. Proximal / old 2 and 3, the policy is at the proximal one, A = 1:
    #   action_dim: (2 + 3) / 2 = 2.5, with cap 2.5 (2 + 2.5) / 2 = 2.25       action, chunk: 2 * 3 = 6, with cap 2.5
    proximal = tensor([[[2.0, 3.0], [math.nan, 7.0]]]).log()
    mask, one = torch.tensor([[True, False]]), torch.ones(1, dtype=F64)
    for cap, wanted in ((None, [2.5, 6.0, 6.0]), (2.5, [2.25, 2.5, 2.5])):
        options = PPO_CLIP | {"proximal": proximal, "importance_cap": cap}
        found = [
            policy_loss_sum(proximal, torch.zeros_like(proximal), one, mask, one, level=level, **options)
            for level in LEVELS
        ]
        assert [-loss.item() for loss, _ in found] == pytest.approx(wanted)
        assert [stats["importance_weight"].item() for _, stats in found] == pytest.approx(wanted)


def mask_config(kind, **options):
    return PPOConfig(**{"episode_mask": kind, "episode_mask_low": 0.5, "episode_mask_high": 5.0} | options)


def test_episodes_whose_ratio_is_out_of_bounds_are_found():
    # Three episodes of two, one and two items of one unit, ratios 2 and 8, 4, and 1/8 and 1/2:
    #   products 16, 4, 1/16: outside 0.5 to 5 are the first and the last
    #   geometric means sqrt(16) = 4, 4, sqrt(1/16) = 1/4: only the last is outside
    proximal = tensor([2.0, 8.0, 4.0, 1 / 8, 1 / 2]).log().view(5, 1, 1)
    known = (proximal, torch.zeros_like(proximal), torch.ones(5, 1, dtype=torch.bool), torch.tensor([0, 0, 1, 2, 2]))
    assert out_of_bounds(*known, mask_config("product")).tolist() == [True, True, False, True, True]
    assert out_of_bounds(*known, mask_config("mean")).tolist() == [False, False, False, True, True]
    assert out_of_bounds(*known, mask_config("product", episode_mask_low=None)).tolist() == [True, True, *[False] * 3]
    assert out_of_bounds(*known, mask_config("mean", episode_mask_high=None)).tolist() == [*[False] * 3, True, True]


def test_the_mean_ratio_is_over_units_and_counts_no_masked_step():
    # One item, the second step not played, ratios 2 and 18 in two dimensions, bounds 0.5 to 20:
    #   action_dim: sqrt(2 * 18) = 6      chunk: 2 * 18 = 36
    proximal = tensor([[[2.0, 18.0], [math.nan, 1e9]]]).log()
    known = (proximal, torch.zeros_like(proximal), torch.tensor([[True, False]]), torch.zeros(1, dtype=torch.int64))
    for level, outside in (("action_dim", False), ("chunk", True)):
        config = mask_config("mean", episode_mask_high=20.0, logprob_level=level)
        assert out_of_bounds(*known, config).tolist() == [outside]
    nobody = (proximal, torch.zeros_like(proximal), torch.tensor([[False, False]]), known[-1])
    assert out_of_bounds(*nobody, mask_config("mean")).tolist() == [False]
