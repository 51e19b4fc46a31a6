"""The packaged recipes by name and by family. Fast: only the standard library is imported."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

RECIPES = Path(__file__).parents[1].joinpath("recipes").resolve()
ENVS = Path(__file__).parents[1] / "envs"
# Folders of recipes for single tasks, by simulator
BY_TASK = tuple(sorted(at for at in RECIPES.iterdir() if (ENVS / at.name / "__init__.py").is_file()))
TINY = RECIPES / "tiny"  # recipes with small models instead of large ones, for a laptop
FOLDERS = (RECIPES, *BY_TASK, TINY)
ENV_NAME = re.compile(r"""^env:[ ]*(?:\{[^}]*?|\n(?:[ ]+.*\n|\n)*?[ ]+)\bname:[ ]*["']?([\w.]+)""", re.M)
BASE = re.compile(r"^extends:[ ]*(\S+)", re.M)
FAMILY = re.compile(r'^FAMILY = "(\w+)"', re.M)
DEFAULT_ENV = "maniskill"
LANGUAGE = "language"
EVERY_RECIPE = "python -m embodied.list recipes says which there are"


def recipe_names(*folders: Path) -> list[str]:
    """Names of the packaged recipes, or of the recipes in these folders; recipes of single tasks and tiny recipes come
    last."""
    return [name for folder in folders or FOLDERS for name in sorted(path.stem for path in folder.glob("*.yaml"))]


def recipe_file(name: str) -> Path:
    """The file of a packaged recipe."""
    return next(path for folder in FOLDERS if (path := folder / f"{name}.yaml").is_file())


def env_of(recipe: str) -> str:
    """The env of a packaged recipe or of its base."""
    text = recipe_file(recipe).read_text(encoding="utf-8")
    if match := ENV_NAME.search(text):
        return match[1]
    base = BASE.search(text)
    return env_of(base[1]) if base else DEFAULT_ENV


@cache
def family_of(env: str) -> str:
    """The family under which an env's recipes are listed: `FAMILY` in its folder, else the env's name; envs without a
    folder are "language". Read without importing the env."""
    module = ENVS / env / "__init__.py"
    if not module.is_file():
        return LANGUAGE
    match = FAMILY.search(module.read_text(encoding="utf-8"))
    return match[1] if match else env


def by_family(names: list[str]) -> dict[str, list[str]]:
    """The recipes by family; the default env comes first, language models come last."""
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(family_of(env_of(name)), []).append(name)
    return dict(sorted(families.items(), key=lambda item: (item[0] == LANGUAGE, item[0] != DEFAULT_ENV, item[0])))
