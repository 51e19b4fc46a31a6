"""Merges recipe files and arguments into one tree of values with the source of each.

Later sources win: the recipe's base, the recipe, the command line. A plain value is replaced as a whole, a section key
by key. A section is a key with subkeys: one model, or several variants with different `name`s. Naming another variant
drops the values of the old variant.

Files and values are simple YAML: only true and false are booleans (`off` stays a word), 1e-4 is a number, and the same
key twice is a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from inspect import get_annotations
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from embodied.config.recipe_files import BY_TASK, DEFAULT_ENV, EVERY_RECIPE, RECIPES, recipe_file, recipe_names
from embodied.core.errors import ConfigError, nearest
from embodied.core.files import BadPath, as_path, is_data_set
from embodied.core.options import BelongsToFile, ChosenByName
from embodied.core.yaml_text import read_yaml, write_yaml, yaml_problem

COMMAND_LINE = "command line"
Key = tuple[str, ...]
ENV_NAME, ENV_TASK, CLUSTER, EVAL_SETS = ("env", "name"), ("env", "task"), ("cluster",), ("eval", "sets")
ENV_PYTHON = ("env", "python")
WITH_PATHS = {("algo", "imitation"): ("data", "cache")}  # plain values with paths


@dataclass(frozen=True)
class Command:
    """A command: its own arguments besides the recipe's keys, and the sections without effect."""

    name: str
    purpose: str
    arguments: dict[str, str]  # key -> help
    unused: tuple[str, ...] = ()
    used: tuple[str, ...] = ()  # keys of these sections that have an effect
    several: dict[str, str] = field(default_factory=dict)  # arguments of several runs; key -> help

    def ignores(self, key: str) -> bool:
        return is_one_of(key, self.unused) and not is_one_of(key, self.used)


def is_one_of(key: str, keys: Iterable[str]) -> bool:
    """True for these keys, and for keys of a map among them."""
    return any(key == name or key.startswith(f"{name}.") for name in keys)


@dataclass(frozen=True)
class Source:
    """One file, or the command line: its values by key, and the folder its relative paths belong to."""

    name: str
    folder: Path
    values: list[tuple[Key, Any]]


