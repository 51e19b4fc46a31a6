"""What a user asks for: the commands with a recipe, the `key=value` arguments, and the recipe that they start from.

A command line names its recipe, or the run to resume or evaluate, whose stored recipe is then the base. An evaluation
with `env.name` needs none.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import Any

import yaml

from embodied.config.read import (
    COMMAND_LINE,
    Command,
    Section,
    Source,
    flatten,
    own_path,
    recipe_sources,
)
from embodied.config.recipe_files import EVERY_RECIPE, recipe_names
from embodied.core.errors import ConfigError
from embodied.core.files import as_path
from embodied.core.yaml_text import read_yaml, write_yaml, yaml_problem
from embodied.policies.config import ANSWERING, PLAYING

FLAGS = {"-h": "--help", "--help": "--help", "--cfg": "--cfg", "--dry-run": "--dry-run"}
SEVERAL = {  # arguments of several runs (embodied/sweep.py)
    "seeds": "0-4 or 0,2,5: a run for each seed, and a page of all; the same command continues.",
    "at_once": "Number of simultaneous runs, each on its own cores [as the machine allows].",
    "group": "The folder that names these runs [the newest of this command, else a new one].",
}
CONFIG = "config.yaml"
ENV = ("env", "env.name", "env.task")  # keys that choose the env
EVERY_ENV = "python -m embodied.list envs tasks says which there are"
WHICH_POLICY = "which policy? add checkpoint=runs/..., or checkpoint=random env.name=NAME"
KEY = re.compile(r"[A-Za-z_]\w*(\.[\w,+-]+)*")


NOT_ENV = ("policy", "algo", "sft", "collect", "learner", "roles", "placement", "pipeline", "eval", "resume")
COMMANDS = {
    "train": Command(
        "train",
        "Train a policy.",
        {"program": "A workflow of your own, my_pkg.my_module:MyLoop; unset: collect, update, publish."},
        unused=("sft", "collect"),
        several=SEVERAL,
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
            "my_pkg.my_module:MyPolicy, or the address of a server, ws://HOST:PORT; several as [A,B,random] play the "
            "same episodes and are compared."
        },
        unused=("policy", "algo", "sft", "collect", "roles", "resume", "eval.interleave"),
        used=(*ANSWERING, *PLAYING, "policy.name"),  # what may be said of a policy folder, and its class
    ),
}


# Arguments


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
    if any(word in FLAGS for word in arguments):
        raise ConfigError("--help, --cfg and --dry-run are for the command line")
    return arguments


def parse(
    argv: Sequence[str], folder_key: str = "resume", has_recipes: bool = True
) -> tuple[set[str], dict[str, Any], list[str]]:
    """The flags, the values by key, and the mistakes of a command line. For a path without a key the message suggests
    `folder_key`, or recipe= if the command `has_recipes`."""
    flags: set[str] = set()
    values: dict[str, Any] = {}
    problems: list[str] = []
    for arg in argv:
        key, equals, text = arg.partition("=")
        if arg in FLAGS:
            flags.add(FLAGS[arg])
        elif not equals or not KEY.fullmatch(key):
            from embodied.config.answers import not_a_setting

            problems.append(not_a_setting(arg, FLAGS, folder_key, has_recipes))
        elif key in values:
            problems.append(f"{key} is given twice on the command line: {write_yaml(values[key])} and {text}")
        elif not text.strip():
            problems.append(f"{key}= has no value; if this key may have none, write {key}=null")
        else:
            try:
                values[key] = read_yaml(text)
            except (yaml.YAMLError, ValueError) as err:
                reason = yaml_problem(err).removeprefix("line 1: ")
                problems.append(f"{arg}: the value is not YAML ({reason}); quote it for the shell: '{key}=...'")
            if lost := key_without_space(values.get(key)):
                del values[key]
                spaced = lost.replace(":", ": ", 1)
                problems.append(
                    f"{arg}: a space is missing after a colon; write {{{spaced}, ...}} and quote it for the shell"
                )
    return flags, values, problems


def key_without_space(value: Any) -> str:
    """The first key of a map in braces of which YAML reads every key:value as a key alone; empty if there is none."""
    if isinstance(value, dict) and value and all(given is None and ":" in str(key) for key, given in value.items()):
        return str(next(iter(value)))
    inside = value if isinstance(value, list) else value.values() if isinstance(value, dict) else []
    return next(filter(None, map(key_without_space, inside)), "")


# The base recipe


def base_recipe(
    values: dict[str, Any],
    arguments: dict[str, tuple[str, ...]],
    command: Command,
    schema: Section,
    problems: list[str],
) -> str | None:
    """The named recipe, else the stored recipe of the run to resume or evaluate; None without either."""
    if "recipe" in values:
        given = values.pop("recipe")
        named = text("recipe", given, problems)
        if named is not given:
            return None
        if values.get("resume") == "auto" and (run := run_to_resume(named, values, command, schema)):
            values["resume"] = str(run)  # the stored recipe contains the arguments of the first start
            return str(run / CONFIG)
        return named
    for stored in (values.get("resume"), *arguments.get("checkpoint", ())):
        if isinstance(stored, str) and not is_server(stored) and (recipe_path := stored_recipe(as_path(stored))):
            return str(recipe_path)
    if family := published(values | arguments):
        from embodied.envs.config import env_that_knows

        task = values.get("env.task")
        env = values.get("env.name") or (env_that_knows(task) if isinstance(task, str | list) else None)
        return protocol_recipe(arguments["checkpoint"][0], str(values.get("policy.name", family)), env, problems)
    if isinstance(values.get("resume"), str) and values["resume"] != "auto":
        problems.append(f"resume={values['resume']}: there is no config.yaml of a run in this folder")
    elif command.name == "evaluate" and "checkpoint" not in arguments:
        problems += [] if problems else [WHICH_POLICY]
    elif "checkpoint" in arguments:
        named = command.name == "evaluate" and bool(values.keys() & {*ENV})
        problems += [] if problems else no_recipe_in(arguments["checkpoint"], named)
    elif command.name == "check":
        if not problems and not any(key.partition(".")[0] == "env" for key in values):
            problems.append(f"which env? env.name=NAME, env.task=TASK or recipe=NAME; {EVERY_ENV}")
    elif not problems:
        problems.append(f"which recipe? recipe=NAME, or recipe=path/to/my.yaml; {EVERY_RECIPE}")
    return None


def run_to_resume(recipe: str, values: dict[str, Any], command: Command, schema: Section) -> Path | None:
    """The run for resume=auto; None: a new run begins. The recipe may set run.name and run.dir. Prints the run."""
    sources = recipe_sources(recipe, schema, [])
    sources.append(Source(COMMAND_LINE, Path.cwd(), flatten(schema, values, COMMAND_LINE, [])))
    given = {key: own_path(schema, key, value, source.folder) for source in sources for key, value in source.values}
    name = str(given.get(("run", "name")) or usual_name(recipe, command))
    parent = Path(str(given.get(("run", "dir"), "runs")))
    run, notes = newest_run(parent, name)
    if run is None:
        notes.append(f"{parent} has no run called {name}, so a new one begins")
    else:
        saved = any(run.glob("checkpoints/v[0-9]*"))
        notes.append(f"goes on with {run}{'' if saved else ' from its start: it has saved nothing yet'}")
    print("\n".join(f"resume=auto {note}" for note in notes), flush=True)
    return run


def newest_run(parent: Path, name: str) -> tuple[Path | None, list[str]]:
    """The last run of this name, with or without checkpoints, or None; and a line for each newer folder that is no
    run."""
    dated = re.compile(re.escape(name) + r"-\d{8}-\d{6}(-\d+)?")
    folders = [path for path in parent.glob(f"{escape(name)}-*") if dated.fullmatch(path.name) and path.is_dir()]
    files = ("run.json", "config.yaml")  # that every run folder has
    lacks = {path: next((file for file in files if not (path / file).is_file()), None) for path in folders}
    whole = [path for path in folders if lacks[path] is None]
    last = max(whole, key=lambda path: (path / "run.json").stat().st_mtime, default=None)
    newer = sorted(path for path in folders if lacks[path] and (last is None or path.name > last.name))
    return last, [f"{path} cannot be resumed: {lacks[path]} is missing" for path in newer]


def usual_name(recipe: str, command: Command) -> str:
    """The default name of a recipe's runs."""
    return "sft-" * (command.name == "sft") + Path(recipe).stem


