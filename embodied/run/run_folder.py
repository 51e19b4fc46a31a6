"""The folder of a run: provenance, resolved recipe, metrics, checkpoints, evaluations, logs; never overwritten."""

from __future__ import annotations

import errno
import itertools
import json
import os
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from shlex import quote

from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.files import in_words, replace_text
from embodied.records.progress import RunLog, timestamp
from embodied.run.checkpoints import name_of, read_json
from embodied.run.provenance import provenance, try_lock

DRIVER = "driver"
REQUEST, ANSWER = "workers.request.json", "workers.answer.json"  # of python -m embodied.workers, and to it
ENDING_S = 10.0  # wait for the processes of a killed command to end


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
        run._write({"state": "running", "command": command, "started": timestamp(), "provenance": provenance()})
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
        resumed = [*run.info().get("resumed", []), {"at": timestamp(), "provenance": provenance()}]
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

    def forget_processes(self, hosts: Collection[str]) -> None:
        """These hosts have ended; the system reuses their process ids."""
        with self._writing:
            processes = self.info().get("processes", {})
            self.record(processes={host: pid for host, pid in processes.items() if host not in hosts})

    def new_trace(self) -> Path:
        """The file for the timeline of this start of the run: trace.json, trace-2.json after a resume, and so on."""
        names = (f"trace-{n}.json" if n > 1 else "trace.json" for n in itertools.count(1))
        return next(path for name in names if not (path := self.path / name).exists())

    def count_restart(self) -> None:
        """Count one more restart of a worker."""
        with self._writing:
            self.record(restarts=self.info().get("restarts", 0) + 1)

    def finish(self, state: str, cause: str = "") -> None:
        self.record(state=state, cause=cause, ended=timestamp(), processes={})  # the system reuses process ids
        self.log.close(failed=state == "failed")
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _hold(self) -> None:
        """Lock this run while it is in progress. The kernel unlocks it when this process ends."""
        lock = os.open(self.logs / "driver.log", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        if try_lock(lock) is False:
            print(f"{self.path}: another process still runs it; waiting {ENDING_S:g} s for its end", flush=True)
        until = time.monotonic() + ENDING_S
        while try_lock(lock) is False:
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
