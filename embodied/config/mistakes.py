"""One line for every mistake in a recipe or on the command line: key, value, reason, and source of the value.

For a typo the nearest key is suggested (`unknown_key`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pydantic_core import ErrorDetails
from typing_extensions import is_typeddict

from embodied.config.key_tree import Section, choices, leaves
from embodied.config.merge import Tree
from embodied.config.suggestions import FAR, hint
from embodied.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from embodied.config.commands import Command

MOST = 20  # largest number of shown mistakes


def config_error(problems: Iterable[str]) -> ConfigError:
    """The error that lists these problems."""
    lines = list(dict.fromkeys(line for problem in problems for line in problem.split("\n")))
    if len(lines) == 1:
        return ConfigError(lines[0])
    shown = [*lines[:MOST], f"and {len(lines) - MOST} more"] if len(lines) > MOST else lines
    return ConfigError(f"{len(lines)} mistakes:\n" + "\n".join(f"  {line}" for line in shown))


def explain(
    errors: list[ErrorDetails], root: Section, tree: Tree, incomplete: bool = False, command: Command | None = None
) -> list[str]:
    """pydantic's errors, a line each. If a source was unreadable (`incomplete`), missing keys are left out. Suggestions
    take time, so only the first mistakes get them."""
    lines: list[str] = []
    above = {error["loc"][:depth] for error in errors for depth in range(len(error["loc"]))}
    for error in errors:
        if error["loc"] in above or (incomplete and error["type"] == "missing"):  # an error below says more
            continue
        if len(lines) < MOST:
            lines += _explain(error, root, tree, command)
        else:
            lines.append(f"{'.'.join(map(str, error['loc']))}: {error['msg']}")
    return lines


def _explain(error: ErrorDetails, root: Section, tree: Tree, command: Command | None) -> list[str]:
    path = key_of(error["loc"], root)
    kind = error["type"]
    if kind == "union_tag_invalid":  # a section with an unknown name
        path, error = f"{path}.name", {**error, "input": error["ctx"]["tag"]}
    if kind == "extra_forbidden":
        set_below = [key for key in tree.sources if key == path or key.startswith(path + ".")]
        return [unknown_key(key, root, tree, command) for key in set_below or [path]]
    if kind == "value_error":
        text = str(error["ctx"]["error"])
        if re.match(r"[a-z]+(\.\w+)*=", text) or text.startswith(f"{path}.") or "\n" in text:
            return [line + came_from(keys_in(line, tree) or [path], tree) for line in text.split("\n")]
        return [f"{path}={shown(error['input'])}: {text}{came_from([path], tree)}"]
    if kind == "missing":
        return [f"{path} is missing{came_from([path.rpartition('.')[0]], tree)}"]
    return [f"{path}={shown(error['input'])}: {reason(error, path, root, tree)}{came_from([path], tree)}"]


def reason(error: ErrorDetails, path: str, root: Section, tree: Tree) -> str:
    """Says why the value is wrong, and names a value that works."""
    kind, value = error["type"], error["input"]
    if kind in ("literal_error", "union_tag_invalid"):
        known = [*dict.fromkeys(str(word) for word in allowed_words(path, root, tree))]
        return f"unknown{nearest(str(value), known, 0.6, ', ') or ';'} known: {', '.join(known)}"
    if kind == "string_type" and isinstance(value, dict | list):
        return f"should be text, which is quoted twice: {path}='\"...\"'"
    if kind == "string_type":
        return f"should be text; write {path}='\"{value}\"'" if value is not None else "should be text, not empty"
    if kind in ("int_parsing", "int_type", "int_from_float"):
        return "should be a whole number"
    if kind in ("float_parsing", "float_type"):
        return "should be a number"
    if kind in ("bool_parsing", "bool_type"):
        return "should be true or false"
    if kind == "path_type":
        return "should be a path"
    if kind == "tuple_type":
        return f"should be a list; write {path}=[{shown(value)}]"
    if kind == "too_short":
        least = error["ctx"]["min_length"]
        return f"should hold {least} value{'s' * (least > 1)} or more"
    text = error["msg"].removeprefix("Input ")
    return text[0].lower() + text[1:]


def unknown_key(path: str, root: Section, tree: Tree, command: Command | None) -> str:
    """The message for an unknown key, with the nearest known key or the variant that has this key."""
    if path == "recipe":
        return f"recipe: a recipe names its base with `extends`{came_from([path], tree)}"
    *above, name = path.split(".")
    section, section_path = root.at(above), ".".join(above)
    if section and (owners := [tag for tag, model in section.variants.items() if name in model.model_fields]):
        chosen = (tree.section(above) or {}).get("name", "the default")
        variants = " or ".join(f"{section_path}.name={tag}" for tag in owners)
        return f"{path} is a key of {variants}, but {section_path}.name is {chosen}{came_from([path], tree)}"
    if fields := fields_of(above, root, tree):
        near = nearest(name, fields, FAR, ", ") or ";"
        return f"{path}: unknown key{near} known: {', '.join(fields)}{came_from([path], tree)}"
    known = [key for key, _, only in leaves(root) if not only or only == chosen_variant(key, root, tree)]
    if command:
        known = ["recipe", *command.own, *(key for key in known if not command.ignores(key))]
    return f"{path}: unknown key{hint(path, list(dict.fromkeys(known)))}{came_from([path], tree)}"


def fields_of(path: list[str], root: Section, tree: Tree) -> list[str]:
    """The fields of a key whose value is a map with fixed fields; empty for other keys."""
    section = root.at(path[:-1])
    field = section.field(path[-1], tree.section(path[:-1])) if section and path else None
    return [*getattr(field.annotation, "__annotations__", ())] if field and is_typeddict(field.annotation) else []


def chosen_variant(path: str, root: Section, tree: Tree) -> str | None:
    """The tag of the configured variant of a key's section."""
    above = path.split(".")[:-1]
    section = root.at(above)
    return section and section.tag(tree.section(above) or {})


def allowed_words(path: str, root: Section, tree: Tree) -> list[Any]:
    """The allowed words of a key, if they are fixed."""
    *above, name = re.sub(r"(\.\d+)+$", "", path).split(".")  # without the place in a list
    section = root.at(above)
    if section is None:
        return []
    if name == "name":
        words = [word for model in section.variants.values() for word in choices(model.model_fields["name"].annotation)]
        return words or list(section.variants)
    return choices(section.field(name, tree.section(above)).annotation)


def key_of(loc: tuple[int | str, ...], root: Section) -> str:
    """The dotted key of a pydantic location, without the tags of variants."""
    parts: list[str] = []
    section: Section | None = root
    for part in map(str, loc):
        if section and part in section.variants and parts and not section.field(part):
            continue
        parts.append(part)
        section = section.child(part) if section else None
    return ".".join(parts)


def keys_in(text: str, tree: Tree) -> list[str]:
    """The keys in a message with a known source."""
    return [key for key in dict.fromkeys(re.findall(r"[a-z_]+(?:\.\w+)*", text)) if key in tree.sources]


def came_from(keys: list[str], tree: Tree) -> str:
    """` (from recipes/x.yaml)`: the sources of the keys and of their subkeys."""
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