@dataclass
class Tree:
    """The values of all sources so far, with their sources, and the mistakes."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # dotted key -> source
    problems: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)  # printed only if there are problems
    evaluates: bool = False  # an evaluation: the policy keeps the observations of its training
    unused: tuple[str, ...] = ()  # sections without effect in this command
    left_out: list[str] = field(default_factory=list)  # dropped settings for another variant, task or engine

    def section(self, key: Key) -> dict | None:
        """The values below a key; None without any."""
        values = self.values
        for name in key:
            values = values.get(name) if isinstance(values, dict) else None
        return values if isinstance(values, dict) else None

    def put(self, key: Key, value: Any, where: str) -> None:
        """Set a value and its source."""
        self.drop(key)
        values = self.values
        for depth, name in enumerate(key[:-1], 1):
            if not isinstance(values.get(name), dict):
                self.drop(key[:depth])
                values[name] = {}
            values = values[name]
        values[key[-1]] = value
        self.sources[".".join(key)] = where

    def drop(self, key: Key) -> None:
        """Remove a key and all keys below it."""
        path, values = ".".join(key), self.section(key[:-1])
        if not values or key[-1] not in values:
            return
        del values[key[-1]]
        for source_key in [
            source_key for source_key in self.sources if source_key == path or source_key.startswith(path + ".")
        ]:
            del self.sources[source_key]


# Recipes and their bases


def recipe_of_task(task: str) -> str | None:
    """The recipe for this task; None if the task has no recipe of its own."""
    recipes = {name: read_yaml(recipe_file(name).read_text(encoding="utf-8")) for name in recipe_names(*BY_TASK)}
    return next((name for name, values in recipes.items() if values["env"]["task"] == task), None)


def recipe_sources(recipe: str, root: Section, problems: list[str]) -> list[Source]:
    """The recipe and its bases, the base first. Problems with the files are added to `problems`."""
    chain: list[Source] = []
    seen: list[Path] = []
    asked_by, folder = "", Path.cwd()
    while True:
        path = find_recipe(recipe, folder, asked_by, problems)
        if path is None:
            break
        if path in seen:
            circle = " -> ".join(display(p) for p in [*seen[seen.index(path) :], path])
            problems.append(f"recipes extend each other in a circle: {circle}")
            break
        seen.append(path)
        values = read_recipe(path, asked_by or "recipe=", problems)
        parent = values.pop("extends", None)
        chain.append(Source(display(path), path.parent, flatten(root, values, display(path), problems)))
        if parent is None:
            break
        if not isinstance(parent, str):
            problems.append(f"{display(path)}: extends={parent!r} is not the name or path of one recipe")
            break
        recipe, asked_by, folder = parent, f"{display(path)}: extends=", path.parent
    return chain[::-1]


def find_recipe(recipe: str, folder: Path, asked_by: str, problems: list[str]) -> Path | None:
    """The file of a recipe: a path (relative to `folder`), or the name of a packaged recipe."""
    problem = f"{asked_by or 'recipe='}{recipe}: "
    if not ("/" in recipe or recipe.endswith((".yaml", ".yml"))):
        names = recipe_names()
        if recipe in names:
            return recipe_file(recipe)
        hint = nearest(recipe, names, 0.6, ", ") or ";"
        problems.append(f"{problem}no such recipe{hint} {EVERY_RECIPE}, or name path/to/my.yaml")
        return None
    try:
        path = (folder / as_path(recipe)).resolve()
    except (BadPath, RuntimeError) as err:  # a path that cannot be, or a link to itself
        problems.append(f"{problem}{err}")
        return None
    if path.exists():
        return path
    beside = sorted(str(p) for pattern in ("*.yaml", "*.yml") for p in path.parent.glob(pattern))
    problems.append(f"{problem}there is no file {path}{nearest(str(path), beside, 0.6, ', ')}")
    return None


def display(path: Path) -> str:
    """A recipe file's name in messages: short for ours, a path for the user's."""
    if path.is_relative_to(RECIPES):
        return f"recipes/{path.relative_to(RECIPES)}"
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def read_recipe(path: Path, asked_by: str, problems: list[str]) -> dict[str, Any]:
    """The mapping in a recipe file; empty if it cannot be read. `asked_by`: the key that names it."""
    try:
        values = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as err:
        problems.append(f"{asked_by}{display(path)} cannot be read: {yaml_problem(err)}")
        return {}
    if isinstance(values, dict):
        return values
    example = "such as env: {name: pointmass}"
    problems.append(f"{display(path)} should be a mapping of sections, {example}, not {write_yaml(values):.40}")
    return {}


# Checking values


def flatten(root: Section, values: dict, where: str, problems: list[str]) -> list[tuple[Key, Any]]:
    """Nested sections as a list of (key, value). Dotted keys equal nested keys, and a list of one task equals the
    task."""
    values_by_key: dict[Key, Any] = {}
    first_below: dict[Key, Key] = {}  # a key or prefix -> the first key set there

    def visit(prefix: Key, values: dict) -> None:
        for name, value in values.items():
            key = (*prefix, *name.split("."))
            below = root.section_at(key)
            if below and isinstance(value, dict):
                visit(key, value)
            elif below and value is None and where != COMMAND_LINE:
                continue  # an empty section
            elif key == CLUSTER and isinstance(value, str):
                visit(key, {"machines": value})  # cluster=8xH100
            elif below:
                problems.append(f"{not_a_section_value(below, key, value)} (from {where})")
            elif clash := first_below.get(key) or next((k for k in prefixes(key) if k in values_by_key), None):
                problems.append(f"{'.'.join(key)} is set twice: also as {'.'.join(clash)} (both from {where})")
            else:
                values_by_key[key] = (
                    value[0] if key == ENV_TASK and isinstance(value, list) and len(value) == 1 else value
                )
                for above in prefixes(key):
                    first_below.setdefault(above, key)

    visit((), values)
    return list(values_by_key.items())


def prefixes(key: Key) -> list[Key]:
    """The key and its prefixes."""
    return [key[:depth] for depth in range(1, len(key) + 1)]


def not_a_section_value(section: Section, key: Key, value: Any) -> str:
    path = ".".join(key)
    names = section.names()
    if "name" in names and isinstance(value, str):
        return f"{path}={value}: did you mean {path}.name={value}?"
    return f"{path}={value!r}: {path} is a section; set its keys: {', '.join(f'{path}.{name}' for name in names[:6])}"


def with_own_task(source: Source, tree: Tree) -> Source:
    """If `env.name=my_tasks:Class` names a task of a simulator, the source with env.name=SIMULATOR
    env.task=my_tasks:Class instead. The same for `env.task=my_tasks:Class` over a recipe of another simulator.
    """
    from embodied.envs.config import ENV_CONFIGS, kind_of
    from embodied.envs.own_modules import as_a_task

    values = dict(source.values)
    earlier = tree.section(("env",)) or {}
    if values.get(ENV_PYTHON, earlier.get("python")) is not None:  # its packages are in another interpreter
        return source
    before = earlier.get("name", DEFAULT_ENV)
    named, simulator = values.get(ENV_NAME), None
    if ENV_NAME not in values and ENV_TASK in values and ENV_CONFIGS[kind_of({"name": before})].task_base:
        named = values[ENV_TASK]
    try:
        simulator = as_a_task(named)
    except ConfigError as err:  # reported again before a run; until then it may explain other mistakes
        tree.doubts.append(str(err))
    if simulator in (None, values.get(ENV_NAME, before)):
        return source
    others = [(key, value) for key, value in source.values if key != ENV_NAME]
    task = [(ENV_TASK, named)] if ENV_TASK not in dict(others) else []
    return replace(source, values=[(ENV_NAME, simulator), *task, *others])


# One over the other


def merge_source(tree: Tree, root: Section, source: Source) -> None:
    """Merge one source into the tree."""
    for key, value in source.values:
        if key[-1] == "name":
            switch(tree, root.section_at(key[:-1]), key[:-1], value, source)
    for key, value in source.values:
        drop_superseded(tree, root, key, value, source)
    for key, value in sorted(source.values, key=lambda item: item[0][-1] != "name"):  # names choose the models
        tree.put(key, own_path(root, key, value, source.folder, tree.section(key[:-1])), source.name)


def switch(tree: Tree, section: Section | None, prefix: Key, name: Any, source: Source) -> None:
    """If a source names another variant, drop the old variant's settings, except keys that both share."""
    values = tree.section(prefix)
    if section is None or not values or values.get("name") == name:
        return
    before, after = section.tag(values), section.tag({"name": name})
    if None in (before, after) or ("name" not in values and before == after):
        return
    old, new = section.variants[before], section.variants[after]
    gone = [key for key in values if key != "name" and not same_key(old, new, key)]
    if source.name == COMMAND_LINE:
        note_left_out(tree, (*prefix, "name"), values.get("name", before), old, gone, source)
    for key in gone:
        tree.drop((*prefix, key))


