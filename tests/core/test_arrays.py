"""Observations are cut, joined, flattened and copied without changing a number."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embodied.core import arrays

NAMES = st.text("abc", min_size=1, max_size=2)
TREES = st.recursive(st.integers(), lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3))


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_rows_of_an_observation_are_cut_and_joined_again(kind, sizes):
    ends = np.cumsum(sizes)
    numbers, texts = np.arange(ends[-1]), [f"task {row}" for row in range(ends[-1])]
    whole = arrays.text_arrays(
        {"images": {"top": kind(numbers[:, None])}, "state": kind(numbers), "instruction": texts}
    )
    parts = [arrays.take_rows(whole, slice(end - size, end)) for end, size in zip(ends, sizes)]
    joined = arrays.join_rows(parts)
    assert arrays.num_rows(joined) == ends[-1] and arrays.text_lists(joined)["instruction"] == texts
    assert isinstance(joined["state"], type(whole["state"]))
    written = arrays.map_obs(arrays.copy_of, arrays.take_rows(whole, numbers[::-1].copy()))
    arrays.write(written, numbers, whole)
    for found in (joined, written):
        assert all(map(np.array_equal, arrays.leaves(found), arrays.leaves(whole)))


@given(st.dictionaries(NAMES, TREES, max_size=3))
def test_a_flat_dictionary_is_nested_again(tree):
    flat = arrays.flat_dict(tree)
    assert arrays.nested_dict(flat) == tree and not any(isinstance(value, dict) for value in flat.values())


def test_row_counts_are_padded_to_powers_of_two_up_to_64_and_to_its_multiples_above():
    assert [arrays.padded_rows(rows) for rows in (1, 2, 3, 8, 33, 64, 65, 200)] == [1, 2, 4, 8, 64, 64, 128, 256]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 2)), max_size=5))
def test_arrays_and_tensors_are_copied_to_the_cpu_in_their_order_and_shape(kinds):
    wanted = [np.full((rows, columns), number) for number, (_, rows, columns) in enumerate(kinds)]
    copied = arrays.on_cpu([torch.as_tensor(array) if kind[0] else array for kind, array in zip(kinds, wanted)])
    assert len(copied) == len(wanted) and all(map(np.array_equal, copied, wanted))
