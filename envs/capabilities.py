"""Questions to an env's class before a run: can it run here, what does "auto" mean, what should users know."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypedDict

import numpy as np

from embodied.core.errors import ConfigError
from embodied.envs.evaluation_protocols import AS_TRAINED, EvaluationProtocol


class Expert(Protocol):
    """A script that solves a task, for all rows of one env."""

    def begin(self, rows: np.ndarray) -> None:
        """These rows were just reset."""

    def act(self) -> np.ndarray:
        """[N, A]: the next action of every row; actions of rows without an open episode are ignored."""


class CataloguedTask(TypedDict):
    """What `embodied.list tasks` and `embodied.doctor` say of a task."""

    about: str
    problem: str  # why it cannot be trained, wherever; empty if it can
    missing: dict[str, str]  # downloads that it needs and this machine lacks -> how to get each


class EnvCapabilities:
    """Answers of an env's class before a run; a plug-in overrides the methods for which it has one."""

    draws_on_gpus = False  # whether its cameras can, beside a simulator on cores
    catalogue = ""  # the name of the simulator whose own list of tasks `catalogued` asks
    other_folder = ""  # how one says where the downloads are that these tasks need

    @classmethod
    def tasks(cls, config: Any) -> tuple[str, ...]:
        """The tasks of `env.task`, by the names of `EpisodeSpec`; episodes take turns among them."""
        return (config.task,) if isinstance(config.task, str) else tuple(config.task)

    @classmethod
    def protocols(cls, config: Any) -> tuple[EvaluationProtocol, ...]:
        """The protocols for evaluation episodes; the first is taken unless `eval.protocol` names another."""
        return (AS_TRAINED,)

    @classmethod
    def plays_together(cls, config: Any) -> bool:
        """True if the rows of one env are simulated in a batch, so that few cost almost as much as some more."""
        return False

    @classmethod
    def knows(cls, task: str) -> bool:
        """True if this name alone says that the task is this env's, for evaluations that name no env."""
        return False

    @classmethod
    def missing_files(cls, config: Any, machine: Any) -> dict[str, str]:
        """Files that the config's task needs and this `system.machine.Machine` lacks: name -> how to get it."""
        return {}

    @classmethod
    def catalogued(cls) -> dict[str, CataloguedTask]:
        """The tasks that the simulator lists, by name. Imports it: called in a process of its own (`system.probes`)."""
        raise NotImplementedError

    @classmethod
    def longest_episode(cls, config: Any) -> int | None:
        """The longest episode in env steps, as far as it is known without the simulator."""
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
        """The config with what `python -m embodied.check` found out on this machine. Called before `check`."""
        return config

    @classmethod
    def seek_proof(cls, config: Any, proofs: Path, say: Callable[[str], object]) -> None:
        """Find out what `proven` wants to know where that is quick, and `say` so. Called before training."""

    @classmethod
    def remarks(cls, config: Any, proofs: Path) -> list[str]:
        """Lines for the first screen about a resolved config that would surprise."""
        return []

    @classmethod
    def rehearse(cls, config: Any) -> None:
        """Refuse what only a built env knows to be wrong; for a dry run."""

    @classmethod
    def on_cores(cls, config: Any) -> Any:
        """The config for a machine without GPUs."""
        return config

    @classmethod
    def plain(cls, config: Any) -> Any:
        """A resolved config that tests nothing but the env itself."""
        return cls.resolve(config)

    @classmethod
    def explained(cls, config: Any) -> AbstractContextManager[None]:
        """Turns mistakes in the code of a user's task into one line, around building and stepping."""
        return nullcontext()

    @classmethod
    def prove(cls, config: Any, proofs: Path) -> list[str]:
        """Find out on this machine what `proven` wants to know, keep it, and say it in lines."""
        return []

    def expert(self, kind: str = "scripted", tick: Callable[[], None] = lambda: None) -> Expert:
        """The expert of this kind (`collect.expert`) that plays this env's rows; it calls `tick` during long work."""
        if kind == "planner":
            raise ConfigError(
                f"collect.expert=planner is ManiSkill's motion planner and does not play env.name={self.config.name}"
            )
        raise ConfigError(
            f"there is no expert for env.name={self.config.name}; name a policy that solves it: checkpoint=runs/..."
        )

    @classmethod
    def check_expert(cls, config: Any, kind: str) -> None:
        """Refuse what no expert of this kind plays, before anything is built."""

    def facts(self) -> dict[str, str]:
        """The choices of this env and their values, by topic."""
        return {}