def note_left_out(tree: Tree, key: Key, value: Any, model: Any, dropped: list[str], source: Source) -> None:
    """Note the settings that a user's source drops, if they differ from the default. `value`: of `key` before."""
    if source.folder.resolve().is_relative_to(RECIPES.resolve()) or key[0] in tree.unused:
        return
    *above, _ = key
    before, fields = tree.section(tuple(above)) or {}, model.model_fields
    reported = [left for left in dropped if left in before and (*above, left) not in dict(source.values)]
    reported = [
        left
        for left in reported
        if left not in fields or before[left] != fields[left].get_default(call_default_factory=True)
    ]
    if reported:
        whose = f"{'.'.join(key)}={write_yaml(value)}"
        tree.left_out.append(
            f"left out, since the recipe sets it for {whose}: {', '.join(settings(above, reported, before))}"
        )


def same_key(old: type, new: type, key: str) -> bool:
    """True if both models inherit the key from a common base. `kwargs` belong to a single class."""

    def owner(kind: type) -> type | None:
        return next((base for base in kind.__mro__ if key in get_annotations(base)), None)

    owners = [owner(old), owner(new)]
    return owners[0] is not None and owners[0] is owners[1] and (old is not new or key != "kwargs")


def drop_superseded(tree: Tree, root: Section, key: Key, value: Any, source: Source) -> None:
    """Drop earlier settings replaced by this value: alternatives of its key (`one_of`), and for another task or engine
    the settings of the old one (`of_task`, `view_of_task`, `of_engine`)."""
    *above, name = key
    section, before = root.section_at(above), tree.section(tuple(above))
    model = section.variants.get(section.tag_of(before)) if section and before else None
    if model is None or before is None:
        return
    gone = [other for other in model.one_of if other != name] if name in model.one_of and value is not None else []
    if name in ("task", "engine") and before.get(name) not in (None, value):
        theirs = [*getattr(model, f"of_{name}"), *(model.view_of_task if name == "task" and not tree.evaluates else ())]
        gone += theirs
        note_left_out(tree, key, before[name], model, theirs, source)
    for other in gone:
        tree.drop((*above, other))


def drop_training_only(tree: Tree, root: Section, source: Source) -> None:
    """Before the command line of an evaluation is merged: drop options for training only, unless it names them."""
    section, values = root.section_at(("env",)), tree.section(("env",))
    model = section.variants.get(section.tag_of(values)) if section and values else None
    keys = model.training_only(values) if model and values else ()
    if keys and ("env", keys[0]) not in dict(source.values):
        for key in keys:
            tree.drop(("env", key))


