"""The folder of a run: provenance, resolved recipe, metrics, checkpoints, evaluations, logs; never overwritten.

The provenance of a result (`provenance` in `records/progress.py`) is in run.json and in every results.json. The
driver of a run holds a lock on the run's log, which the kernel releases when the process ends.

Checkpoints are written whole or not at all, as often as needed, and pruned. A checkpoint is written into a new folder
with a temporary name; when every file is hashed and flushed to disk, the folder gets its final name. Readers verify the
hashes. `latest` is a text file with a checkpoint's name, which is verified, too. Older checkpoints are removed when a
new one is complete.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import platform
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from shlex import quote

import numpy as np

from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.files import as_path, digest, flush, in_words, replace_text
from embodied.policies.policy_folder import AVERAGE, CHECKSUMS, MANIFEST, POLICY, no_policy_in, read_json
from embodied.records.progress import RunLog, provenance, timestamp

DRIVER = "driver"
REQUEST, ANSWER = "workers.request.json", "workers.answer.json"  # of python -m embodied.workers, and to it
ENDING_S = 10.0  # wait for the processes of a killed command to end
STOPPED_AT_ONCE = "second "  # begins the cause in run.json of a run that a second signal has ended
STATE = "state.json"
SIMS = "sims.npz"
COUNTERS = {  # counters that a resumed run continues, with their types
    **dict.fromkeys(("iteration", "version", "env_steps", "abandoned_episodes", "dropped_batches"), (int,)),
    "train_s": (int, float),
}
NAME = re.compile(r"v(\d{6,})")
DRAFT, DOOMED = ".writing-", ".removing-"  # a checkpoint while it is written, and while it is removed
LARGEST = 1e18  # upper limit of a counter
MOST = 1 / 20  # fraction of the training time spent on saving, at most


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
    def check_resumable(cls, path: Path, command: str = "train") -> None:
        """Refuse a folder that holds no run of this command."""
        if not (path / "run.json").is_file():
            raise CheckpointError(f"{path} is not a run folder: run.json is missing")
        if (made_by := cls(path).info().get("command", "train")) != command:
            again = f"python -m embodied.{made_by} {quote(f'resume={path}')}"
            raise CheckpointError(f"{path} is a run of another command: {again}")

    @classmethod
    def reopen(cls, path: Path, command: str = "train", config_yaml: str = "") -> RunFolder:
        """Continue in the folder of an earlier run of the same command. `config_yaml` replaces its recipe."""
        cls.check_resumable(path, command)
        run = cls(path)
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


# Checkpoints


def name_of(version: int) -> str:
    return f"v{version:06d}"


def write_checkpoint(
    parent: Path, version: int, fill: Callable[[Path], None], state: dict, sims: dict[str, np.ndarray]
) -> Path:
    """Write one checkpoint. `fill` writes the learner's and the policy's files into the folder it is given."""
    parent.mkdir(parents=True, exist_ok=True)
    final = parent / name_of(version)
    with suppress(CheckpointError):
        verify(final)
        return final  # already saved, for example by a resumed run that ends at once
    draft = parent / f"{DRAFT}{name_of(version)}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        fill(draft)
        if not any(draft.glob(f"{POLICY}/*")):
            raise CheckpointError(
                f"{draft} has no policy: learner-0 is on a machine that does not see this folder; give it a device of "
                "the machine that the run is started on, or share run.dir between them"
            )
        (draft / STATE).write_text(json.dumps(state, indent=2) + "\n")
        np.savez(draft / SIMS, **sims)
        checksums: dict[str, str] = {}  # large weights are read once
        for saved in (POLICY, AVERAGE):
            old_checksums = read_json(sums)["files"] if (sums := draft / saved / CHECKSUMS).is_file() else {}
            checksums |= {f"{saved}/{name}": expected for name, expected in old_checksums.items()}
        files = {name: checksums.get(name) or digest(draft / name) for name in files_of(draft)}
        manifest = {"version": version, "files": files}
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        for name in (*manifest["files"], MANIFEST):
            flush(draft / name)
        for folder in [draft, *(p for p in draft.rglob("*") if p.is_dir())]:
            flush(folder)
        shutil.rmtree(final, ignore_errors=True)  # an existing folder of this name is damaged
        os.rename(draft, final)
        flush(parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    replace_text(parent / "latest", final.name + "\n")
    return final


def verify(checkpoint: Path) -> dict:
    """Check every file against the manifest and return the driver's state."""
    manifest = read_json(checkpoint / MANIFEST)
    files, version = manifest.get("files"), manifest.get("version")
    if not isinstance(files, dict) or not {STATE, SIMS} <= files.keys():
        raise CheckpointError(f"checkpoint {checkpoint} is damaged: {MANIFEST} does not list its files")
    if type(version) is not int or (NAME.fullmatch(checkpoint.name) and name_of(version) != checkpoint.name):
        raise CheckpointError(f"checkpoint {checkpoint} is damaged: {MANIFEST} says that it is version {version!r}")
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {checkpoint} is incomplete: {name} is missing")
        if digest(path) != expected:
            raise CheckpointError(f"checkpoint {checkpoint} is damaged: {name} does not match its checksum")
    return read_json(checkpoint / STATE)


