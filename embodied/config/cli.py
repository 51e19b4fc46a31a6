"""Reads what users type: YAML with numbers as people write them, and `key=value` arguments.

Only true and false are booleans (`off` stays a word) and 1e-4 is a number. The same key twice is a mistake, in a file
as on the command line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import yaml

from embodied.config.key_tree import nearest_key
from embodied.config.usual_names import usual

FLAGS = {"-h": "--help", "--help": "--help", "--cfg": "--cfg", "--dry-run": "--dry-run"}


def from_python(words: Sequence[str | Mapping[str, Any]], first: str = "recipe") -> list[str]:
    """The arguments that a call from Python means: "pointmass_ppo", "algo.lr=1e-3" or {"algo.lr": 1e-3}. A word
    without = can only be the first, and names the recipe."""
    arguments = []
    for word in words:
        if isinstance(word, Mapping):
            arguments += [f"{key}={json.dumps(value, default=str)}" for key, value in word.items()]
        else:
            named = "=" in word or word.startswith("-") or bool(arguments)
            arguments.append(word if named else f"{first}={word}")
    return arguments


class Loader(yaml.SafeLoader):
    """Safe YAML without aliases and duplicate keys."""

    yaml_implicit_resolvers: ClassVar[dict] = {}

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not read; use extends", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge" or not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a plain word", problem_mark=key_node.start_mark)
            if key_node.value in seen:
                mark = key_node.start_mark
                raise yaml.MarkedYAMLError(problem=f"{key_node.value!r} is there twice", problem_mark=mark)
            seen.add(key_node.value)
            key_node.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep=True)


class Dumper(yaml.SafeDumper):
    """Writes what `Loader` reads back as the same value."""

    yaml_implicit_resolvers: ClassVar[dict] = {}

    def ignore_aliases(self, data):
        return True


_NUMBER = list("-+0123456789.")
for _kind in (Loader, Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
    _kind.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))
    _kind.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), _NUMBER)
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"^[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|nan))$"
        ),
        _NUMBER,
    )


def read_yaml(text: str) -> Any:
    """The value of a YAML text; raises yaml.YAMLError where there is none."""
    return deepcopy(_value(text))


@lru_cache(maxsize=256)  # a run and its report read the same recipes time and again
def _value(text: str) -> Any:
    try:
        return yaml.load(text, Loader)  # noqa: S506 - Loader is a SafeLoader
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


def write_yaml(value: Any) -> str:
    """The value as YAML on one line."""
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def yaml_problem(err: yaml.YAMLError) -> str:
    """The line and what is wrong with it."""
    problem = getattr(err, "problem", None) or str(err)
    mark = getattr(err, "problem_mark", None)
    return f"line {mark.line + 1}: {problem}" if mark else problem


@dataclass
class Arguments:
    """The parts of a command line; `problems` says what could not be read."""

    flags: set[str] = field(default_factory=set)
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def parse(argv: list[str], recipes: list[str]) -> Arguments:
    """Take a command line apart; `recipes` are names that may stand without `recipe=`, which is answered."""
    arguments = Arguments()
    for arg in argv:
        if arg in FLAGS:
            arguments.flags.add(FLAGS[arg])
            continue
        key, equals, text = arg.partition("=")
        problem = _not_an_override(key, equals, text, recipes)
        if not problem and key in arguments.values:
            problem = f"{key} is given twice on the command line: {write_yaml(arguments.values[key])} and {text}"
        if problem:
            arguments.problems.append(problem)
            continue
        try:
            arguments.values[key] = read_yaml(text)
        except (yaml.YAMLError, ValueError) as err:
            reason = yaml_problem(err).removeprefix("line 1: ") if isinstance(err, yaml.YAMLError) else str(err)
            arguments.problems.append(f"{arg}: the value is not YAML ({reason}); quote it for the shell: '{key}=...'")
    return arguments


def _not_an_override(key: str, equals: str, text: str, recipes: list[str]) -> str | None:
    bare = key.lstrip("+-~")
    ours = usual(bare) if recipes else bare
    if key.startswith("-") and not equals and ours != bare:
        return f"{key}: write {ours}=VALUE; keys are set without {key[: len(key) - len(bare)]}"
    if key.startswith("-") and not equals:
        near = nearest_key(key, list(FLAGS))
        return f"{key}: unknown option{near}; options: --help, --cfg, --dry-run; settings: key=value"
    if key.startswith(("--", "+")):
        return f"{key}={text}: write {ours}={text or '...'}; keys are set without {key[: len(key) - len(bare)]}"
    if key.startswith("~"):
        return f"{key}: a key cannot be deleted; write {bare}=null if it may be empty, or {bare}=VALUE"
    if not equals:
        guess = f"recipe={key}" if key in recipes else "key=value, for example algo.lr=1e-4"
        return f"{key!r} is not a setting; write {guess}"
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[\w,+-]+)*", key):
        example = f"{ours}={text}" if ours != bare else "key=value, for example algo.lr=1e-4"
        return f"{key}={text}: {key!r} is not a key; write {example}"
    if not text.strip():
        return f"{key}= has no value; to set it to nothing write {key}=null"
    return None
