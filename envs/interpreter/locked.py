"""The locked environments of simulators: `env.python=auto` takes one that `python -m embodied.sims NAME` has made.

`locks/NAME.txt` pins every package. The packages above its first empty line are the simulator itself: lists name their
versions. An environment lies in the user's cache folder, with a copy of the lock that it was made from.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shlex import quote

from embodied.core.errors import ConfigError, EmbodiedError, nearest
from embodied.core.files import cache_folder

LOCKS = Path(__file__).with_name("locks")
STAMP = "lock.txt"  # in an environment that is whole
INSTALL_S = 3600.0
LAST_LINES = 5


def names() -> list[str]:
    return sorted(path.stem for path in LOCKS.glob("*.txt"))


def lock_of(name: str) -> Path:
    if name not in names():
        choices = f"(known: {', '.join(names())}){nearest(name, names())}"
        raise ConfigError(
            f"no locked environment is called {name!r} {choices}; name yours: env.python=FOLDER/bin/python"
        )
    return LOCKS / f"{name}.txt"


def about(name: str) -> tuple[str, dict[str, str]]:
    """What a lock is for, and the versions of the simulator's own packages."""
    first, *rest = lock_of(name).read_text().partition("\n\n")[0].splitlines()
    return first.lstrip("# "), dict(line.split("==") for line in rest)


def folder(name: str) -> Path:
    return cache_folder() / "sims" / name


def problem_of(name: str) -> str:
    """Why this environment cannot be used, with the command that makes it; empty if it can."""
    lock, stamp = lock_of(name).read_text(), folder(name) / STAMP
    if stamp.is_file() and stamp.read_text() == lock:
        return ""
    state = "made from another lock" if stamp.is_file() else "not made yet"
    return f"{state}: {how_to_make(name)}"


def how_to_make(name: str) -> str:
    return f"python -m embodied.sims {quote(name)}"


def python_of(name: str) -> Path:
    """The interpreter of this environment."""
    if problem := problem_of(name):
        raise ConfigError(f"the locked environment {name} is {problem}")
    return folder(name) / "bin" / "python"


def make(name: str, python: str = sys.executable, say: Callable[[str], None] = print) -> Path:
    """Make this environment anew. Returns its interpreter."""
    lock, place = lock_of(name), folder(name)
    (place / STAMP).unlink(missing_ok=True)
    say(f"{name}: virtual environment {place}")
    run([python, "-m", "venv", "--clear", str(place)])
    say(f"{name}: packages (minutes)")
    pip = [str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
    run([*pip, "--no-deps", "-r", str(lock)])  # the lock names all of them
    if "\ntorch==" in lock.read_text():
        run([*pip, "-c", str(lock), "torch"])  # except the CUDA libraries of its builds for GPUs
    (place / STAMP).write_text(lock.read_text())
    return python_of(name)


def run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=INSTALL_S)
    except OSError as err:
        raise ConfigError(f"{command[0] or 'python='}: {err.strerror}") from None
    except subprocess.TimeoutExpired:
        raise EmbodiedError(f"{' '.join(command)} was not done within {INSTALL_S:g} seconds") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-LAST_LINES:]
        raise EmbodiedError(f"{' '.join(command)} failed: {' | '.join(last)}")
