"""A GPU that is not there, for finding tensors that were left on the CPU.

Inside `with Card():` tensors have a device and a shape but no numbers, and torch refuses whatever mixes devices, as a
GPU does. The device is `meta`: with `cuda` a torch that was built for CPUs cannot take so much as a slice. What comes
back from there is zeros, and `truth` where somebody asks yes or no.
"""

from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

WHERE = "meta"
numpy_of, tensor = torch.Tensor.numpy, torch.tensor


class Card(FakeTensorMode):
    def __init__(self, truth: bool = True) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.truth = truth
        self.inside = 0

    def __enter__(self):
        """Torch enters and leaves it now and then on its own."""
        if not self.inside:
            self.patches = [patch.object(torch.Tensor, name, replacement) for name, replacement in METHODS.items()]
            self.patches.append(patch.multiple(torch, tensor=made, is_autocast_enabled=lambda device: False))
            for each in self.patches:
                each.start()
        self.inside += 1
        return super().__enter__()

    def __exit__(self, *args):
        super().__exit__(*args)
        self.inside -= 1
        if not self.inside:
            for each in self.patches:
                each.stop()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.truth if args[0].dtype == torch.bool else 0.0 if args[0].is_floating_point() else 0
        return super().__torch_dispatch__(func, types, args, kwargs)

    def take(self, module: torch.nn.Module) -> torch.nn.Module:
        """`module.to("cuda")`: what is neither a parameter nor a buffer stays behind."""
        with self:
            for part in module.modules():
                for name, old in [*part._parameters.items()]:
                    if old is not None:
                        there = torch.empty(old.shape, dtype=old.dtype, device=WHERE)
                        part._parameters[name] = torch.nn.Parameter(there, requires_grad=old.requires_grad)
                for name, old in [*part._buffers.items()]:
                    if old is not None:
                        part._buffers[name] = torch.empty(old.shape, dtype=old.dtype, device=WHERE)
        return module


def fetched(tensor: torch.Tensor) -> np.ndarray:
    if not isinstance(tensor, FakeTensor):
        with unset_fake_temporarily():
            return numpy_of(tensor)
    if tensor.device.type != "cpu":
        raise TypeError(f"can't convert {tensor.device} device type tensor to numpy")
    with unset_fake_temporarily():
        return numpy_of(torch.zeros(tensor.shape, dtype=tensor.dtype))


def made(data, dtype=None, device="cpu", **options) -> torch.Tensor:
    """`torch.tensor`, which nobody can ask for on `meta` directly."""
    with unset_fake_temporarily():
        here = tensor(data, dtype=dtype, **options)
    return here.to(device)


METHODS = {
    "numpy": fetched,
    "tolist": lambda tensor: fetched(tensor.cpu()).tolist(),
    "new_tensor": lambda like, data: made(data, like.dtype, like.device),
}
