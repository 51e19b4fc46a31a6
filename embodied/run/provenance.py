"""Where a result comes from, and whether a run is still going on.

The command, the commit, the packages and the machine stand in run.json and in every results.json. A run's driver
holds a lock on its log, which the kernel releases when the process ends."""

from __future__ import annotations

import fcntl
import os
import platform
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

from embodied.system import version_of

SIMULATORS = ("mani_skill", "sapien", "mujoco", "robosuite")


STOPPED_AT_ONCE = "second "  # begins the cause in run.json of a run that a second signal has ended
PACKAGES = ("embodied-loop", "torch", "numpy", "gymnasium", *SIMULATORS, "transformers", "ray")


def try_lock(lock: int) -> bool | None:
    """Lock this open file until it is closed. False: another process holds the lock; None: the file system has no
    locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def was_killed(run: Path, info: dict) -> bool:
    """True if the run was killed, or its machine went down, before it recorded its end."""
    newest = [info, *info.get("resumed", [])][-1]
    if info.get("state") != "running" or newest.get("provenance", {}).get("host") != platform.node():
        return False  # not every file system shows locks of other machines
    return is_held(run) is False


def is_held(run: Path) -> bool | None:
    """True if a process is running this run; None if unknown."""
    try:
        lock = os.open(run / "logs" / "driver.log", os.O_RDWR)
    except OSError:
        return None
    try:
        free = try_lock(lock)
        return None if free is None else not free
    finally:
        os.close(lock)


def command_line() -> list[str]:
    """The command that started this process, as its user typed it: `python -m embodied.train recipe=NAME`."""
    if "-m" in sys.orig_argv[:-1]:
        return ["python", *sys.orig_argv[sys.orig_argv.index("-m") :]]
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def provenance() -> dict:
    """Origin of a result: command, code, packages, machine."""
    return {
        "command": command_line(),
        "commit": commit(),
        "host": platform.node(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "packages": {name: version for name in PACKAGES if (version := version_of(name))},
        "time": time.time(),
    }


@cache  # cached: the commit of the imported code, even if files change later
def commit() -> str | None:
    """The commit of the code that runs, marked when it has uncommitted changes; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
