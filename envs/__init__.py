"""The envs, one folder per simulator, and the classes for the user's own env. This module picks the env that a recipe
names; simulators are imported only when named.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from embodied.core.errors import ConfigError
from embodied.core.plugins import imported
from embodied.envs.config import ENV_CONFIGS, kind_of
from embodied.envs.own_modules import import_all, import_class, simulator_of

if TYPE_CHECKING:
    from embodied.envs.vector_env import VectorEnv

PUBLIC = {  # names for the user's own env, by the module that defines them; imported on first use
    "ActionSpec": "embodied.core.types",
    "EnvSpec": "embodied.core.types",
    "EpisodeSpec": "embodied.core.types",
    "Observation": "embodied.core.types",
    "EvaluationProtocol": "embodied.envs.capabilities",
    "StepResult": "embodied.envs.vector_env",
    "TextEnv": "embodied.envs.text.text_env",
    "Turn": "embodied.envs.text.text_env",
    "VectorEnv": "embodied.envs.vector_env",
    "check_text_env": "embodied.envs.text.text_env_checker",
    "check_vector_env": "embodied.envs.env_checker",
}
__all__ = ["env_class", "import_class", "make_env", *PUBLIC]


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return getattr(importlib.import_module(PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def make_env(config: Any, num_envs: int) -> VectorEnv:
    """The env of this config, with `num_envs` rows."""
    return env_class(config)(config, num_envs)


def interpreter_of(config: Any) -> dict[str, dict[str, str]]:
    """The versions of Python and packages in a simulator's own interpreter, as `interpreter`; empty without one."""
    return {"interpreter": env_class(config).versions(config)} if config.elsewhere else {}


def plugin(name: str) -> type[Any]:
    """The class of a registered env."""
    return imported(ENV_CONFIGS[name].env)


def env_class(config: Any) -> type[Any]:
    """The class for `env.name`: ours, the user's, or our wrapper of the user's `gymnasium.Env`. A subclass of VectorEnv
    or TextEnv, constructed from config and num_envs."""
    if config.elsewhere:
        from embodied.envs.interpreter.env import foreign_class

        return foreign_class(config)
    import_all(config)
    kind = kind_of(config)
    if kind != "external":
        return imported(config.plays)

    import gymnasium

    from embodied.envs.text.text_env import TextEnv
    from embodied.envs.vector_env import VectorEnv

    user_class = import_class(config.name)
    if inspect.isclass(user_class) and issubclass(user_class, (VectorEnv, TextEnv)):
        return user_class
    if simulator := simulator_of(user_class):
        raise ConfigError(f"{config.name} is a task of env.name={simulator}: set env.task={config.name}")
    if inspect.isclass(user_class) and issubclass(user_class, gymnasium.Env):
        return plugin("gym")
    raise ConfigError(
        f"env.name={config.name!r} is not a class of embodied.envs.vector_env.VectorEnv or gymnasium.Env, and not a "
        f"task of a simulator: {user_class!r}"
    )
