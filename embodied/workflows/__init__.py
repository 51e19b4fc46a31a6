"""The training loops: their roles, the data between them, and the steps of an iteration.

`contract` has the declarations of a program, `rl_loop` the RL loop, `imitation` the imitation loop. `collector`
collects batches, of PPO (`horizon`) or GRPO (`groups`). `evaluator` evaluates. `workers` launches the roles and syncs
weights, `rollout_manager` runs and replaces sim and policy workers, and assigns policy workers to sims; `prompts` hands
prompts to several language engines. `roles` are the roles added by a recipe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embodied.config.recipe import RunConfig
    from embodied.workflows.contract import Role

__all__ = ["contract", "evaluator", "imitation", "relay", "rl_loop", "roles_of_run", "shipped_roles", "workers"]


def roles_of_run(program: Any, config: RunConfig) -> tuple[Role, ...]:
    """The roles of a program; if it trains by RL, with the recipe's additional roles."""
    wanted = config.roles
    if program.command != "train" or not (wanted.scorer or wanted.judge or wanted.reference or wanted.critic):
        return (*program.roles,)
    from embodied.workflows.shipped_roles import shipped_roles

    return (*program.roles, *shipped_roles(config))
