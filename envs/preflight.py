"""What is asked of an env's class before a run: whether it can run here, what "auto" means, what one should know."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any


class BeforeARun:
    """A plug-in overrides what it has an answer to."""

    draws_on_gpus = False  # whether its cameras can, beside a simulator on cores

    @classmethod
    def plays_together(cls, config: Any) -> bool:
        """Whether the rows of one env are simulated in a batch, so that few cost almost as much as some more."""
        return False

    @classmethod
    def knows(cls, task: str) -> bool:
        """Whether this name alone says that the task is this env's, for evaluations that name no env."""
        return False

    @classmethod
    def missing_files(cls, config: Any, machine: Any) -> dict[str, str]:
        """Files that the config's task needs and this `system.machine.Machine` lacks: name -> how to get it."""
        return {}

    @classmethod
    def longest_episode(cls, config: Any) -> int | None:
        """In env steps, as far as it is known without the simulator."""
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
    def remarks(cls, config: Any, proofs: Path) -> list[str]:
        """What the first screen should say of a resolved config that would surprise."""
        return []

    @classmethod
    def rehearse(cls, config: Any) -> None:
        """Refuse what only a built env knows to be wrong; for a dry run."""

    @classmethod
    def plain(cls, config: Any) -> Any:
        """A resolved config in which nothing but the env itself is looked at."""
        return cls.resolve(config)

    @classmethod
    def explained(cls, config: Any) -> AbstractContextManager[None]:
        """Around building and stepping: mistakes in the code of a user's task become one line."""
        return nullcontext()

    @classmethod
    def prove(cls, config: Any, proofs: Path) -> list[str]:
        """Find out on this machine what `proven` wants to know, keep it, and say it in lines."""
        return []

    def facts(self) -> dict[str, str]:
        """What one can choose in this env, and what is chosen, by topic."""
        return {}
