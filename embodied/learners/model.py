"""The policy in training: precision, compilation, frozen features, and Adam over its trained weights. The gradient is
summed over all learner ranks and clipped as a whole.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from embodied.algorithms.config import AlgoConfig, PPOConfig, SFTConfig
from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.types import Observation
from embodied.learners.config import LearnerConfig
from embodied.policies.base import Policy, Scores
from embodied.runtime.collective import Alone, Collective
from embodied.runtime.published_weights import (
    Blob,
    Spec,
    blob_of,
    read_safetensors,
    spec_of,
    tensor_of,
    write_safetensors,
)

KEPT_BYTES = 4 * 2**30  # limit of host memory for an iteration's frozen features
FILE, SHARD = "optimizer.safetensors", "optimizer-{}-of-{}.safetensors"
MASTER, MEAN = "master", "mean"  # a parameter's further tensors in the stored state
HALVES = (torch.bfloat16, torch.float16)
LrFactors = Sequence[float | Tensor]  # on the learning rates of the policy and of its value function
NORM_PART = 2**20  # numbers whose squares are summed in their own precision, exact to five digits


@dataclass(frozen=True)
class Pass:
    """The items of one forward pass."""

    items: Tensor  # items of this rank's batch; none if it helps with another rank's sequence
    counts: bool = True  # False: padding
    is_own: bool = True  # True if it has this rank's items or padding

    def inputs(self, inputs_of: Callable[[Tensor], dict[str, Any]]) -> dict[str, Any]:
        """The inputs of `Policy.forward`, given the function that makes them of this rank's items."""
        return inputs_of(self.items) | ({} if self.counts else {"is_padding": True})


class DividesPasses(Protocol):
    """A `PassTable`."""

    degrees: list[int]  # numbers of ranks that may run a pass together
    exchange: Any

    def passes(
        self, items: Sequence[Tensor], inputs: Callable[[Tensor], dict], padding: Tensor | None
    ) -> Sequence[Pass]:
        """This rank's passes for its sequences."""


class Model:
    def __init__(self, policy: Policy, config: LearnerConfig, tick: Callable[[], None] = lambda: None) -> None:
        """`tick` sends a sign of life before every pass."""
        self.policy = policy
        self.config = config
        self.tick = tick
        first = next(policy.parameters())
        self.device = first.device.type
        self.dtype = torch.promote_types(first.dtype, torch.float32)  # dtype of losses and exchanged gradients
        self.collective: Collective = Alone()  # ranks that must run a sharded network equally often
        self.table: DividesPasses | None = None  # set if ranks run passes together
        self.imitation: Any = None  # adds the imitation loss of RL (`imitation.ImitatingLearner.imitate_too`)
        self.graphed: Any = None  # gradient steps that were captured (`update.GraphedSteps`), or False: they cannot be
        self.rescores = False  # True: log-probs of acting were too far from the policy's own (`Policy.gap_limits`)
        self.first_backward: float | None = None  # when it began, by time.perf_counter; of the update since it was None
        if config.checkpoint_activations:
            recompute(policy, config.checkpoint_activations)
        if config.compile:
            compile_blocks(policy)

    @property
    def pack_tokens(self) -> int:
        """Size of a language model's micro-batch in tokens."""
        return self.config.pack_tokens * (1 if self.table is None else self.table.degrees[0])

    def begin_pass(self) -> None:
        """Called before a captured pass (forward and backward)."""
        self.tick()
        self.first_backward = self.first_backward or perf_counter()

    def score(self, inputs: dict) -> Scores:
        self.tick()
        with self.cast():
            scores = self.policy(inputs)
        tensors = (scores.logprobs, scores.entropy, scores.values, scores.own_loss)
        return Scores(*(None if tensor is None else tensor.to(self.dtype) for tensor in tensors))

    def cast(self) -> AbstractContextManager:
        """Inside, matrix products have learner.precision."""
        if self.config.precision != "bf16":
            return nullcontext()
        return torch.autocast(self.device, torch.bfloat16, cache_enabled=not self.graphed)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Backward pass. Ranks with shards sum their gradients only in the `last` pass of a gradient step, unless
        learner.reduce_each_pass is set."""
        if self.first_backward is None:
            self.first_backward = perf_counter()
        if self.config.shard:
            self.policy.set_requires_gradient_sync(last or bool(self.config.reduce_each_pass))
        loss.backward()

    @torch.no_grad()
    def features(self, obs: Observation) -> dict[str, Tensor]:
        """`Policy.frozen_features`, in the host's memory, since the features of a whole iteration are large."""
        self.tick()
        with self.cast():
            return {name: tensor.cpu() for name, tensor in self.policy.frozen_features(obs).items()}

    def imitate(self, inputs: dict, noise) -> tuple[Tensor, Tensor | None]:
        """The losses of actions, and the auxiliary losses."""
        self.tick()
        with self.cast():
            losses = self.policy.imitate(inputs, noise)
        actions, beside = losses if isinstance(losses, tuple) else (losses, None)
        return actions.to(self.dtype), None if beside is None else beside.to(self.dtype)

    def passes(self, micro_batches: Sequence[Tensor], padding: Tensor) -> list[Pass]:
        """A pass for each micro-batch of items. If all ranks must run the network equally often, a rank with fewer
        passes adds passes of `padding`."""
        missing = self.most_passes(len(micro_batches)) - len(micro_batches)
        return [Pass(items) for items in micro_batches] + [Pass(padding, counts=False)] * missing

    def most_passes(self, passes: int) -> int:
        """The largest number of passes over the ranks, if all must run the network equally often."""
        if not self.config.shard:
            return 0
        return max(int(row[0]) for row in self.collective.gather(np.array([passes])))


