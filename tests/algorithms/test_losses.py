"""PPO's losses by hand, against scalar references, and every option changing what it says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.algorithms.config import PPOConfig
from embodied.algorithms.losses import LossItems, entropy_sum, loss_sum, policy_loss_sum, value_loss_sum

F64 = torch.float64
LEVELS = ["action_dim", "action", "chunk"]


def tensor(numbers, grad=False):
    return torch.tensor(numbers, dtype=F64, requires_grad=grad)


def one_ratio(ratio, advantage, clip_low=0.2, clip_high=0.2, dual_clip=None):
    """Loss, d loss / d log-prob and stats of one item of one unit whose ratio is given."""
    logp = tensor([[[math.log(ratio)]]], grad=True)
    loss, stats = policy_loss_sum(
        logp,
        torch.zeros(1, 1, 1, dtype=F64),
        tensor([advantage]),
        torch.ones(1, 1, dtype=torch.bool),
        torch.ones(1, dtype=F64),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        level="chunk",
    )
    loss.backward()
    return loss.item(), logp.grad.item(), {name: value.item() for name, value in stats.items()}


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
def test_the_clipped_loss_by_hand(ratio, advantage, loss, gradient, clipped):
    found, slope, stats = one_ratio(ratio, advantage)
    assert (found, slope) == (pytest.approx(loss), pytest.approx(gradient))
    assert stats["clip_fraction"] == clipped
    assert stats["dual_clip_fraction"] == 0
    assert stats["ratio_max"] == pytest.approx(ratio)
    assert stats["approx_kl"] == pytest.approx(ratio - 1 - math.log(ratio))


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    loss, slope, stats = one_ratio(5.0, -2.0, dual_clip=3.0)
    assert (loss, slope, stats["dual_clip_fraction"]) == (pytest.approx(6.0), 0.0, 1.0)  # 3 * 2
    assert one_ratio(2.0, -2.0, dual_clip=3.0)[0] == pytest.approx(4.0)  # below 3: as without
    assert one_ratio(5.0, 2.0, dual_clip=3.0)[0] == pytest.approx(-2.4)  # A > 0: as without


def test_what_a_level_means():
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
def test_the_value_loss_by_hand(value, value_clip, huber_delta, loss, gradient):
    values = tensor([value], grad=True)
    found, stats = value_loss_sum(
        values, tensor([1.0]), tensor([4.0]), tensor([1.0]), value_clip=value_clip, huber_delta=huber_delta
    )
    found.backward()
    assert (found.item(), values.grad.item()) == (pytest.approx(loss), pytest.approx(gradient))
    assert stats["value_clip_fraction"].item() == (value_clip is not None and abs(value - 1) > value_clip)


def test_the_entropy_of_a_unit_by_hand():
    # one item, second step not played: entropies 1 and 3 -> per dimension (1 + 3) / 2, per step and decision 1 + 3
    entropy = tensor([[[1.0, 3.0], [100.0, 100.0]]])
    mask = torch.tensor([[True, False]])
    found = {level: entropy_sum(entropy, mask, tensor([2.0]), level).item() for level in LEVELS}
    assert found == {"action_dim": 4.0, "action": 8.0, "chunk": 8.0}  # twice, by the weight of 2
    # two played steps: per step the mean, per decision the sum
    both = torch.ones(1, 2, dtype=torch.bool)
    found = [entropy_sum(tensor([[[1.0, 3.0], [2.0, 4.0]]]), both, tensor([1.0]), level).item() for level in LEVELS]
    assert found == [2.5, 5.0, 10.0]


def example(seed=0, size=6, chunk=3, dims=2, spread=0.5):
    """Random (logprobs, entropy, values) and their items."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: torch.from_numpy(rng.normal(size=shape))  # noqa: E731
    mask = torch.from_numpy(rng.random((size, chunk)) < 0.8)
    mask[:, 0] = True
    old = draw(size, chunk, dims)
    new = (old + spread * draw(size, chunk, dims), draw(size, chunk, dims), draw(size))
    numbers = {name: draw(size) for name in ("values", "advantages", "returns")}
    items = LossItems(old, mask=mask, weights=torch.ones(size, dtype=F64), **numbers)
    return new, items


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
            ratio = math.exp(sum((logprobs[b, c, a] - items.logprobs[b, c, a]).item() for c, a in unit))
            gain = min(ratio * advantage, min(max(ratio, 1 - config.clip_low), 1 + config.clip_high) * advantage)
            if config.dual_clip is not None and advantage < 0:
                gain = max(gain, config.dual_clip * advantage)
            bonus = config.entropy_coef * sum(entropy[b, c, a].item() for c, a in unit)
            total -= weight * (gain + bonus) / len(cells)
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


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.1, 1.0, 3.0]),
    st.sampled_from(LEVELS),
    st.sampled_from([None, 1.5, 3.0]),
    st.sampled_from([None, 0.2]),
    st.sampled_from([None, 0.5]),
)
def test_the_loss_equals_a_scalar_reference(seed, size, chunk, dims, spread, level, dual_clip, value_clip, huber):
    options = {"logprob_level": level, "dual_clip": dual_clip, "value_clip": value_clip, "huber_delta": huber}
    config = PPOConfig(**options, clip_high=0.3, entropy_coef=0.1)
    new, items = example(seed, size, chunk, dims, spread)
    assert loss_sum(*new, items, config)[0].item() == pytest.approx(slow_loss(new, items, config), rel=1e-12)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("options", [{}, EVERYTHING_ON], ids=["plain", "everything on"])
def test_gradients_are_those_of_finite_differences(level, options):
    config = PPOConfig(logprob_level=level, **options)
    new, items = example(seed=1)
    new = [x.clone().requires_grad_() for x in new]
    assert torch.autograd.gradcheck(lambda *new: loss_sum(*new, items, config)[0], new, eps=1e-7, atol=1e-6)


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
    merged = {n: max(p[n] for p in parts) if n.endswith("_max") else sum(p[n] for p in parts) for n in whole}
    close(merged, whole)


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
