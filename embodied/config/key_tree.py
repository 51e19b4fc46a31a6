"""The keys that can be set, as a tree of the options models: for merging recipes, `--help` and "did you mean".

A section is a key with subkeys: one model, or several variants with different `name`s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator, Tag
from pydantic.fields import FieldInfo

from embodied.core.options import BelongsToFile


@dataclass(frozen=True)
class Section:
    """The models that a section can hold."""

    variants: dict[str, type[BaseModel]]  # by tag; a plain section has one, tagged ""
    discriminator: Any = None

    def tag(self, values: dict) -> str | None:
        """The tag of the variant selected by these values; None if their name is unknown."""
        if len(self.variants) == 1:
            return next(iter(self.variants))
        pick = self.discriminator
        tag = pick(values) if callable(pick) else values.get(pick)
        return tag if tag in self.variants else None

    def field(self, key: str, values: dict | None = None) -> FieldInfo | None:
        """The field of a key in the variant selected by these values, else in any variant."""
        first = self.variants.get(self.tag(values)) if values else None
        models = [*([first] if first else []), *self.variants.values()]
        return next((model.model_fields[key] for model in models if key in model.model_fields), None)

    def child(self, key: str) -> Section | None:
        """The section at this key; None for other keys."""
        field = self.field(key)
        return section_of(field) if field else None

    def at(self, path: Sequence[str]) -> Section | None:
        """The section at the end of a path of keys, or None."""
        section: Section | None = self
        for key in path:
            section = section.child(key) if section else None
        return section

    def names(self) -> list[str]:
        """The keys of all variants."""
        return list(dict.fromkeys(key for model in self.variants.values() for key in model.model_fields))


def section_of(field: FieldInfo) -> Section | None:
    """The section a field holds, or None for a plain value."""
    models = {}
    union = get_origin(field.annotation) in (Union, UnionType)
    for kind in get_args(field.annotation) if union else (field.annotation,):
        tag = None
        if get_origin(kind) is Annotated:
            kind, *marks = get_args(kind)
            tag = next((mark.tag for mark in marks if isinstance(mark, Tag)), None)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            models[tag or ("" if not union else get_args(kind.model_fields["name"].annotation)[0])] = kind
    if not models:
        return None
    mark = field.discriminator or next((m for m in field.metadata if isinstance(m, Discriminator)), None)
    return Section(models, mark.discriminator if isinstance(mark, Discriminator) else mark)


def root(model: type[BaseModel]) -> Section:
    """The section that holds all keys of a model."""
    return Section({"": model})


def leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, FieldInfo, str]]:
    """Yields every key, its field, and the tag of the variant with that key ("" for keys of all variants)."""
    for key in section.names():
        owners = [tag for tag, model in section.variants.items() if key in model.model_fields]
        below = section.child(key)
        if below:
            yield from leaves(below, f"{prefix}{key}.")
        elif len(owners) == len(section.variants):
            yield f"{prefix}{key}", section.field(key), ""
        else:
            for tag in owners:
                yield f"{prefix}{key}", section.variants[tag].model_fields[key], tag


def path_mark(field: FieldInfo) -> BelongsToFile | None:
    """The mark of a field with a path on this machine; None for other fields."""
    kinds = [field.annotation, *get_args(field.annotation)]
    marks = [*field.metadata, *(mark for kind in kinds if get_origin(kind) is Annotated for mark in get_args(kind))]
    return next((mark for mark in marks if isinstance(mark, BelongsToFile)), None)


def choices(annotation: Any) -> list[Any]:
    """The allowed words of a field, if they are fixed."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [word for kind in get_args(annotation) for word in choices(kind)]