class FrozenFeatures:
    """Features from frozen parts of the policy, computed once for all epochs of an update if all of them fit into
    memory."""

    def __init__(self, model: Model, num_items: int) -> None:
        self.model, self.num_items = model, num_items
        self.wanted = True
        self.kept: dict[str, Tensor] = {}

    def add(self, obs: Observation, items: Tensor) -> None:
        """Encode the observations of these items in one pass."""
        if not len(items):
            return
        features = self.model.features(obs)
        if not self.kept:
            item_bytes = sum(tensor[0].nbytes for tensor in features.values())
            self.wanted = 0 < item_bytes * self.num_items <= KEPT_BYTES
            if not self.wanted:
                return
            self.kept = {name: tensor.new_empty(self.num_items, *tensor.shape[1:]) for name, tensor in features.items()}
        for name, tensor in features.items():
            self.kept[name][items] = tensor


def recompute(policy: Policy, which: bool | str = True) -> None:
    """Compute activations of these blocks (learner.checkpoint_activations) again in the backward pass. Policies have no
    randomness of their own to keep."""
    from torch.utils.checkpoint import checkpoint

    if not policy.blocks():
        raise ConfigError(
            f"learner.checkpoint_activations=true, but {type(policy).__name__} names no blocks to compute again; "
            "leave it out, or give the policy a method `blocks`"
        )
    for block in CHECKPOINTED[which](policy):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def without_towers(policy: Policy) -> list[nn.Module]:
    """The blocks that are no part of a vision tower."""
    towers = {id(module) for name, module in policy.named_modules() if "vision" in name}
    return [block for block in policy.blocks() if id(block) not in towers]


# learner.checkpoint_activations -> the blocks that it computes again. A plan decides `auto`; without one it is all
CHECKPOINTED: dict[bool | str, Callable[[Policy], list[nn.Module]]] = {
    True: lambda policy: policy.blocks(),
    "auto": lambda policy: policy.blocks(),
    "half": lambda policy: policy.blocks()[::2],
    "language": without_towers,
}


def compile_blocks(policy: Policy) -> None:
    """Compile the policy's blocks if it names some, which is faster than compiling the whole policy."""
    if next(policy.parameters()).device.type == "cpu" and not shutil.which("g++"):
        raise ConfigError("learner.compile=true needs a C++ compiler; install g++ or leave it out")
    torch._inductor.config.compile_threads = 1  # no additional pool of processes
    for module in policy.blocks() or [policy]:
        module.compile(dynamic=True)


