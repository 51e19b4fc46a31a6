"""`run.start_from=RECIPE`: finds the finished run of that recipe whose policy is the start, or describes the run to
make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from glob import escape
from operator import getitem
from pathlib import Path
from shlex import join
from typing import Any

from embodied.config.commands import COMMANDS, Command
from embodied.config.key_tree import root
from embodied.config.merge import COMMAND_LINE, recipe_sources
from embodied.config.recipe import Loaded, RunConfig, load
from embodied.config.recipe_files import recipe_names
from embodied.config.yaml_values import write_yaml
from embodied.core.arrays import flat_dict
from embodied.core.errors import CheckpointError, ConfigError, nearest
from embodied.run.checkpoints import read_json
from embodied.run.policy_source import find_start, stored

# The command line's values of these also hold for the first run.
ALSO = ("seed", "run.dir", "env", "policy", "learner", "placement", "cluster", "eval", "faults")
# Keys that must agree for an existing run to be the wanted one, besides task and policy
DECIDES = ("seed", "algo", "sft", "collect", "run.env_steps", "run.iterations")
WHERE = ("data", "cache")  # options of sft: paths
# Options of an env that do not change a policy's observations and actions
ASIDE = ("num_envs", "stagger", "retries", "modules", "fast_images", "video_size")


@dataclass(frozen=True)
class FirstRun:
    """A run that trains the initial policy of another run."""

    recipe: str
    command: str  # train or sft
    arguments: tuple[str, ...]
    loaded: Loaded
    folder: Path | None = None  # of the finished run; None: not trained yet
    trained_otherwise: tuple[Path, str] | None = None  # a finished run of the same policy, and an option it differs in

    def describe(self) -> str:
        """A line that names the run that the start comes from, or the command that trains it first."""
        if self.folder:
            return f"start       {self.folder}, a run of recipe {self.recipe}"
        missing = f"no finished run of recipe {self.recipe} with this policy in {self.loaded.config.run.dir}"
        if self.trained_otherwise:
            run, key = self.trained_otherwise
            missing = f"{run} had another {key} (to start from it all the same: run.start_from={run})"
        return f"start       {missing}: first\n            python -m embodied.{self.command} {join(self.arguments)}"


def first_run(loaded: Loaded, before: tuple[str, ...] = ()) -> FirstRun | None:
    """The first run of a recipe whose `run.start_from` names another recipe. `before`: the recipes that wait for this
    start, to detect circles."""
    config = loaded.config
    recipe = recipe_named(config.run.start_from) if config.run.start_from else None
    if recipe is None:
        return None
    if recipe in before:
        circle = " -> ".join([*before[before.index(recipe) :], recipe])
        raise ConfigError(
            f"run.start_from: recipes start from each other in a circle: {circle}; set null in one of them"
        )
    command = commands_of_recipe(recipe)[0]
    arguments = (f"recipe={recipe}", *said_for_both(loaded, COMMANDS[command]))
    try:
        first = load([*arguments], entry=command)
    except ConfigError as err:
        raise ConfigError(f"run.start_from={recipe}: {err}") from None
    assert first is not None, "it was asked for no help"
    run = FirstRun(recipe, command, arguments, replace(first, flags=loaded.flags))
    finished = finished_runs(first, config.policy)
    folder = next((path for path, other in finished.items() if not other), None)
    return replace(run, folder=folder, trained_otherwise=None if folder else next(iter(finished.items()), None))


def recipe_named(start: Path) -> str | None:
    """The recipe in `run.start_from`; None if it is a folder."""
    if start.is_dir():
        return None
    if str(start) in recipe_names() or (start.suffix in (".yaml", ".yml") and start.is_file()):
        return str(start)
    raise ConfigError(
        f"run.start_from={start}: there is no such folder (of a run, a checkpoint or a policy), and no recipe of this "
        f"name{nearest(start.name, recipe_names())}"
    )


def commands_of_recipe(recipe: str) -> list[str]:
    """The commands of a recipe, sft first: decided by the nearest file, among the recipe and its bases, that sets keys
    of `sft` or `algo`."""
    problems: list[str] = []
    for source in reversed(recipe_sources(recipe, root(RunConfig), problems)):
        sections = {key[0] for key, _ in source.values}
        if commands := [name for name, section in (("sft", "sft"), ("train", "algo")) if section in sections]:
            return commands
    return ["train"]


def said_for_both(loaded: Loaded, command: Command) -> list[str]:
    """Arguments of the command line that also hold for the first run, which is one of `command`."""
    values = loaded.config.model_dump(mode="json")
    asked = [key for key, where in loaded.sources.items() if where == COMMAND_LINE]
    both = [key for key in asked if any(key == name or key.startswith(f"{name}.") for name in ALSO)]
    both = [key for key in both if not command.ignores(key)]
    return [f"{key}={write_yaml(reduce(getitem, key.split('.'), values))}" for key in both]


def start_of_resumed(run: Path, asked: Path) -> Path | None:
    """The start of the resumed run, if `asked` names its folder or a recipe."""
    start = stored(run).get("run", {}).get("start_from")
    if not start or not Path(start).is_absolute():
        return None
    return Path(start) if asked == Path(start) or recipe_named(asked) else None


def finished_runs(first: Loaded, policy: Any) -> dict[Path, str]:
    """The finished runs of this recipe in run.dir with the same env and policy, newest first; and for each an option of
    training in which it differs, or ""."""
    finished: dict[Path, str] = {}
    runs = first.config.run.dir.glob(f"{escape(first.name)}-[0-9]*/run.json")
    for file in sorted(runs, key=lambda path: path.stat().st_mtime, reverse=True):
        run = file.parent
        try:
            if read_json(file).get("state") == "finished" and same_task(run, first.config):
                find_start(run, policy)
                finished[run] = different_training(run, first)
        except (CheckpointError, ConfigError):
            continue  # of another policy, or damaged
    return finished


def same_task(run: Path, config: RunConfig) -> bool:
    """True if a run was trained in this recipe's env; options newer than the run, or left to the task, are not
    compared."""
    env, wanted = stored(run).get("env", {}), config.env.model_dump(mode="json")
    return all(None in (value, env.get(key)) or env[key] == value for key, value in wanted.items() if key not in ASIDE)


def different_training(run: Path, first: Loaded) -> str:
    """An option in which a run's training differs from this recipe's; "" if none does. Options newer than the run are
    not compared."""
    then, now = flat_dict(stored(run)), flat_dict(first.config.model_dump(mode="json"))
    different = (
        key
        for key, value in now.items()
        if key.startswith(DECIDES) and key.partition(".")[2] not in WHERE and then.get(key, value) != value
    )
    return next(different, "")


def starting_from(config: RunConfig, folder: Path) -> RunConfig:
    """The config with this folder in `run.start_from`, so that a resumed run finds it."""
    return config.with_values("run", start_from=folder.absolute())
