"""What the policy's loss does against stale items, by hand, against a scalar reference, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.algorithms.config import GRPOConfig, PPOConfig
from embodied.algorithms.losses import LossItems, loss_sum, out_of_bounds, policy_loss_sum

F64 = torch.float64
LEVELS = ["action_dim", "action", "chunk"]
PPO_CLIP = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}


def f64(numbers):
    return torch.tensor(numbers, dtype=F64)


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
    ("ratio", "advantage", "loss", "aipo", "tis", "above"),
    [
        (1.5, 2.0, -3.0, -3.0, -3.0, 0),  # -ratio * A, above what PPO would clip
        (0.1, 2.0, -0.2, -0.2, -0.2, 0),
        (0.1, -2.0, 0.2, 0.2, 0.2, 0),  # no lower clip: a bad action that is rare is still pushed down
        (10.0, 2.0, -16.0, 0.0, -16.0, 1),  # -8 * 2: cut, or still of weight 8
        (10.0, -2.0, 16.0, 0.0, 16.0, 1),  # also for A < 0, where PPO would push without bound
    ],
)
def test_one_sided_caps_by_hand(ratio, advantage, loss, aipo, tis, above):
    for clip, slope in (("aipo", aipo), ("tis", tis)):
        found, gradient, stats = one_unit(ratio, advantage, clip=clip)
        assert (found, gradient) == (pytest.approx(loss), pytest.approx(slope)), clip
        assert (stats["clip_fraction"], stats["dual_clip_fraction"]) == (above, 0)
        assert stats["ratio_max"] == pytest.approx(ratio)
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
def test_the_decoupled_loss_by_hand(importance, cap, ratio, advantage, loss, slope):
    found, gradient, stats = one_unit(ratio, advantage, importance=importance, importance_cap=cap)
    assert (found, gradient) == (pytest.approx(loss), pytest.approx(slope))
    assert stats["importance_weight"] == pytest.approx(min(importance, cap or importance))
    assert stats["approx_kl"] == pytest.approx(ratio - 1 - math.log(ratio))  # from the proximal policy


def test_the_importance_weight_is_of_units_and_masked_steps_are_in_none():
    # Two dimensions; the second step was not played. Proximal / old 2 and 3, the policy is at the proximal one, A = 1:
    #   action_dim: (2 + 3) / 2 = 2.5, with cap 2.5 (2 + 2.5) / 2 = 2.25       action, chunk: 2 * 3 = 6, with cap 2.5
    proximal = f64([[[2.0, 3.0], [math.nan, 7.0]]]).log()
    mask, one = torch.tensor([[True, False]]), torch.ones(1, dtype=F64)
    for cap, wanted in ((None, [2.5, 6.0, 6.0]), (2.5, [2.25, 2.5, 2.5])):
        options = PPO_CLIP | {"proximal": proximal, "importance_cap": cap}
        found = [
            policy_loss_sum(proximal, torch.zeros_like(proximal), one, mask, one, level=level, **options)
            for level in LEVELS
        ]
        assert [-loss.item() for loss, _ in found] == pytest.approx(wanted)
        assert [stats["importance_weight"].item() for _, stats in found] == pytest.approx(wanted)


def example(seed, size=5, chunk=3, dims=2):
    """Random new log-probs and entropies, and stale items of which the last is padding."""
    draw = torch.Generator().manual_seed(seed)
    new, old, proximal = 0.7 * torch.randn(3, size, chunk, dims, dtype=F64, generator=draw) - 1
    steps = torch.randint(0, chunk + 1, (size,), generator=draw)
    mask = torch.arange(chunk)[None] < steps[:, None]
    weights = torch.rand(size, dtype=F64, generator=draw) + 0.5
    weights[-1] = 0
    advantages = torch.randn(size, dtype=F64, generator=draw)
    return new, torch.zeros_like(new), LossItems(old, advantages, mask, weights, proximal=proximal)


def units_of(numbers, mask, level):
    """The sums of one item's numbers [C][A] over its units."""
    played = [row for row, there in zip(numbers, mask, strict=True) if there]
    if level == "action_dim":
        return [number for row in played for number in row]
    rows = [sum(row) for row in played]
    return rows if level == "action" else [sum(rows)] * bool(rows)


