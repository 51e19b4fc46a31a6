"""Runs in child processes: the one way to start, resume, watch and stop seeds, settings of a sweep, and shared runs.

Each child is an `embodied.train` command on a part of the machine. `Children` watches the processes; its subclasses
record every new folder and every end in the file that lists the runs, at once, so a killed command loses nothing.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import join, quote
from typing import Any

from embodied.config.sections import LONGEST_NAME
from embodied.core.errors import CheckpointError, printable
from embodied.core.files import encode
from embodied.core.yaml_text import write_yaml
from embodied.placement.topology import number
from embodied.policies.policy_folder import read_json
from embodied.reporting.run_page import REPORT, report_or_say_why
from embodied.reporting.seed_sets_page import in_order, in_words, sets_of
from embodied.run import launch
from embodied.run.ending import Interruption
from embodied.run.run_folder import DRIVER
from embodied.run.run_group import ENDED, FINISHED, LOG, MISSING, OVER, Member, RunGroup, state_of
from embodied.runtime.device_leases import SHARE
from embodied.sharing.lease_server import RecordedLeases

POLL_S = 0.2
REPORT_S = 60.0  # between two lines about the runs in progress, off a terminal
CLOSE_S = 60.0  # for a run to give up its step (run.stop_s), save and end
GRACE_S = 10.0  # in addition to faults.hang_s, after which a run ends its own hung workers
TRAIN = ("-m", "embodied.train")
STOPPED = (143, 130, -signal.SIGTERM, -signal.SIGINT)  # exit codes of a run that was asked to stop
WIDTH = 150
DATE = "[0-9]" * 8  # in a folder's name, as a pattern
# Limits itself to its cores, receives SIGTERM when the command that started it dies, and becomes the run.
BEGIN = """import ctypes, json, os, signal, sys
parent, cores = json.loads(sys.argv[1])
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != parent:
    os._exit(1)
if cores:
    os.sched_setaffinity(0, cores)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@dataclass(frozen=True)
class Place:
    """The part of the machine that a run gets; all of it if nothing is named."""

    cores: Sequence[int] = ()
    cards: str = ""  # its CUDA_VISIBLE_DEVICES
    own: Sequence[str] = ()  # its devices, which it lends to other runs
    placement: Mapping[str, Any] | None = None  # of a run that may borrow devices

    @property
    def arguments(self) -> list[str]:
        """The arguments of a run there."""
        return [] if self.placement is None else [f"placement={json.dumps(self.placement)}"]


