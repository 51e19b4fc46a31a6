"""The envs: one folder per simulator, of which this module picks the one that a recipe names, and what an env of one's
own is made of. Simulators are imported only when named.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from embodied.core.errors import ConfigError
from embodied.envs.own_modules import import_all, import_class, simulator_of

if TYPE_CHECKING:
    from embodied.envs.vector_env import VectorEnv

PUBLIC = {  # what an env of one's own needs, by the module that defines it; imported when asked for
    "ActionSpec": "embodied.core.types",
    "EnvSpec": "embodied.core.types",
    "EpisodeSpec": "embodied.core.types",
    "Observation": "embodied.core.types",
    "EvaluationProtocol": "embodied.envs.evaluation_protocols",
    "StepResult": "embodied.envs.vector_env",
    "TextEnv": "embodied.envs.text.text_env",
    "Turn": "embodied.envs.text.text_env",
    "VectorEnv": "embodied.envs.vector_env",
    "check_text_env": "embodied.envs.text.text_env_checker",
    "check_vector_env": "embodied.envs.env_checker",
}
__all__ = ["PLUGINS", "env_class", "env_that_knows", "import_class", "make_env", "speaks", *PUBLIC]

PLUGINS = {
    "maniskill": "embodied.envs.maniskill.env:ManiSkillEnv",
    "libero": "embodied.envs.libero.env:LiberoEnv",
    "robosuite": "embodied.envs.robosuite.env:RobosuiteEnv",
    "pointmass": "embodied.envs.pointmass.env:PointMassEnv",
    "sums": "embodied.envs.text.sums:Sums",
    "sort": "embodied.envs.text.sort:Sort",
    "pictures": "embodied.envs.text.picture_questions:PictureQuestions",
    "reverse_text": "embodied.envs.text.reverse_text:ReverseText",
    "math": "embodied.envs.text.math:Math",
    "mixture": "embodied.envs.text.mixture:Mixture",
    "reasoning_gym": "embodied.envs.text.reasoning_gym:ReasoningGym",
    "verifiers": "embodied.envs.text.verifiers:Verifiers",
    "gym": "embodied.envs.gym.env:GymEnv",
}


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return getattr(importlib.import_module(PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def make_env(config: Any, num_envs: int) -> VectorEnv:
    """`num_envs` rows of the env a config describes."""
    return env_class(config)(config, num_envs)


def env_that_knows(tasks: str | Sequence[str]) -> str | None:
    """The `env.name` that the names of these tasks alone say, if they do."""
    names = (tasks,) if isinstance(tasks, str) else tasks
    return next((name for name in PLUGINS if names and all(map(plugin(name).knows, names))), None)


def plugin(name: str) -> type[VectorEnv]:
    module, _, cls = PLUGINS[name].partition(":")
    return getattr(importlib.import_module(module), cls)


def speaks(kind: type) -> bool:
    """True if this is a class of text envs."""
    from embodied.envs.text.text_env import TextEnv

    return issubclass(kind, TextEnv)


def env_class(config: Any) -> type[Any]:
    """The plug-in behind `env.name`: ours, the user's, or ours around the user's `gymnasium.Env`. A class
    of VectorEnv or TextEnv that is made from config and num_envs."""
    from embodied.envs.config import kind_of

    import_all(config)
    kind = kind_of(config)
    if kind != "external":
        return plugin(kind)

    import gymnasium

    from embodied.envs.text.text_env import TextEnv
    from embodied.envs.vector_env import VectorEnv

    found = import_class(config.name)
    if inspect.isclass(found) and issubclass(found, VectorEnv | TextEnv):
        return found
    if simulator := simulator_of(found):
        raise ConfigError(f"{config.name} is a task of env.name={simulator}: set env.task={config.name}")
    if inspect.isclass(found) and issubclass(found, gymnasium.Env):
        return plugin("gym")
    raise ConfigError(
        f"env.name={config.name!r} is not a class of embodied.envs.vector_env.VectorEnv or gymnasium.Env, and not a "
        f"task of a simulator: {found!r}"
    )
