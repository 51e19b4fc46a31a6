"""The folder of a run: provenance, resolved recipe, metrics, checkpoints, evaluations, logs; never overwritten."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import platform
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from shlex import quote

from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.files import in_words, replace_text
from embodied.reporting.progress import RunLog, now
from embodied.run.checkpoints import name_of, read_json
from embodied.system.machine import version_of

DRIVER = "driver"
ENDING_S = 10.0  # wait for the processes of a killed command to end
SIMULATORS = ("mani_skill", "sapien", "mujoco", "robosuite")
PACKAGES = ("embodied-loop", "torch", "numpy", "gymnasium", *SIMULATORS, "transformers", "ray")


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.log = RunLog(path)
        self._lock = None
        self._writing = threading.RLock()  # guards run.json: other threads record starting hosts there

    @classmethod
    def create(cls, parent: Path, recipe: str, config_yaml: str, command: str = "train") -> RunFolder:
        """A new folder `<recipe>-<date>`, with a number if that name exists. `command` starts and resumes the run."""
        path = new_folder(parent, f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}")
        run = cls(path)
        run.logs.mkdir()
        run._hold()
        (path / "config.yaml").write_text(config_yaml)
        run._write({"state": "running", "command": command, "started": now(), "provenance": provenance()})
        run.record(processes={DRIVER: os.getpid()})
        return run

    @classmethod
    def reopen(cls, path: Path, command: str = "train", config_yaml: str = "") -> RunFolder:
        """Continue in the folder of an earlier run of the same command. `config_yaml` replaces its recipe."""
        run = cls(path)
        if not (path / "run.json").is_file():
            raise CheckpointError(f"{path} is not a run folder: run.json is missing")
        if (made_by := run.info().get("command", "train")) != command:
            again = f"python -m embodied.{made_by} {quote(f'resume={path}')}"
            raise CheckpointError(f"{path} is a run of another command: {again}")
        run.logs.mkdir(exist_ok=True)
        run._hold()
        resumed = [*run.info().get("resumed", []), {"at": now(), "provenance": provenance()}]
        if config_yaml and (before := (path / "config.yaml").read_text()) != config_yaml:
            resumed[-1]["config_before"] = f"config-{len(resumed)}.yaml"
            replace_text(path / resumed[-1]["config_before"], before)
            replace_text(path / "config.yaml", config_yaml)
        run.record(state="running", resumed=resumed, processes={DRIVER: os.getpid()})
        return run

    def evaluation(self, version: int) -> Path:
        """The folder of this version's evaluation in the run."""
        return self.path / "eval" / name_of(version)

    def info(self) -> dict:
        return read_json(self.path / "run.json")

    def record(self, **facts: object) -> None:
        """Add facts to run.json."""
        with self._writing:
            self._write({**self.info(), **facts})

    def record_process(self, host: str, pid: int) -> None:
        """Record the process id of a host, which ps shows under the same name."""
        # A missing folder is reported at the end of the run.
        with self._writing, suppress(OSError, CheckpointError):
            self.record(processes={**self.info().get("processes", {}), host: pid})

    def new_trace(self) -> Path:
        """The file for the timeline of this start of the run: trace.json, trace-2.json after a resume, and so on."""
        names = (f"trace-{n}.json" if n > 1 else "trace.json" for n in itertools.count(1))
        return next(path for name in names if not (path := self.path / name).exists())

    def count_restart(self) -> None:
        """Count one more restart of a worker."""
        with self._writing:
            self.record(restarts=self.info().get("restarts", 0) + 1)

    def finish(self, state: str, cause: str = "") -> None:
        self.record(state=state, cause=cause, ended=now(), processes={})  # the system reuses process ids
        self.log.close(failed=state == "failed")
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _hold(self) -> None:
        """Lock this run while it is in progress. The kernel unlocks it when this process ends."""
        lock = os.open(self.logs / "driver.log", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        if taken(lock) is False:
            print(f"{self.path}: another process still runs it; waiting {ENDING_S:g} s for its end", flush=True)
        until = time.monotonic() + ENDING_S
        while taken(lock) is False:
            if time.monotonic() >= until:
                os.close(lock)
                raise CheckpointError(f"{self.path}: this run is going on in another process; stop that one first")
            time.sleep(0.1)
        self._lock = lock  # without locks on this file system, two processes in one folder go unnoticed

    def _write(self, content: dict) -> None:
        replace_text(self.path / "run.json", json.dumps(content, indent=2) + "\n")


def new_folder(parent: Path, name: str) -> Path:
    """Make a folder of this name in `run.dir`, with a number if the name exists."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for attempt in itertools.count(1):
            path = parent / (name if attempt == 1 else f"{name}-{attempt}")
            with suppress(FileExistsError):
                path.mkdir()
                break
    except OSError as err:
        if err.errno == errno.ENOSPC:
            raise
        raise ConfigError(f"run.dir={parent}: no folder can be made there ({in_words(err)}); choose another") from None
    return path


def taken(lock: int) -> bool | None:
    """Lock this open file until it is closed. False: another process holds the lock; None: the file system has no
    locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def lost(run: Path, info: dict) -> bool:
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
        free = taken(lock)
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
