"""Adam over the policy's parameter groups, with gradients exchanged and clipped as one flat vector."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from embodied.errors import CheckpointError, Diverged

FILE = "optimizer.safetensors"


class Optimizer:
    def __init__(self, policy, algo) -> None:
        rates = {"policy": algo.lr, "value": algo.lr if algo.value_lr is None else algo.value_lr}
        groups = policy.parameter_groups()
        self.named = {id(p): name for name, p in policy.named_parameters()}
        self.params = [p for group in groups.values() for p in group]
        self.base_lrs = [rates[name] for name in groups]
        self.adam = torch.optim.Adam(
            [{"params": group, "lr": rates[name]} for name, group in groups.items()], eps=algo.adam_eps, fused=True
        )
        self.max_grad_norm = algo.max_grad_norm

    def flat_gradient(self, extra: Tensor) -> Tensor:
        """All gradients behind each other, then `extra` numbers that travel along; clears the gradients."""
        parts = [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.view(-1) for p in self.params]
        return torch.cat([*parts, extra.to(parts[0].dtype)])

    def step(self, flat: Tensor, lr_factor: float) -> float:
        """Apply a summed gradient; returns its norm before clipping. Refuses one that is not finite."""
        norm = float(torch.linalg.vector_norm(flat))
        if not math.isfinite(norm):
            raise Diverged(
                f"the gradient norm is {norm}, and the step was not taken; try a lower algo.lr or "
                "algo.max_grad_norm=0.5, and see which of the train/ numbers in metrics.jsonl grew"
            )
        scale = 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (norm + 1e-6))
        at = 0
        for p in self.params:
            part = flat[at : at + p.numel()].view_as(p)
            p.grad = part if scale == 1.0 else part * scale
            at += p.numel()
        for group, lr in zip(self.adam.param_groups, self.base_lrs, strict=True):
            group["lr"] = lr * lr_factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        return norm

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        tensors = {
            f"{self.named[id(p)]}/{key}": value.contiguous()
            for p, state in self.adam.state.items()
            for key, value in state.items()
        }
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / FILE)

    def load(self, folder: Path) -> None:
        from safetensors.torch import load_file

        tensors = load_file(folder / FILE)
        by_name = {name: p for p in self.params for name in [self.named[id(p)]]}
        for key, value in tensors.items():
            name, _, entry = key.rpartition("/")
            if name not in by_name:
                raise CheckpointError(f"{folder / FILE} holds {name}, which this policy does not have")
            self.adam.state[by_name[name]][entry] = value