def read_counters(checkpoint: Path) -> dict:
    """The driver state of a checkpoint to resume from."""
    state = verify(checkpoint)
    odd = [key for key, kinds in COUNTERS.items() if type(state.get(key)) not in kinds or not 0 <= state[key] < LARGEST]
    odd += ["version"] * (state.get("version") != read_json(checkpoint / MANIFEST)["version"])
    if odd:
        raise CheckpointError(f"checkpoint {checkpoint} is damaged: {STATE} has {odd[0]}={state.get(odd[0])!r}")
    return state


def newest(run: Path) -> Path:
    """The newest whole checkpoint of a run: the highest version that verifies, whatever `latest` says."""
    parent = run / "checkpoints"
    candidates = sorted((p for p in parent.glob("v[0-9]*") if p.is_dir()), reverse=True)
    problems = []
    for candidate in candidates:
        try:
            verify(candidate)
        except CheckpointError as err:
            problems.append(str(err))
            continue
        if problems:
            print("\n".join([*problems, f"using {candidate.name}, the newest whole one"]), file=sys.stderr)
        return candidate
    more = [f"and {len(problems) - 3} more like these"] if len(problems) > 3 else []
    detail = "\n  ".join(["", *problems[:3], *more]) if problems else " nothing was saved yet"
    raise CheckpointError(f"{run} has no usable checkpoint:{detail}")


class SaveClock:
    """Decides when to save: every `every` iterations, and after `minutes` of training since the last save. Slow saves
    become rarer, so that saving takes at most `MOST` of the time."""

    def __init__(self, every: int | None, minutes: float | None) -> None:
        self.every = every
        self.limit_s = float("inf") if minutes is None else 60 * minutes
        self.cost_s = 0.0  # seconds of the last save
        self.now_s = self.saved_s = 0.0  # seconds of training: so far, and at the last save
        self.version: int | None = None  # version of the last save

    def is_due(self, iteration: int, train_s: float) -> bool:
        """True if a checkpoint is due now; called after every iteration."""
        iteration_s, self.now_s = train_s - self.now_s, train_s
        limit_s = max(self.limit_s, self.cost_s / MOST)
        return bool(self.every and iteration % self.every == 0) or train_s - self.saved_s + iteration_s > limit_s

    def note_save(self, version: int, train_s: float, cost_s: float = 0.0) -> None:
        self.version, self.cost_s = version, cost_s
        self.now_s = self.saved_s = train_s


def prune(run: Path, version: int, keep: int) -> None:
    """Delete old checkpoints up to this version. The newest `keep`, the best by evaluation, and all checkpoints
    evaluated by hand stay. Folders with files of the user's are never deleted."""
    parent = run / "checkpoints"
    for rest in [*parent.glob(f"{DRAFT}v*"), *parent.glob(f"{DOOMED}v*")]:
        shutil.rmtree(rest)
    saved = sorted(int(match[1]) for path in parent.iterdir() if (match := NAME.fullmatch(path.name)))
    old = [checkpoint for checkpoint in saved if checkpoint <= version][:-keep]
    by_hand = (NAME.match(path.name) for path in run.glob("eval/v*-*"))
    spared = {best_version(run), *(int(match[1]) for match in by_hand if match)}
    for path in (parent / name_of(checkpoint) for checkpoint in old if checkpoint not in spared):
        if is_ours(path):
            os.rename(path, doomed := parent / f"{DOOMED}{path.name}")
            shutil.rmtree(doomed)


def is_ours(checkpoint: Path) -> bool:
    """True if the folder holds exactly the files of its manifest."""
    with suppress(CheckpointError, TypeError):
        listed = {*read_json(checkpoint / MANIFEST).get("files", ()), MANIFEST}
        return not checkpoint.is_symlink() and {*files_of(checkpoint)} == listed
    return False


def best_version(run: Path) -> int | None:
    """The version with the highest success in the run's own evaluations; ties are broken by return, then by age
    (newest)."""
    ranked = []
    for path in run.glob("eval/v*/results.json"):
        with suppress(CheckpointError, KeyError, TypeError):
            overall = read_json(path)["overall"]
            if NAME.fullmatch(path.parent.name) and overall["return"] is not None:
                success = overall["success_once"]["rate"] if overall["success_once"] else 0.0
                ranked.append((success, overall["return"], int(path.parent.name[1:])))
    return max(ranked)[2] if ranked else None


def locate(text: str) -> tuple[Path, Path | None, Path | None]:
    """A run folder, a version folder or a policy folder -> (policy folder, checkpoint or None, run folder or None)."""
    path = as_path(text)
    if (path / "run.json").is_file():
        checkpoint = newest(path)
        return policy_in(checkpoint), checkpoint, path
    if (path / MANIFEST).is_file():
        verify(path)
        run = path.resolve().parent.parent
        return policy_in(path), path, run if (run / "run.json").is_file() else None
    if (path / "config.json").is_file():
        return path, None, None
    if not path.exists():
        raise CheckpointError(f"{text}: there is no such folder")
    raise CheckpointError(no_policy_in(text))


def policy_in(checkpoint: Path) -> Path:
    """The policy folder to play with: the mean of the last weights, if the run keeps one (algo.average)."""
    mean = checkpoint / AVERAGE
    return mean if mean.is_dir() else checkpoint / POLICY


def files_of(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
