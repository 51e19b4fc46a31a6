"""The base of every options model: frozen, without unknown keys, overflowing numbers or NUL characters. Free of torch:
`--help` stays fast.

Rules between options are data beside the refused options, and one function checks them:

    rules = (
        only_with("ratio_cap", {"clip": ("aipo", "tis")}),
        never_with("pools", {"prompts": "epochs"}, "it repeats some prompts; leave one of them out"),
    )

A rule names options: "lr epochs" means both, refused if they differ from their defaults. {"epochs": 1} means this
value, a tuple any of its values, a function the values for which it is true (`bool`: any set value). Options that must
be compared with each other are checked by a plain function instead (`Strict.conflicts`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.files import as_path, is_data_set

ROOT = Path(__file__).resolve().parents[2]  # of a checkout
LARGEST_FLOAT = 1e30  # float32 ends at 3e38
LARGEST_INT = 2**63 - 1
LONGEST_S = 2e6  # 23 days; the operating system's waits end at 2**31 milliseconds
COMMIT = re.compile(r"[0-9a-f]{40}")
CHANGED = object()  # stands for every value but the default


@dataclass(frozen=True)
class Rule:
    """Refuses each of the `refused` options if all conditions in `others` hold, or, for `only_with`, if one of them
    fails."""

    refused: Mapping[str, Any]
    others: Mapping[str, Any]
    where_all_hold: bool
    advice: str  # the reason, and a value that works

    def broken(self, config: Any, section: str) -> str:
        """The message with the values of this configuration; empty if it keeps the rule."""
        given = [key for key, values in self.refused.items() if holds(config, key, values)]
        against = [key for key, values in self.others.items() if holds(config, key, values) == self.where_all_hold]
        if not given or (len(against) < len(self.others) if self.where_all_hold else not against):
            return ""
        given, against = ([setting(config, key, section) for key in keys] for keys in (given, against))
        does, has = ("do", "have") if len(given) > 1 else ("does", "has")
        link = f" {does} not go with " if self.where_all_hold else f" {has} no effect with "
        text = f"{' and '.join(given)}{link * bool(against)}{' and '.join(against)}"
        advice = self.advice or self.usual_advice(section)
        return f"{text}{': ' if '; ' in advice else '; '}{advice}"

    def usual_advice(self, section: str) -> str:
        if self.where_all_hold:
            return "leave it out"
        key, values = next(iter(self.others.items()))
        value = values[0] if isinstance(values, tuple) else values
        return f"leave it out, or set {section}{key}{'' if callable(value) else f'={written(value)}'}"


def only_with(refused: str | Mapping[str, Any], needed: Mapping[str, Any], advice: str = "") -> Rule:
    """These options are refused unless all `needed` conditions hold."""
    return Rule(options(refused), needed, False, advice)


def never_with(refused: str | Mapping[str, Any], others: Mapping[str, Any], advice: str = "") -> Rule:
    """These options are refused if all `others` hold."""
    return Rule(options(refused), others, True, advice)


def options(refused: str | Mapping[str, Any]) -> Mapping[str, Any]:
    return dict.fromkeys(refused.split(), CHANGED) if isinstance(refused, str) else refused


def broken_rules(rules: tuple[Rule, ...], config: Any, section: str = "") -> Iterator[str]:
    """Messages for the rules broken by a configuration. `section`: the prefix of its keys in messages, such as
    `algo.`."""
    return filter(None, (rule.broken(config, section) for rule in rules))


def holds(config: Any, key: str, values: Any) -> bool:
    owner, name = owner_of(config, key)
    value = getattr(owner, name, None)
    if values is CHANGED:
        return name in type(owner).model_fields and value != owner.default_of(name)
    if callable(values):
        return bool(values(value))
    return value in values if isinstance(values, tuple) else value == values


def setting(config: Any, key: str, section: str) -> str:
    """`algo.epochs=1`; for a property the name of its owner, since properties cannot be set."""
    owner, name = owner_of(config, key)
    shown = name if name in type(owner).model_fields else "name"
    return f"{section}{key.removesuffix(name)}{shown}={written(getattr(owner, shown))}"


def owner_of(config: Any, key: str) -> tuple[Any, str]:
    """The section of a dotted key, and the key's last part."""
    *above, name = key.split(".")
    for section in above:
        config = getattr(config, section)
    return config, name


