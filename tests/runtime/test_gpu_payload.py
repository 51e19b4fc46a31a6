"""Tensors on a GPU on their way to another process."""

import pytest

from embodied.runtime import Cluster, HostPlan, Worker


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
    hosts = (HostPlan("left", ("a",)), HostPlan("right", ("b",)))
    with Cluster("local", hosts, tmp_path, 60) as cluster:
        left, right = cluster.launch(Holder, "a"), cluster.launch(Holder, "b")
        channel = cluster.channel("tensors", home=right[0])
        left.make(channel).wait()
        right.double(channel).wait()
        assert left.total().wait() == [2 * sum(range(1000))]
