"""The recipes that come with the package, by name and by family. Only the standard library is needed: it is quick."""

from __future__ import annotations

import re
from pathlib import Path

from embodied import recipes

RECIPES = Path(recipes.__file__).resolve().parent
BY_TASK = RECIPES / "maniskill"  # a task of ManiSkill's each
TINY = RECIPES / "tiny"  # small models where others are large, for a quick look on a laptop
FOLDERS = (RECIPES, BY_TASK, TINY)
ENV_NAME = re.compile(r"""^env:[ ]*(?:\{[^}]*?|\n(?:[ ]+.*\n|\n)*?[ ]+)\bname:[ ]*["']?([\w.]+)""", re.M)
BASE = re.compile(r"^extends:[ ]*(\S+)", re.M)
DEFAULT_ENV = "maniskill"
FAMILIES = {  # env.name -> family; what is not here is a text env
    "maniskill": "maniskill",
    "libero": "libero",
    "robosuite": "robosuite",
    "pointmass": "toys",
    "gym": "toys",
}
LANGUAGE = "language"


def recipe_names(*folders: Path) -> list[str]:
    """Names of the recipes that come with the package, or of those in these folders; those of single tasks and tiny
    ones last."""
    return [name for folder in folders or FOLDERS for name in sorted(path.stem for path in folder.glob("*.yaml"))]


def recipe_file(name: str) -> Path:
    """The file of one of our recipes."""
    return next(path for folder in FOLDERS if (path := folder / f"{name}.yaml").is_file())


def env_of(recipe: str) -> str:
    """The env that one of our recipes names, or the one it extends."""
    text = recipe_file(recipe).read_text(encoding="utf-8")
    if found := ENV_NAME.search(text):
        return found[1]
    base = BASE.search(text)
    return env_of(base[1]) if base else DEFAULT_ENV


def by_family(names: list[str]) -> dict[str, list[str]]:
    """The recipes of each family: what they simulate, or language."""
    found: dict[str, list[str]] = {family: [] for family in (*FAMILIES.values(), LANGUAGE)}
    for name in names:
        found[FAMILIES.get(env_of(name), LANGUAGE)].append(name)
    return {family: those for family, those in found.items() if those}


def recipe_words() -> str:
    """The words that `recipe=` takes, on one line."""
    families = "; ".join(f"{family}: {', '.join(names)}" for family, names in by_family(recipe_names(RECIPES)).items())
    return f"{families}; one of recipes/maniskill or recipes/tiny (python -m embodied.list), or path/to/my.yaml"
