"""Plug-ins by name: envs, policy families, engines and loggers, also those of other installed packages.

A package names its classes in its pyproject.toml, under [project.entry-points."embodied.envs"] and the groups below.
Names are listed from this metadata, and a class is imported when its name is used. Our own classes are registered in
the same way; OURS repeats their entries, since a checkout runs without being installed and reading metadata takes time.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from functools import cache
from typing import Any

from embodied.core.errors import ConfigError, in_a_line, nearest

PACKAGE = "embodied-loop"
ENVS, FAMILIES, ENGINES, LOGGERS = (f"embodied.{group}" for group in ("envs", "families", "engines", "loggers"))
OURS = {
    ENVS: {  # env.name -> its options, which name the env's class
        "maniskill": "embodied.envs.maniskill.config:ManiSkillConfig",
        "libero": "embodied.envs.libero.config:LiberoConfig",
        "robosuite": "embodied.envs.robosuite.config:RobosuiteConfig",
        "pointmass": "embodied.envs.pointmass.config:PointMassConfig",
        "sums": "embodied.envs.text.config:SumsConfig",
        "tools": "embodied.envs.text.config:ToolsConfig",
        "sort": "embodied.envs.text.config:SortConfig",
        "pictures": "embodied.envs.text.config:PicturesConfig",
        "reverse_text": "embodied.envs.text.config:ReverseTextConfig",
        "math": "embodied.envs.text.config:MathConfig",
        "mixture": "embodied.envs.text.config:MixtureConfig",
        "reasoning_gym": "embodied.envs.reasoning_gym.config:ReasoningGymConfig",
        "verifiers": "embodied.envs.verifiers.config:VerifiersConfig",
        "gym": "embodied.envs.gym.config:GymConfig",
        "envpool": "embodied.envs.envpool.config:EnvPoolConfig",
        "metaworld": "embodied.envs.metaworld.config:MetaWorldConfig",
    },
    FAMILIES: {  # policy.name -> its options, which name the policy's class
        "mlp": "embodied.policies.config:MLPConfig",
        "cnn": "embodied.policies.config:CNNConfig",
        "openvla": "embodied.policies.openvla.config:OpenVLAConfig",
        "openvla_oft": "embodied.policies.openvla.config:OpenVLAOFTConfig",
        "pi0": "embodied.policies.pi0.config:Pi0Config",
        "pi05": "embodied.policies.pi0.config:Pi0Config",
        "smolvla": "embodied.policies.smolvla.config:SmolVLAConfig",
        "language": "embodied.policies.language.config:LanguageConfig",
        "exported": "embodied.policies.config:ExportedConfig",
    },
    ENGINES: {  # policy.engine -> its class
        "transformers": "embodied.policies.language.slot_engine:SlotEngine",
        "vllm": "embodied.policies.language.vllm:VLLMEngine",
        "http": "embodied.policies.language.servers.http_engine:HTTPEngine",
    },
    LOGGERS: {  # run.log -> its class
        "tensorboard": "embodied.records.loggers:TensorBoardLogger",
        "wandb": "embodied.records.loggers:WandbLogger",
        "trackio": "embodied.records.loggers:TrackioLogger",
    },
}
BASES = {  # of the classes in each group
    ENVS: "embodied.envs.config:CommonEnvConfig",
    FAMILIES: "embodied.policies.config:PolicyOptions",
    ENGINES: "embodied.policies.language.engine:Engine",
    LOGGERS: "embodied.records.loggers:Logger",
}


@dataclass(frozen=True)
class Entry:
    """A class by its name in a group."""

    name: str
    where: str  # my_pkg.my_module:MyClass
    package: str  # the distribution that registers it


class Plugins(Mapping[str, Any]):
    """The classes of a group by name. `values` and `items` import all of them, and leave out with a warning what
    cannot be imported; anything else imports at most the named class."""

    def __init__(self, group: str, key: str, more: Mapping[str, type] = {}) -> None:
        """`key` is the option that chooses among them. `more`: classes that no package registers, by a tag of ours."""
        self.group, self.key, self.more = group, key, more

    @property
    def names(self) -> list[str]:
        """The registered names, ours first."""
        return [*OURS[self.group], *entries_of_packages()[self.group]]

    def entry(self, name: str) -> Entry:
        """Where a name leads; KeyError for unknown names. Our names need no metadata of packages."""
        if where := OURS[self.group].get(name):
            return Entry(name, where, PACKAGE)
        return entries_of_packages()[self.group][name]

    def checked_name(self, name: str) -> str:
        """The name; ValueError with the nearest one if it is unknown."""
        if name not in self:
            hint = nearest(name, self.names)
            raise ValueError(f"{self.key}={name!r} is unknown (known: {', '.join(self.names)}){hint}")
        return name

    def __contains__(self, name: object) -> bool:
        return name in self.more or name in OURS[self.group] or name in entries_of_packages()[self.group]

    def __getitem__(self, name: str) -> Any:
        if name in self.more:
            return self.more[name]
        entry = self.entry(name)
        if entry.package == PACKAGE:
            return imported(entry.where)
        where = f"{entry.where} of the package {entry.package}"
        try:
            found = imported(entry.where)
        except (Exception, SystemExit) as err:
            raise ConfigError(f"{self.key}={name}: importing {where} failed: {in_a_line(err)}") from err
        if not (isinstance(found, type) and issubclass(found, imported(BASES[self.group]))):
            raise ConfigError(f"{self.key}={name}: {where} is no class derived from {BASES[self.group]}")
        return found

    def __iter__(self) -> Iterator[str]:
        yield from (*self.names, *self.more)

    def __len__(self) -> int:
        return len(self.names) + len(self.more)

    def values(self) -> ValuesView[Any]:
        return self._importable().values()

    def items(self) -> ItemsView[str, Any]:
        return self._importable().items()

    def _importable(self) -> dict[str, Any]:
        found = {}
        for name in self:
            try:
                found[name] = self[name]
            except ConfigError as err:
                warnings.warn(f"left out: {err}", stacklevel=4)
        return found


def imported(where: str) -> Any:
    """The object at my_pkg.my_module:MyClass."""
    module, _, attribute = where.partition(":")
    return getattr(importlib.import_module(module), attribute)


@cache
def entries_of_packages() -> dict[str, dict[str, Entry]]:
    """The entries of other installed packages, by group and name. A name of ours stays ours."""
    from importlib.metadata import distributions  # 40 ms

    entries: dict[str, dict[str, Entry]] = {group: {} for group in OURS}
    seen = {PACKAGE}
    for package in distributions():  # a folder that is on the path twice shows a package twice
        try:
            named = [entry for entry in package.entry_points if entry.group in OURS]
        except Exception as err:  # a damaged file
            warnings.warn(f"plug-ins of a package are missing: {package!r}: {in_a_line(err)}", stacklevel=2)
            continue
        if not named or package.name in seen:
            continue
        seen.add(package.name)
        for entry in named:
            if entry.name in OURS[entry.group] or entry.name in entries[entry.group]:
                warnings.warn(
                    f"{entry.group}: {entry.name} of the package {package.name} is left out, since the name is taken",
                    stacklevel=2,
                )
                continue
            entries[entry.group][entry.name] = Entry(entry.name, entry.value, package.name)
    return entries


ENGINE_CLASSES = Plugins(ENGINES, "policy.engine")
LOGGER_CLASSES = Plugins(LOGGERS, "run.log")