class PolicyOptimizer:
    """Adam over the policy's trainable parameters.

    Ranks with all weights exchange their gradients as one flat vector. Between ranks with shards FSDP has already
    summed gradients, so they only exchange statistics. Half-precision weights are trained in float32 (master weights):
    a copy, or the shards themselves.
    """

    def __init__(self, policy, algo, collective: Collective, dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        """`dtypes` of published weights, where they differ from the learner's."""
        rates = learning_rates(algo)
        found = sorted(policy.parameter_groups().items())  # "policy", then "value", as in LrFactors
        groups = {name: [p for p in group if p.requires_grad] for name, group in found}
        names = {id(p): name for name, p in policy.named_parameters()}
        self.collective = collective
        self.params = [p for group in groups.values() for p in group]
        self.names = [names[id(p)] for p in self.params]
        self.masters = [master_of(p) for p in self.params]
        dtypes = dtypes or {name: p.dtype for name, p in policy.named_parameters()}
        self.halves = {name for name, dtype in dtypes.items() if dtype in HALVES}
        self.sharded = any(map(is_sharded, self.params))
        self.base_lrs = [rates[name] for name in groups]
        of = {id(p): master for p, master in zip(self.params, self.masters, strict=True)}
        masters = [[of[id(p)] for p in group] for group in groups.values()]
        self.adam = Adam(masters, algo.adam_eps, algo.adam_betas, algo.weight_decay)
        self.max_grad_norm = algo.max_grad_norm
        self.keeps_mean = bool(getattr(algo, "average", None))
        self.sizes = [master.numel() for master in self.masters]
        self.summed: Tensor | None = None  # memory reused by all steps: new pages would cost as much as the copy
        self.gradients: list[Tensor] = []  # views of `summed`, by parameter
        self.zeros: Tensor | None = None  # the gradient of parameters without one, also reused
        self.fixed = False  # gradients are added up in that memory
        self.mean_shown = False  # True: the parameters hold the mean of weights, and `state` the weights

    def exchange(self, stats: Tensor, count: float | None = None) -> tuple[Tensor, Tensor]:
        """Sum the gradients and these numbers over all ranks, and clear the gradients. Returns the sums of the numbers,
        and the norm of the whole gradient after its division by `count`, if given. Both stay on the device."""
        tensors = [self._gradient(p, m).view(-1) for p, m in zip(self.params, self.masters, strict=True)]
        if self.sharded:
            self.flat = torch.cat(tensors)
            if count is not None:
                self.flat /= count
            squares = norm_of(self.flat).square().view(1)
            totals = self.collective.sum(torch.cat([stats.double(), squares]))
            return totals[:-1], totals[-1].sqrt()
        tensors.append(stats.to(tensors[0].dtype))
        if self.summed is None or len(self.summed) != sum(self.sizes) + len(stats):
            self._allocate(len(stats))
        return self.split(self.collective.sum(torch.cat(tensors, out=self.summed)), count)

    def split(self, flat: Tensor, count: float | None = None) -> tuple[Tensor, Tensor]:
        """Split the exchanged vector: returns the sums of numbers at its end, and the norm of the gradient before
        them."""
        size = sum(self.sizes)
        self.flat = flat[:size]
        if count is not None:
            self.flat /= count
        return flat[size:], norm_of(self.flat)

    def fix_gradients(self, num_stats: int) -> Tensor:
        """From now on accumulate gradients in memory with a fixed address. Returns the memory behind it for `num_stats`
        numbers. `forget_gradients` undoes this."""
        self.forget_gradients()
        self.fixed = True
        self._allocate(num_stats)
        for p, master, gradient in zip(self.params, self.masters, self.gradients, strict=True):
            self.adam.state_of(master)
            (master if p.dtype in HALVES else p).grad = gradient
        return self.summed[-num_stats:]

    def step(self, norm: Tensor, lr_factors: LrFactors, skipped: Tensor | None = None) -> None:
        """Apply the gradient of the last `exchange`, scaled down if its norm is too large; if `skipped` is 1, nothing
        changes."""
        if self.max_grad_norm is not None:
            self.flat *= (torch.full_like(norm, self.max_grad_norm) / (norm + 1e-6)).clamp(max=1.0)
        gradients = self._by_parameter(self.flat) if self.sharded else self.gradients
        self.adam.step(gradients, [lr * factor for lr, factor in zip(self.base_lrs, lr_factors)], skipped)
        with torch.no_grad():
            if halves := [(local(p), m) for p, m in zip(self.params, self.masters, strict=True) if p.dtype in HALVES]:
                torch._foreach_copy_(*map(list, zip(*halves, strict=True)))

    @torch.no_grad()
    def add_to_mean(self, weight: float) -> None:
        """Move the mean of weights by this part of the way to the present ones; the first weights are the mean."""
        states = [self.adam.state_of(master) for master in self.masters]
        new = [(state, master) for state, master in zip(states, self.masters, strict=True) if MEAN not in state]
        for state, master in new:
            state[MEAN] = master.clone()
        if not new:
            torch._foreach_lerp_([state[MEAN] for state in states], self.masters, weight)

    def means(self) -> dict[str, Tensor]:
        """The mean of weights by name; {} before the first update."""
        state = {name: self.adam.state[master] for name, master in zip(self.names, self.masters, strict=True)}
        return {name: entries[MEAN] for name, entries in state.items() if MEAN in entries}

    @torch.no_grad()
    def show_mean(self, shown: bool) -> None:
        """Let the parameters hold the mean of weights, if there is one, or the weights again; neither is lost."""
        if shown == self.mean_shown or any(MEAN not in self.adam.state[master] for master in self.masters):
            return
        for p, master in zip(self.params, self.masters, strict=True):
            mean = self.adam.state[master][MEAN]
            if p.dtype in HALVES:
                local(p).copy_(mean if shown else master)
            else:  # the master is the parameter itself
                other = mean.clone()
                mean.copy_(master)
                master.copy_(other)
        self.mean_shown = shown

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All state between steps, by name."""
        for name, p in self._named():
            for key, value in self._state(name, p).items():
                yield f"{name}/{key}", value

    def masters_aside(self) -> list[Tensor]:
        """The master weights that are copies, not the parameters' own memory."""
        return [master for p, master in zip(self.params, self.masters, strict=True) if p.dtype in HALVES]

    def tensors(self) -> list[Tensor]:
        """All state between steps, except the parameters."""
        return [*self.masters_aside(), *(value for state in self.adam.state.values() for value in state.values())]

    def forget_gradients(self) -> None:
        """Free the gradients, which are not needed between updates."""
        self.flat, self.summed, self.gradients, self.zeros, self.fixed = None, None, [], None, False
        for p in (*self.params, *self.masters):
            p.grad = None

    def broken(self) -> Tensor:
        """True if some of this rank's weights are not finite, or above 1e19: their norm is not."""
        none = self.masters[0].new_zeros(1)  # a rank may hold no rows of some weights
        return ~torch.stack(torch._foreach_norm([none, *filter(Tensor.numel, self.masters)])).isfinite().all()

    def save(self, folder: Path, rank: int = 0) -> None:
        """Write the state into a folder of a checkpoint. Each rank with shards writes a file with its rows, if all
        ranks see the folder; else rank 0 writes one file of whole tensors."""
        shards = 1
        if self.sharded:
            seen = np.concatenate(self.collective.gather(np.array([float(folder.parent.is_dir())])))
            shards = len(seen) if seen.all() else 1
        whole = self.sharded and shards == 1
        if rank and shards == 1:
            deque(self._tensors_to_store(whole), maxlen=0)  # takes part in gathering
            return
        specs = {key: spec for name, p in self._named() for key, spec in self._specs(name, p, whole).items()}
        folder.mkdir(parents=True, exist_ok=True)
        write_safetensors(
            folder / (FILE if shards == 1 else SHARD.format(rank + 1, shards)), specs, self._tensors_to_store(whole)
        )

    def load(self, folder: Path) -> None:
        """Load the state written by any number of ranks."""
        where, (first, stored) = dict(self._named()), read_shards(folder)
        wanted = [f"{name}/{key}" for name, p in where.items() for key in self._state(name, p)]
        if lacking := [key for key in wanted if key not in stored]:
            raise CheckpointError(
                f"{first} lacks {len(lacking)} of the optimizer's {len(wanted)} tensors, {lacking[0]} among "
                f"them; it is damaged: remove {folder.parent} to resume from the checkpoint before it"
            )
        for key, shards in stored.items():
            name, _, entry = key.rpartition("/")
            if name not in where:
                raise CheckpointError(f"{first} holds {name}, which this policy does not have")
            if entry == MEAN and not self.keeps_mean:
                continue
            p = where[name]
            value = tensor_of(shards[0]) if entry == "step" else join_rows(shards, rows_of(p))
            master = self._master(p)
            if entry == MASTER:
                master.copy_(value)
            else:
                self.adam.state[master][entry] = value.to(master.device, copy=True)

    # Inside

    def _allocate(self, num_stats: int) -> None:
        """Allocate memory for all gradients and `num_stats` numbers."""
        self.summed = self.masters[0].new_zeros(sum(self.sizes) + num_stats)
        self.gradients = self._by_parameter(self.summed[: sum(self.sizes)])

    def _by_parameter(self, flat: Tensor) -> list[Tensor]:
        return [gradient.view_as(master) for gradient, master in zip(flat.split(self.sizes), self.masters, strict=True)]

    def _gradient(self, p: Tensor, master: Tensor) -> Tensor:
        grad = p.grad if master.grad is None else master.grad
        p.grad = master.grad = None
        if grad is None:
            if self.zeros is None or len(self.zeros) < master.numel():
                self.zeros = master.new_zeros(master.numel())
            return self.zeros[: master.numel()]
        return (local(grad) if self.sharded else grad).to(master.dtype)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        return zip(self.names, self.params, strict=True)

    def _master(self, p: Tensor) -> Tensor:
        return next(master for q, master in zip(self.params, self.masters, strict=True) if q is p)

    def _state(self, name: str, p: Tensor) -> dict[str, Tensor]:
        master = self._master(p)
        return self.adam.state_of(master) | ({MASTER: master} if name in self.halves else {})

    def _specs(self, name: str, p: Tensor, whole: bool) -> dict[str, Spec]:
        specs = {f"{name}/{key}": spec_of(value) for key, value in self._state(name, p).items()}
        return {key: Spec(s.dtype, tuple(p.shape)) if whole and s.shape else s for key, s in specs.items()}

    def _tensors_to_store(self, whole: bool) -> Iterator[tuple[str, Blob]]:
        for name, p in self._named():
            for key, value in self._state(name, p).items():
                yield f"{name}/{key}", blob_of(whole_of(value, p) if whole and key != "step" else value)


def read_shards(folder: Path) -> tuple[Path, dict[str, list[Blob]]]:
    """The first file of an optimizer's state, and the rows of each tensor in all files, in the order of ranks."""
    shards = sorted(folder.glob(SHARD.format("*", "*")), key=lambda path: int(path.stem.split("-")[1]))
    if not shards:
        return folder / FILE, {name: [blob] for name, blob in read_safetensors(folder / FILE).items()}
    count = int(shards[0].stem.split("-")[-1])
    if {path.name for path in shards} != {SHARD.format(rank + 1, count) for rank in range(count)}:
        raise CheckpointError(
            f"{folder} has {len(shards)} of the optimizer's {count} files; it is damaged: remove {folder.parent} to "
            "resume from the checkpoint before it"
        )
    files = [read_safetensors(path) for path in shards]
    return shards[0], {name: [file[name] for file in files] for name in files[0] if all(name in file for file in files)}


class Adam:
    """Torch's fused Adam, with its state by parameter. The class `torch.optim.Adam` calls the same kernel, but its
    constructor imports torch's compiler: 1.7 s of a core at every learner's start (torch 2.13); and it sorts the
    tensors before each step."""

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        eps: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        """The weight decay is AdamW's: it acts on the weights, not on their gradients."""
        self.groups, self.eps, self.betas, self.weight_decay = groups, eps, betas, weight_decay
        self.state: dict[Tensor, dict[str, Tensor]] = {p: {} for group in groups for p in group}

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], rates: Sequence[float | Tensor], skipped: Tensor | None = None) -> None:
        """Take a step with the gradients of all parameters in their order, and a learning rate per group; with
        `skipped` 1 nothing changes."""
        states = [self.state_of(p) for group in self.groups for p in group]
        means, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        torch._foreach_add_(steps, 1)
        first = 0
        for group, lr in zip(self.groups, rates, strict=True):
            block = slice(first, first := first + len(group))
            if not group:
                continue
            torch._fused_adamw_(
                group,
                gradients[block],
                means[block],
                squares[block],
                [],
                steps[block],
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=lr,
                weight_decay=self.weight_decay,
                eps=self.eps,
                maximize=False,
                found_inf=skipped,
            )
        if skipped is not None:
            torch._foreach_sub_(steps, [skipped] * len(steps))

    def state_of(self, p: Tensor) -> dict[str, Tensor]:
        """The moments of a parameter's gradients, zeros before its first step."""
        if not (state := self.state[p]):
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        return state


