"""The policies: one file or folder per family, chosen here by `policy.name`, and the public classes for the user's own
policy.

`make_policy` builds one with fresh weights, `load_policy` one from its folder. Families are imported only when named.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied.core.errors import CheckpointError, ConfigError, in_a_line
from embodied.policies.config import POLICY_CONFIGS

if TYPE_CHECKING:
    from embodied.core.types import EnvSpec
    from embodied.policies.base import Policy

PUBLIC = {  # public names by module; imported on access
    "EnvSpec": "embodied.core.types",
    "NoiseSpec": "embodied.core.types",
    "Observation": "embodied.core.types",
    "Policy": "embodied.policies.base",
    "PolicyOutput": "embodied.core.types",
    "Scores": "embodied.policies.base",
}
__all__ = ["load_policy", "make_policy", "policy_class", *PUBLIC]


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return getattr(importlib.import_module(PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def policy_class(name: str) -> type[Policy]:
    """The class behind `policy.name`."""
    where = POLICY_CONFIGS[name].policy if ":" not in name and name in POLICY_CONFIGS else name
    module, _, attribute = where.partition(":")
    if not attribute:
        raise ConfigError(
            f"policy.name={name!r} is unknown; families: {', '.join(POLICY_CONFIGS.names)}, or "
            "my_pkg.my_module:MyPolicy"
        )
    if where is name:
        check_package(name)
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as err:
        last = traceback.extract_tb(err.__traceback__)[-1]
        ours = last.filename == __file__ or "importlib" in last.filename
        line = "" if ours else f" ({last.filename}, line {last.lineno})"
        raise ConfigError(f"policy.name={name!r} cannot be imported: {in_a_line(err)}{line}") from err
    from embodied.policies.base import Policy

    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise ConfigError(f"policy.name={name!r} is not a class of embodied.policies.base.Policy: {kind!r}")
    check_methods(kind, *(() if kind.speaks else ("noise_spec", "act")))
    return kind


def slow_imports(config: Any) -> tuple[str, ...]:
    """The slow imports of a policy; modules of the user's own are not included."""
    family = config.policy.partition(":")[0]
    return tuple(filter(None, ("torch", family, "peft" if getattr(config, "lora_rank", None) else "")))


def check_methods(kind: type[Policy], *needed: str) -> None:
    """Refuse a class that lacks needed methods."""
    from embodied.policies.base import Policy

    if missing := [name for name in needed if getattr(kind, name) is getattr(Policy, name)]:
        meaning = "; ".join(f"{name}: {' '.join((getattr(Policy, name).__doc__ or '').split())}" for name in missing)
        raise ConfigError(f"{kind.__module__}:{kind.__name__} has no method {' and no '.join(missing)} ({meaning})")


def check_package(name: str, key: str = "policy.name") -> None:
    """Refuse a policy of a missing package. Imports nothing, since imports may take seconds."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    package = name.partition(":")[0].partition(".")[0]
    if not package or find_spec(package) is None:
        raise ConfigError(f"{key}={name!r}: No module named {package!r}; is it importable from {Path.cwd()}?")


def make_policy(config: Any, spec: EnvSpec, seed: int | None = None) -> Policy:
    """A policy for this env. With a seed its initial weights are drawn, otherwise `load_weights` must follow."""
    from embodied.core.rng import generator

    kind = policy_class(config.name)
    if seed is not None:
        check_methods(kind, "initialise")
    policy = kind(config, spec)
    if seed is not None:
        policy.initialise(generator(seed, "policy", "initial weights"))
    return policy


def load_policy(folder: Path | str, name: str | None = None) -> Policy:
    """The policy stored in a folder by `save_pretrained`. A class of yours needs its `name`, such as my_nets:Linear,
    unless its module is imported already: a folder never decides alone which code runs."""
    from embodied.policies.policy_folder import CONFIG, check_files, read_description, read_weights

    folder = Path(folder)
    check_files(folder)
    config, spec = read_description(folder)
    if ":" in config.name and config.name != name and config.name.partition(":")[0] not in sys.modules:
        raise ConfigError(
            f"{folder} names a class of {config.name.partition(':')[0]}, and a folder never "
            f"decides alone which code runs; if it is yours, add its name: load_policy(folder, {config.name!r})"
        )
    try:
        policy = make_policy(config, spec)
    except (MemoryError, OverflowError, RuntimeError, TypeError) as err:  # sizes that no memory has
        raise CheckpointError(f"{folder / CONFIG}: no policy can be built from it: {in_a_line(err)}") from err
    if config.sends_weights:
        policy.load_weights(read_weights(folder))
    return policy
