"""Learning rates, what changes them over a run, and what ends an iteration early."""

from __future__ import annotations

from embodied.algorithms.config import AlgoConfig, GRPOConfig, SFTConfig


def learning_rates(config: AlgoConfig | SFTConfig) -> dict[str, float]:
    """Of a policy's groups of parameters. GRPO and imitation have no value function to learn."""
    if isinstance(config, GRPOConfig | SFTConfig):
        return {"policy": config.lr, "value": 0.0}
    return {"policy": config.lr, "value": config.lr if config.value_lr is None else config.value_lr}


def lr_factor(schedule: str, progress: float) -> float:
    """Learning rates are multiplied with it; `progress` is 0 before the first iteration, 1 after the last."""
    return min(1.0, max(0.0, 1.0 - progress)) if schedule == "linear" else 1.0


def skip_remaining_epochs(mean_kl: float, target_kl: float | None) -> bool:
    """Given `approx_kl` of an epoch (all ranks, measured before each gradient step) divided by its number of items."""
    return target_kl is not None and mean_kl > target_kl
