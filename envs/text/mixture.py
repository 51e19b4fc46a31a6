"""Several text envs as one: every group of conversations plays one of them, drawn by their weights.

    env:
      name: mixture
      mixture:
        sums: {name: sums, weight: 3}
        puzzles: {name: "reasoning_gym:chain_sum", kwargs: {max_terms: 3}}

An evaluation plays the held-out prompts of each env and reports them separately, and so do training metrics, under the
names given here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from embodied.core.conversations import Said
from embodied.core.errors import ConfigError
from embodied.core.rng import generator
from embodied.core.types import EpisodeSpec
from embodied.envs import env_class
from embodied.envs.config import EnvConfig
from embodied.envs.text.text_env import TextEnv, Turn


@dataclass(frozen=True)
class Part:
    """One env of a mixture."""

    name: str
    kind: type[TextEnv]
    config: Any
    weight: float
    tasks: tuple[str, ...]  # its own


_known: dict[str, dict[str, Part]] = {}  # by the mixture as JSON, in this process


def parts_of(config: Any) -> dict[str, Part]:
    """The envs of a mixture by the tasks of the mixture: a name, or name/task if an env has several tasks."""
    key = json.dumps(config.mixture, sort_keys=True, default=str)
    if key not in _known:
        _known[key] = made_of(config)
    return _known[key]


def made_of(config: Any) -> dict[str, Part]:
    parts = {}
    for name, options in config.mixture.items():
        kind = env_class(its := options_of(name, options))
        if not kind.speaks:
            raise ConfigError(f"env.mixture.{name}: env.name={its.name} is no text env; leave it out")
        tasks = kind.tasks(its)
        made = Part(name, kind, its, options.get("weight", 1) / len(tasks), tasks)
        parts |= {(name if len(tasks) == 1 else f"{name}/{task}"): replace(made, tasks=(task,)) for task in tasks}
    return parts


def options_of(name: str, options: dict[str, Any]) -> Any:
    """The config of one env of a mixture."""
    try:
        return TypeAdapter(EnvConfig).validate_python(
            {key: option for key, option in options.items() if key != "weight"}
        )
    except ValidationError as err:
        first = err.errors()[0]
        where = ".".join(map(str, first["loc"])) or "name"
        raise ConfigError(f"env.mixture.{name}.{where}: {first['msg'].removeprefix('Value error, ')}") from None


class Mixture(TextEnv):
    """Plays a conversation with its task's env, or in training with an env drawn by its seed."""

    @classmethod
    def tasks(cls, config: Any) -> tuple[str, ...]:
        return tuple(parts_of(config))

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        for part in parts_of(config).values():
            part.kind.check(part.config)

    @classmethod
    def missing_files(cls, config: Any, machine: Any) -> dict[str, str]:
        files = [part.kind.missing_files(part.config, machine) for part in parts_of(config).values()]
        return {what: how for files_of_env in files for what, how in files_of_env.items()}

    @classmethod
    def remarks(cls, config: Any, proofs: Path) -> list[str]:
        return [line for part in parts_of(config).values() for line in part.kind.remarks(part.config, proofs)]

    @classmethod
    def held_out(cls, config: Any) -> int:
        return min(part.kind.held_out(part.config) for part in parts_of(config).values())

    @classmethod
    def rewrites(cls, config: Any) -> bool:
        return any(part.kind.rewrites(part.config) for part in parts_of(config).values())

    @classmethod
    def plays_groups(cls, config: Any) -> bool:
        return any(part.kind.plays_groups(part.config) for part in parts_of(config).values())

    @classmethod
    def num_questions(cls, config: Any, task: str) -> int | None:
        part = parts_of(config)[task]
        return part.kind.num_questions(part.config, part.tasks[0])

    @classmethod
    def longest_episode(cls, config: Any) -> int:
        longest = max(part.kind.longest_episode(part.config) for part in parts_of(config).values())
        return config.max_episode_steps or longest

    @classmethod
    def load(cls, config: Any) -> dict[str, tuple[type[TextEnv], Any]]:
        """By name, the class of each env and its loaded data."""
        parts = {part.name: part for part in parts_of(config).values()}
        return {name: (part.kind, part.kind.load(part.config)) for name, part in parts.items()}

    @classmethod
    def unload(cls, shared: dict[str, tuple[type[TextEnv], Any]]) -> None:
        for kind, loaded in shared.values():
            kind.unload(loaded)

    def __init__(self, config: Any, shared: Any = None) -> None:
        super().__init__(config, shared)
        self.parts = parts_of(config)
        self.envs: dict[str, TextEnv] = {}

    def reset(self, spec: EpisodeSpec) -> Said:
        draw, self.source = generator(spec.seed, "mixture", spec.task), spec.task
        if spec.init_state_id < 0 and spec.question < 0:
            weights = np.array([part.weight for part in self.parts.values()])
            self.source = str(draw.choice([*self.parts], p=weights / weights.sum()))
        part = self.parts[self.source]
        self.env = self.envs.get(part.name) or part.kind(part.config, self.shared[part.name][1])
        self.envs[part.name] = self.env
        self.turns, self.most = 0, part.kind.longest_episode(part.config)
        self.env.group_size = self.group_size
        # Seeds are dealt to tasks in turn, but a mixture may draw another task.
        said = self.env.reset(spec._replace(task=part.tasks[0], seed=int(draw.integers(2**31))))
        self.drawn = None if self.env.drawn is None else (self.source, self.env.drawn)
        return said

    def step(self, answer: str) -> Turn:
        self.turns += 1
        turn = self.env.step(answer)
        if self.turns >= self.most and not (turn.done or turn.ends_sample):
            turn = self.env.cut_short(turn)
            turn = turn if turn.ends_sample else replace(turn, said=(), done=True)
        self.turns = 0 if turn.ends_sample else self.turns
        if self.parts[self.source].config.reward == "success":
            scores = None if turn.scores is None else [replace(one, reward=float(one.success)) for one in turn.scores]
            turn = replace(turn, reward=float(turn.success), scores=scores)
        return turn

    def cut_short(self, turn: Turn) -> Turn:
        return self.env.cut_short(turn)

    def solution(self) -> str | None:
        return self.env.solution()
