"""The options of an env: a model for each `env.name`, imported when it is named. They are in the `config.py` of the
env's folder, free of torch and simulators.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, model_validator

from embodied.core.errors import nearest
from embodied.core.options import ChosenByName
from embodied.core.plugins import ENVS, OURS, Plugins
from embodied.envs.common_config import EXTERNAL, CommonEnvConfig, NamedWithKind, Tasks, side_by_side, with_task


class ExternalEnvConfig(CommonEnvConfig):
    name: str = Field(description="Your own env class, my_pkg.my_module:MyEnv, importable in every worker.")
    task: Tasks = Field(
        description="Handed to your env with every episode, one of them if it is a list; unset: the name of its class."
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Options for your own class.")
    side_by_side: int = side_by_side("Text envs: ")

    @model_validator(mode="before")
    @classmethod
    def _names_a_class(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        name = str(values.get("name", ""))
        if not EXTERNAL.fullmatch(name):
            raise ValueError(unknown_env(name))
        return with_task(values, name.rpartition(":")[2])


ENV_CONFIGS = Plugins(ENVS, "env.name", {"external": ExternalEnvConfig})


def unknown_env(name: str) -> str:
    """The message for a name that is neither an env's nor a class."""
    ours = [getattr(ENV_CONFIGS[kind], "written", kind) for kind in OURS[ENVS]]
    names = [*ours, *(kind for kind in ENV_CONFIGS.names if kind not in OURS[ENVS])]
    known = ", ".join([*names, "my_pkg.my_module:MyEnv"])
    if re.fullmatch(r"[\w/-]+-v\d+", name):
        meant = f"env.name=gym:{name}, of Gymnasium, or env.name=maniskill env.task={name}"
        return f"env.name={name!r} is unknown; did you mean {meant}? (known: {known})"
    return f"env.name={name!r} is unknown (known: {known}){nearest(name, [word.partition('<')[0] for word in names])}"


def kind_of(value: Any) -> str:
    """The tag of the model that an env section belongs to."""
    name = value.get("name", "maniskill") if isinstance(value, dict) else getattr(value, "name", "maniskill")
    kind, colon, _ = str(name).partition(":")  # "gym:" in YAML is a mapping
    return kind if kind in ENV_CONFIGS and issubclass(ENV_CONFIGS[kind], NamedWithKind) == bool(colon) else "external"


EnvConfig = Annotated[CommonEnvConfig, ChosenByName(ENV_CONFIGS, kind_of)]


def env_that_knows(tasks: str | tuple[str, ...] | list[str]) -> str | None:
    """The `env.name` that follows from the names of these tasks alone; None if it does not."""
    names = [tasks] if isinstance(tasks, str) else tasks
    return next((name for name, kind in ENV_CONFIGS.items() if names and all(map(kind.is_task, names))), None)
