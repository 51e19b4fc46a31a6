"""Every mistake in a recipe in one line each: which key, its value, what is wrong, and where the value came from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic_core import ErrorDetails

from embodied.config.merge import Tree, branch, recipe_names
from embodied.config.schema import Section, choices, leaves, nearest_key, section_of
from embodied.core.errors import ConfigError
from embodied.run.hub import is_hub_id


def config_error(problems: Iterable[str]) -> ConfigError:
    lines = list(dict.fromkeys(line for problem in problems for line in problem.split("\n")))
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError(f"{len(lines)} mistakes:\n" + "\n".join(f"  {line}" for line in lines))


def explain(errors: list[ErrorDetails], root: Section, tree: Tree, incomplete: bool = False) -> list[str]:
    """One line per mistake. `incomplete`: a source could not be read, so a missing key is no mistake of its own."""
    lines = []
    for error in errors:
        follows = any(
            len(e["loc"]) > len(error["loc"]) and e["loc"][: len(error["loc"])] == error["loc"] for e in errors
        )
        if not follows and not (incomplete and error["type"] == "missing"):
            lines += _explain(error, root, tree)
    return lines


def _explain(error: ErrorDetails, root: Section, tree: Tree) -> list[str]:
    path = key_of(error["loc"], root)
    kind = error["type"]
    if kind == "extra_forbidden":
        set_below = [key for key in tree.sources if key == path or key.startswith(path + ".")]
        return [unknown_key(key, root, tree) for key in set_below or [path]]
    if kind == "value_error":
        told = str(error["ctx"]["error"])
        if re.match(r"[a-z]+(\.\w+)*=", told) or "\n" in told:
            return [line + came_from(keys_in(line, tree) or [path], tree) for line in told.split("\n")]
        return [f"{path}={shown(error['input'])}: {told}{came_from([path], tree)}"]
    if kind == "missing":
        return [f"{path} is missing{came_from([path.rpartition('.')[0]], tree)}"]
    return [f"{path}={shown(error['input'])}: {told_by(error, path, root, tree)}{came_from([path], tree)}"]


def told_by(error: ErrorDetails, path: str, root: Section, tree: Tree) -> str:
    kind, value = error["type"], error["input"]
    if kind in ("literal_error", "union_tag_invalid"):
        known = [str(word) for word in allowed_words(path, root, tree)]
        return f"unknown{nearest_key(str(value), known) or ';'} known: {', '.join(known)}"
    if kind == "string_type":
        return f"should be text; write {path}='\"{value}\"'" if value is not None else "should be text, not empty"
    if kind in ("int_parsing", "int_type", "int_from_float"):
        return "should be a whole number"
    if kind in ("float_parsing", "float_type"):
        return "should be a number"
    if kind in ("bool_parsing", "bool_type"):
        return "should be true or false"
    if kind == "tuple_type":
        return f"should be a list; write {path}=[{shown(value)}]"
    told = error["msg"].removeprefix("Input ")
    return told[0].lower() + told[1:]


def unknown_key(path: str, root: Section, tree: Tree) -> str:
    """The nearest_key key of what is configured; or the variant that would have this one."""
    if path == "recipe":
        return f"recipe: a recipe names its base with `extends`{came_from([path], tree)}"
    section_path, _, name = path.rpartition(".")
    section = _section(section_path, root)
    if section and (owners := [tag for tag, model in section.variants.items() if name in model.model_fields]):
        chosen = (branch(tree.values, tuple(section_path.split("."))) or {}).get("name", "the default")
        variants = " or ".join(f"{section_path}.name={tag}" for tag in owners)
        return f"{path} is a key of {variants}, but {section_path}.name is {chosen}{came_from([path], tree)}"
    known = [key for key, _, only in leaves(root) if not only or only in _chosen(key, root, tree)]
    return f"{path}: unknown key{nearest_key(path, known)}{came_from([path], tree)}"


def _chosen(key: str, root: Section, tree: Tree) -> list[str]:
    section_path = key.rpartition(".")[0]
    section = _section(section_path, root)
    values = branch(tree.values, tuple(section_path.split("."))) or {}
    return [section.tag(values) or ""] if section else []


def _section(path: str, root: Section) -> Section | None:
    section: Section | None = root
    for part in path.split(".") if path else []:
        section = section.child(part) if section else None
    return section


def allowed_words(path: str, root: Section, tree: Tree) -> list[Any]:
    section_path, _, name = path.rpartition(".")
    section = _section(section_path, root)
    if section is None:
        return []
    if name == "name":
        words = [word for model in section.variants.values() for word in choices(model.model_fields["name"].annotation)]
        return words or list(section.variants)
    values = branch(tree.values, tuple(section_path.split("."))) if section_path else tree.values
    return choices(section.field(name, values).annotation)


def key_of(loc: tuple[int | str, ...], root: Section) -> str:
    """The dotted key of a pydantic location, which also names the variants of unions on its way."""
    parts: list[str] = []
    section: Section | None = root
    for part in map(str, loc):
        if section and part in section.variants and parts and not section.field(part):
            continue
        parts.append(part)
        field = section.field(part) if section else None
        section = section_of(field) if field else None if section is None or field is None else section
    return ".".join(parts)


def keys_in(text: str, tree: Tree) -> list[str]:
    """The keys a message speaks of, as far as they were set somewhere."""
    return [key for key in dict.fromkeys(re.findall(r"[a-z_]+(?:\.\w+)*", text)) if key in tree.sources]


def came_from(keys: list[str], tree: Tree) -> str:
    """` (from recipes/x.yaml)`: where the keys, or what is below them, were set."""
    places = {}
    for key in keys:
        for known, where in tree.sources.items():
            if known == key or known.startswith(key + ".") or key.startswith(known + "."):
                places.setdefault(where, key)
    if len(places) > 1:
        return f" ({', '.join(f'{key} from {where}' for where, key in places.items())})"
    return f" (from {next(iter(places))})" if places else ""


def shown(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def missing_recipe(command: str) -> str:
    names = recipe_names()
    return (
        f"which recipe? python -m embodied.{command} recipe=NAME, or recipe=path/to/my.yaml; python -m embodied.list "
        f"says what each is for. Recipes: {', '.join(names)}"
    )


def no_recipe_in(checkpoints: tuple[str, ...], env_is_named: bool = False) -> list[str]:
    """What to do about checkpoints that lie in no run; nothing, where they are there and their env is named."""
    problems, others = [], []
    for checkpoint in checkpoints:
        on_hub = env_is_named and is_hub_id(checkpoint)
        here = ":" in checkpoint or checkpoint in ("random", "zero") or Path(checkpoint).expanduser().exists()
        if on_hub or here:
            others.append(checkpoint)
        else:
            named = "; if it is a policy on the Hugging Face hub, name its env: env.name=libero, or recipe=NAME"
            hub = named * is_hub_id(checkpoint)
            problems.append(f"checkpoint={checkpoint}: there is no such folder{hub}")
    if others and not problems and not env_is_named:
        problems.append(
            f"checkpoint={' or '.join(others)} is not in a run's folder, so name the env: "
            "env.name=maniskill env.task=PushCube-v1, for example, or recipe=NAME"
        )
    return problems
