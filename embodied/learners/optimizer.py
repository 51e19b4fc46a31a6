"""Adam over what a policy trains: the gradient of all ranks, clipped, and how large a step is.

The gradient is summed over all learner ranks and clipped as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.adam import adam

from embodied.algorithms.config import AlgoConfig, GRPOConfig
from embodied.algorithms.sft_config import SFTConfig
from embodied.core.errors import CheckpointError
from embodied.learners.sharding import HALVES, is_sharded, local, part_of
from embodied.runtime.collective import Collective
from embodied.runtime.tensor_bytes import (
    Blob,
    Spec,
    array_of,
    blob_of,
    read_safetensors,
    spec_of,
    tensor_of,
    write_safetensors,
)

FILE = "optimizer.safetensors"
MASTER = "master"


class PolicyOptimizer:
    """Adam over the policy's trainable parameters.

    Ranks that hold all weights exchange their gradients as one flat vector; ranks that hold shards have them summed by
    FSDP already and exchange only numbers. Weights of half precision are trained in float32, the master: a copy, or
    where they are sharded the shards themselves.
    """

    def __init__(self, policy, algo, collective: Collective, dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        """`dtypes`: in which the weights leave the learner, where that is not as they are here."""
        rates = learning_rates(algo)
        groups = {name: [p for p in group if p.requires_grad] for name, group in policy.parameter_groups().items()}
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
        self.sizes = [master.numel() for master in self.masters]
        self.summed: Tensor | None = None  # room that steps use again: the pages of a new one cost as much as the copy

    def exchange(self, stats: Tensor, count: float | None = None) -> tuple[Tensor, float]:
        """Sum the gradients and these numbers over all ranks, and clear the gradients; -> the sums of the numbers and
        the norm of the whole gradient, which is divided by `count` where that was not known before."""
        parts = [self._gradient(p, m).view(-1) for p, m in zip(self.params, self.masters, strict=True)]
        if self.sharded:
            self.flat = torch.cat(parts)
            squares = self.flat.square().sum().view(1)
            totals = self.collective.sum(torch.cat([stats.to(squares.dtype), squares]))
            return totals[:-1], math.sqrt(totals[-1])
        parts.append(stats.to(parts[0].dtype))
        if self.summed is None or len(self.summed) != sum(self.sizes) + len(stats):
            self.summed = parts[0].new_empty(sum(self.sizes) + len(stats))
        flat = self.collective.sum(torch.cat(parts, out=self.summed))
        self.flat = flat[: -len(stats)]
        if count is not None:
            self.flat /= count
        return flat[-len(stats) :], float(torch.linalg.vector_norm(self.flat))

    def step(self, norm: float, lr_factor: float) -> None:
        """Apply the gradient of the last `exchange`, scaled down where its norm is too large."""
        scale = 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (norm + 1e-6))
        if scale != 1.0:
            self.flat *= scale
        for master, part in zip(self.masters, self.flat.split(self.sizes), strict=True):
            master.grad = part.view_as(master)
        self.adam.step([lr * lr_factor for lr in self.base_lrs])
        self.adam.forget_gradients()
        with torch.no_grad():
            for p, master in zip(self.params, self.masters, strict=True):
                if p.dtype in HALVES:
                    local(p).copy_(master)

    def masters_aside(self) -> list[Tensor]:
        """The masters that are not the parameters' own memory."""
        return [master for p, master in zip(self.params, self.masters, strict=True) if p.dtype in HALVES]

    def tensors(self) -> list[Tensor]:
        """All that it keeps from step to step besides the parameters."""
        return [*self.masters_aside(), *(value for state in self.adam.state.values() for value in state.values())]

    def forget_gradients(self) -> None:
        """Frees the gradients: between updates nobody needs them."""
        self.flat = self.summed = None
        self.adam.forget_gradients()
        for p in self.params:
            p.grad = None

    def finite(self) -> bool:
        """True if this rank's weights are finite."""
        return all(bool(torch.isfinite(master).all()) for master in self.masters)

    def save(self, folder: Path, write: bool = True) -> None:
        """All ranks take part where they hold shards; `write` on one of them."""
        if not write:
            if self.sharded:
                for _ in self._whole():
                    pass
            return
        specs = {f"{name}/{key}": spec for name, p in self._named() for key, spec in self._specs(name, p).items()}
        folder.mkdir(parents=True, exist_ok=True)
        write_safetensors(folder / FILE, specs, self._whole())

    def load(self, folder: Path) -> None:
        where = dict(self._named())
        for key, blob in read_safetensors(folder / FILE).items():
            name, _, entry = key.rpartition("/")
            if name not in where:
                raise CheckpointError(f"{folder / FILE} holds {name}, which this policy does not have")
            p, value = where[name], tensor_of(blob)
            value = value if entry == "step" else part_of(value, p)
            master = self._master(p)
            if entry == MASTER:
                master.copy_(value)
            else:
                self.adam.state[master][entry] = value.to(master.device, copy=True)

    # Inside

    def _gradient(self, p: Tensor, master: Tensor) -> Tensor:
        grad = p.grad if master.grad is None else master.grad
        p.grad = None
        if grad is None:
            return torch.zeros_like(master)
        return (local(grad) if self.sharded else grad).to(master.dtype)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        return zip(self.names, self.params, strict=True)

    def _master(self, p: Tensor) -> Tensor:
        return next(master for q, master in zip(self.params, self.masters, strict=True) if q is p)

    def _state(self, name: str, p: Tensor) -> dict[str, Tensor]:
        master = self._master(p)
        return self.adam.state[master] | ({MASTER: master} if name in self.halves else {})

    def _specs(self, name: str, p: Tensor) -> dict[str, Spec]:
        return {
            key: Spec(spec_of(value).dtype, () if key == "step" else tuple(p.shape))
            for key, value in self._state(name, p).items()
        }

    def _whole(self) -> Iterator[tuple[str, Blob]]:
        for name, p in self._named():
            for key, value in self._state(name, p).items():
                if self.sharded and key != "step":
                    parts = self.collective.gather(array_of(blob_of(value)))
                    value = torch.cat([torch.from_numpy(rows) for rows in parts])
                yield f"{name}/{key}", blob_of(value)


