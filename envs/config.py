"""The options of an env: one model per kind, chosen by `name`, each in a `config.py` of its simulator's folder. Free of
torch and simulators.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from embodied.core.errors import nearest
from embodied.core.options import variants
from embodied.envs.common_config import EXTERNAL, CommonEnvConfig, NamedWithKind, Tasks, side_by_side, with_task
from embodied.envs.gym.config import GymConfig
from embodied.envs.libero.config import LiberoConfig
from embodied.envs.maniskill.config import ManiSkillConfig
from embodied.envs.pointmass.config import PointMassConfig
from embodied.envs.robosuite.config import RobosuiteConfig
from embodied.envs.text.config import (
    MathConfig,
    MixtureConfig,
    PicturesConfig,
    ReasoningGymConfig,
    ReverseTextConfig,
    ToyTextConfig,
    VerifiersConfig,
)


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


def unknown_env(name: str) -> str:
    """The message for a name that is neither ours nor a class."""
    whole = [kind for kind in ENV_CONFIGS if kind not in NAMED]
    known = ", ".join([*whole, *(model.written for model in NAMED.values()), "my_pkg.my_module:MyEnv"])
    if re.fullmatch(r"[\w/-]+-v\d+", name):
        meant = f"env.name=gym:{name}, of Gymnasium, or env.name=maniskill env.task={name}"
        return f"env.name={name!r} is unknown; did you mean {meant}? (known: {known})"
    return f"env.name={name!r} is unknown (known: {known}){nearest(name, [*whole, *(f'{kind}:' for kind in NAMED)])}"


def kind_of(value: Any) -> str:
    """The tag of the model that an env section belongs to."""
    name = value.get("name", "maniskill") if isinstance(value, dict) else getattr(value, "name", "maniskill")
    name = str(name)  # "gym:" in YAML is a mapping
    kind, colon, _ = name.partition(":")
    return kind if kind in ENV_CONFIGS and (kind in NAMED) == bool(colon) else "external"


EnvConfig = Annotated[
    Annotated[ManiSkillConfig, Tag("maniskill")]
    | Annotated[PointMassConfig, Tag("pointmass")]
    | Annotated[LiberoConfig, Tag("libero")]
    | Annotated[RobosuiteConfig, Tag("robosuite")]
    | Annotated[ToyTextConfig, Tag("sums")]
    | Annotated[ToyTextConfig, Tag("sort")]
    | Annotated[PicturesConfig, Tag("pictures")]
    | Annotated[ReverseTextConfig, Tag("reverse_text")]
    | Annotated[MathConfig, Tag("math")]
    | Annotated[MixtureConfig, Tag("mixture")]
    | Annotated[ReasoningGymConfig, Tag("reasoning_gym")]
    | Annotated[VerifiersConfig, Tag("verifiers")]
    | Annotated[GymConfig, Tag("gym")]
    | Annotated[ExternalEnvConfig, Tag("external")],
    Discriminator(kind_of),
]
ENV_CONFIGS: dict[str, type[CommonEnvConfig]] = {
    kind: model for kind, model in variants(EnvConfig).items() if kind != "external"
}
NAMED = {kind: model for kind, model in ENV_CONFIGS.items() if issubclass(model, NamedWithKind)}  # env.name=KIND:NAME
SIMULATORS = {model.task_base: kind for kind, model in ENV_CONFIGS.items() if model.task_base}
"""Simulators that take the user's own tasks, by the base class of these tasks."""
