"""The base of every options model: frozen, no unknown keys, no number or text that breaks whatever reads it. Free of
torch: `--help` stays fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator

from embodied.core.files import as_path

LARGEST_FLOAT = 1e30  # float32 ends at 3e38
LARGEST_INT = 2**63 - 1
LONGEST_S = 2e6  # 23 days; the operating system's waits end at 2**31 milliseconds


class Strict(BaseModel):
    # Building a model costs milliseconds, and --help looks at their fields only: each is built when it is first used.
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, defer_build=True)

    one_of: ClassVar[
        tuple[str, ...]
    ] = ()  # keys that replace each other: a later source that sets one unsets the others

    of_task: ClassVar[tuple[str, ...]] = ()  # keys that belong to `task`: a later source that sets another unsets them

    view_of_task: ClassVar[tuple[str, ...]] = ()  # likewise, but an evaluation keeps them: the policy saw `task` so

    of_engine: ClassVar[tuple[str, ...]] = ()  # likewise, to `engine`

    @field_validator("*", mode="before")
    @classmethod
    def _can_be_used(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true for 1, numbers that overflow, and NUL in texts."""
        name = str(info.field_name)
        kinds = set(types_of(cls.model_fields[name].annotation))
        numbers_only = bool(kinds & {int, float}) and bool not in kinds
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, bool) and numbers_only:
                raise ValueError("should be a number" if one is value else f"{str(one).lower()} is not a number")
            if isinstance(one, int | float) and kinds & {int, float}:
                check_size(name, one)
            if isinstance(one, str) and "\0" in one:
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
    """The types that an annotation is made of, `X | None` and `Annotated[X, ...]` taken apart."""
    parts = [part for part in get_args(annotation) if isinstance(part, type) or get_args(part)]
    return [annotation, *(kind for part in parts for kind in types_of(part))]


def variants(union: Any) -> dict[str, type[Any]]:
    """The models of a section that holds one of several, by tag."""
    return {mark.tag: model for model, mark in map(get_args, get_args(get_args(union)[0]))}


def one_or_several(value: Any) -> Any:
    """A list for a single word."""
    return [value] if isinstance(value, str) else value


@dataclass(frozen=True)
class Requirement:
    """The packages that one env, policy or part needs beyond the core."""

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


@dataclass(frozen=True)
class BelongsToFile:
    """Marks a path: a relative one means relative to the recipe file that states it, or to the working directory.
    `or_recipe`: where nothing is there, the name of a recipe stays as it is."""

    or_recipe: bool = False


LocalPath = Annotated[Path, AfterValidator(as_path), BelongsToFile()]
PathOrRecipe = Annotated[Path, AfterValidator(as_path), BelongsToFile(or_recipe=True)]
