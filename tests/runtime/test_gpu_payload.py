"""Tensors on a GPU on their way to another process: shared where both hold the same GPU, copied elsewhere.

Without a GPU a tensor of 1000 numbers stands for one there, `meta` for the reader's own GPU, and a list of the numbers
plus one for a handle of the memory.
"""

import pytest

from embodied.runtime import Cluster, HostPlan, Worker, local, payload
from embodied.runtime.payload import decode, encode, own_device


class Holder(Worker):
    def make(self, channel):
        import torch

        self.tensor = torch.arange(1000, device="cuda")
        channel.put({"numbers": self.tensor})

    def double(self, channel):
        """In place: who shares the memory sees it."""
        import torch

        tensor = channel.get()["numbers"]
        assert tensor.device.type == "cuda"
        tensor *= 2
        torch.cuda.synchronize()

    def total(self):
        return int(self.tensor.sum())


@pytest.mark.gpu
def test_a_tensor_on_a_gpu_is_handed_over_without_a_copy(tmp_path):
    held = {"env": {"EMBODIED_DEVICE": "gpu:0"}, "devices": ("gpu:0",)}
    hosts = (HostPlan("left", ("a",), **held), HostPlan("right", ("b",), **held))
    with Cluster("local", hosts, tmp_path, 300) as cluster:
        left, right = cluster.launch(Holder, "a"), cluster.launch(Holder, "b")
        channel = cluster.channel("tensors", home=right[0])
        left.make(channel).wait()
        right.double(channel).wait()
        assert left.total().wait() == [2 * sum(range(1000))]


def opened(numbers):
    import torch

    return torch.tensor(numbers) + 1


@pytest.fixture
def pretended(monkeypatch):
    pretend(monkeypatch.setattr)
    return monkeypatch


def pretend(replace):
    replace(payload, "is_on_gpu", lambda tensor: tensor.numel() == 1000 and not getattr(tensor, "fetched", False))
    replace(payload, "to_host", fetched)
    replace(payload, "handle_of", lambda tensor: (opened, (tensor.tolist(),)))


def fetched(tensor):
    copy = tensor.clone()
    copy.fetched = True
    return copy


def test_a_gpu_handle_is_only_sent_to_a_reader_on_the_same_gpu(pretended):
    import torch

    item = {"numbers": torch.zeros(1000), "few": torch.zeros(3)}
    pretended.setenv("EMBODIED_DEVICE", "gpu:3")
    assert decode(encode(item, "gpu:3"))["numbers"][0] == 1
    pretended.setattr(payload, "own_device", lambda: "meta")
    for reader in ("gpu:0", "gpu:30", ""):
        got = decode(encode(item, reader))
        assert got["numbers"].device.type == "meta" and got["few"].device.type == "cpu"
    pretended.delenv("EMBODIED_DEVICE")
    assert decode(encode(item, ""))["numbers"].device.type == "meta", "nobody holds nothing"


def test_gpu_tensors_arrive_on_the_cpu_of_a_reader_without_a_gpu(pretended):
    import torch

    pretended.setenv("EMBODIED_DEVICE", "gpu:3")
    packed = encode({"numbers": torch.arange(1000)}, "arm:0")
    for here, device in (("arm:0", "cpu"), ("gpu:0", "cuda"), (None, "cpu")):
        pretended.delenv("EMBODIED_DEVICE") if here is None else pretended.setenv("EMBODIED_DEVICE", here)
        assert own_device() == device
        if device == "cpu":
            got = decode(packed)["numbers"]
            assert got.device.type == "cpu" and torch.equal(got, torch.arange(1000))


class Pretender(Worker):
    """`gpu:0` is a GPU to it."""

    def __init__(self):
        pretend(setattr)
        if payload.own_gpu():
            payload.own_device = lambda: "meta"

    def give(self, channels):
        import torch

        for channel in channels:
            channel.put(torch.zeros(1000))

    def found(self, channel):
        tensor = channel.get()
        return tensor.device.type, None if tensor.is_meta else float(tensor[0])

    def itself(self):
        import torch

        return torch.zeros(1000)


def test_in_a_cluster_tensors_go_where_their_reader_computes(tmp_path):
    held = {"giver": "gpu:0", "same": "gpu:0", "none": "cpu:0"}
    hosts = [
        HostPlan(
            role, (role,), env={"EMBODIED_DEVICE": gpu} if "gpu" in gpu else {}, devices=(gpu,), imports=("torch",)
        )
        for role, gpu in held.items()
    ]
    with Cluster("local", hosts, tmp_path, 300) as cluster:
        giver, *readers = (cluster.launch(Pretender, role) for role in held)
        channels = [cluster.channel(f"to {reader.role}", home=reader[0]) for reader in readers]
        giver.give(channels).wait()
        found = [reader.found(channel).wait()[0] for reader, channel in zip(readers, channels, strict=True)]
        assert found == [("cpu", 1.0), ("cpu", 0.0)]
        assert giver.itself().wait()[0][0] == 0, "results go to the driver, which holds no GPU"


def test_on_another_machine_a_gpu_of_the_same_name_is_another_one(tmp_path, monkeypatch):
    boot_order = local.boot_order
    monkeypatch.setattr(local, "boot_order", lambda *about: {**boot_order(*about), "driver": None})
    held = {"env": {"EMBODIED_DEVICE": "gpu:0"}, "devices": ("gpu:0",)}
    with Cluster("local", [HostPlan(role, (role,), **held) for role in ("giver", "same")], tmp_path, 300) as cluster:
        giver, reader = (cluster.launch(Pretender, role) for role in ("giver", "same"))
        channel = cluster.channel("to it", home=reader[0])
        giver.give([channel]).wait()
        assert reader.found(channel).wait() == [("meta", None)], "its bytes, not a handle"