@dataclass
class ChildRun:
    """A run in a child process, which ends with this process."""

    entry: Any  # the run in the file that lists the runs
    name: str  # its run.name
    log: Path  # the output of the process
    parent: Path  # folder that contains the run folder
    folder: Path | None  # of a resumed run; a new run creates it
    hang_s: float  # its faults.hang_s

    def start(self, arguments: Sequence[str], cores: Sequence[int], **environment: str) -> None:
        """`arguments`: Python's; `cores`: all if empty."""
        self.begun, self.older = time.monotonic(), self.folders()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BEGIN, json.dumps([os.getpid(), [*cores]]), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                process_group=0,  # Ctrl-C reaches this command, which stops the runs
            )

    def folders(self) -> set[Path]:
        """The folders of all runs of this name."""
        return {path for path in self.parent.glob(f"{self.name}-{DATE}-*") if path.is_dir()}

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def outcome(self) -> str:
        """How the run ended: finished, ended early, stopped or failed."""
        state = state_of(self.folder) if self.folder else MISSING
        return state if state in OVER else "stopped" if self.process.returncode in STOPPED else "failed"

    def find_folder(self) -> Path | None:
        """Look for the folder that the run creates: its run.json names the process, or it is new after the process
        ended. Returns it when it is found first."""
        if self.folder is None:
            ended = self.has_ended
            for folder in sorted(self.folders() - self.older):
                if ended or read_info(folder).get("processes", {}).get(DRIVER) == self.process.pid:
                    self.folder = folder
                    return folder
        return None

    def signal(self, sign: int) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(sign)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Children:
    """The child processes of several runs. A subclass begins runs, and records folders and ends."""

    train: Sequence[str] = TRAIN  # Python's arguments
    most: float = float("inf")  # simultaneous runs

    def __init__(self, group: Any, leases: RecordedLeases | None = None) -> None:
        """`group`: the runs, as their file lists them. `leases`: of runs that share devices."""
        self.group, self.folder, self.leases = group, group.folder, leases
        self.going: list[ChildRun] = []
        self.stopping, self.interruption = False, Interruption()
        self.live = bool(sys.stdout and sys.stdout.isatty())
        self.reported, self.reported_at = "", time.monotonic()

    # What a subclass knows of its runs

    def begin(self, entry: Any) -> None:
        """Start or resume a run."""
        raise NotImplementedError

    def record_end(self, child: ChildRun, cause: str) -> None:
        """Record and print how a run ended. `cause`: why it did not finish."""
        raise NotImplementedError

    # The way of all children

    def run(self, entries: Sequence[Any], interruption: Interruption) -> None:
        """Run all of these until they end, `most` at a time. No process is left at the end, also after an error."""
        waiting, self.interruption = list(entries), interruption
        try:
            while self.going or ((waiting or self.programs) and not interruption.requested):
                while waiting and not interruption.requested and len(self.going) < self.most:
                    self.begin(waiting.pop(0))
                if interruption.requested and not self.stopping:
                    self.signal(signal.SIGTERM)
                self.look()
                self.pass_time(POLL_S)
        except BaseException as err:
            self.signal(signal.SIGINT if isinstance(err, KeyboardInterrupt) else signal.SIGTERM)
            raise
        finally:
            self.close()

    def start(self, child: ChildRun, words: Sequence[str], place: Place, weight: float = 1.0) -> None:
        """Start a child with these arguments on its place."""
        environment = {"CUDA_VISIBLE_DEVICES": place.cards} if place.cards else {}
        if self.leases:
            environment[SHARE] = str(self.leases.path)
        with self.interruption.deferred():
            child.start([*self.train, *words], place.cores, **environment)
            self.going.append(child)
        if self.leases:
            self.leases.expect(str(child.entry), child.process.pid, weight, place.own)
        on = f" on {', '.join(place.own)}" if place.own else ""
        self.say(f"{child.entry} {f'goes on: {child.folder}' if child.folder else 'begins'}{on}")

    def look(self) -> None:
        """Record new folders and ended runs, end runs that keep a device too long, and report the progress."""
        for child in list(self.going):
            if child.has_ended:
                self.end_child(child)
                continue
            self.find_folder(child)
            if self.leases and str(child.entry) in self.leases.overdue(child.hang_s + GRACE_S):
                kept = f"did not give a device back within {child.hang_s:g} s (faults.hang_s): ended"
                self.say(f"{child.entry} {kept}")
                child.process.kill()
        for name in self.leases.end_late_programs() if self.leases else ():
            self.say(f"{name} was silent for longer than its lease while others waited for its devices: killed")
        self.show()

    def end_child(self, child: ChildRun) -> None:
        """Record the end of a child, and free its devices."""
        self.going.remove(child)
        self.find_folder(child)
        if self.leases:
            self.leases.end(str(child.entry), child.outcome)
        self.record_end(child, "" if child.outcome == FINISHED else last_words(child))

    def find_folder(self, child: ChildRun) -> None:
        if folder := child.find_folder():
            relative = os.path.relpath(folder.resolve(), self.folder.resolve())
            child.entry = self.group.change(child.entry, folder=relative)

    def begun_folder(self, entry: Any) -> Path | None:
        """The folder of a run that has begun, which can be resumed."""
        return self.group.path(entry) if self.group.state(entry) != MISSING else None

    def say(self, text: str) -> None:
        """Print a permanent line."""
        if self.leases:
            self.leases.table.say(printable(text))
        else:
            launch.say(f"\r\033[K{text}" if self.live else text)

    def show(self) -> None:
        """Print the progress of the runs now and then: a table of devices, or the last line of each run."""
        if self.leases:
            paths = {str(member): path for member in self.group.members if (path := self.group.path(member))}
            self.leases.table.show(self.leases.now, paths)
        elif self.going and (self.live or time.monotonic() - self.reported_at > REPORT_S):
            self.reported_at = time.monotonic()
            text = " | ".join(f"{child.entry}: {last_line(child)}" for child in self.going)
            if text != self.reported:
                self.reported = text
                print(f"\r\033[K{text[:WIDTH]}" if self.live else text, end="" if self.live else "\n", flush=True)

    def signal(self, sign: int) -> None:
        self.stopping = True
        for child in self.going:
            child.signal(sign)

    def close(self) -> None:
        """Wait for stopping runs, and kill a run that does not stop in time; then record their ends. No process is left
        where an end cannot be recorded."""
        until = time.monotonic() + CLOSE_S
        while time.monotonic() < until and not all(child.has_ended for child in self.going):
            self.pass_time(POLL_S)
        for child in self.going:
            child.kill()
        try:
            for child in list(self.going):
                self.end_child(child)
        finally:
            if self.leases:
                self.leases.close()

    @property
    def programs(self) -> bool:
        """True while other programs use the devices."""
        return bool(self.leases and self.leases.programs)

    def pass_time(self, seconds: float) -> None:
        """Wait for this time; serve runs that share devices meanwhile."""
        if self.leases:
            self.leases.serve(seconds)
        else:
            time.sleep(seconds)


