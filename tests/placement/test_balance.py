"""Units dealt to learner ranks by what they cost."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import balance
from embodied.placement.balance import BALANCED, PassCost, balance_ratio, blocks, deal, deal_groups
from embodied.placement.topology import PlacementError


def test_the_cost_of_a_shared_prompt_counts_once():
    """The example of `PassCost.of`; and apart, where 8 tokens and 9 + 25 pairs pass."""
    assert PassCost(1.0, 1.0).of([3, 5], shared=2) == (2 + 1 + 3) + (4 + 5 + 21)
    assert PassCost(1.0, 1.0).of([3, 5]) == 8 + 34 and PassCost().of([3, 5]) == 8


def test_the_costliest_items_are_dealt_first_to_the_rank_with_the_least_cost():
    assert deal([8, 1, 1, 6], 2) == [0, 1, 1, 1]
    assert deal([2, 2, 2, 2], 2) == [0, 0, 1, 1], "neighbours stay together where that is balanced"
    assert deal([], 2) == [] and len(deal([5], 2)) == 1
    square = PassCost(0.0, 1.0)  # attention alone: four short ones are as much as one of twice their length
    assert deal([square.of([length]) for length in (1, 1, 1, 1, 2)], 2) == [1, 1, 1, 1, 0]


def test_each_minibatch_is_balanced_and_not_only_their_sum():
    """Both long ones of a minibatch on one rank would be balanced in all, and leave the other rank idle twice."""
    costs, steps = [5, 5, 1, 1, 5, 5, 1, 1], [[0, 1, 2, 3], [4, 5, 6, 7]]
    ranks = deal(costs, 2, steps)
    assert balance_ratio(costs, ranks, 2, steps) == 1.0
    assert balance_ratio(costs, [0, 0, 0, 0, 1, 1, 1, 1], 2, steps) == 2.0
    epochs = [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 4, 5], [2, 3, 6, 7]]  # a second one that takes them otherwise
    assert balance_ratio(costs, deal(costs, 2, epochs), 2, epochs) == 1.0


def test_groups_are_cut_only_where_that_lowers_the_maximum():
    """Members cost 3 beside a prompt of 2: a group of 4 is 14, a half 8. One group of two ranks is cut, and of three
    groups one; four groups stay whole."""
    groups = [[f"{group}{member}" for member in range(4)] for group in range(4)]

    def ranks_of(count):
        return [[ranks[one] for one in group] for ranks in [dealt(count)] for group in groups[:count]]

    def dealt(count):
        return deal_groups(groups[:count], lambda members: 2 + 3 * len(members), 2)

    assert ranks_of(1) == [[0, 0, 1, 1]]
    assert sum(len({*ranks}) == 2 for ranks in ranks_of(3)) == 1
    assert [len({*ranks}) for ranks in ranks_of(4)] == [1] * 4
    steps = [[0, 1], [2, 3]]
    ranks = deal_groups(groups, lambda members: 2 + 3 * len(members), 2, steps)
    assert {ranks["00"], ranks["10"]} == {ranks["20"], ranks["30"]} == {0, 1}


def test_no_rank_has_more_items_than_it_has_room_for():
    costs, items = [9, 4, 4, 1], [3, 6, 6, 6]
    assert deal(costs, 2, items=items) == [0, 1, 1, 1]
    assert np.bincount(deal(costs, 2, (), items, 12), items).tolist() == [9, 12]
    with pytest.raises(PlacementError, match=r"21 tokens .* 2 learners .* 10 each \(learner.most_items\); try 17"):
        deal(costs, 2, (), items, 10)
    assert len(deal(costs, 2, (), items, 17)) == 4


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=7),
    st.integers(1, 3),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_balanced_loads_are_within_a_third_of_the_best_and_no_worse_than_equal_blocks(costs, num_ranks, cut, draw):
    """4/3 is what longest-first promises where all units are of one step."""
    order = draw.sample(range(len(costs)), len(costs))
    steps = [step for step in (order[: len(costs) // 2], order[len(costs) // 2 :]) if step and cut]
    ranks = deal(costs, num_ranks, steps)
    unequal = balance_ratio(costs, blocks(len(costs), num_ranks), num_ranks, steps)
    assert balance_ratio(costs, ranks, num_ranks, steps) <= unequal
    if not cut:
        every = itertools.product(range(num_ranks), repeat=len(costs))
        best = min(max(np.bincount(ranks, costs, minlength=num_ranks)) for ranks in every)
        most = max(np.bincount(ranks, costs, minlength=num_ranks))
        assert most <= max(4 / 3, BALANCED) * best + 1e-9


def test_blocks_are_as_equal_as_possible():
    assert blocks(7, 3) == [0, 0, 1, 1, 2, 2, 2]


def test_the_published_example_and_draws_of_lengths_are_counted_as_the_page_says():
    assert balance.example() == {"neighbours": 2.5, "buckets": 3.0, "packing": 2.0, "dealt": 2.0, "divided": 1.0}
    for one in balance.draws(3, tflops=400.0):
        ratio = one["ratio"]
        assert 1.0 <= ratio["dealt"] <= ratio["neighbours"] + 1e-9 and ratio["cut"] <= max(ratio["dealt"], BALANCED)
        assert one["seconds"]["cut"] > 0
