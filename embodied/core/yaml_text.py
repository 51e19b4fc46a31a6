"""Values as YAML text and back: words, numbers, lists and mappings, by YAML 1.2's rules for numbers and booleans."""

from __future__ import annotations

import re
from copy import deepcopy
from functools import lru_cache
from typing import Any, ClassVar

import yaml


class Loader(yaml.SafeLoader):
    """Loads words, numbers, lists and mappings; refuses aliases and duplicate keys."""

    yaml_implicit_resolvers: ClassVar[dict] = {}
    yaml_constructors: ClassVar[dict] = {
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in ("null", "bool", "int", "float", "str", "seq", "map")
    }

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
    """Writes text that `Loader` reads as the same value."""

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
    """The value of a YAML text; raises yaml.YAMLError for invalid text."""
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


def yaml_problem(err: Exception) -> str:
    """The mistake in a YAML text, with its line, or why a file cannot be read."""
    problem = getattr(err, "problem", None) or getattr(err, "strerror", None) or str(err)
    mark = getattr(err, "problem_mark", None)
    return f"line {mark.line + 1}: {problem}" if mark else problem
