"""Shuffling, minibatches, a rank's share, and schedules."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from embodied.core.rng import minibatches, permutation
from embodied.learners.model import lr_factor
from embodied.learners.train_batch import owned
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


def test_a_rank_takes_the_units_that_it_has_in_minibatch_order():
    minibatch = np.array([7, 2, 5, 9, 4])
    assert owned(minibatch, np.array([1, 4, 5, 7])).tolist() == [3, 2, 1]  # 7, 5 and 4 are at these places
    assert owned(minibatch, np.array([0, 1])).tolist() == owned(minibatch, np.array([-1, -1])).tolist() == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 70))
def test_every_unit_is_processed_once_by_the_rank_that_has_it(ranks, size):
    mine = [np.flatnonzero(np.array(ranks) == rank) for rank in set(ranks)]
    order = permutation(0, 0, 0, len(ranks))
    seen = [unit for part in minibatches(order, size) for one in mine for unit in one[owned(part, one)]]
    assert sorted(seen) == list(range(len(ranks)))


def test_the_linear_schedule_falls_to_zero_and_the_constant_one_stays():
    assert [lr_factor("linear", progress) for progress in (0, 0.25, 1, 1.1)] == [1, 0.75, 0, 0]
    assert [lr_factor("constant", progress) for progress in (0, 0.25, 1)] == [1, 1, 1]


def test_only_a_kl_above_its_target_skips_epochs():
    assert skip_remaining_epochs(0.03, 0.02)
    assert not skip_remaining_epochs(0.02, 0.02)
    assert not skip_remaining_epochs(99.0, None)
