"""Weights split over the learner ranks by FSDP2: every rank holds some rows of every tensor and of its optimizer state.

A block's whole weights exist only while it computes. Trained half-precision weights are sharded in float32 and cast to
half precision for computing; float32 parts (a value head) stay float32. Gradients accumulate unsharded, in float32, and
are summed over ranks once a step or, with learner.reduce_each_pass, after every pass. Weights in policy folders and
published versions are joined tensor by tensor, in their original precision. Each rank writes its own file of the
optimizer's state. (`torch.distributed.checkpoint` would send pickled plans between ranks, and a rank's socket accepts
every connection.)
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor, nn

from embodied.runtime.published_weights import Blob, tensor_of
from embodied.runtime.rendezvous import RendezvousAddress, RendezvousFile

HALVES = (torch.bfloat16, torch.float16)


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


def is_sharded(tensor: Tensor) -> bool:
    """True for a DTensor. Its class is slow to import, so a process that has not imported it has no DTensor."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)  # None while a thread imports it
    return kind is not None and isinstance(tensor, kind)


def local_weights(policy: nn.Module) -> list[Tensor]:
    """This rank's rows of all weights and buffers."""
    return [local(tensor) for tensor in (*policy.parameters(), *policy.buffers())]


def local(tensor: Tensor) -> Tensor:
    """This rank's rows; for an unsharded tensor the tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def rows_of(tensor: Tensor) -> slice:
    """The rows that this rank holds of a tensor."""
    if not is_sharded(tensor):
        return slice(None)
    count = -(-len(tensor) // tensor.device_mesh.size())
    first = min(tensor.device_mesh.get_local_rank() * count, len(tensor))
    return slice(first, min(first + count, len(tensor)))


def join_rows(shards: Sequence[Blob], rows: slice) -> Tensor:
    """These rows of a tensor that is stored in shards; only shards with such rows are read.

    Rows 2 to 5 of shards of 3 rows each: row 2 of the first, rows 0 and 1 of the second."""
    if len(shards) == 1:
        return tensor_of(shards[0])[rows] if shards[0].spec.shape else tensor_of(shards[0])
    ends = np.cumsum([shard.spec.shape[0] for shard in shards]).tolist()
    first, last, _ = rows.indices(ends[-1])
    pieces = []
    for shard, end in zip(shards, ends, strict=True):
        begin = end - shard.spec.shape[0]
        if max(first, begin) < min(last, end):
            pieces.append(tensor_of(shard)[max(first - begin, 0) : last - begin])
    return torch.cat(pieces) if pieces else tensor_of(shards[0])[:0]


def whole_of(rows: Tensor, like: Tensor) -> Tensor:
    """The whole tensor from this rank's `rows`, sharded like `like`; all ranks must take part."""
    if not is_sharded(like):
        return rows
    same = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    return type(like).from_local(rows, like.device_mesh, like.placements, **same).full_tensor()


def whole_tensors(
    policy: nn.Module, dtypes: Mapping[str, torch.dtype], names: Set[str]
) -> Iterator[tuple[str, Tensor]]:
    """The weights and buffers of these names, one whole tensor of its dtype at a time; all ranks must take part."""
    for name, tensor in policy.state_dict().items():
        if name in names:
            yield name, tensor.to(dtypes[name]).full_tensor() if is_sharded(tensor) else tensor


def load_whole(policy, tensors: dict[str, Tensor]) -> None:
    """Replace all weights by this rank's parts of whole tensors, which may be read lazily."""
    policy.check_names(tensors)
    with torch.no_grad():
        for name, tensor in policy.state_dict(keep_vars=True).items():
            local(tensor).copy_(tensors[name][rows_of(tensor)] if is_sharded(tensor) else tensors[name])
