"""Weights split over the learner ranks by FSDP2: every rank holds some rows of every tensor and of its optimizer state.

A block's whole weights exist only while it computes. Trained half-precision weights are sharded in float32 and cast to
half precision for computing; float32 parts (a value head) stay float32. Gradients accumulate unsharded, in float32, and
are summed over ranks once a step or, with learner.reduce_each_pass, after every pass. Weights in policy folders and
published versions are joined tensor by tensor, in their original precision. Each rank writes its own file of the
optimizer's state. (`torch.distributed.checkpoint` would send pickled plans between ranks, and a rank's socket accepts
every connection.)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Set
from datetime import timedelta

import torch
from torch import Tensor, nn

from embodied.learners.model import HALVES, is_sharded
from embodied.runtime.rendezvous import RendezvousAddress, RendezvousFile


def form_shards(rendezvous: RendezvousFile | RendezvousAddress, rank: int, world_size: int, device: str) -> None:
    """Form the process group over which `shard` splits weights."""
    import torch.distributed as dist

    rendezvous.use_interface()
    on_gpus = device == "cuda"
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        store=rendezvous.store("shards", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=rendezvous.timeout_s),
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpus else None,
    )
    # The outputs of a policy are never changed in place.
    warnings.filterwarnings("ignore", ".* returned a view tensor", UserWarning)


def shard(policy: nn.Module) -> None:
    """Keep this rank's part of every parameter. Gradients are sums over ranks, not means."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(next(policy.parameters()).device.type, (dist.get_world_size(),))
    half = next((p.dtype for p in policy.parameters() if p.dtype in HALVES), None)
    dtypes = [(module, {p.dtype for p in module.parameters()}) for module in policy.children()]
    trained = any(p.requires_grad for p in policy.parameters())
    exact = [module for module, kinds in dtypes if half and kinds and not kinds & {*HALVES}]
    for p in policy.parameters():
        if p.requires_grad and p.dtype in HALVES:
            p.data = p.data.float()
    precision = MixedPrecisionPolicy(half, torch.float32 if half else None, cast_forward_inputs=False)
    for module in exact:
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for module in [*policy.blocks(), policy]:
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=None if trained else True)
    register_fsdp_forward_method(policy, "imitate")
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # FSDP would scale float32; gloo can only sum


def leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def whole_tensors(
    policy: nn.Module, dtypes: Mapping[str, torch.dtype], names: Set[str]
) -> Iterator[tuple[str, Tensor]]:
    """The weights and buffers of these names, one whole tensor of its dtype at a time; all ranks must take part."""
    for name, tensor in policy.state_dict().items():
        if name in names:
            yield name, tensor.to(dtypes[name]).full_tensor() if is_sharded(tensor) else tensor
