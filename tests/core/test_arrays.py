"""Observations are cut, joined, flattened and copied without changing a number."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embodied.core.arrays import (
    flat_dict,
    host,
    join_rows,
    leaves,
    map_obs,
    nested_dict,
    num_rows,
    on_cpu,
    padded_rows,
    take_rows,
    text_arrays,
    text_lists,
    write,
)

NAMES = st.text("abc", min_size=1, max_size=2)
TREES = st.recursive(st.integers(), lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3))


def observation(rows):
    draw = np.random.default_rng(rows)
    images = {"top": draw.integers(0, 256, (rows, 2, 2, 3), np.uint8)}
    return {
        "images": images,
        "state": draw.normal(size=(rows, 4)),
        "instruction": [f"task {row}" for row in range(rows)],
    }


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_rows_of_an_observation_are_cut_and_joined_again(kind, sizes):
    whole = observation(sum(sizes))
    sent = text_arrays(whole)
    sent |= map_obs(kind, {name: sent[name] for name in ("images", "state")})
    ends = np.cumsum(sizes)
    joined = text_lists(join_rows([take_rows(sent, slice(end - size, end)) for end, size in zip(ends, sizes)]))
    assert num_rows(joined) == sum(sizes) and joined["instruction"] == whole["instruction"]
    assert np.array_equal(host(joined["images"]["top"]), whole["images"]["top"])
    assert isinstance(joined["state"], type(sent["state"]))
    written = map_obs(lambda array: array[::-1].copy(), text_arrays(whole))
    write(written, np.arange(sum(sizes)), text_arrays(whole))
    assert all(map(np.array_equal, leaves(written), leaves(text_arrays(whole))))


@given(st.dictionaries(NAMES, TREES, max_size=3))
def test_a_flat_dictionary_is_nested_again(tree):
    flat = flat_dict(tree)
    assert nested_dict(flat) == tree and not any(isinstance(value, dict) for value in flat.values())


def test_row_counts_are_padded_to_powers_of_two_up_to_64_and_to_its_multiples_above():
    assert [padded_rows(rows) for rows in (1, 2, 3, 8, 33, 64, 65, 200)] == [1, 2, 4, 8, 64, 64, 128, 256]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 2)), max_size=5))
def test_arrays_and_tensors_are_copied_to_the_cpu_in_their_order_and_shape(kinds):
    wanted = [np.full((rows, columns), number) for number, (_, rows, columns) in enumerate(kinds)]
    copied = on_cpu([torch.as_tensor(array) if kind[0] else array for kind, array in zip(kinds, wanted)])
    assert len(copied) == len(wanted) and all(map(np.array_equal, copied, wanted))
