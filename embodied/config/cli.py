"""Reads the command line: `key=value` arguments and options. The same key twice is a mistake.

The commands with a recipe: the purpose of each, its own arguments, and the sections without effect.

The output of `--help` and `--cfg`: every key with default and meaning; the resolved recipe with its sources.

One line for every mistake in a recipe or on the command line: key, value, reason, and source of the value.

For a typo the nearest key is suggested (`unknown_key`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, to_jsonable_python
from typing_extensions import is_typeddict

from embodied.config.read import Section, Tree, choices, leaves, read_yaml, write_yaml, yaml_problem
from embodied.config.recipe_files import BY_TASK, RECIPES, by_family, recipe_names
from embodied.config.suggestions import FAR, USUAL, as_word, hint, usual
from embodied.core.errors import ConfigError, nearest
from embodied.policies.language.config import ANSWERING

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


@dataclass(frozen=True)
class Command:
    """A command: its own arguments besides the recipe's keys, and the sections without effect."""

    name: str
    purpose: str
    own: dict[str, str]  # key -> help
    unused: tuple[str, ...] = ()

    def ignores(self, key: str) -> bool:
        kept = self.name == "evaluate" and (key in ANSWERING or key == "policy.name")  # the class of a policy folder
        return not kept and any(key == name or key.startswith(f"{name}.") for name in self.unused)


NOT_ENV = ("policy", "algo", "sft", "collect", "learner", "roles", "placement", "pipeline", "eval", "resume")
COMMANDS = {
    "train": Command(
        "train",
        "Train a policy.",
        {"program": "A workflow of your own, my_pkg.my_module:MyLoop; unset: collect, update, publish."},
        unused=("sft", "collect"),
    ),
    "sft": Command(
        "sft",
        "Train a policy to imitate demonstrations, for sft.epochs passes over sft.data.",
        {},
        unused=("algo", "roles", "run.env_steps", "run.iterations", "eval.interleave"),
    ),
    "collect": Command(
        "collect",
        "Play episodes with a scripted expert or a policy and write them down as demonstrations.",
        {
            "out": "New folder for the dataset, in LeRobot's layout 3.0.",
            "checkpoint": "Source of the episodes: expert, or any value of embodied.evaluate's checkpoint [expert].",
        },
        unused=("run", "policy", "algo", "sft", "learner", "roles", "resume", "eval.interleave"),
    ),
    "check": Command(
        "check",
        "Check that an env keeps the contract, and list its observations and actions.",
        {
            "images": "true writes the images that a policy sees as PNG files, into run.dir/images/TASK [false].",
            "limit_s": "Seconds after which the check gives up and names its last step [1800].",
        },
        unused=NOT_ENV,
    ),
    "evaluate": Command(
        "evaluate",
        "Play a fixed list of episodes with a trained policy and report its success.",
        {
            "checkpoint": "A run's folder, one of its checkpoints, a policy folder, a hub id, random, zero, "
            "or my_pkg.my_module:MyPolicy; several as [A,B,random] play the same episodes and are compared."
        },
        unused=("policy", "algo", "sft", "collect", "roles", "resume", "eval.interleave"),
    ),
}


INDENT = 30
WIDTH = 118
SEVERAL = {
    "seeds": "0-4 or 0,2,5: a run for each seed, and a page of all; the same command continues.",
    "at_once": "Number of simultaneous runs, each on its own cores [as the machine allows].",
    "group": "The folder that names these runs [the newest of this command, else a new one].",
}  # of embodied.train, for several runs (sweeps/seeds_and_sweeps.py)


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
    for key, option, only in leaves(schema):
        if not command.ignores(key):
            tags.setdefault((key, describe(option)), []).append(only)
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
