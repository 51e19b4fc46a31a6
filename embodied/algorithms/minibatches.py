"""How an update goes through its items: one permutation per epoch, of which each learner rank does its share, with
which learning rate, and when it ends early."""

from __future__ import annotations

import math

import numpy as np

from embodied.algorithms.config import AlgoConfig, GRPOConfig
from embodied.algorithms.sft_config import SFTConfig
from embodied.core.rng import generator


def learning_rates(config: AlgoConfig | SFTConfig) -> dict[str, float]:
    """Of a policy's groups of parameters. GRPO and imitation have no value function to learn."""
    if isinstance(config, GRPOConfig | SFTConfig):
        return {"policy": config.lr, "value": 0.0}
    return {"policy": config.lr, "value": config.lr if config.value_lr is None else config.value_lr}


def lr_factor(schedule: str, progress: float) -> float:
    """Learning rates are multiplied by it; `progress` is 0 before the first iteration, 1 after the last."""
    return min(1.0, max(0.0, 1.0 - progress)) if schedule == "linear" else 1.0


def sft_factor(config: SFTConfig, step: int, steps: int, total: int) -> float:
    """The same for the `step`-th gradient step of a run of `total`, `steps` of them in a pass over the data.

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


def skip_remaining_epochs(mean_kl: float, target_kl: float | None) -> bool:
    """Given `approx_kl` of an epoch (all ranks, measured before each gradient step) divided by its number of items."""
    return target_kl is not None and mean_kl > target_kl


def permutation(seed: int, iteration: int, epoch: int, num_items: int) -> np.ndarray:
    """All item ids, shuffled by the run's seed, the iteration and the epoch alone."""
    return generator(seed, "shuffle", iteration, epoch).permutation(num_items)


def minibatches(order: np.ndarray, size: int) -> list[np.ndarray]:
    """Consecutive slices of `size` items; the last one is smaller where they do not divide."""
    return [order[start : start + size] for start in range(0, len(order), size)]


def owned(minibatch: np.ndarray, first: int, count: int) -> np.ndarray:
    """Local ids (id - first) of a minibatch's items in a rank's block [first, first + count), in the same order."""
    local = minibatch - first
    return local[(local >= 0) & (local < count)]


def step_items(config: AlgoConfig, items: int) -> int:
    """Items per gradient step, of so many in an iteration."""
    return min(config.minibatch_size or items, items)
