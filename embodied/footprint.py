"""How much memory a run takes, from the recipe alone, so that what cannot fit is refused at once.

Counted is the bulk of it: the pictures that PPO collects from cameras, and simulators that load large scenes.
Everything else a worker needs is measured: `embodied.profiling`.
"""

from __future__ import annotations

import os
from math import prod
from typing import TYPE_CHECKING

from embodied.errors import ConfigError

if TYPE_CHECKING:
    from embodied.config import RunConfig

# The sims' record, its way through shared memory, side by side in a learner, and as that learner's items.
COPIES = 4


def picture_bytes(config: RunConfig) -> int:
    """Of one copy of all pictures of an iteration; 0 without cameras, or where episodes are collected whole."""
    cameras = getattr(config.env, "cameras", ())
    if not cameras or not hasattr(config.algo, "rollout_decisions"):
        return 0
    size = config.env.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return prod((config.env.num_envs, config.algo.rollout_decisions, len(cameras), height, width, 3))


def check_pictures(config: RunConfig, memory_bytes: int | None = None) -> None:
    """Raise if this machine could not hold them."""
    have = memory_bytes or machine_bytes()
    need = COPIES * picture_bytes(config)
    if need > have:
        env, decisions = config.env, config.algo.rollout_decisions
        fit = int(decisions * have / need / 2)
        works = f"algo.rollout_decisions={fit}" if fit else "a smaller env.image_size"
        raise ConfigError(
            f"env.num_envs={env.num_envs} * algo.rollout_decisions={decisions} pictures of {len(env.cameras)} "
            f"camera(s) are {gigabytes(need / COPIES)} an iteration and are held up to {COPIES} times: "
            f"{gigabytes(need)}, and this machine has {gigabytes(have)}; try {works}"
        )


def simulator_bytes(config: RunConfig, num_sims: int) -> float:
    """Of all sim workers; 0 where the env does not say."""
    if not hasattr(config.env, "worker_bytes"):
        return 0.0
    return num_sims * config.env.worker_bytes(-(-config.env.num_envs // num_sims))


def check_simulators(config: RunConfig, num_sims: int, memory_bytes: int | None = None) -> None:
    """Raise if this machine could not hold them."""
    have = memory_bytes or machine_bytes()
    need = simulator_bytes(config, num_sims)
    if need > have:
        fit = int(have * num_sims / need)
        works = f"{fit} sim worker(s)" if fit else "env.tasks_in_memory=1 with fewer env.num_envs"
        raise ConfigError(
            f"{num_sims} sim workers of env.name={config.env.name} take about {gigabytes(need / num_sims)} each, "
            f"{gigabytes(need)} in all, and this machine has {gigabytes(have)}; try {works}, or fewer tasks at a time"
        )


def machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
