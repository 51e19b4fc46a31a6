"""The declarations of a program for `train`, placement and reports: its roles, its workflow, its batches.

Three independent parts: a `Role` declares workers, a `BatchSource` collects a batch and starts the update on it, a
`Workflow` defines an iteration. docs/workflows.md builds a workflow with a reward model between sims and learners.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol

import numpy as np

from embodied.core.errors import ConfigError
from embodied.core.types import EnvSpec, EpisodeResult
from embodied.runtime import Handle

if TYPE_CHECKING:
    from embodied.config.recipe import RunConfig
    from embodied.reporting.partial_evaluation import PartialEvaluation
    from embodied.reporting.timeline import Timeline
    from embodied.workflows.evaluator import Evaluator
    from embodied.workflows.workers import Workers

ROLLOUT: Final = "rollout"  # phases of an iteration; workers hold their devices for a phase
UPDATE: Final = "update"
WARNING: Final = "warning: "  # begins a line of `notify` that is no restart


@dataclass(frozen=True)
class Role:
    """One kind of worker, with one replica on each host of the role; `workers.groups[name]` calls all replicas.

    A dead sim or policy worker is replaced; a dead worker of another role ends the run with its cause. `arguments` is
    called while groups are launched: then `workers` has the recipe (`config`), `torch_device(role)` and the groups
    launched so far.
    """

    name: str  # in placements, logs and process names
    worker: str | Callable[[RunConfig], str]  # "package.module:Class", or a function that returns it
    arguments: Callable[[Workers], tuple] = lambda workers: ()  # of the constructor, equal for all replicas
    phase: Literal["rollout", "update"] = ROLLOUT
    beside: str | None = None  # in modes: the role whose processes it shares; None: learners; "": no role
    sends_to: tuple[str, ...] = ()  # roles that read its channels; answers need no name
    holds_policy: bool = False  # has the policy's weights; such roles in one process share their memory
    relays: bool = False  # trajectories pass through its workers (`RelayWorker`s) on their way to learners
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


class Batch(Protocol):
    """The driver's record of one iteration's data; the learners have the trajectories."""

    @property
    def finished(self) -> list[EpisodeResult]:
        """The episodes that ended during its collection."""


class BatchSource:
    """Collects batches and starts updates on them: rollouts of a fixed length, groups of whole episodes, demonstrations
    on disk. It is constructed after all workers, and creates the channels of trajectories."""

    exhausted = ""
    """Why the run should end here; empty while there is something to learn from."""

    def __init__(self, workers: Workers) -> None:
        """Raises ConfigError if the env is unsuitable."""

    def total_iterations(self) -> int:
        """The number of iterations of the recipe."""
        raise NotImplementedError

    def collect(self, version: int) -> Any:
        """Collect a batch with this version of the weights; lost parts are left out or collected again."""
        raise NotImplementedError

    def update(self, batch: Any, iteration: int, total: int) -> Handle | None:
        """Begin the learners' update on this batch. Learners compute advantages, unless this source compares scores.
        None if the batch has no gradient."""
        raise NotImplementedError

    def metrics(self, batch: Any) -> dict[str, float]:
        """The batch's metrics, `env_steps` among them."""
        raise NotImplementedError

    def save(self) -> dict[str, np.ndarray]:
        """Returns collected data that no update has used, as arrays for a checkpoint."""
        return {}

    def abandon(self) -> dict[str, np.ndarray]:
        """Returns the arrays of `save` after a final failure of sims or policies: open episodes are abandoned, and
        waiting learners are released."""
        return {}

    def restore(self, state: dict[str, np.ndarray]) -> int:
        """Continue from `save`; returns the number of open episodes that had to be abandoned."""
        return 0


class Workflow(Protocol):
    """The loop that `train` runs. On the plan's cluster it launches, builds and connects all workers.

    `notify` gets a line for each restart of a worker and each warning. `start_folder` is the folder of the initial
    policy: the start, or for a resumed run its checkpoint, unless algo.kl_coef or roles.judge need the start.
    """

    command: ClassVar[str]
    """The command that runs and resumes it, `train` for python -m embodied.train."""

    roles: ClassVar[tuple[Role, ...]]
    config: RunConfig
    evaluator: Evaluator

    spec: EnvSpec
    """The observations and actions of the env."""

    def __init__(
        self,
        config: RunConfig,
        cluster: Any,
        notify: Callable[[str], None] = ...,
        start_folder: Path | None = None,
    ) -> None: ...

    def total_iterations(self) -> int:
        """The number of iterations of the recipe."""

    def iterate(self, iteration: int, total: int) -> tuple[list[EpisodeResult], dict[str, float]]:
        """Collect, update, publish; returns the finished episodes and the iteration's metrics."""

    @property
    def exhausted(self) -> str:
        """The reason to end the run before its last iteration; else empty."""

    @property
    def solved(self) -> bool:
        """True if the run ends before its last iteration since every episode succeeds."""

    @property
    def version(self) -> int:
        """Version of the learners' weights, which the next checkpoint saves."""

    def act_with_newest(self) -> None:
        """Let policies act with this version before an evaluation."""

    def evaluate_beside(self, kept: PartialEvaluation, finish: Callable[[], object]) -> None:
        """Evaluate this version during the next rollout; call `finish` before the rollout after that."""

    def publish(self, version: int) -> float:
        """Publish the learners' weights under this version, for all following rollouts; returns the learners'
        seconds."""

    def save(self, checkpoints: Path, state: dict[str, Any]) -> Path:
        """Write a checkpoint of this version into the folder of checkpoints, with the run's counters."""

    def restore(self, checkpoint: Path, sims: dict[str, np.ndarray], version: int) -> int:
        """Continue from a checkpoint; returns the number of open episodes that had to be abandoned."""

    def take_abandoned(self) -> int:
        """Episodes that were abandoned since the last call."""

    def take_samples(self) -> list[dict[str, Any]]:
        """Conversations of the last iteration, as lines of samples.jsonl."""

    def take_ends(self) -> list[tuple[int, float]]:
        """The tokens of the last iteration's conversations, and each one's end in seconds after the rollout's begin."""

    def take_dropped(self) -> int:
        """Number of batches collected before the checkpoint and collected again after resuming, since the last call."""

    def timeline(self, trace: Path, iterations: int) -> AbstractContextManager[Timeline]:
        """Record the use of time from now on; the first `iterations` in detail, into `trace`."""