def norm_of(flat: Tensor) -> Tensor:
    """The norm of a long vector, in float64. A sum of 100 million float32 squares would be 2% short: small squares
    vanish beside the running sum."""
    return torch.stack([torch.linalg.vector_norm(block) for block in flat.split(NORM_PART)]).double().norm()


def master_of(p: Tensor) -> Tensor:
    """The tensor that Adam changes: the parameter itself, or a float32 copy that also accumulates gradients."""
    rows = local(p).detach()
    if p.dtype not in HALVES:
        return rows
    master = rows.float()

    def collect(p: Tensor) -> None:
        grad = p.grad.float()
        master.grad = grad if master.grad is None else master.grad.add_(grad)
        p.grad = None

    p.register_post_accumulate_grad_hook(collect)
    return master


def learning_rates(config: AlgoConfig | SFTConfig) -> dict[str, float]:
    """The learning rates of a policy's parameter groups. GRPO and imitation train no value function."""
    if not isinstance(config, PPOConfig):
        return {"policy": config.lr, "value": 0.0}
    return {"policy": config.lr, "value": config.lr if config.value_lr is None else config.value_lr}


def lr_factor(schedule: str, progress: float, last: float = 0.0) -> float:
    """The factor on learning rates, which falls to `last`; `progress` is 0 before the first iteration, 1 after the
    last."""
    progress = min(1.0, max(0.0, progress))
    if schedule == "cosine":
        return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * progress))
    return last + (1 - last) * (1.0 - progress) if schedule == "linear" else 1.0


def scheduled(algo: Any, iteration: int, total: int) -> float:
    """The factor in this iteration of RL: with two iterations of warmup 1/3, 2/3, then the schedule."""
    warm = algo.warmup_iterations
    if iteration < warm:
        return (iteration + 1) / (warm + 1)
    last = algo.final_lr / algo.lr if algo.lr else 0.0
    return lr_factor(algo.lr_schedule, (iteration - warm) / max(1, total - warm), last)


# Rows of weights that are sharded over the ranks (`sharding.py`)


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


def load_whole(policy, tensors: dict[str, Tensor]) -> None:
    """Replace all weights by this rank's parts of whole tensors, which may be read lazily."""
    policy.check_names(tensors)
    with torch.no_grad():
        for name, tensor in policy.state_dict(keep_vars=True).items():
            local(tensor).copy_(tensors[name][rows_of(tensor)] if is_sharded(tensor) else tensors[name])
