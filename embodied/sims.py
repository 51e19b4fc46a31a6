"""Make the environment of a simulator that needs packages of its own: python -m embodied.sims NAME"""

from __future__ import annotations

import sys

from embodied.core.errors import ConfigError
from embodied.envs.interpreter import locked
from embodied.run import launch

USAGE = """Make the locked environment of a simulator in the user's cache folder; env.python=auto takes it.

usage: python -m embodied.sims NAME [python=PATH] [--help]

  NAME      a name of python -m embodied.list sims
  python    the interpreter to make it with; unset: this one

An environment that is there and up to date stays as it is."""
PYTHON = "python="


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv, USAGE)


def start(argv: list[str]) -> int:
    chosen = [word for word in argv if word not in locked.names()]
    if len(argv) - len(chosen) != 1 or not all(word.startswith(PYTHON) for word in chosen):
        raise ConfigError(f"python -m embodied.sims NAME [python=PATH]; the names are {', '.join(locked.names())}")
    (name,) = set(argv) - {*chosen}
    if locked.problem_of(name) or chosen:
        locked.make(name, chosen[0].removeprefix(PYTHON) if chosen else sys.executable, launch.say)
    launch.say(f"{name}: {locked.python_of(name)} is there; use it with env.python=auto")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
