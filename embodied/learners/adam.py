"""Adam as `torch.optim.adam` computes it, with its state by parameter.

`torch.optim.Adam` is the same and imports torch's compiler at its first step: a second of every learner's start.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam


class Adam:
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
        """With a learning rate per group; parameters without a gradient stay."""
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
