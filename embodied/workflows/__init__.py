"""The training loops: their roles, the data between them, and the steps of an iteration.

`contract` has the declarations of a program, `rl_loop` the RL loop, `imitation` the imitation loop. `collector`
collects batches, of PPO (`horizon`) or GRPO (`groups`). `evaluator` evaluates. `workers` launches the roles and syncs
weights, `rollout_manager` runs and replaces sim and policy workers, and assigns policy workers to sims; `prompts` hands
prompts to several language engines. `roles` has the workers of the roles that a recipe adds: a reward, a judge, a
reference, a critic.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embodied.config.recipe import RunConfig
    from embodied.workflows.contract import Role
    from embodied.workflows.workers import Workers

__all__ = ["contract", "evaluator", "imitation", "relay", "rl_loop", "roles_of_run", "workers"]

WORKERS = "embodied.workflows.roles:"


def roles_of_run(program: Any, config: RunConfig) -> tuple[Role, ...]:
    """The roles of a program; if it trains by RL, with the recipe's additional roles, in the order in which rollouts
    and groups pass through them."""
    from embodied.workflows.contract import Role

    wanted, roles = config.roles, [*program.roles]
    if program.command != "train":
        return tuple(roles)
    passing = partial(Role, relays=True, streams=True, builds=True)
    network = partial(passing, keeps_rewards=True, streams=not (config.learner.shard and config.policy.speaks))
    if wanted.scorer:
        worker = {"verifier": "VerifierWorker", "reward_model": "ClassifierWorker", "judge": "JudgedWorker"}
        asks = "judge" if wanted.judge else ""
        roles.append(passing("reward", WORKERS + worker[wanted.scorer], scorer_arguments, asks=asks))
    if wanted.judge:
        roles.append(Role("judge", f"{WORKERS}JudgeWorker", judge_arguments, builds=True))
    if wanted.reference:
        roles.append(network("reference", f"{WORKERS}ReferenceWorker", network_arguments))
    if wanted.critic:
        roles.append(network("critic", f"{WORKERS}CriticWorker", critic_arguments, saved=True))
    return tuple(roles)


def scorer_arguments(workers: Workers) -> tuple:
    return workers.config.policy, workers.config.roles, workers.torch_device("reward")


def judge_arguments(workers: Workers) -> tuple:
    return workers.config.policy, workers.config.roles, workers.config.seed, workers.torch_device("judge")


def network_arguments(workers: Workers, role: str = "reference") -> tuple:
    config = workers.config
    shards = config.shards_role(role, [host.roles for host in workers.cluster.hosts])
    meeting = workers.cluster.rendezvous(role) if shards else None
    return config.policy, config.algo, config.learner, config.seed, workers.torch_device(role), meeting


def critic_arguments(workers: Workers) -> tuple:
    return *network_arguments(workers, "critic"), workers.config.roles.critic_lr, workers.config.run.iterations
