"""Measures the balance of a mixture of experts, and balances it by a routing bias, without a loss.

Forward hooks on transformers' routers count each expert's tokens while a learner scores. After every gradient step the
bias of experts above the mean load falls by a constant, and the bias of other experts rises (Wang et al., 2024,
"Auxiliary-loss-free load balancing"). The bias affects the choice of experts, never their weight. DeepSeek-V3 and
related models have such a bias; it is added to Qwen's and Mixtral's routers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from embodied.core.errors import ConfigError

BIAS = "e_score_correction_bias"  # transformers' name of it
SOFTMAX = ("Qwen3MoeTopKRouter", "Qwen2MoeTopKRouter", "OlmoeTopKRouter", "MixtralTopKRouter")
"""Routers that choose the largest probabilities of a softmax, to which a bias can be added."""


class ExpertLoads:
    """Counts every expert's tokens in each layer, and balances them with `rate`."""

    def __init__(self, model: Any, rate: float | None, engine: str) -> None:
        routers = {name: module for name, module in model.named_modules() if is_router(module)}
        self.rate, self.routers = rate, list(routers.values())
        self.adds_bias = rate is not None and not all(hasattr(router, BIAS) for router in self.routers)
        self.places: Tensor | None = None  # bool mask of the current tokens that are counted
        self.ignores = False  # True: no tokens are counted
        self.counts = [torch.zeros(0)] * len(routers)
        if rate is not None:
            self._check(model.config.model_type, engine)
            for router in self.routers:
                known = getattr(router, BIAS, torch.zeros(num_experts(router), device="meta"))
                router.register_buffer(BIAS, known.float())  # steps are too small for half precision
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(Routed(self, layer))

    def _check(self, kind: str, engine: str) -> None:
        given = f"policy.expert_bias_rate={self.rate:g}"
        if not self.routers:
            raise ConfigError(f"{given} balances experts, and a {kind} has none; leave it out")
        odd = [type(router).__name__ for router in self.routers if not hasattr(router, BIAS)]
        if unknown := sorted({*odd} - {*SOFTMAX}):
            raise ConfigError(f"{given}: a {kind}'s {unknown[0]} takes no bias; leave it out")
        if odd and engine != "transformers":
            why = f"{given} gives a {kind}'s routers a bias that policy.engine={engine} does not know"
            raise ConfigError(f"{why}; try policy.engine=transformers")

    def check_publishable(self) -> None:
        if self.adds_bias:
            raise ConfigError(
                "policy.expert_bias_rate gave this model's routers biases that other programs do not support: the "
                "published model would answer differently; train without it to publish"
            )

    @contextmanager
    def counting(self, places: Tensor) -> Iterator[None]:
        """Inside, count these tokens (a bool mask) in passes with gradients."""
        counts = self.routers and not self.ignores and torch.is_grad_enabled() and not places.is_meta
        self.places = places.reshape(-1) if counts else None
        try:
            yield
        finally:
            self.places = None

    @torch.no_grad()
    def end_step(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Update the biases, reset the counts, and return MaxViolation, (max - mean) / mean, of every layer and the
        largest."""
        if not self.routers:
            return {}
        sizes = [num_experts(router) for router in self.routers]
        device = self.routers[0].weight.device
        counts = [
            count if len(count) else torch.zeros(size, dtype=torch.float64, device=device)
            for count, size in zip(self.counts, sizes, strict=True)
        ]
        loads = sum_over_ranks(torch.cat(counts)).split(sizes)
        self.counts = [torch.zeros(0)] * len(sizes)
        if self.rate is not None:
            for router, load in zip(self.routers, loads, strict=True):
                bias = getattr(router, BIAS)
                bias += self.rate * torch.sign(load.mean() - load).to(bias)
        violations = [max_violation(load) for load in loads]
        layers = {f"max_violation_{number}": violation for number, violation in enumerate(violations)}
        return {"max_violation": max(violations)} | layers


class Routed:
    """A forward hook; an object, so that a copy of the policy counts for itself."""

    def __init__(self, loads: ExpertLoads, layer: int) -> None:
        self.loads, self.layer = loads, layer

    def __call__(self, router: Any, _: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A router's output, with the added bias if it has one."""
        loads, layer = self.loads, self.layer
        if loads.adds_bias:
            output = biased(router, *output)
        if loads.places is not None:
            chosen = output[-1].reshape(len(loads.places), -1)
            if not len(loads.counts[layer]):
                loads.counts[layer] = chosen.new_zeros(num_experts(router), dtype=torch.float64)
            counted = loads.places.double()[:, None].expand(chosen.shape)
            loads.counts[layer].index_add_(0, chosen.reshape(-1), counted.reshape(-1))
        return output


def is_router(module: nn.Module) -> bool:
    return type(module).__name__.lower().endswith("topkrouter")


def num_experts(router: Any) -> int:
    return int(router.weight.shape[0])


def biased(router: Any, logits: Tensor, weights: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A softmax router's output if experts are chosen by probability plus bias."""
    likely = logits.softmax(-1, dtype=torch.float)
    chosen = (likely + getattr(router, BIAS)).topk(router.top_k, dim=-1).indices
    kept = likely.gather(-1, chosen)
    if getattr(router, "norm_topk_prob", True):
        kept = kept / kept.sum(-1, keepdim=True)
    return logits, kept.to(weights.dtype), chosen


def max_violation(load: Tensor) -> float:
    """Loads 4, 1 and 1: (4 - 2) / 2 = 1. 0 where no token came."""
    mean = float(load.mean())
    return (float(load.max()) - mean) / mean if mean else 0.0
