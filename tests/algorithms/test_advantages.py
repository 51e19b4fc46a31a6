"""GAE by hand, against a scalar reference, and the moments that learner ranks merge."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from embodied.algorithms.advantages import Moments, gae, merge_moments, moments, normalize


def fields(rewards, values, *, terminated=(), truncated=(), masked=(), final_values=()):
    """Arguments of `gae` for rewards [T, N, C]; the rest lists the (t, n, c) that are set, or {(t, n): value}."""
    rewards = np.array(rewards, float)
    flags = {name: np.zeros(rewards.shape, bool) for name in ("terminated", "truncated", "mask")}
    flags["mask"][:] = True
    for name, where in (("terminated", terminated), ("truncated", truncated), ("mask", masked)):
        for index in where:
            flags[name][index] = name != "mask"
    final = np.zeros(rewards.shape[:2])
    for index, value in dict(final_values).items():
        final[index] = value
    return {"rewards": rewards, "values": np.array(values, float), "final_values": final, **flags}


def column(*numbers):
    """[T] of one env."""
    return np.array(numbers, float)[:, None]


def ones(horizon, chunk=1):
    return np.ones((horizon, 1, chunk))


def test_the_worked_example_of_the_docstring():
    data = fields(
        np.ones((3, 2, 1)),
        np.full((4, 2), 4.0),
        truncated=[(1, 0, 0)],
        terminated=[(1, 1, 0)],
        final_values={(1, 0): 8.0},
    )
    advantages, returns = gae(**data, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[-0.75, -1.75], [1.0, -3.0], [-1.0, -1.0]]
    assert returns.tolist() == [[3.25, 2.25], [5.0, 1.0], [3.0, 3.0]]


CHUNKS = {  # three env steps per decision; the episode is truncated at the second step of decision 0
    "rewards": [[[1, 2, 64]], [[3, 4, 5]]],
    "values": column(1, 2, 3),
    "truncated": [(0, 0, 1)],
    "masked": [(0, 0, 2)],
    "final_values": {(0, 0): 8.0},
}


def test_gamma_acts_once_on_the_summed_rewards_of_a_chunk_and_masked_rewards_do_not_count():
    # delta[0] = (1 + 2) + 0.5 * 8 - 1 = 6      delta[1] = (3 + 4 + 5) + 0.5 * 3 - 2 = 11.5
    advantages, returns = gae(**fields(**CHUNKS), gamma=0.5, lam=0.5)
    assert_allclose(advantages, column(6, 11.5))
    assert_allclose(returns, column(7, 13.5))


def test_at_step_level_gamma_acts_once_per_played_env_step():
    # delta[0] = (1 + 2/2) + 8/4 - 1 = 3        two steps were played
    # delta[1] = (3 + 4/2 + 5/4) + 3/8 - 2 = 4.625
    advantages, _ = gae(**fields(**CHUNKS), gamma=0.5, lam=0.5, level="step")
    assert_allclose(advantages, column(3, 4.625))


def test_the_numbers_of_masked_steps_do_not_change_advantages():
    data = fields(**CHUNKS)
    expected = gae(**data, gamma=0.5, lam=0.5)
    data["rewards"][0, 0, 2] = np.nan
    data["terminated"][0, 0, 2] = True
    assert_allclose(gae(**data, gamma=0.5, lam=0.5), expected)


def test_advantages_are_float64_whatever_comes_in():
    data = fields(ones(2), column(1, 2, 3))
    data = {k: v.astype(np.float32) if v.dtype == float else v for k, v in data.items()}
    assert all(array.dtype == np.float64 for array in gae(**data, gamma=0.9, lam=0.8))


def slow_gae(data, gamma, lam, level):
    """One env, one decision at a time, in plain numbers; follows the definition as an explicit sum over the future."""
    horizon, num_envs, chunk = data["rewards"].shape
    result = np.zeros((horizon, num_envs))
    for n in range(num_envs):
        for start in range(horizon):
            weight, total = 1.0, 0.0
            for t in range(start, horizon):
                steps = [c for c in range(chunk) if data["mask"][t, n, c]]
                if not steps:
                    break
                power = len(steps) if level == "step" else 1
                reward = sum(
                    data["rewards"][t, n, c] * (gamma**i if level == "step" else 1) for i, c in enumerate(steps)
                )
                if any(data["terminated"][t, n, c] for c in steps):
                    total += weight * (reward - data["values"][t, n])
                    break
                if any(data["truncated"][t, n, c] for c in steps):
                    total += weight * (reward + gamma**power * data["final_values"][t, n] - data["values"][t, n])
                    break
                total += weight * (reward + gamma**power * data["values"][t + 1, n] - data["values"][t, n])
                weight *= (gamma * lam) ** power
            result[start, n] = total
    return result


@st.composite
def rollouts(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    horizon, num_envs, chunk = draw(st.integers(1, 7)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    shape = (horizon, num_envs, chunk)
    done = (rng.random(shape) < draw(st.sampled_from([0.0, 0.15, 0.5]))).cumsum(axis=2)
    mask = (done.cumsum(axis=2) == 0) | ((done == 1) & (np.diff(done, axis=2, prepend=0) == 1))
    first = (done == 1) & mask
    terminated = first & (rng.random(shape) < 0.5)
    mask &= (rng.random(shape[:2]) < 0.9)[:, :, None]
    return {
        "rewards": rng.normal(size=shape),
        "terminated": terminated & mask,
        "truncated": first & ~terminated & mask,
        "mask": mask,
        "values": rng.normal(size=(horizon + 1, num_envs)),
        "final_values": rng.normal(size=shape[:2]),
    }


@settings(max_examples=150, deadline=None)
@given(rollouts(), st.floats(0, 1), st.floats(0, 1), st.sampled_from(["decision", "step"]))
def test_gae_equals_the_sum_over_the_future(data, gamma, lam, level):
    advantages, returns = gae(**data, gamma=gamma, lam=lam, level=level)
    assert_allclose(advantages, slow_gae(data, gamma, lam, level), atol=1e-12)
    assert_allclose(returns - advantages, data["values"][:-1], atol=1e-12)


def test_moments_of_four_numbers():
    # mean (1+2+3+6)/4 = 3, M2 = 4+1+0+9 = 14; the fifth has no weight
    found = moments(np.array([1, 2, 3, 6, 100.0]), np.array([1, 1, 1, 1, 0]))
    assert found == Moments(4, 3, 14)
    assert found.std == pytest.approx(3.5**0.5)


def test_no_numbers_have_no_moments():
    nothing = moments(np.zeros(3), np.zeros(3))
    assert nothing == Moments(0, 0, 0)
    assert nothing.std == 0
    assert merge_moments([nothing, Moments(4, 3, 14), nothing]) == Moments(4, 3, 14)
    assert merge_moments([]) == nothing


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-1e3, 1e3), st.sampled_from([0.0, 1.0])), min_size=1, max_size=40),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_moments_of_ranks_merge_to_the_moments_of_the_whole(pairs, cuts):
    numbers, weights = np.array(pairs).T
    cuts = sorted(min(cut, len(numbers)) for cut in cuts)
    parts = [moments(x, w) for x, w in zip(np.split(numbers, cuts), np.split(weights, cuts), strict=True)]
    assert_allclose(merge_moments(np.array(parts)), moments(numbers, weights), rtol=1e-10, atol=1e-7)


def test_a_large_offset_does_not_swallow_the_deviation():
    numbers = 1e9 + np.array([1.0, 2, 3, 6])
    merged = merge_moments([moments(numbers[:2], np.ones(2)), moments(numbers[2:], np.ones(2))])
    assert merged.m2 == pytest.approx(14)


def test_normalised_advantages_have_mean_zero_and_deviation_one():
    advantages = np.array([[1.0, 2.0], [3.0, 6.0]])
    result = normalize(advantages, moments(advantages, np.ones((2, 2))))
    assert_allclose(result, (advantages - 3) / 3.5**0.5, rtol=1e-7)


def test_equal_advantages_normalise_to_zero():
    advantages = np.full((3, 2), 0.1)
    assert_allclose(normalize(advantages, moments(advantages, np.ones((3, 2)))), 0, atol=1e-6)
