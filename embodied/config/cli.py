"""Reads the command line: `key=value` arguments and options. The same key twice is a mistake."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from embodied.config.suggestions import usual
from embodied.config.yaml_values import read_yaml, write_yaml, yaml_problem
from embodied.core.errors import nearest

ON_COMMAND_LINE = "--help, --cfg and --dry-run are for the command line"
FLAGS = {"-h": "--help", "--help": "--help", "--cfg": "--cfg", "--dry-run": "--dry-run"}


def from_python(words: Sequence[str | Mapping[str, Any]]) -> list[str]:
    """The arguments of a call from Python: "pointmass_ppo", "algo.lr=1e-3" or {"algo.lr": 1e-3}. Only the first word
    may lack a =; it names the recipe."""
    arguments = []
    for word in words:
        if isinstance(word, Mapping):
            arguments += [f"{key}={json.dumps(value, default=str)}" for key, value in word.items()]
        else:
            named = "=" in word or word.startswith("-") or bool(arguments)
            arguments.append(word if named else f"recipe={word}")
    return arguments


@dataclass
class Arguments:
    """The parts of a command line; `problems` are messages about unreadable arguments."""

    flags: set[str] = field(default_factory=set)
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def parse(argv: list[str], recipes: list[str], folder_key: str = "resume") -> Arguments:
    """Parse a command line; for a name of `recipes` without `recipe=` the message suggests the key, for another path
    `folder_key`."""
    arguments = Arguments()
    for arg in argv:
        if arg in FLAGS:
            arguments.flags.add(FLAGS[arg])
            continue
        key, equals, text = arg.partition("=")
        problem = _not_an_override(key, equals, text, recipes, folder_key)
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


def _not_an_override(key: str, equals: str, text: str, recipes: list[str], folder_key: str) -> str | None:
    bare = key.lstrip("+-~")
    ours = usual(bare) if recipes else bare
    if key.startswith("-") and not equals and ours != bare:
        return f"{key}: write {ours}=VALUE; keys are set without {key[: len(key) - len(bare)]}"
    if key.startswith("-") and not equals:
        near = nearest(key, FLAGS, 0.6, ", ")
        return f"{key}: unknown option{near}; options: --help, --cfg, --dry-run; settings: key=value"
    if key.startswith(("--", "+")):
        return f"{key}={text}: write {ours}={text or '...'}; keys are set without {key[: len(key) - len(bare)]}"
    if key.startswith("~"):
        return f"{key}: a key cannot be deleted; write {bare}=null if it may be empty, or {bare}=VALUE"
    if not equals:
        guess = "key=value, for example algo.lr=1e-4"
        if key in recipes or key.endswith((".yaml", ".yml")):
            guess = f"recipe={key}"
        elif "/" in key:
            guess = f"{folder_key}={key}"
        return f"{key!r} is not a setting; write {guess}"
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[\w,+-]+)*", key):
        example = f"{ours}={text}" if ours != bare else "key=value, for example algo.lr=1e-4"
        return f"{key}={text}: {key!r} is not a key; write {example}"
    if not text.strip():
        return f"{key}= has no value; to set it to nothing write {key}=null"
    return None