def slow_loss(new, items, config):
    """The same, one unit at a time, in plain floats."""
    total, level = 0.0, config.logprob_level
    for b, (advantage, mask) in enumerate(zip(items.advantages.tolist(), items.mask.tolist(), strict=True)):
        acted, now = (units_of(numbers[b].tolist(), mask, level) for numbers in (items.logprobs, new))
        start = acted if items.proximal is None else units_of(items.proximal[b].tolist(), mask, level)
        for mu, prox, pi in zip(acted, start, now, strict=True):
            ratio = math.exp(pi - prox)
            if config.clip == "two_sided":
                clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
                gain = min(ratio * advantage, clipped * advantage)
                if config.dual_clip is not None and advantage < 0:
                    gain = max(gain, config.dual_clip * advantage)
            else:
                gain = min(ratio, config.ratio_cap) * advantage
            weight = min(math.exp(prox - mu), config.importance_cap or math.inf)
            total -= items.weights[b].item() * gain * weight / len(now)
    return total


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from(LEVELS),
    st.sampled_from(
        [
            {"clip": "aipo", "ratio_cap": 1.5},
            {"clip": "tis", "ratio_cap": 1.5},
            {"decoupled": True},
            {"decoupled": True, "importance_cap": 1.2, "dual_clip": 2.0},
        ]
    ),
)
def test_the_loss_equals_a_scalar_reference(seed, level, options):
    config = GRPOConfig(name="grpo", logprob_level=level, **options)
    new, entropy, items = example(seed)
    if not config.decoupled:
        items = LossItems(**vars(items) | {"proximal": None})
    loss, _ = loss_sum(new, entropy, None, items, config)
    assert loss.item() == pytest.approx(slow_loss(new, items, config), rel=1e-12, abs=1e-12)


def mask_config(kind, **options):
    return PPOConfig(**{"episode_mask": kind, "episode_mask_low": 0.5, "episode_mask_high": 5.0} | options)


def test_episodes_out_of_bounds_by_hand():
    # Three episodes of two, one and two items of one unit, ratios 2 and 8, 4, and 1/8 and 1/2:
    #   products 16, 4, 1/16: outside 0.5 to 5 are the first and the last
    #   geometric means sqrt(16) = 4, 4, sqrt(1/16) = 1/4: only the last is outside
    proximal = f64([2.0, 8.0, 4.0, 1 / 8, 1 / 2]).log().view(5, 1, 1)
    known = (proximal, torch.zeros_like(proximal), torch.ones(5, 1, dtype=torch.bool), torch.tensor([0, 0, 1, 2, 2]))
    assert out_of_bounds(*known, mask_config("product")).tolist() == [True, True, False, True, True]
    assert out_of_bounds(*known, mask_config("mean")).tolist() == [False, False, False, True, True]
    assert out_of_bounds(*known, mask_config("product", episode_mask_low=None)).tolist() == [True, True, *[False] * 3]
    assert out_of_bounds(*known, mask_config("mean", episode_mask_high=None)).tolist() == [*[False] * 3, True, True]


def test_the_mean_ratio_is_over_units_and_counts_no_masked_step():
    # One item, the second step not played, ratios 2 and 18 in two dimensions, bounds 0.5 to 20:
    #   action_dim: sqrt(2 * 18) = 6      chunk: 2 * 18 = 36
    proximal = f64([[[2.0, 18.0], [math.nan, 1e9]]]).log()
    known = (proximal, torch.zeros_like(proximal), torch.tensor([[True, False]]), torch.zeros(1, dtype=torch.int64))
    for level, outside in (("action_dim", False), ("chunk", True)):
        config = mask_config("mean", episode_mask_high=20.0, logprob_level=level)
        assert out_of_bounds(*known, config).tolist() == [outside]
    nobody = (proximal, torch.zeros_like(proximal), torch.tensor([[False, False]]), known[-1])
    assert out_of_bounds(*nobody, mask_config("mean")).tolist() == [False]
