"""Shuffling, minibatches, a rank's share, and schedules."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from embodied.learners.model import lr_factor
from embodied.learners.rollout_buffer import minibatches, owned, permutation
from embodied.learners.update import skip_remaining_epochs


def test_a_permutation_holds_every_item_once_and_repeats():
    order = permutation(3, 7, 1, 100)
    assert sorted(order) == list(range(100))
    assert np.array_equal(order, permutation(3, 7, 1, 100))


def test_seed_iteration_and_epoch_each_give_another_order():
    orders = [tuple(permutation(*key, 50)) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert len(set(orders)) == 4


def test_the_last_minibatch_may_be_smaller():
    assert [part.tolist() for part in minibatches(np.array([4, 0, 3, 1, 2]), 2)] == [[4, 0], [3, 1], [2]]


def test_a_rank_takes_the_items_of_its_block_in_minibatch_order():
    minibatch = np.array([7, 2, 5, 9, 4])
    assert owned(minibatch, 4, 4).tolist() == [3, 1, 0]  # items 7, 5 and 4 of 4..7
    assert owned(minibatch, 0, 2).tolist() == []


@given(st.integers(1, 60), st.integers(1, 70), st.lists(st.integers(0, 60), max_size=3))
def test_every_item_is_processed_once_by_exactly_one_rank(num_items, size, cuts):
    edges = [0, *sorted(min(cut, num_items) for cut in cuts), num_items]
    seen = [
        first + item
        for part in minibatches(permutation(0, 0, 0, num_items), size)
        for first, end in itertools.pairwise(edges)
        for item in owned(part, first, end - first)
    ]
    assert sorted(seen) == list(range(num_items))


def test_the_linear_schedule_falls_to_zero_and_the_constant_one_stays():
    assert [lr_factor("linear", progress) for progress in (0, 0.25, 1, 1.1)] == [1, 0.75, 0, 0]
    assert [lr_factor("constant", progress) for progress in (0, 0.25, 1)] == [1, 1, 1]


def test_only_a_kl_above_its_target_skips_epochs():
    assert skip_remaining_epochs(0.03, 0.02)
    assert not skip_remaining_epochs(0.02, 0.02)
    assert not skip_remaining_epochs(99.0, None)
