"""Tensors as bytes, and the checksum that guards them."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from embodied.core.errors import CheckpointError
from embodied.runtime.published_weights import (
    ITEM_BYTES,
    array_of,
    blob_of,
    checksum,
    read_safetensors,
    tensor_of,
    write_safetensors,
)

SOME = {
    "half": torch.arange(6, dtype=torch.bfloat16).view(2, 3) / 7,
    "count": torch.tensor(3.5, dtype=torch.float64),
    "none": torch.empty(0, 4),
    "turned": torch.arange(6.0).view(2, 3).T,
    "flags": torch.tensor([True, False]),
    "whole": torch.tensor([1, -2], dtype=torch.int64),
}


@pytest.mark.parametrize("name", SOME)
def test_a_tensor_comes_back_from_its_bytes(name):
    again = tensor_of(blob_of(SOME[name]))
    assert again.dtype == SOME[name].dtype and torch.equal(again, SOME[name])


def test_the_bytes_of_a_contiguous_tensor_are_its_own():
    weight = torch.zeros(4)
    tensor_of(blob_of(weight))[1] = 5.0
    assert weight[1] == 5.0


def test_a_safetensors_file_is_read_without_torch_and_bfloat16_keeps_its_numbers(tmp_path):
    save_file({name: tensor.contiguous() for name, tensor in SOME.items()}, tmp_path / "model.safetensors")
    blobs = read_safetensors(tmp_path / "model.safetensors")
    assert blobs.keys() == SOME.keys()
    for name, tensor in SOME.items():
        assert torch.equal(tensor_of(blobs[name]), tensor)
        expected = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        assert np.array_equal(array_of(blobs[name]), expected.numpy())


def test_weights_written_tensor_by_tensor_make_a_safetensors_file(tmp_path):
    blobs = {name: blob_of(tensor) for name, tensor in SOME.items()}
    specs = {name: blob.spec for name, blob in blobs.items()}
    write_safetensors(tmp_path / "model.safetensors", specs, reversed(blobs.items()))
    again = load_file(tmp_path / "model.safetensors")
    assert again.keys() == SOME.keys()
    assert all(again[n].dtype == t.dtype and torch.equal(again[n], t) for n, t in SOME.items())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # without it transformers 4.40, which OpenVLA runs on, reads nothing


@pytest.mark.parametrize("keep", [4, 60, -3])
def test_a_damaged_file_is_refused(tmp_path, keep):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(9)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="damaged"):
        read_safetensors(path)


def test_a_file_that_is_cut_short_while_it_is_used_is_an_error_and_not_the_end(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(9), "b": torch.ones(100_000)}, path)
    blobs = read_safetensors(path)
    os.truncate(path, 4096)
    assert torch.equal(tensor_of(blobs["a"]), torch.ones(9))
    with pytest.raises(CheckpointError, match="damaged: it ends at byte 4096 of"):
        tensor_of(blobs["b"])


def test_every_dtype_has_the_size_torch_gives_it():
    assert all(getattr(torch, name).itemsize == size for name, size in ITEM_BYTES.items())


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 200_000), at=st.floats(0, 1), change=st.integers(1, 255), seed=st.integers(0, 9))
def test_a_changed_byte_changes_the_checksum(size, at, change, seed):
    content = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    before = checksum(content)
    content[int(at * (size - 1))] ^= change
    assert checksum(content) != before


def test_missing_and_misplaced_parts_change_the_checksum():
    content = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    turned = np.concatenate([content[40_000:], content[:40_000]])
    sums = {checksum(part) for part in (content, turned, content[:-1], np.append(content, np.uint8(0)), content[:0])}
    assert len(sums) == 5
