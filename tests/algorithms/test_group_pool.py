"""Which groups are played, kept, dropped and carried over, and what an episode's score is worth in its group."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.algorithms.advantages import group_advantages, returns_to_go
from embodied.algorithms.config import GRPOConfig
from embodied.algorithms.group_pool import GroupPool, verdict_on


def config(**options):
    return GRPOConfig(**{"name": "grpo", "groups": 2, "group_size": 2} | options)


def finished(pool, scores):
    """Deal as many episodes as there are scores, and bring them all."""
    dealt = pool.deal(len(scores))
    pool.add(dict(zip(dealt, scores, strict=True)))


def test_group_advantages_equal_hand_computed_numbers():
    scores = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    # group 0: mean 1/4, deviation sqrt(3/16) = 0.433; group 1 has nothing to tell
    found = group_advantages(scores, "group", "group")
    assert found[0] == pytest.approx([0.75 / 0.4330127, *[-0.25 / 0.4330127] * 3], rel=1e-5)
    assert not found[1].any()
    # the others' mean is 0 for the first and 1/3 for the rest
    sample = group_advantages(scores, deviation="sample")  # sqrt(3/12) = 0.5
    assert sample[0] == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5) and not sample[1].any()
    assert group_advantages(scores, "leave_one_out", "none")[0] == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    # all: mean 5/8, deviation sqrt(5/8 * 3/8) = 0.484123
    assert group_advantages(scores, "batch", "batch")[1] == pytest.approx([0.375 / 0.484123] * 4, rel=1e-5)
    assert group_advantages(scores, "group", "none")[0] == pytest.approx([0.75, -0.25, -0.25, -0.25])
    # compared within groups, the differences .75, -.25 (3) and 0 (4) deviate by sqrt((9 + 3) / 16 / 8) = 0.306186
    assert group_advantages(scores, "group", "batch")[0, 0] == pytest.approx(0.75 / 0.306186, rel=1e-5)


def slow_advantages(scores, baseline, scale):
    everything = [s for group in scores for s in group]

    def mean(numbers):
        return sum(numbers) / len(numbers)

    def deviation(numbers):
        return (sum((x - mean(numbers)) ** 2 for x in numbers) / len(numbers)) ** 0.5

    compared = [
        [
            s - mean({"group": group, "leave_one_out": group[:i] + group[i + 1 :], "batch": everything}[baseline])
            for i, s in enumerate(group)
        ]
        for group in scores
    ]
    flat = [a for group in compared for a in group]
    by = {"group": deviation, "batch": lambda _: deviation(flat), "none": lambda _: 1.0 - 1e-6}[scale]
    return [[a / (by(scores[g]) + 1e-6) for a in group] for g, group in enumerate(compared)]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(2, 5),
    st.sampled_from(["group", "leave_one_out", "batch"]),
    st.sampled_from(["group", "batch", "none"]),
    st.data(),
)
def test_advantages_equal_a_slow_reference(groups, size, baseline, scale, data):
    number = st.integers(0, 3).map(float)
    scores = [[data.draw(number) for _ in range(size)] for _ in range(groups)]
    expected = slow_advantages(scores, baseline, scale)
    np.testing.assert_allclose(group_advantages(np.array(scores), baseline, scale), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("score", "unit"), [(0.1, 1e-17), (0.7, 2**-24), (-300.0, 2**-15)])
def test_scores_that_differ_by_rounding_alone_have_no_advantage(score, unit):
    """A unit in the last place of a sum in float64, and of what a reward network says in float32."""
    scores = np.full((1, 3), score) + np.array([[0.0, unit, -unit]])
    assert not group_advantages(scores).any()
    assert verdict_on(tuple(scores[0]), config()) == "equal"


def test_a_decision_pays_for_its_own_divergence_and_what_comes_after():
    found = returns_to_go(np.array([1.0, 0.0]), np.array([0.5, 0.25, 1.0]), np.array([2, 1]), 2.0)
    assert found.tolist() == [1 - 2 * 0.75, 1 - 2 * 0.25, 0 - 2 * 1.0]


@pytest.mark.parametrize(
    ("scores", "options", "verdict"),
    [
        ((1.0, 0.0), {}, "kept"),
        ((1.0, 1.0), {}, "equal"),
        ((1.0, 1.0), {"filter": "none"}, "kept"),
        ((1.0, 0.0), {"filter_low": 0.6}, "out_of_bounds"),
        ((1.0, 0.0), {"filter_high": 0.4}, "out_of_bounds"),
        ((1.0, 0.0), {"filter_low": 0.5, "filter_high": 0.5}, "kept"),
    ],
)
def test_the_filter_keeps_or_drops_groups_by_their_scores(scores, options, verdict):
    assert verdict_on(scores, config(**options)) == verdict


def test_dropped_groups_are_not_replaced_unless_asked_to():
    pool = GroupPool(config())
    assert pool.wanted(0, num_envs=4) == 4
    finished(pool, [1, 0, 1, 1])
    assert pool.wanted(1, num_envs=4) == 0
    assert [group.episodes for group in pool.take()] == [(0, 1)]
    assert pool.counts == {"kept": 1, "equal": 1}
    assert pool.held == ()


def test_resampling_fills_the_envs_and_carries_surplus_and_partial_groups_over():
    pool = GroupPool(config(filter="resample", group_size=3))
    assert pool.wanted(0, num_envs=4) == 6
    finished(pool, [1, 0, 0, 0, 0, 0])  # one group of two is kept
    assert pool.wanted(1, num_envs=4) == 4  # three are missing, four envs can play
    finished(pool, [1, 0, 0, 1])
    assert pool.wanted(2, num_envs=4) == 0
    assert [group.episodes for group in pool.take()] == [(0, 1, 2), (6, 7, 8)]
    assert pool.held == (9,)  # of a group that is not complete
    pool.counts.clear()
    assert pool.wanted(0, num_envs=4) == 5
    finished(pool, [0, 0, 1, 0, 1])
    assert pool.wanted(1, num_envs=4) == 0
    assert [group.scores for group in pool.take()] == [(1, 0, 0), (1, 0, 1)]


def test_incomplete_groups_are_dropped_and_played_again_where_half_is_missing():
    pool = GroupPool(config(groups=3))
    dealt = pool.deal(pool.wanted(0, num_envs=6))
    pool.add({episode: episode % 2 for episode in dealt if episode != 3})
    pool.drop_groups_of([3])
    assert pool.wanted(1, num_envs=6) == 0  # one of three
    assert [group.episodes for group in pool.take()] == [(0, 1), (4, 5)]
    assert pool.counts["incomplete"] == 1

    pool.counts.clear()
    dealt = pool.deal(pool.wanted(0, num_envs=6))
    pool.add({dealt[0]: 0.0, dealt[1]: 1.0, dealt[2]: 0.0})
    pool.drop_groups_of(dealt[3:])
    assert pool.counts["incomplete"] == 2
    assert pool.wanted(1, num_envs=6) == 4
    finished(pool, [0, 1, 1, 0])
    assert [group.episodes for group in pool.take()] == [(6, 7), (12, 13), (14, 15)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_dealt_episode_is_used_once_or_dropped_and_counted(data):
    size, envs = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 9))
    how = data.draw(st.sampled_from(["none", "drop", "resample"]))
    pool = GroupPool(config(groups=data.draw(st.integers(1, 4)), group_size=size, filter=how, max_rounds=3))
    used, totals, dealt, skipped = [], 0, set(), 0
    for _ in range(3):
        pool.counts.clear()
        rounds = 0
        while count := pool.wanted(rounds, envs):
            before = pool.dealt
            episodes = pool.deal(count)
            dealt |= set(episodes)
            gone = [episode for episode in episodes if data.draw(st.integers(0, 9)) == 0]
            pool.add({e: float(data.draw(st.integers(0, 1))) for e in episodes if e not in gone})
            pool.drop_groups_of(gone)
            skipped += pool.dealt - before - count
            rounds += 1
            assert rounds <= 3
        groups = pool.take()
        assert len(groups) <= pool.config.groups
        used += [episode for group in groups for episode in group.episodes]
        totals += sum(pool.counts[verdict] for verdict in ("equal", "out_of_bounds", "incomplete"))
        if how != "resample":
            assert pool.held == ()
    assert len(used) == len(set(used)) and set(used) <= dealt
    assert not set(used) & set(pool.held)
    assert len(dealt) + skipped == pool.dealt
    assert len(used) + len(pool.held) + totals * size == pool.dealt  # nothing is lost silently


def test_bounds_hold_for_the_rate_of_success_where_the_filter_says_so():
    bounds = {"filter_low": 0.25, "filter_high": 0.75, "group_size": 4, "filter": "drop"}
    returns, success = config(**bounds), config(**bounds, filter_metric="success")
    shaped = (3.0, 5.0, 4.0, 6.0)  # returns of a shaped reward: their mean says nothing about success
    assert verdict_on(shaped, returns) == "out_of_bounds"
    assert verdict_on(shaped, success, [False, True, False, True]) == "kept"
    assert verdict_on(shaped, success, [False, False, False, True]) == "kept"  # 0.25: bounds are kept
    assert verdict_on(shaped, success, [False] * 4) == verdict_on(shaped, success, [True] * 4) == "out_of_bounds"
    assert verdict_on((1.0,) * 4, success, [False, True, False, True]) == "equal"  # nothing to learn from, as ever


def test_successes_of_carried_episodes_are_kept_and_saved():
    options = {"groups": 1, "group_size": 2, "filter": "resample", "filter_low": 0.5, "filter_metric": "success"}
    pool, again = GroupPool(config(**options)), GroupPool(config(**options))
    dealt = pool.deal(5)
    pool.add(dict(zip(dealt, [1, 2, 3, 4, 5])), dict(zip(dealt, [False, False, True, False, True])))
    assert pool.counts == {"out_of_bounds": 1, "kept": 1} and pool.held == (2, 3, 4)
    again.restore(pool.state())
    assert again.held == pool.held and again.solved == pool.solved == {2: True, 3: False, 4: True}
    for each in (pool, again):
        each.add({5: 1.0}, {5: False})
        assert [group.episodes for group in (*each.take(), *each.take())] == [(2, 3), (4, 5)]


def test_a_restored_pool_goes_on_as_if_nothing_had_happened():
    pool, again = (GroupPool(config(groups=1, group_size=3, filter="resample")) for _ in range(2))
    finished(pool, [1, 0, 1, 0, 0, 1, 1])
    pool.take()
    again.restore(pool.state())
    assert again.held == pool.held == (3, 4, 5, 6)
    assert (again.take(), again.dealt, again.open) == (pool.take(), pool.dealt, pool.open)
