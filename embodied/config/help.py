"""The output of `--help` and `--cfg`: every key with default and meaning; the resolved recipe with its sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from embodied.config.key_tree import Section, leaves
from embodied.config.recipe_files import BY_TASK, RECIPES, by_family, recipe_names
from embodied.config.suggestions import USUAL, as_word, hint
from embodied.config.yaml_values import write_yaml

if TYPE_CHECKING:
    from embodied.config.commands import Command

INDENT = 30
WIDTH = 118
SEVERAL = {
    "seeds": "0-4 or 0,2,5: a run for each seed, and a page of all; the same command continues.",
    "at_once": "Number of simultaneous runs, each on its own cores [as the machine allows].",
    "group": "The folder that names these runs [the newest of this command, else a new one].",
}  # of embodied.train, for several runs (run/seeds_and_sweeps.py)


def help_text(command: Command, schema: Section, words: Sequence[str] = ()) -> str:
    """The answer to --help; with words, only the keys with these words in name or meaning."""
    if words:
        return found_text(command, schema, words)
    first = next((key for key in command.own if key != "program"), "recipe")
    own = command.own | (SEVERAL if command.name == "train" else {})
    lines = [
        command.purpose,
        "",
        f"usage: python -m embodied.{command.name} {first}={'NAME' if first == 'recipe' else '...'} [key=value ...] "
        "[--cfg | --dry-run | --help [WORD]]",
        "",
        *recipe_lines(),
        *[line for key, meaning in own.items() for line in wrapped(key, meaning)],
        *wrapped("--cfg", "print the resolved recipe and where each value comes from; it can be saved and loaded"),
        *wrapped("--dry-run", "check everything and say what would run where, then stop"),
        *wrapped("--help WORD", "only the keys of a section, or with this in their name: --help algo, --help lr"),
        "",
        "Values are YAML: algo.lr=1e-4  policy.hidden='[64, 64]'  algo.target_kl=null",
        "In a recipe file, `extends: NAME` starts from another one. Defaults are in brackets; a key that only some",
        "kinds of env, policy or algorithm have is marked with them.",
        *key_lines(entries(command, schema)),
    ]
    return "\n".join(lines)


def found_text(command: Command, schema: Section, words: Sequence[str]) -> str:
    """The keys with these words in their names; if no name has a word, the keys with it in their help."""
    every = entries(command, schema)
    keys = list(dict.fromkeys(key for key, _ in every))
    lines, chosen = [], {}
    for word in map(as_word, words):
        if word == "recipe":
            lines += recipe_lines()
            continue
        lines += [line for key in command.own if key == word for line in wrapped(key, command.own[key])]
        named = [key for key in keys if word in key.split(".")[:-1]] or [key for key in keys if word in key]
        named += [key for key in USUAL.get(word, ()) if key in keys]
        matches = {at: owners for at, owners in every.items() if at[0] in named}
        matches = matches or {at: owners for at, owners in every.items() if word in at[1].lower()}
        chosen |= matches
        if not (matches or lines):
            lines.append(f"no key of {command.name} has {word!r} in its name or meaning{hint(word, keys)}")
    return "\n".join([*lines, *key_lines(chosen)]).strip("\n")


def recipe_lines() -> list[str]:
    """The recipes by family, and the forms of recipe=."""
    lines = wrapped("recipe", "a name of these, one of recipes/tiny (python -m embodied.list), or path/to/my.yaml")
    for family, names in by_family(recipe_names(RECIPES, *BY_TASK)).items():
        lines += wrapped(f"  {family}", ", ".join(names))
    return lines


def key_lines(entries_shown: dict[tuple[str, str], list[str]]) -> list[str]:
    """The keys with their meaning, an empty line before each section."""
    lines, section = [], ""
    for (key, text), owners in entries_shown.items():
        head = key.partition(".")[0]
        if head != section:
            section = head
            lines.append("")
        kind = f"({', '.join(owners)}) " if owners[0] else ""
        lines += wrapped(key, f"{kind}{text}")
    return lines


def wrapped(key: str, text: str) -> list[str]:
    line = f"  {key:<{INDENT - 1}} {text}"
    return wrap(line, WIDTH, subsequent_indent=" " * (INDENT + 4), break_on_hyphens=False)


def entries(command: Command, schema: Section) -> dict[tuple[str, str], list[str]]:
    """For each (key, description) of a section the variants that have it."""
    tags: dict[tuple[str, str], list[str]] = {}
    for key, field, only in leaves(schema):
        if not command.ignores(key):
            tags.setdefault((key, describe(field)), []).append(only)
    return tags


def describe(field: FieldInfo) -> str:
    """The type, default and meaning of a field."""
    default = "needed" if field.is_required() else plain(field.get_default(call_default_factory=True))
    fixed = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
    return f"{'text' if fixed else name_of(field.annotation)} [{default}]  {field.description or ''}"


def name_of(kind: Any) -> str:
    """A type in the user's words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "|".join(map(str, args))
    if origin in (Union, UnionType):
        return "|".join(name_of(arg) for arg in args if arg is not type(None))
    if origin is tuple:
        return f"list of {name_of(args[0])}"
    if origin is dict or kind is dict:
        return "map"
    if origin is not None:
        return name_of(args[0])
    names = {str: "text", int: "integer", float: "number", bool: "true|false", Path: "path"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def plain(value: Any) -> str:
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
        if isinstance(value, Path):
            value = value.absolute()
        set_by = {where for known, where in sources.items() if known == key or known.startswith(key + ".")}
        where = ", ".join(sorted(set_by)) or default
        line = f"{indent}{name}: {plain(value)}"
        lines.append(f"{line:<48}# {where}" if where else line)
    return lines