def settings(above: list[str], names: list[str], values: dict) -> list[str]:
    """`env.image_fov=60` for each of these keys."""
    return [f"{'.'.join([*above, name])}={write_yaml(values[name])}" for name in names]


def own_path(root: Section, key: Key, value: Any, folder: Path, values: dict | None = None) -> Any:
    """The value; a path (or a task's file) is made relative to the folder of its source. An invalid path stays
    unchanged and is refused by the model. `values`: of the key's section, whose name chooses the model."""
    with suppress(BadPath):
        return _own_path(root, key, value, folder, values)
    return value


def _own_path(root: Section, key: Key, value: Any, folder: Path, values: dict | None) -> Any:
    if key == ENV_TASK:
        named = value if isinstance(value, list) else [value]
        files = [str(folder / as_path(entry)) if str(entry).endswith(".bddl") else entry for entry in named]
        return files if isinstance(value, list) else files[0]
    if key == EVAL_SETS and isinstance(value, dict):
        return {name: _set_with_path(item, folder) for name, item in value.items()}
    if key in WITH_PATHS and isinstance(value, dict):
        return {name: _own_path(root, (*key, name), entry, folder, None) for name, entry in value.items()}
    if key[-1] in WITH_PATHS.get(key[:-1], ()) and isinstance(value, str) and not is_data_set(value):
        return str(folder / as_path(value))
    if key[-1] == "name" or not isinstance(value, str):
        return value
    section = root.section_at(key[:-1])
    field = section.field(key[-1], values) if section else None
    mark = path_mark(field) if field else None
    if mark is None or value in choices(field.annotation) or is_data_set(value):
        return value
    path = folder / as_path(value)
    return value if mark.or_recipe and value in recipe_names() and not path.exists() else str(path)


def _set_with_path(value: Any, folder: Path) -> Any:
    """A data set of `eval.sets` with the whole path of its file."""
    file = value.get("file") if isinstance(value, dict) else value
    if not isinstance(file, str):
        return value  # refused later
    file = file if is_data_set(file) else str(folder / as_path(file))
    return value | {"file": file} if isinstance(value, dict) else file


@dataclass(frozen=True)
class Section:
    """The models that a section can hold."""

    variants: Mapping[str, type[BaseModel]]  # by tag; a plain section has one, tagged ""
    tag_of: Callable[[Any], str] = lambda values: ""

    def tag(self, values: dict) -> str | None:
        """The tag of the variant selected by these values; None if their name is unknown."""
        tag = self.tag_of(values)
        return tag if tag in self.variants else None

    def field(self, key: str, values: dict | None = None) -> FieldInfo | None:
        """The field of a key in the variant selected by these values, else in any variant."""
        chosen = self.variants.get(self.tag_of(values or {}))
        if chosen and key in chosen.model_fields:
            return chosen.model_fields[key]
        return next((model.model_fields[key] for model in self.variants.values() if key in model.model_fields), None)

    def child(self, key: str) -> Section | None:
        """The section at this key; None for other keys, and in a section with variants, which hold plain values."""
        field = self.variants[""].model_fields.get(key) if "" in self.variants else None
        return section_of(field) if field else None

    def section_at(self, path: Sequence[str]) -> Section | None:
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
    if chosen := next((mark for mark in field.metadata if isinstance(mark, ChosenByName)), None):
        return Section(chosen.models, chosen.tag_of)
    kind = field.annotation
    return Section({"": kind}) if isinstance(kind, type) and issubclass(kind, BaseModel) else None


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


def as_yaml_value(value: Any) -> str:
    """A default as YAML, which has neither paths nor tuples."""
    return write_yaml(to_jsonable_python(value))


def config_yaml(config: BaseModel, sources: dict[str, str], default: str = "") -> str:
    """Nested YAML with one line per key and the value's source as a comment."""
    return "\n".join(_lines(config, sources, default, "", "")) + "\n"


def _lines(model: BaseModel, sources: dict[str, str], default: str, prefix: str, indent: str) -> list[str]:
    lines = []
    for name in type(model).model_fields:
        value, key = getattr(model, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            lines += [f"{indent}{name}:", *_lines(value, sources, default, key + ".", indent + "  ")]
            continue
        if isinstance(value, Path) and not is_data_set(value):
            value = value.absolute()
        set_by = {where for other, where in sources.items() if other == key or other.startswith(key + ".")}
        where = ", ".join(sorted(set_by)) or default
        line = f"{indent}{name}: {as_yaml_value(value)}"
        lines.append(f"{line:<48}# {where}" if where else line)
    return lines
