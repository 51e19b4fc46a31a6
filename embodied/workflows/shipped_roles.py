"""The roles that a recipe's section `roles` adds to a program: a reward, a judge, a reference, a critic.

Trajectories pass through them in this order before learners get them. Their workers are in `roles.py`; this module has
the driver's part.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from embodied.workflows.contract import Role

if TYPE_CHECKING:
    from embodied.config.recipe import RunConfig
    from embodied.workflows.workers import Workers

WORKERS = "embodied.workflows.roles:"


def shipped_roles(config: RunConfig) -> tuple[Role, ...]:
    """The additional roles of a recipe, in the order in which rollouts and groups pass through them."""
    wanted, roles = config.roles, []
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
    config = workers.config
    return config.policy, config.roles, config.seed, workers.torch_device("judge")


def network_arguments(workers: Workers, role: str = "reference") -> tuple:
    config = workers.config
    shards = config.shards_role(role, [host.roles for host in workers.cluster.hosts])
    meeting = workers.cluster.rendezvous(role) if shards else None
    return config.policy, config.algo, config.learner, config.seed, workers.torch_device(role), meeting


def critic_arguments(workers: Workers) -> tuple:
    config = workers.config
    return *network_arguments(workers, "critic"), config.roles.critic_lr, config.run.iterations