class GroupChildren(Children):
    """The runs of a group: seeds, or the settings of a sweep."""

    def __init__(
        self,
        group: RunGroup,
        shared: Sequence[str],
        parent: Path,
        places: Sequence[Place] = (Place(),),
        hang_s: float = 0.0,
        leases: RecordedLeases | None = None,
    ) -> None:
        """`shared`: arguments common to all runs. `parent`: folder of the run folders. `places`: one for each
        simultaneous run."""
        super().__init__(group, leases)
        self.shared, self.parent, self.places, self.hang_s = shared, parent, places, hang_s
        self.most = len(places)
        self.taken: dict[str, int] = {}  # index of its place, by run

    def begin(self, entry: Member) -> None:
        index = min({*range(len(self.places))} - {*self.taken.values()})
        folder = self.begun_folder(entry)
        programs = [word for word in self.shared if word.startswith("program=")]
        words = [*programs, f"resume={folder}"] if folder else self.arguments_of(entry)
        child = ChildRun(entry, self.run_name(entry), self.log_of(entry), self.parent, folder, self.hang_s)
        self.taken[str(entry)], place = index, self.places[index]
        self.start(child, [*words, *place.arguments], place)

    def arguments_of(self, member: Member) -> list[str]:
        """The arguments of a new run."""
        swept = [f"{key}={write_yaml(value)}" for key, value in member.settings.items()]
        shared = [word for word in self.shared if not word.startswith("run.name=")]  # the group has that name
        return [*shared, *swept, f"seed={member.seed}", f"run.name={self.run_name(member)}"]

    def run_name(self, member: Member) -> str:
        """pointmass_ppo-lr1e-3-seed0"""
        settings = "".join(f"-{key.rpartition('.')[2]}{write_yaml(value)}" for key, value in member.settings.items())
        end = f"-seed{member.seed}"
        return slug(self.group.name + settings)[: LONGEST_NAME - len(end)] + end

    def log_of(self, member: Member) -> Path:
        """The log file of a member's process."""
        return self.folder / "logs" / f"{slug(str(member))}.log"

    def record_end(self, child: ChildRun, cause: str) -> None:
        del self.taken[str(child.entry)]
        child.entry = self.group.change(child.entry, problem=cause)
        where = f": {child.folder}" if child.folder else ""
        if child.outcome == FINISHED:
            self.say(f"{child.entry} finished after {time.monotonic() - child.begun:.0f} s{where}")
        elif child.outcome == "stopped":
            self.say(f"{child.entry} stopped{where}")
        elif child.outcome == ENDED:
            self.say(f"{child.entry} ended early: {cause}")
        else:
            self.say(f"{child.entry} failed (exit code {child.process.returncode}): {cause}\n  its log: {child.log}")
        report_or_say_why(self.folder)

    def say(self, text: str) -> None:
        super().say(text)
        with (self.folder / LOG).open("ab") as file:
            file.write(encode(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {printable(text)}\n"))

    def say_results(self, todo: Sequence[Member], interruption: Interruption) -> int:
        """Print the results, the failed runs, and the commands that continue; returns the exit code."""
        todo = [member for member in self.group.members if member.key in {one.key for one in todo}]
        states = {member.key: self.group.state(member) for member in todo}
        left = [member for member in todo if states[member.key] not in OVER]
        report_or_say_why(self.folder)
        launch.say(f"\n{sum(state == FINISHED for state in states.values())} of {number(len(todo), 'run')} finished")
        for member in todo:
            where = self.group.path(member) or (self.log_of(member) if member.problem else "")
            cause = f", {member.problem}" if member.problem else ""
            launch.say(f"  {member}: {states[member.key]}{cause}{f' ({where})' if where else ''}")
        sets = sets_of(self.group)
        for line in in_words(sets):
            launch.say(f"  result      {line}")
        launch.say(f"  report      {self.folder / REPORT}")
        if self.leases:
            report_or_say_why(self.leases.folder)
            launch.say(f"  devices     {self.leases.folder / REPORT}")
        over = {self.group.path(member) for member in todo if states[member.key] in OVER}
        best_first = (run.folder for one in in_order(sets) for run in one.runs)
        if one := next((folder for folder in best_first if folder in over), None):
            launch.say(f"  evaluate    python -m embodied.evaluate {quote(f'checkpoint={one}')}")
            launch.say(f"  resume      python -m embodied.train {quote(f'resume={one}')}")
        if left:
            launch.say(f"  continue    python -m {join(self.group.command)}")
        return interruption.exit_code if interruption.requested else int(bool(left))


def read_info(run: Path) -> dict:
    """The content of run.json; empty if there is none yet."""
    with suppress(CheckpointError):
        return read_json(run / "run.json")
    return {}


def last_line(child: ChildRun) -> str:
    """The last line that a run printed."""
    path = child.folder / "logs" / "driver.log" if child.folder else child.log
    with suppress(OSError):
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - 2000, 0))
            lines = file.read().decode(errors="replace").split("\n")
        if texts := [line for line in lines if line.strip()]:
            return re.sub(r"^\S+T\S+ ", "", texts[-1]).strip()
    return "begins"


def last_words(child: ChildRun) -> str:
    """One line on why a run did not finish: from run.json, else the last line of its output."""
    info = read_info(child.folder) if child.folder else {}
    if info.get("state") in ("stopped", "failed"):
        return (str(info.get("cause", "")).splitlines() or [""])[0]
    if (code := child.process.returncode) is not None and code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    lines = child.log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or [line for line in lines if line.strip()] or ["it printed nothing"])[-1].removeprefix("error: ")


def slug(text: str) -> str:
    """A name for files: letters, digits and . + - _ = alone."""
    return re.sub(r"_*-_*", "-", re.sub(r"[^A-Za-z0-9.+=-]+", "_", text)).strip("_.-")
