"""Questions to an env's class before a run: can it run here, what does "auto" mean, what should users know, and by
which protocols are its evaluations played.

A protocol has a name with a version. When one of its rules changes, so does its name: results under the same name were
played by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypedDict

import numpy as np

from embodied.core.errors import ConfigError
from embodied.envs.own_modules import explain_errors


class Expert(Protocol):
    """A script that solves a task, for all rows of one env."""

    def begin(self, rows: np.ndarray) -> None:
        """These rows were just reset."""

    def act(self) -> np.ndarray:
        """[N, A]: the next action of every row; actions of rows without an open episode are ignored."""


class CataloguedTask(TypedDict):
    """A task as `embodied.list tasks` and `embodied.doctor` show it."""

    about: str
    problem: str  # why it cannot be trained on any machine; empty if it can
    missing: dict[str, str]  # downloads that it needs and this machine lacks -> how to get each


class EnvCapabilities:
    """Answers of an env's class before a run; a plug-in overrides the methods that concern it."""

    speaks: ClassVar[bool] = False  # whether it is a text env
    draws_on_gpus = False  # whether its cameras can render on GPUs while the simulator is on cores
    catalogue = ""  # the name of the simulator whose list of tasks `list_tasks` returns
    other_folder = ""  # how to tell the folder of the downloads that these tasks need

    @classmethod
    def tasks(cls, config: Any) -> tuple[str, ...]:
        """The tasks of `env.task`, named as in `EpisodeSpec`; episodes take turns among them."""
        return (config.task,) if isinstance(config.task, str) else tuple(config.task)

    @classmethod
    def protocols(cls, config: Any) -> tuple[EvaluationProtocol, ...]:
        """The protocols for evaluation episodes; the first is taken unless `eval.protocol` names another."""
        return (AS_TRAINED,)

    @classmethod
    def plays_together(cls, config: Any) -> bool:
        """True if the rows of one env are simulated in a batch, so that a few more rows cost little."""
        return False

    @classmethod
    def missing_files(cls, config: Any, machine: Any) -> dict[str, str]:
        """Files that the config's task needs and this `system.machine.Machine` lacks: name -> how to get it."""
        return {}

    @classmethod
    def list_tasks(cls) -> dict[str, CataloguedTask]:
        """The tasks that the simulator lists, by name. Imports it: called in a process of its own (`system.probes`)."""
        raise NotImplementedError

    @classmethod
    def longest_episode(cls, config: Any) -> int | None:
        """The longest episode in env steps; None if only the simulator knows it."""
        return config.max_episode_steps

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise `MissingAsset` or `ConfigError` if this env cannot run here. Called before a run, never prompts."""

    @classmethod
    def resolve(cls, config: Any) -> Any:
        """The config with every "auto" decided. Called before placement."""
        return config

    @classmethod
    def proven(cls, config: Any, proofs: Path) -> Any:
        """The config with the findings of `python -m embodied.check` on this machine. Called before `check`."""
        return config

    @classmethod
    def seek_proof(cls, config: Any, proofs: Path, say: Callable[[str], object]) -> None:
        """Find out what `proven` needs if that is quick, and report it with `say`. Called before training."""

    @classmethod
    def remarks(cls, config: Any, proofs: Path) -> list[str]:
        """Lines for the first screen about surprising properties of a resolved config."""
        return []

    @classmethod
    def rehearse(cls, config: Any) -> None:
        """Refuse mistakes that only a built env can find; for a dry run."""

    @classmethod
    def on_cores(cls, config: Any) -> Any:
        """The config for a machine without GPUs."""
        return config

    @classmethod
    def on_gpus(cls, config: Any) -> Any | None:
        """The config with physics on GPUs that draw, where its "auto" means them; None where it means cores."""
        return None

    @classmethod
    def plain_config(cls, config: Any) -> Any:
        """A resolved config for testing the env itself."""
        return cls.resolve(config)

    @classmethod
    def explain_errors(cls, config: Any) -> AbstractContextManager[None]:
        """Around building and stepping: turns an exception from the user's code into one line."""
        return explain_errors(f"env.name={config.name}") if ":" in config.name else nullcontext()

    @classmethod
    def prove(cls, config: Any, proofs: Path) -> list[str]:
        """Find out on this machine what `proven` needs, store it, and return lines that report it."""
        return []

    def expert(self, kind: str = "scripted", tick: Callable[[], None] = lambda: None) -> Expert:
        """The expert of this kind (`collect.expert`) that plays this env's rows; it calls `tick` during long work."""
        self.check_expert(self.config, kind)
        raise NotImplementedError(f"{type(self).__name__} has no expert of the kind {kind}")

    @classmethod
    def check_expert(cls, config: Any, kind: str) -> None:
        """Refuse tasks that no expert of this kind plays, before anything is built."""
        if kind == "planner":
            raise ConfigError(
                f"collect.expert=planner is ManiSkill's motion planner and does not play env.name={config.name}"
            )
        if cls.expert is EnvCapabilities.expert:
            raise ConfigError(
                f"there is no expert for env.name={config.name}; an env of yours may have one (docs/own_task.md), and "
                "python -m embodied.collect lets a policy play instead: checkpoint=runs/..."
            )

    def facts(self) -> dict[str, str]:
        """The choices of this env and their values, by topic."""
        return {}


@dataclass(frozen=True)
class EvaluationProtocol:
    name: str
    rules: str  # in words, for results.json and the report
    options: dict[str, Any] = field(default_factory=dict)  # env options it fixes
    stored_states: int = 0  # stored initial states of a task, taken in order; 0: an episode draws its own from its seed

    def apply(self, config: Any) -> Any:
        """The config of evaluation envs, whose returns are the task's own."""
        free = {"action_cost": 0.0} if config.action_cost else {}
        return config.model_copy(update=free | self.options)

    @property
    def published_name(self) -> str:
        """Its name with the physics of published results."""
        return self.name.partition("+")[0]


def of_version(protocol: EvaluationProtocol, package: str, measured: str) -> EvaluationProtocol:
    """The protocol; its name contains the version of this package if another one than `measured` is installed."""
    try:
        installed = version(package)
    except PackageNotFoundError:  # planned here, played on another machine
        return protocol
    same = installed == measured
    return replace(protocol, name=protocol.name if same else f"{protocol.name}+{package}{installed}")


AS_TRAINED = EvaluationProtocol(
    "as-trained-v1", "episodes are played as in training: on_success, the step limit and the physics of the recipe"
)


def choose_protocol(kind: type[EnvCapabilities], config: Any, name: str | None) -> EvaluationProtocol:
    """The protocol of this name, or the env's first one. Which protocols exist may depend on the resolved env
    config."""
    protocols = {protocol.name: protocol for protocol in kind.protocols(config)}
    if name is None:
        return next(iter(protocols.values()))
    if name not in protocols:
        raise ConfigError(f"eval.protocol={name!r}: {config.name} {config.task} has {', '.join(protocols)}")
    return protocols[name]
