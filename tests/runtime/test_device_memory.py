"""Tensors leave their device and come back with every alias intact."""

import pytest
import torch

from embodied.runtime.device_memory import DeviceTensors, Offloader, num_bytes
from embodied.runtime.published_weights import blob_of
from embodied.runtime.worker import Timers


def trained(device="cpu"):
    """A network, its optimizer after a step, and a view of its first weight."""
    network = torch.nn.Linear(64, 64).to(device)
    adam = torch.optim.Adam(network.parameters())
    network(torch.ones(2, 64, device=device)).sum().backward()
    adam.step()
    adam.zero_grad(set_to_none=True)
    return network, adam, network.weight.detach()[3:5]


def tensors_of(network, adam):
    return [*network.parameters(), *(value for state in adam.state.values() for value in state.values())]


def test_published_weights_can_be_offloaded():
    weights = torch.nn.Parameter(torch.ones(8))
    assert blob_of(weights).data.ctypes.data == weights.data_ptr()  # without a copy
    assert Offloader().offload([weights]) == 32


def test_memory_that_processes_share_stays():
    own, shared = torch.ones(8), torch.ones(8).share_memory_()
    offloader = Offloader()
    assert offloader.offload([own, shared]) == 32 and not own.untyped_storage().nbytes()
    offloader.onload()
    assert own.sum() == shared.sum() == 8


def test_offloaded_tensors_take_no_memory_and_return_with_their_views():
    network, adam, view = trained()
    tensors = tensors_of(network, adam)
    before, shown = [tensor.clone() for tensor in tensors], view.clone()
    offloader = Offloader()
    assert offloader.offload([*tensors, view]) == num_bytes(tensors)  # shared storage counts once
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    assert offloader.away
    offloader.onload()
    assert all(torch.equal(tensor, was) for tensor, was in zip(tensors, before, strict=True))
    assert torch.equal(view, shown)
    with torch.no_grad():
        network.weight.add_(1)
    assert torch.equal(view, shown + 1)


def test_weights_cache_and_optimizer_are_offloaded_and_traced_separately():
    timers, weights, scratch = Timers(), torch.arange(1000.0), torch.ones(500)
    belongings = DeviceTensors(timers)
    timers.record(True)
    belongings.offload({"weights": [weights], "cache": [scratch], "optimizer": []}, emptied=("cache",))
    assert belongings.away and not weights.untyped_storage().nbytes() + scratch.untyped_storage().nbytes()
    belongings.onload()
    assert not belongings.away and torch.equal(weights, torch.arange(1000.0)) and scratch.untyped_storage().nbytes()
    told = [name for name, _, _ in timers.record(False).spans]
    parts = ("weights, 0.004 MB", "cache, 0.002 MB")
    assert told == [*(f"offload {part}" for part in parts), *(f"onload {part}" for part in parts)]


def test_tensors_offloaded_without_content_return_as_zeros():
    cache, offloader = torch.ones(1000), Offloader(keeps=False)
    offloader.offload([cache])
    freed = torch.full((1000,), torch.nan)  # its memory is the next to be given out
    del freed
    offloader.onload()
    assert not cache.any()


def test_every_turn_uses_the_copy_of_the_first():
    weights, offloader, copies = torch.arange(8.0), Offloader(), set()
    for _ in range(3):
        offloader.offload([weights.view(2, 4)])
        copies.update(copy.data_ptr() for _, _, copy in offloader._away)
        offloader.onload()
    assert len(copies) == len(offloader._copies) == 1 and torch.equal(weights, torch.arange(8.0))


def test_memory_that_a_tensor_only_maps_is_not_offloaded():
    mapped = torch.frombuffer(bytearray(32), dtype=torch.float32)
    assert Offloader().offload([mapped]) == 0
    assert mapped.untyped_storage().nbytes() == 32


def test_changed_tensors_return_with_their_new_values():
    network, adam, _ = trained()
    offloader = Offloader()
    for value in (1.0, 2.0):
        torch.nn.init.constant_(network.weight, value)
        offloader.offload(tensors_of(network, adam))
        offloader.onload()
        assert network.weight.unique().tolist() == [value]


@pytest.fixture(scope="module")
def cuda():
    """What it opens and takes for its first product stays to the end."""
    trained("cuda")
    return "cuda"


@pytest.mark.gpu
def test_on_a_gpu_the_memory_is_free_again_and_the_copies_are_pinned(cuda):
    torch.cuda.empty_cache()
    baseline = torch.cuda.memory_allocated()
    network, adam, _ = trained(cuda)
    tensors = tensors_of(network, adam)
    before = [tensor.clone().cpu() for tensor in tensors]
    offloader = Offloader()
    offloader.offload(tensors)
    assert torch.cuda.memory_allocated() <= baseline + 4096
    assert all(copy.is_pinned() for tensor, _, copy in offloader._away if tensor.is_cuda)
    offloader.onload()
    assert all(torch.equal(tensor.cpu(), was) for tensor, was in zip(tensors, before, strict=True))
