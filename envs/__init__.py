"""One file per simulator; this module picks the one a recipe names. Simulators are imported only when named."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied.errors import ConfigError

if TYPE_CHECKING:
    from embodied.envs.base import VectorEnv

PLUGINS = {
    "maniskill": "embodied.envs.maniskill:ManiSkillEnv",
    "libero": "embodied.envs.libero:LiberoEnv",
    "pointmass": "embodied.envs.pointmass:PointMassEnv",
    "gym": "embodied.envs.gym_env:GymEnv",
}


def make_env(config: Any, num_envs: int) -> VectorEnv:
    """`num_envs` rows of the env a config describes."""
    return env_class(config)(config, num_envs)


def env_class(config: Any) -> type[VectorEnv]:
    """The plug-in behind `env.name`: ours, the user's, or ours around the user's `gymnasium.Env`."""
    from embodied.envs.config import kind_of

    kind = kind_of(config)
    if kind != "external":
        module, _, name = PLUGINS[kind].partition(":")
        return getattr(importlib.import_module(module), name)

    import gymnasium

    from embodied.envs.base import VectorEnv

    found = import_class(config.name)
    if inspect.isclass(found) and issubclass(found, VectorEnv):
        return found
    if inspect.isclass(found) and issubclass(found, gymnasium.Env):
        return env_class({"name": "gym:"})
    raise ConfigError(
        f"env.name={config.name!r} is no class of embodied.envs.base.VectorEnv or gymnasium.Env: {found!r}"
    )


def import_class(where: str, key: str = "env.name") -> Any:
    """What `my_pkg.my_module:Name` names as this key's value; modules in the working directory are found as well."""
    from embodied.envs.config import EXTERNAL, nearest, unknown_env

    if not EXTERNAL.fullmatch(where):
        raise ConfigError(unknown_env(where) if key == "env.name" else f"{key}={where!r} is not my_pkg.my_module:name")
    module_name, _, name = where.partition(":")
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as err:
        if err.name is None or not f"{module_name}.".startswith(f"{err.name}."):
            raise ConfigError(f"{key}={where!r}: importing {module_name} failed: {err}") from err
        raise ConfigError(
            f"{key}={where!r}: there is no module {err.name}; install it or start from the folder that holds it "
            f"(this is {Path.cwd()})"
        ) from None
    except Exception as err:
        last = traceback.extract_tb(err.__traceback__)[-1]
        cause = f"{type(err).__name__}: {err} ({last.filename}, line {last.lineno})"
        raise ConfigError(f"{key}={where!r}: importing {module_name} failed: {cause}") from err
    if not hasattr(module, name):
        known = [word for word, value in vars(module).items() if callable(value)]
        raise ConfigError(f"{key}={where!r}: {module.__file__} has no {name}{nearest(name, known)}")
    return getattr(module, name)