def written(value: Any) -> str:
    """A value as it is written in a recipe."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, BaseModel):
        set_fields = [name for name in type(value).model_fields if name in value.model_fields_set]
        return f"{{{', '.join(f'{name}: {written(getattr(value, name))}' for name in set_fields)}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {written(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(written, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


class Strict(BaseModel):
    # Building a model takes milliseconds, and --help only needs its fields: models are built on first use.
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, defer_build=True)

    one_of: ClassVar[tuple[str, ...]] = ()  # alternative keys: a later source that sets one unsets the other ones

    of_task: ClassVar[tuple[str, ...]] = ()  # keys that belong to `task`: a later source that sets another unsets them

    view_of_task: ClassVar[tuple[str, ...]] = ()  # likewise, but an evaluation keeps them: the policy saw `task` so

    of_engine: ClassVar[tuple[str, ...]] = ()  # likewise, to `engine`

    section: ClassVar[str] = ""  # prefix of these keys in messages, such as `algo.`

    rules: ClassVar[tuple[Rule, ...]] = ()  # between these options; a base class's rules also apply

    def conflicts(self) -> Iterator[str]:
        """Yields the mistakes between options."""
        return iter(())

    def default_of(self, key: str) -> Any:
        """An option's default."""
        return type(self).model_fields[key].get_default(call_default_factory=True)

    @model_validator(mode="after")
    def _options_fit(self) -> Strict:
        rules = tuple(rule for base in type(self).__mro__ for rule in vars(base).get("rules", ()))
        if problems := [*broken_rules(rules, self, self.section), *self.conflicts()]:
            raise ValueError("\n".join(problems))
        return self

    @field_validator("*", mode="before")
    @classmethod
    def _can_be_used(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true for 1, numbers that overflow, and NUL in texts."""
        name = str(info.field_name)
        kinds = set(types_of(cls.model_fields[name].annotation))
        numbers_only = bool(kinds & {int, float}) and bool not in kinds
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, bool) and numbers_only:
                raise ValueError("should be a number" if item is value else f"{str(item).lower()} is not a number")
            if isinstance(item, (int, float)) and kinds & {int, float}:
                check_size(name, item)
            if isinstance(item, str) and "\0" in item:
                raise ValueError("holds a NUL character, which no name or path may have; leave it out")
        return value


def check_size(name: str, value: float) -> None:
    """Raise ValueError for a number that overflows where it is used."""
    if name.endswith("_s") and LONGEST_S < value < float("inf"):
        raise ValueError(f"should be at most {LONGEST_S:.0f} seconds (23 days)")
    if isinstance(value, float) and LARGEST_FLOAT < abs(value) < float("inf"):
        raise ValueError(f"should be between -{LARGEST_FLOAT:g} and {LARGEST_FLOAT:g}")
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        raise ValueError("should be a number of at most 64 bits")


def types_of(annotation: Any) -> list[Any]:
    """The types in an annotation; `X | None` and `Annotated[X, ...]` are unwrapped."""
    parts = [argument for argument in get_args(annotation) if isinstance(argument, type) or get_args(argument)]
    return [annotation, *(kind for argument in parts for kind in types_of(argument))]


@dataclass(frozen=True)
class ChosenByName:
    """Marks a section whose model follows from its values. Only the chosen model is imported."""

    models: Mapping[str, type[Strict]]
    tag_of: Callable[[Any], str]  # the key in `models`, for a section's values or a model

    def __get_pydantic_core_schema__(self, *_: Any) -> CoreSchema:
        as_it_is = core_schema.simple_ser_schema("any")
        return core_schema.with_info_plain_validator_function(self.validate, serialization=as_it_is)

    def validate(self, value: Any, info: ValidationInfo) -> Strict:
        tag = self.tag_of(value)
        if tag not in self.models:
            raise PydanticKnownError("union_tag_invalid", {"discriminator": "name", "tag": tag, "expected_tags": ""})
        return self.models[tag].model_validate(value, context=info.context)


def one_or_several(value: Any) -> Any:
    """A list for a single word."""
    return [value] if isinstance(value, str) else value


@dataclass(frozen=True)
class Requirement:
    """The packages of one env, policy or part, beyond the core."""

    packages: tuple[str, ...] = ()  # distributions
    extra: str = ""  # the extra of embodied-loop that installs them
    vulkan: bool = False
    data: tuple[str, ...] = ()  # distributions that only hold files; the packages require them
    hidden_by: tuple[str, ...] = ()  # distributions whose module has the name of the first package's
    elsewhere: str = ""  # a distribution in an interpreter of its own, which env.python names

    def __str__(self) -> str:
        parts = [*self.packages, *(["a Vulkan driver"] if self.vulkan else [])]
        parts += [f"an interpreter that has {self.elsewhere}"] if self.elsewhere else []
        return ", ".join(parts) or "nothing more"

    @property
    def install(self) -> str:
        """The command that installs the packages; in a checkout with the locked versions."""
        if (ROOT / "scripts" / "setup.py").exists():
            return f"python -m pip install -c {ROOT}/constraints.txt -e '{ROOT}[{self.extra}]'"
        return f"python -m pip install 'embodied-loop[{self.extra}]'"

    def check(self, what: str, error: type[EmbodiedError] = ConfigError) -> None:
        """Raise an error if a package is missing that `what` needs."""
        if missing := [name for name in self.packages if not any(metadata.distributions(name=name))]:
            raise error(f"{what} needs {', '.join(missing)}, which is not installed: {self.install}")


@cache
def version_of(package: str) -> str | None:
    """The version of an installed distribution; cached, since its whole metadata is parsed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# Of what is neither an env nor a policy; these state their own (`needs`)
RAY = Requirement(("ray",), "ray")
DATASETS = Requirement(("pyarrow",), "datasets")
SERVERS = Requirement(("aiohttp",), "serve")
WEBSOCKETS = Requirement(("msgpack", "websockets"), "serve")
ONNX = Requirement(("onnx", "onnxscript", "onnxruntime"), "onnx")
RERUN_SDK = Requirement(("rerun-sdk",), "rerun")


@dataclass(frozen=True)
class BelongsToFile:
    """Marks a path, relative to the recipe file that states it, or to the working directory. `or_recipe`: if no such
    file exists, the name of a recipe stays unchanged."""

    or_recipe: bool = False


LocalPath = Annotated[Path, AfterValidator(as_path), BelongsToFile()]
PathOrRecipe = Annotated[Path, AfterValidator(as_path), BelongsToFile(or_recipe=True)]


def pinned(values: Any) -> Any:
    """These options, nested in any way, with the present commit in every data set's name on the hub."""
    if isinstance(values, BaseModel):
        changes = {key: new for key, value in values if (new := pinned(value)) != value}
        return values.model_copy(update=changes) if changes else values
    if isinstance(values, dict):
        return {key: pinned(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(pinned(value) for value in values)
    if isinstance(values, (str, Path)) and is_data_set(values):
        from embodied.core.files import data_files

        name, _, revision = str(values).partition("@")
        return values if COMMIT.fullmatch(revision) else type(values)(f"{name}@{data_files(str(values))[0]}")
    return values