def without_recipe(command: Command, values: dict[str, Any], arguments: dict[str, tuple[str, ...]]) -> list[Source]:
    """The base of an evaluation without a recipe: it sets a length of training, which every config needs, and the
    family of a published model that needs no protocol."""
    if command.name != "evaluate":
        return []
    speaks = bool(values.keys() & {*ANSWERING}) and "policy.name" not in values
    family = "language" if speaks else published(values | arguments)
    policy = [(("policy", "name"), family)] if family else []
    return [Source("no recipe", Path.cwd(), [(("run", "iterations"), 1), *policy])]


def has_options(values: dict[str, Any]) -> bool:
    """True if the checkpoint takes its options from the command line: a server, a user's class or a published model."""
    mine = own_classes(values.get("checkpoint"))
    return (
        values.get("policy.name", mine[0]) in mine
        if mine
        else is_server(values.get("policy.url")) or bool(published(values))
    )


def name_server(values: dict[str, Any]) -> None:
    """Without a checkpoint, the server in policy.url is the policy to evaluate, as in checkpoint=ws://HOST:PORT."""
    named = values.get("policy.url", values.get("checkpoint"))
    if is_server(named):
        values.update({"checkpoint": named, "policy.name": "remote"} | values | {"policy.url": named})


def is_server(named: Any) -> bool:
    """True for the address of a server that acts."""
    return isinstance(named, str) and named.startswith(("ws://", "wss://"))


