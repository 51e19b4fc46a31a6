"""List recipes, envs, policies and models with their needs: python -m embodied.list [recipes|envs|tasks|...]"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from functools import partial

from embodied.config.recipe import RunConfig, load
from embodied.config.recipe_files import by_family, recipe_file, recipe_names
from embodied.core.arrays import gather
from embodied.core.errors import ConfigError, nearest
from embodied.core.files import as_path
from embodied.core.plugins import ENGINE_CLASSES, ENVS, OURS, PACKAGE, Entry, Plugins
from embodied.envs import env_class, plugin
from embodied.envs.config import ENV_CONFIGS, EnvConfig
from embodied.envs.interpreter import locked
from embodied.policies.config import POLICY_CONFIGS
from embodied.policies.hub import how_to_get
from embodied.run import launch
from embodied.system.machine import ENGINES, NO_VLLM, Machine, why_no_engine, why_not

NVIDIA = "/dev/nvidiactl"
USAGE = """List recipes, envs, tasks, policies, models and engines: their needs, and whether they run here.

usage: python -m embodied.list [recipes|envs|tasks|sims|policies|models|engines] [--help]

  recipes                       recipe=NAME: configurations of runs
  envs                          env.name=NAME: simulators, and envs that ask in words
  tasks                         env.task=NAME, by simulator (takes some seconds: it starts the simulators)
  sims                          env.python=auto: environments of simulators with packages of their own
  policies                      policy.name=NAME: families of robot policies, and language models
  models                        policy.pretrained=NAME: language models on this machine, and those of recipes
  engines                       policy.engine=NAME: programs that generate a language model's answers

Without a word: all but tasks."""
LACKS = "lacks "


@dataclass(frozen=True)
class Item:
    """A line of a list."""

    name: str
    purpose: str
    problem: str  # reason why it does not run here; "" if it runs
    family: str = ""  # of a recipe


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv, USAGE)


def start(argv: list[str]) -> int:
    if unknown := [word for word in argv if word not in LISTS]:
        hint = nearest(unknown[0], LISTS, before=", ") or ";"
        raise ConfigError(f"{unknown[0]}: no such list{hint} there are {', '.join(LISTS)}; --help says more")
    machine = Machine()
    problems = set()
    for name in argv or ["recipes", "envs", "sims", "policies", "models", "engines"]:
        items = list(LISTS[name](machine))
        print_list(name, items)
        problems |= {item.problem for item in items}
    for line in advice(problems, machine):
        print(line)
    return 0


def advice(problems: set[str], machine: Machine) -> Iterable[str]:
    """Lines that say how to install missing parts."""
    if NO_VLLM in problems:
        yield "vLLM is installed by: make vllm"
    if any(problem.startswith("not installed") for problem in problems - {NO_VLLM}):
        yield "How to install missing parts: python -m embodied.doctor."
    if lacking := [problem for problem in problems if problem.startswith(LACKS)]:
        for options in dict.fromkeys(ENV_CONFIGS.values()):
            yield from options.advice(lacking, machine.environ)


def print_list(title: str, items: list[Item]) -> None:
    """Print a list."""
    width = max(len(title), *(len(item.name) + 2 for item in items))
    print(f"{title:<{width}}  here")
    family = ""
    for item in items:
        if item.family != family:
            family = item.family
            print(f" {family}")
        problem = f" ({item.problem})" if item.problem else ""
        here = "no" if item.problem else "yes"
        print(f"  {item.name:<{width - 2}}  {here:<4}  {item.purpose}{problem}")
    print()


def recipes(machine: Machine) -> Iterable[Item]:
    """The recipes by family, small ones for a laptop last in each."""
    models, families = machine.models(), by_family(recipe_names())
    for family, name in [(family, name) for family, names in families.items() for name in names]:
        config = load([f"recipe={name}"]).config
        yield Item(name, comment_of(name), problem_of_recipe(config, machine, models), family)


def problem_of_recipe(config: RunConfig, machine: Machine, models: Container[str]) -> str:
    """The missing package, file or model of a recipe; empty if the recipe runs here."""
    policy = config.policy
    problem = lacks_packages(config.env, machine) or why_not(policy.needs, machine)
    if policy.speaks:
        problem = problem or why_no_engine(policy.engine, machine)
    problem = problem or problem_of_env(config.env, machine)
    if policy.speaks:
        problem = problem or lacks_model(policy.pretrained, models, machine)
    large = policy.published and policy.preset == "full"
    if (config.env.on_gpu or config.learner.device == "cuda" or large) and not machine.exists(NVIDIA):
        problem = problem or "no NVIDIA GPU"
    return problem


def lacks_packages(env: EnvConfig, machine: Machine) -> str:
    """What an env lacks here, or in the interpreter of its own; an interpreter of the user's is not asked."""
    if env.elsewhere:
        return machine.lock_problem(env.lock) if env.python == "auto" else ""
    return why_not(env.needs, machine)


