"""List the commands and recipes, or run a command: embodied train recipe=pointmass_ppo

`python -m embodied train` and `embodied train` are `python -m embodied.train`. The list is read from the files' first
lines: nothing is imported for it.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from textwrap import wrap

from embodied import __version__
from embodied.config.recipe_files import BY_TASK, RECIPES, by_family, recipe_names
from embodied.core.errors import nearest

HERE = Path(__file__).parent
INDENT, WIDTH = 13, 118


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help", "help"):
        return show(listing())
    if words[0] == "--version":
        return show(__version__)
    name, files = words[0], commands()
    if name not in files:
        print(f"error: {answer_unknown(name, list(files))}", file=sys.stderr)
        return 2
    module = importlib.import_module(".".join(("embodied", *files[name].relative_to(HERE).with_suffix("").parts)))
    sys.argv = [str(files[name]), *words[1:]]  # as if the command had been started by its own name
    return module.main(words[1:])


def show(text: str) -> int:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader of the output, `head` for example, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def commands() -> dict[str, Path]:
    """The file of each command: modules and packages of this folder with a `main`."""
    packages = {path.parent.name: path for path in HERE.glob("*/__main__.py")}
    modules = {path.stem: path for path in HERE.glob("[!_]*.py")}
    return {name: path for name, path in sorted((modules | packages).items()) if has_main(path)}


def has_main(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return "\ndef main(" in text or "import main" in text


def purpose(path: Path) -> str:
    """The purpose of a command, from the first line of its file."""
    with path.open(encoding="utf-8") as file:
        first = file.readline().strip().removeprefix('"""').removesuffix('"""')
    text, _, _ = first.partition(" python -m ")
    return text.rstrip(":. ")


def listing() -> str:
    """The text printed by `embodied` without arguments."""
    lines = [
        f"Embodied Loop {__version__}: reinforcement learning for robot policies and language models.",
        "",
        "usage: embodied COMMAND [key=value ...]         the same as python -m embodied.COMMAND; each has --help",
        "",
        "commands",
        *(f"  {name:<{INDENT - 2}}{purpose(path)}" for name, path in commands().items()),
        "",
        "recipes, by family (recipe=NAME; embodied list says what each is for and whether it runs here)",
    ]
    for family, names in by_family(recipe_names(RECIPES, *BY_TASK)).items():
        lines += wrap_names(family, names)
    pages = f"the pages that messages name are in {(HERE / 'docs').resolve()}"
    return "\n".join([*lines, "", pages, "to begin with: embodied train recipe=pointmass_ppo"])


def wrap_names(title: str, names: list[str]) -> list[str]:
    """The names in lines of at most WIDTH letters; the first line begins with the title."""
    first = f"  {title:<{INDENT - 2}}"
    return wrap(" ".join(names), WIDTH, initial_indent=first, subsequent_indent=" " * INDENT, break_on_hyphens=False)


def answer_unknown(name: str, names: list[str]) -> str:
    if "=" in name:
        return f"{name}: name a command before it: embodied train {name}; the commands are {', '.join(names)}"
    meant = nearest(name, names, before=", ") or "."
    return f"embodied {name}: no such command{meant} Commands: {', '.join(names)}"


if __name__ == "__main__":
    raise SystemExit(main())
