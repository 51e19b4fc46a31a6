"""Finds the base recipe of a command line: the named recipe, or the stored recipe of the run to resume or evaluate.

An evaluation with `env.name` needs no recipe.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied.config.read import COMMAND_LINE, Source, flatten, own_path, recipe_sources
from embodied.config.recipe_files import EVERY_RECIPE, recipe_names
from embodied.core.files import as_path
from embodied.envs import env_that_knows
from embodied.policies.hub import is_hub_id
from embodied.policies.language.config import ANSWERING

if TYPE_CHECKING:
    from embodied.config.cli import Command
    from embodied.config.read import Section

CONFIG = "config.yaml"
ENV = ("env", "env.name", "env.task")  # keys that choose the env
EVERY_ENV = "python -m embodied.list envs tasks says which there are"
WHICH_POLICY = "which policy? python -m embodied.evaluate checkpoint=runs/... or checkpoint=random env.name=NAME"


def base_recipe(
    values: dict[str, Any], own: dict[str, tuple[str, ...]], command: Command, schema: Section, problems: list[str]
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
    for stored in (values.get("resume"), *own.get("checkpoint", ())):
        if isinstance(stored, str) and (recipe_path := stored_recipe(as_path(stored))):
            return str(recipe_path)
    if family := published(values | own):
        task = values.get("env.task")
        env = values.get("env.name") or (env_that_knows(task) if isinstance(task, str | list) else None)
        return protocol_recipe(own["checkpoint"][0], str(values.get("policy.name", family)), env, problems)
    if isinstance(values.get("resume"), str) and values["resume"] != "auto":
        problems.append(f"resume={values['resume']}: there is no config.yaml of a run in this folder")
    elif command.name == "evaluate" and "checkpoint" not in own:
        problems += [] if problems else [WHICH_POLICY]
    elif "checkpoint" in own:
        named = command.name == "evaluate" and bool(values.keys() & {*ENV})
        problems += no_recipe_in(own["checkpoint"], named)
    elif command.name == "check":
        if not problems and not any(key.partition(".")[0] == "env" for key in values):
            problems.append(f"which env? env.name=NAME, env.task=TASK or recipe=NAME; {EVERY_ENV}")
    elif not problems:
        problems.append(f"which recipe? recipe=NAME, or recipe=path/to/my.yaml; {EVERY_RECIPE}")
    return None


def run_to_resume(recipe: str, values: dict[str, Any], command: Command, schema: Section) -> Path | None:
    """The run for resume=auto; None: a new run begins. The recipe may set run.name and run.dir. Prints the run."""
    from embodied.run.checkpoints import newest_run

    sources = recipe_sources(recipe, schema, [])
    sources.append(Source(COMMAND_LINE, Path.cwd(), flatten(schema, values, COMMAND_LINE, [])))
    given = {key: own_path(schema, key, value, each.folder) for each in sources for key, value in each.values}
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


def usual_name(recipe: str, command: Command) -> str:
    """The default name of a recipe's runs."""
    return "sft-" * (command.name == "sft") + Path(recipe).stem


def without_recipe(command: Command, values: dict[str, Any], own: dict[str, tuple[str, ...]]) -> list[Source]:
    """The base of an evaluation without a recipe: it sets a length of training, which every config needs, and the
    family of a published model that needs no protocol."""
    if command.name != "evaluate":
        return []
    family = "language" if values.keys() & {*ANSWERING} else published(values | own)
    policy = [(("policy", "name"), family)] if family else []
    return [Source("no recipe", Path.cwd(), [(("run", "iterations"), 1), *policy])]


def has_options(values: dict[str, Any]) -> bool:
    """True if the checkpoint takes its options from the command line: a user's class or a published model."""
    mine = own_classes(values.get("checkpoint"))
    return values.get("policy.name", mine[0]) in mine if mine else bool(published(values))


def own_classes(checkpoints: Any) -> list[str]:
    """The user's policy classes among the checkpoints."""
    named = checkpoints if isinstance(checkpoints, list | tuple) else [checkpoints]
    return [name for name in named if isinstance(name, str) and is_class(name)]


def is_class(checkpoint: str) -> bool:
    """True for my_pkg.my_module:MyPolicy, unless a folder has this name."""
    return ":" in checkpoint and not as_path(checkpoint).exists()


def published(values: dict[str, Any]) -> str | None:
    """The family of a published checkpoint; one on the hub is downloaded if an env is named too."""
    from embodied.policies.hub import folder_of
    from embodied.policies.policy_folder import published_family

    named = values.get("checkpoint")
    (checkpoint,) = named if isinstance(named, list | tuple) and len(named) == 1 else (named,)
    find = folder_of if {"recipe", *ENV} & values.keys() else as_path
    return published_family(find(checkpoint)) if isinstance(checkpoint, str) else None


def protocol_recipe(checkpoint: str, family: str, env: Any, problems: list[str]) -> str | None:
    """Name of the recipe that evaluates published models of this family in this env; None for a family without such
    recipes, which any env may ask."""
    end = f"_published_{family}"
    known = {name.removesuffix(end) for name in recipe_names() if name.endswith(end)}
    if env in known:
        return f"{env}{end}"
    if known:
        problems.append(
            f"checkpoint={checkpoint} holds a published {family} model, which does not say for which env; there are "
            f"protocols for env.name={'|'.join(sorted(known))}; for another env name a recipe with policy.name={family}"
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
    """The value as a tuple: one text, or a list of them."""
    values = value if isinstance(value, list) else [value]
    if not values:
        problems.append(f"{key}=[]: name at least one")
    return tuple(text(key, one, problems) for one in values)


def no_recipe_in(checkpoints: tuple[str, ...], env_is_named: bool = False) -> list[str]:
    """Problems of checkpoints outside runs; none if they exist and the env is named."""
    from embodied.run.checkpoints import no_policy_in

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