class Adam:
    """Adam as `torch.optim.adam` computes it, with its state by parameter. `torch.optim.Adam` is the same, and imports
    torch's compiler at its first step: a second of every learner's start."""

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        eps: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        """The decay is AdamW's: of the weights, not of their gradients."""
        self.groups, self.eps, self.betas, self.weight_decay = groups, eps, betas, weight_decay
        self.state: dict[Tensor, dict[str, Tensor]] = {p: {} for group in groups for p in group}

    @torch.no_grad()
    def step(self, rates: Sequence[float]) -> None:
        """Take a step with a learning rate per group; parameters without a gradient stay."""
        for group, lr in zip(self.groups, rates, strict=True):
            params = [p for p in group if p.grad is not None]
            states = [self._state(p) for p in params]
            adam(
                params,
                [p.grad for p in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                decoupled_weight_decay=True,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=lr,
                weight_decay=self.weight_decay,
                eps=self.eps,
                maximize=False,
            )

    def forget_gradients(self) -> None:
        for p in self.state:
            p.grad = None

    def _state(self, p: Tensor) -> dict[str, Tensor]:
        if not (state := self.state[p]):
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        return state


def master_of(p: Tensor) -> Tensor:
    """The tensor that Adam changes: the parameter's own memory, or a float32 copy that collects its gradients too."""
    own = local(p).detach()
    if p.dtype not in HALVES:
        return own
    master = own.float()

    def collect(p: Tensor) -> None:
        grad = p.grad.float()
        master.grad = grad if master.grad is None else master.grad + grad
        p.grad = None

    p.register_post_accumulate_grad_hook(collect)
    return master


def learning_rates(config: AlgoConfig | SFTConfig) -> dict[str, float]:
    """The learning rates of a policy's groups of parameters. GRPO and imitation have no value function to learn."""
    if isinstance(config, GRPOConfig | SFTConfig):
        return {"policy": config.lr, "value": 0.0}
    return {"policy": config.lr, "value": config.lr if config.value_lr is None else config.value_lr}


def lr_factor(schedule: str, progress: float) -> float:
    """Learning rates are multiplied by it; `progress` is 0 before the first iteration, 1 after the last."""
    return min(1.0, max(0.0, 1.0 - progress)) if schedule == "linear" else 1.0


def sft_factor(config: SFTConfig, step: int, steps: int, total: int) -> float:
    """Learning rates are multiplied by it at the `step`-th gradient step of a run of `total`, `steps` of them in a pass
    over the data.

    Cosine with lr 1, final_lr 0.1, 1 step to warm up and 5 in all: 0.5, 1, 0.1 + 0.45 * (1 + cos(pi / 4)) = 0.868,
    0.55, 0.232.
    """
    warm = config.warmup_steps
    if step < warm:
        return lr_factor(config.lr_schedule, step // steps * steps / total) * (step + 1) / (warm + 1)
    if config.lr_schedule != "cosine":
        return lr_factor(config.lr_schedule, step // steps * steps / total)
    last = config.final_lr / config.lr if config.lr else 0.0
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))
