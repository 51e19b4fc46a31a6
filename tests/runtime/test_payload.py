import gc
import os
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from embodied.runtime.payload import OUT_OF_BAND_BYTES, decode, encode


@dataclass(frozen=True)
class Carrier:
    images: dict[str, np.ndarray]
    parts: list


def moved(item):
    return decode(encode(item))


def mapped_files() -> int:
    """Of readers: what a writer keeps is shared."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:embodied (" in line and " rw-p " in line for line in lines)


@settings(max_examples=50, deadline=None)
@given(arrays(st.sampled_from(["f4", "f8", "i8", "u1", "?", "U3"]), array_shapes(min_dims=0, min_side=0)))
def test_any_small_array_arrives_equal(array):
    np.testing.assert_array_equal(moved(array), array)


@pytest.mark.parametrize("order", ["C", "F", "strided", "backwards"])
def test_large_arrays_of_any_layout_arrive_equal(order):
    array = np.arange(120_000.0).reshape(300, 400)
    array = {"C": array, "F": np.asfortranarray(array), "strided": array[:, ::2], "backwards": array[::-1]}[order]
    np.testing.assert_array_equal(moved(array), array)


def test_large_arrays_inside_anything_are_not_in_the_message():
    item = Carrier({"base": np.ones((64, 64, 64), np.uint8)}, [(np.zeros(50_000), "text"), {"k": np.arange(9)}])
    payload = encode(item)
    assert len(payload.body) < 2000
    got = decode(payload)
    np.testing.assert_array_equal(got.images["base"], item.images["base"])
    np.testing.assert_array_equal(got.parts[0][0], item.parts[0][0])
    assert not got.images["base"].flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        got.parts[0][0][0] = 1


def test_many_small_parts_go_through_memory_too():
    item = [np.full(100, i) for i in range(1000)]
    payload = encode(item)
    assert len(payload.body) < OUT_OF_BAND_BYTES
    assert [a[0] for a in decode(payload)] == list(range(1000))


def test_memory_is_freed_with_the_last_array_that_uses_it():
    moved(np.ones(200_000))
    gc.collect()  # what earlier tests left to it
    before, files = mapped_files(), len(os.listdir("/proc/self/fd"))
    got = moved([np.ones(100_000), np.zeros(100_000)])
    assert mapped_files() == before + 1
    part = got[0][5:10]
    del got
    gc.collect()
    assert mapped_files() == before + 1
    assert part.sum() == 5
    del part
    gc.collect()
    assert mapped_files() == before
    assert len(os.listdir("/proc/self/fd")) == files


def test_one_payload_may_be_read_many_times():
    payload = encode(np.arange(100_000))
    first, second = decode(payload), decode(payload)
    del payload
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (300, 401)])
def test_torch_tensors_arrive_equal_and_writable(dtype, shape):
    tensor = (torch.arange(int(np.prod(shape))) % 3).reshape(shape).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = moved({"w": tensor})["w"]
    assert got.dtype == dtype
    assert torch.equal(got, tensor)
    got.zero_()  # the reader's own pages
    assert torch.equal(moved(tensor), tensor)


def test_a_tensor_written_by_one_reader_is_unchanged_for_the_next():
    payload = encode(torch.ones(100_000))
    decode(payload).zero_()
    assert decode(payload).sum() == 100_000


def test_views_and_parameters_of_torch_arrive_equal():
    tensor = torch.arange(90_000.0).reshape(300, 300).T
    assert torch.equal(moved(tensor), tensor)
    parameter = torch.nn.Parameter(torch.ones(3))
    got = moved(parameter)
    assert isinstance(got, torch.nn.Parameter)
    assert got.requires_grad


def test_a_payload_can_be_sent_while_another_thread_still_imports_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))  # as it looks halfway through its import
    assert decode(encode({"rank": 3})) == {"rank": 3}
