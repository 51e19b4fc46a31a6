"""The folder of a run: provenance, resolved recipe, metrics, checkpoints, evaluations, logs; never overwritten."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from embodied.core.errors import CheckpointError
from embodied.run.checkpoints import name_of, read_json, replace_text


class Curves:
    """TensorBoard's curves, written with its own record writer: no thread behind, and no torch in the driver.

    One event file. A resumed run opens another beside it; TensorBoard joins them.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab", buffering=0)
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, step: int, numbers: dict) -> None:
        """One point of every curve; names without a folder get `run/`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name if "/" in name else f"run/{name}", simple_value=float(number))
            for name, number in numbers.items()
            if isinstance(number, int | float)
        ]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._file.close()

    def _write(self, event) -> None:
        self._records.write(event.SerializeToString())


DRIVER = "driver"
PACKAGES = ("embodied-loop", "torch", "numpy", "gymnasium", "mani_skill", "sapien", "transformers", "ray")


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self._metrics = None
        self._curves = None
        self._lock = None
        self._writing = threading.RLock()  # of run.json, which hosts that start are written into from other threads

    @classmethod
    def create(cls, parent: Path, recipe: str, config_yaml: str, command: str = "train") -> RunFolder:
        """A new folder `<recipe>-<date>`; a number is added if that name is taken. `command` makes and continues it."""
        stem = f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
        for attempt in range(1, 1000):
            path = parent / (stem if attempt == 1 else f"{stem}-{attempt}")
            try:
                path.mkdir(parents=True)
                break
            except FileExistsError:
                continue
        run = cls(path)
        run.logs.mkdir()
        run._hold()
        (path / "config.yaml").write_text(config_yaml)
        run._write({"state": "running", "command": command, "started": now(), "provenance": provenance()})
        run.record(processes={DRIVER: os.getpid()})
        return run

    @classmethod
    def reopen(cls, path: Path, command: str = "train", config_yaml: str = "") -> RunFolder:
        """Continue in the folder of an earlier run of the same command, with this recipe from now on."""
        run = cls(path)
        if not (path / "run.json").is_file():
            raise CheckpointError(f"{path} is not a run folder: run.json is missing")
        if (made_by := run.info().get("command", "train")) != command:
            raise CheckpointError(f"{path} is a run of another command: python -m embodied.{made_by} resume={path}")
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
        """Where this version's evaluation in the run goes."""
        return self.path / "eval" / name_of(version)

    def info(self) -> dict:
        return read_json(self.path / "run.json")

    def record(self, **facts: object) -> None:
        """Add facts to run.json."""
        with self._writing:
            self._write({**self.info(), **facts})

    def record_process(self, host: str, pid: int) -> None:
        """A host has this process id from now on; ps shows it by the same name."""
        with self._writing, suppress(OSError, CheckpointError):  # whoever has removed the folder is told at its end
            self.record(processes={**self.info().get("processes", {}), host: pid})

    def keep_metrics(self, iteration: int) -> None:
        """Drop the metrics of iterations after `iteration`: a resumed run makes them again."""
        path = self.path / "metrics.jsonl"
        if path.is_file():
            rows = map(row_of, path.read_text(errors="replace").splitlines())
            kept = [row for row in rows if row and row["iteration"] <= iteration]
            replace_text(path, "".join(json.dumps(row) + "\n" for row in kept))

    def log(self, row: dict) -> None:
        """One iteration's numbers, into metrics.jsonl and for TensorBoard (by env steps)."""
        if self._curves is None:
            self._metrics = (self.path / "metrics.jsonl").open("ab", buffering=0)  # nothing is left to flush later
            self._curves = Curves(self.path / "tensorboard")
        self._metrics.write((json.dumps(row) + "\n").encode())
        self._curves.add(row["env_steps"], row)

    def new_trace(self) -> Path:
        """Where this start of the run writes its timeline: trace.json, trace-2.json after a resume, and so on."""
        names = (f"trace-{n}.json" if n > 1 else "trace.json" for n in itertools.count(1))
        return next(path for name in names if not (path := self.path / name).exists())

    def note(self, text: str) -> None:
        """Write a line of the console into logs/driver.log."""
        with (self.logs / "driver.log").open("ab", buffering=0) as file:
            file.write(f"{now()} {text}\n".encode())

    def count_restart(self) -> None:
        """One more worker was started again."""
        with self._writing:
            self.record(restarts=self.info().get("restarts", 0) + 1)

    def finish(self, state: str, cause: str = "", **more: object) -> None:
        for file in (self._metrics, self._curves):
            if file is not None:
                file.close()
        self._metrics = self._curves = None
        self.record(state=state, cause=cause, ended=now(), processes={}, **more)  # numbers are used again
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _hold(self) -> None:
        """Keep others from continuing this run while it goes on. The kernel lets go when this process ends."""
        lock = os.open(self.logs / "driver.log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        if taken(lock) is False:
            os.close(lock)
            raise CheckpointError(f"{self.path}: this run is going on in another process; stop that one first")
        self._lock = lock  # without locks, two runs in one folder go unnoticed

    def _write(self, content: dict) -> None:
        replace_text(self.path / "run.json", json.dumps(content, indent=2) + "\n")


def taken(lock: int) -> bool | None:
    """Lock this open file until it is closed: whether that worked, or it is another process's; None: the file system
    has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def lost(run: Path, info: dict) -> bool:
    """Whether it was killed, or its machine went down, before it could write how it ended."""
    newest = [info, *info.get("resumed", [])][-1]
    if info.get("state") != "running" or newest.get("provenance", {}).get("host") != platform.node():
        return False  # locks of other machines cannot be seen everywhere
    try:
        lock = os.open(run / "logs" / "driver.log", os.O_RDWR)
    except OSError:
        return False
    try:
        return taken(lock) is True
    finally:
        os.close(lock)


def row_of(line: str) -> dict | None:
    """A line of metrics.jsonl; None for what a crash or a full disk has left of one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("iteration"), int) else None


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def provenance() -> dict:
    """Origin of a result: command, code, packages, machine."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": commit(),
        "host": platform.node(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
        "time": time.time(),
    }


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the code that runs, marked when it has uncommitted changes; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        told = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip()
