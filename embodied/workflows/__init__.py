"""The training loops: what a program declares, its roles, the data between them, and the steps of an iteration.

A `Role` declares workers; the workflow (`rl_loop.EmbodiedLoop`, for imitation `imitation.ImitationLoop`) defines an
iteration. Its `collector` collects batches: of fixed parts of every env row (`Horizon`, PPO on robots) or of whole
episodes in groups (`group_collector`), which `dealing` divides among learners. `evaluator` evaluates, and
`demonstrations` checks data sets. `launched_workers` launches the roles and syncs weights. `rollout_manager` runs and
replaces sim and policy workers, and assigns policy workers to sims; with several language engines `prompt_queue` hands
out prompts. `relay` passes trajectories through roles between sims and learners; `roles` has those that a recipe adds:
a reward, a judge, a reference, a critic.
docs/workflows.md derives a workflow with a reward model between sims and learners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from embodied.core.errors import ConfigError
from embodied.core.types import EpisodeSpec, SamplingRule
from embodied.envs.capabilities import EvaluationProtocol

if TYPE_CHECKING:
    from embodied.config.recipe import RunConfig

__all__ = ["evaluator", "imitation", "launched_workers", "relay", "rl_loop", "roles_of_run"]

WORKERS = "embodied.workflows.roles:"
ROLLOUT: Final = "rollout"  # phases of an iteration; workers hold their devices for a phase
UPDATE: Final = "update"
WARNING: Final = "warning: "  # begins a line of `notify` that is no restart


@dataclass(frozen=True)
class Role:
    """One kind of worker, with one replica on each host of the role; `workers.groups[name]` calls all replicas.

    A dead sim or policy worker is replaced; if a process of another role dies, all workers restart from the newest
    checkpoint. `arguments` is called while groups are launched: then its `Workers` have the recipe (`config`),
    `torch_device(role)` and the groups launched so far.
    """

    name: str  # in placements, logs and process names
    worker: str | Callable[[RunConfig], str]  # "package.module:Class", or a function that returns it
    arguments: Callable[[Any], tuple] = lambda workers: ()  # of the constructor, equal for all replicas
    phase: Literal["rollout", "update"] = ROLLOUT
    beside: str | None = None  # in modes: the role whose processes it shares; None: learners; "": no role
    sends_to: tuple[str, ...] = ()  # roles that read its channels; answers need no name
    holds_policy: bool = False  # has the policy's weights; such roles in one process share their memory
    relays: bool = False  # trajectories pass through its workers (`RelayWorker`s) on their way to learners
    streams: bool = False  # of relaying ones: every unit passes by itself, without the other units of its batch
    keeps_rewards: bool = False  # of streaming ones: only adds columns, so it gets only the groups that a batch uses
    asks: str = ""  # the role of language workers that answer the conversations its workers begin, of relaying ones
    builds: bool = False  # `build` of its workers gets the env's spec, and the folder of the policy a run starts from
    saved: bool = False  # checkpoints hold what its workers' `get_state` returns; `set_state` gets it on resuming

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"a role's name should be a word like reward, not {self.name!r}")
        if isinstance(self.worker, str) and ":" not in self.worker:
            raise ValueError(f"role {self.name}: its worker should be package.module:Class, not {self.worker!r}")

    def worker_for(self, config: RunConfig) -> str:
        """The worker class for this recipe."""
        return self.worker if isinstance(self.worker, str) else self.worker(config)


def check_roles(roles: tuple[Role, ...]) -> None:
    """Raise ConfigError if two roles share a name, or if a role names an undeclared one."""
    names = [role.name for role in roles]
    if len({*names}) < len(names):
        raise ConfigError(f"roles need names of their own: {', '.join(names)}")
    for role in roles:
        if unknown := {*role.sends_to} - {*names}:
            raise ConfigError(f"role {role.name} sends to {', '.join(sorted(unknown))}; roles: {', '.join(names)}")
        if role.asks and role.asks not in names:
            raise ConfigError(f"role {role.name} asks {role.asks}; roles: {', '.join(names)}")
        if role.beside and role.beside not in names:
            raise ConfigError(f"role {role.name} is beside {role.beside}; roles: {', '.join(names)}")


@dataclass(frozen=True)
class EvaluationPlan:
    """The episodes and envs of a run's evaluations, the same for all weights."""

    protocol: EvaluationProtocol
    env: Any  # config of the envs under this protocol
    episodes: list[EpisodeSpec]
    most: int | None  # number of different episodes; None: unlimited
    rows: int  # env rows of each sim worker
    rules: Mapping[str, tuple[SamplingRule, int | None]] = field(default_factory=dict)  # of tasks, as in `Job`


# The roles of a run


def roles_of_run(program: Any, config: RunConfig) -> tuple[Role, ...]:
    """The roles of a program; if it trains by RL, with the recipe's additional roles, in the order in which rollouts
    and groups pass through them."""
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


def scorer_arguments(workers: Any) -> tuple:
    return workers.config.policy, workers.config.roles, workers.torch_device("reward")


def judge_arguments(workers: Any) -> tuple:
    return workers.config.policy, workers.config.roles, workers.config.seed, workers.torch_device("judge")


def network_arguments(workers: Any, role: str = "reference") -> tuple:
    config = workers.config
    shards = config.shards_role(role, [host.roles for host in workers.cluster.hosts])
    meeting = workers.cluster.rendezvous(role) if shards else None
    return config.policy, config.algo, config.learner, config.seed, workers.torch_device(role), meeting


def critic_arguments(workers: Any) -> tuple:
    return *network_arguments(workers, "critic"), workers.config.roles.critic_lr, workers.config.run.iterations