def own_classes(checkpoints: Any) -> list[str]:
    """The user's policy classes among the checkpoints."""
    named = checkpoints if isinstance(checkpoints, list | tuple) else [checkpoints]
    return [name for name in named if isinstance(name, str) and is_class(name)]


def is_class(checkpoint: str) -> bool:
    """True for my_pkg.my_module:MyPolicy, unless a folder has this name."""
    return ":" in checkpoint and not is_server(checkpoint) and not as_path(checkpoint).exists()


def published(values: dict[str, Any]) -> str | None:
    """The family of a published checkpoint; one on the hub is downloaded if an env is named too."""
    named = values.get("checkpoint")
    if not named:
        return None
    from embodied.policies.hub import folder_of
    from embodied.policies.policy_folder import published_family

    (checkpoint,) = named if isinstance(named, list | tuple) and len(named) == 1 else (named,)
    find = folder_of if {"recipe", *ENV} & values.keys() else as_path
    return published_family(find(checkpoint)) if isinstance(checkpoint, str) and not is_server(checkpoint) else None


def protocol_recipe(checkpoint: str, family: str, env: Any, problems: list[str]) -> str | None:
    """Name of the recipe that evaluates published models of this family in this env; None for a family without such
    recipes, which any env may ask."""
    end = f"_published_{family}"
    envs = {name.removesuffix(end) for name in recipe_names() if name.endswith(end)}
    if env in envs:
        return f"{env}{end}"
    if envs:
        problems.append(
            f"checkpoint={checkpoint} holds a published {family} model, which does not say for which env; there are "
            f"protocols for env.name={'|'.join(sorted(envs))}; for another env name a recipe with policy.name={family}"
        )
    elif env is None:
        problems.append(
            f"checkpoint={checkpoint} holds a {family} model, so name its env: for example env.name=sums, or "
            "recipe=NAME"
        )
    return None


def stored_recipe(path: Path) -> Path | None:
    """The config.yaml of a run folder, or of the run that contains this folder
    (runs/NAME/checkpoints/VERSION/policy)."""
    path = Path(os.path.realpath(path))  # resolve() fails for circular links
    return next((at / CONFIG for at in [path, *path.parents[:3]] if (at / "run.json").is_file()), None)


def text(key: str, value: Any, problems: list[str]) -> str:
    if not isinstance(value, str):
        problems.append(f"{key}={value!r}: should be text")
    return str(value)


def texts(key: str, value: Any, problems: list[str]) -> tuple[str, ...]:
    """The value as a tuple: one text, or a list of them; a folder may be named 3."""
    values = value if isinstance(value, list) else [value]
    if not values:
        problems.append(f"{key}=[]: name at least one")
    return tuple(text(key, str(word) if type(word) is int else word, problems) for word in values)


def no_recipe_in(checkpoints: tuple[str, ...], env_is_named: bool = False) -> list[str]:
    """Problems of checkpoints outside runs; none if they exist and the env is named."""
    from embodied.policies.hub import is_hub_id
    from embodied.policies.policy_folder import no_policy_in

    problems, others = [], []
    for checkpoint in checkpoints:
        on_hub = env_is_named and is_hub_id(checkpoint)
        by_name = on_hub or ":" in checkpoint or checkpoint in ("random", "zero")
        exists = not by_name and as_path(checkpoint).exists()
        if exists and (empty := no_policy_in(checkpoint)):
            problems.append(f"checkpoint={empty}")
        elif by_name or exists:
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