def lacks_model(name: str | None, models: Container[str], machine: Machine) -> str:
    """The missing model of a recipe and its source; empty if it is on this machine, or if the recipe needs none."""
    here = name is None or name in models or machine.exists(as_path(name))
    return "" if here else missing_with_sources({name: how_to_get(name)})


def sims(machine: Machine) -> Iterable[Item]:
    for name in locked.names():
        purpose, versions = locked.about(name)
        packages = ", ".join(f"{package} {version}" for package, version in versions.items())
        yield Item(name, f"{purpose}: {packages}.", machine.lock_problem(name))


def models(machine: Machine) -> Iterable[Item]:
    kinds = machine.models()
    yield from (Item(name, f"A language model of the kind {kind}.", "") for name, kind in kinds.items())
    configs = {name: load([f"recipe={name}"]).config.policy for name in recipe_names()}
    named = gather((policy.pretrained, name) for name, policy in configs.items() if policy.speaks and policy.pretrained)
    for name, users in named.items():
        if lacks_model(name, kinds, machine):
            yield Item(name, f"A language model of recipe {', '.join(users)}.", f"not here: {how_to_get(name)}")


def engines(machine: Machine) -> Iterable[Item]:
    for entry in map(ENGINE_CLASSES.entry, ENGINE_CLASSES.names):
        ours = ENGINES.get(entry.name)
        yield Item(entry.name, ours.purpose, why_no_engine(entry.name, machine)) if ours else of_package(entry)


def plugins(models: Plugins, machine: Machine) -> Iterable[Item]:
    """An item for each plug-in of these options. Those of other packages are not imported."""
    for entry in map(models.entry, models.names):
        if entry.package == PACKAGE:
            options = models[entry.name]
            text = f"{first_sentence(options.__doc__)} Needs {options.needs}."
            yield Item(entry.name, text, why_not(options.needs, machine))
        else:
            yield of_package(entry)


def of_package(entry: Entry) -> Item:
    return Item(entry.name, f"{entry.where} of the package {entry.package}.", "")


def tasks(machine: Machine) -> Iterable[Item]:
    for env in OURS[ENVS]:
        options, catalogue = ENV_CONFIGS[env], plugin(env).catalogue
        problem = why_not(options.needs, machine)
        if catalogue and not problem:
            yield from tasks_of(env, machine)
        else:
            yield from (Item(f"{env} {task}".strip(), text, problem) for task, text in options.tasks_in_words(env))


def tasks_of(env: str, machine: Machine) -> Iterable[Item]:
    """The tasks listed by a simulator."""
    done = machine.probe("tasks", env)
    if done.problem:
        yield Item(env, "its tasks cannot be listed", done.problem)
        return
    for task, facts in done.answer.items():
        yield Item(f"{env} {task}", facts["about"], missing_with_sources(facts["missing"]) or facts["problem"])


def missing_with_sources(assets: dict[str, str]) -> str:
    """The missing files with the way to get each; empty if none is missing."""
    return LACKS + "; ".join(f"{asset}: {source}" for asset, source in assets.items()) if assets else ""


def problem_of_env(env: EnvConfig, machine: Machine) -> str:
    """The reason why a recipe's env does not run here; empty if it runs."""
    problem = lacks_packages(env, machine)
    if problem or env.elsewhere:
        return problem
    return missing_with_sources(env_class(env).missing_files(env, machine))


def comment_of(recipe: str) -> str:
    """The first sentence of the comment above a recipe."""
    lines = recipe_file(recipe).read_text(encoding="utf-8").splitlines()
    above = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return first_sentence(" ".join(line.removeprefix("#").strip() for line in above))


def first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".:") + "."


LISTS: dict[str, Callable[[Machine], Iterable[Item]]] = {
    "recipes": recipes,
    "envs": partial(plugins, ENV_CONFIGS),
    "tasks": tasks,
    "sims": sims,
    "policies": partial(plugins, POLICY_CONFIGS),
    "models": models,
    "engines": engines,
}


if __name__ == "__main__":
    raise SystemExit(main())
