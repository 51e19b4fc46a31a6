"""The processes of several runs, each on a part of the machine: starts, watches and stops them.

Each is an `embodied.train` command. Changes of its state are written into the group's folder at once, so a killed
command loses nothing.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import join, quote

from embodied.config.read import write_yaml
from embodied.config.sections import LONGEST_NAME
from embodied.core.errors import CheckpointError, printable
from embodied.core.files import encode
from embodied.placement.placement_errors import number
from embodied.reporting.run_page import REPORT, report_or_say_why
from embodied.reporting.seed_sets_page import in_order, in_words, sets_of
from embodied.run import launch
from embodied.run.checkpoints import read_json
from embodied.run.ending import Interruption
from embodied.run.run_folder import DRIVER
from embodied.sharing.lease_server import SharedPlaces
from embodied.sweeps.run_group import ENDED, FINISHED, LOG, MISSING, OVER, Member, RunGroup, state_of

POLL_S = 0.2
REPORT_S = 60.0  # between two lines about the runs in progress, off a terminal
CLOSE_S = 30.0  # for a run that is stopped at once
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


@dataclass
class ChildRun:
    """A run in a child process, which ends with this process."""

    name: str  # its run.name
    log: Path  # the output of the process
    parent: Path  # folder that contains the run folder
    folder: Path | None  # of a resumed run; a new run creates it

    def start(self, arguments: Sequence[str], cores: Sequence[int], **environment: str) -> None:
        """`arguments`: Python's; `cores`: all if empty."""
        self.begun, self.older = time.monotonic(), self.folders()
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BEGIN, json.dumps([os.getpid(), cores]), *arguments],
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
    def ended(self) -> bool:
        return self.process.poll() is not None

    def find_folder(self) -> Path | None:
        """Look for the folder that the run creates: its run.json names the process, or it is new after the process
        ended. Returns it when it is found first."""
        if self.folder is None:
            ended = self.ended
            for folder in sorted(self.folders() - self.older):
                if ended or what_it_says(folder).get("processes", {}).get(DRIVER) == self.process.pid:
                    self.folder = folder
                    return folder
        return None

    def signal(self, sign: int) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(sign)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class ActiveRun(ChildRun):
    """A member's run in progress."""

    member: Member
    place: int  # index of its share of the machine


@dataclass
class Children:
    group: RunGroup
    shared: Sequence[str]  # arguments common to all runs
    parent: Path  # folder that contains the run folders
    # Cores and CUDA_VISIBLE_DEVICES of each simultaneous run; empty if a run has the whole machine.
    places: Sequence[tuple[list[int], str]] = (([], ""),)
    train: Sequence[str] = TRAIN  # Python's arguments
    sharing: SharedPlaces | None = None  # of runs that share their devices
    going: list[ActiveRun] = field(default_factory=list)
    live: bool = field(default_factory=lambda: bool(sys.stdout and sys.stdout.isatty()))
    reported: str = ""
    reported_at: float = field(default_factory=time.monotonic)

    def run(self, members: Sequence[Member], interruption: Interruption) -> None:
        """Run all members, one per place at a time. No process is left at the end, also after an error."""
        waiting, asked_to_stop = list(members), False
        try:
            while self.going or (waiting and not interruption.requested):
                while waiting and not interruption.requested and len(self.going) < len(self.places):
                    self.begin(waiting.pop(0))
                if interruption.requested and not asked_to_stop:
                    asked_to_stop = True
                    self.signal(signal.SIGTERM)
                self.look()
                self.pass_time(POLL_S)
        except BaseException as err:
            self.signal(signal.SIGINT if isinstance(err, KeyboardInterrupt) else signal.SIGTERM)
            raise
        finally:
            self.close()

    def begin(self, member: Member) -> None:
        """Start or resume a member's run on free cores and GPUs."""
        place = min({*range(len(self.places))} - {one.place for one in self.going})
        path = self.group.path(member)
        resumes = path is not None and state_of(path) != MISSING
        own = [word for word in self.shared if word.startswith("program=")]
        words = [*own, f"resume={path}"] if resumes else self.words(member)
        cores, cards = self.places[place]
        environment = {"CUDA_VISIBLE_DEVICES": cards} if cards else {}
        if self.sharing:
            words += self.sharing.words(place)
            environment |= self.sharing.environment
        folder = path if resumes else None
        active = ActiveRun(self.run_name(member), self.log_of(member), self.parent, folder, member, place)
        active.start([*self.train, *words], cores, **environment)
        if self.sharing:
            self.sharing.begin(str(member), active.process.pid, place)
        self.going.append(active)
        self.say(f"{member} {f'goes on: {path}' if resumes else 'begins'}")

    def words(self, member: Member) -> list[str]:
        """The arguments of a new run."""
        swept = [f"{key}={write_yaml(value)}" for key, value in member.settings.items()]
        shared = [word for word in self.shared if not word.startswith("run.name=")]  # the group has that name
        return [*shared, *swept, f"seed={member.seed}", f"run.name={self.run_name(member)}"]

    def run_name(self, member: Member) -> str:
        """pointmass_ppo-lr1e-3-seed0"""
        own = "".join(f"-{key.rpartition('.')[2]}{write_yaml(value)}" for key, value in member.settings.items())
        end = f"-seed{member.seed}"
        return slug(self.group.name + own)[: LONGEST_NAME - len(end)] + end

    def log_of(self, member: Member) -> Path:
        """The log file of a member's process."""
        return self.group.folder / "logs" / f"{slug(str(member))}.log"

    def look(self) -> None:
        """Record new folders and ended runs, and report the progress of active runs."""
        for active in list(self.going):
            self.find_folder(active)
            if active.ended:
                self.over(active)
        if self.sharing:
            self.sharing.leases.table.show(
                self.sharing.leases.now, {str(m): path for m in self.group.members if (path := self.group.path(m))}
            )
        elif self.going and (self.live or time.monotonic() - self.reported_at > REPORT_S):
            self.reported_at = time.monotonic()
            text = " | ".join(f"{active.member}: {last_line(active)}" for active in self.going)
            if text != self.reported:
                self.reported = text
                print(f"\r\033[K{text[:WIDTH]}" if self.live else text, end="" if self.live else "\n", flush=True)

    def find_folder(self, active: ActiveRun) -> None:
        """Record the folder created by this run."""
        if folder := active.find_folder():
            there = os.path.relpath(folder.resolve(), self.group.folder.resolve())
            self.group = self.group.with_member(replace(active.member, folder=there, problem=""))
            active.member = next(m for m in self.group.members if m.key == active.member.key)

    def over(self, active: ActiveRun) -> None:
        """Record how a run ended, and update the page of all runs."""
        self.going.remove(active)
        self.find_folder(active)
        if self.sharing:
            how = "stopped" if active.process.returncode in STOPPED else self.group.state(active.member)
            self.sharing.leases.end(str(active.member), how)
        code, state = active.process.returncode, self.group.state(active.member)
        problem = "" if state == FINISHED else last_words(active)
        self.group = self.group.with_member(replace(active.member, problem=problem))
        seconds = time.monotonic() - active.begun
        where = f": {active.folder}" if active.folder else ""
        if state == FINISHED:
            self.say(f"{active.member} finished after {seconds:.0f} s{where}")
        elif code in STOPPED:
            self.say(f"{active.member} stopped{where}")
        elif state == ENDED:
            self.say(f"{active.member} ended early: {problem}")
        else:
            self.say(f"{active.member} failed (exit code {code}): {problem}\n  its log: {active.log}")
        report_or_say_why(self.group.folder)

    def say(self, text: str) -> None:
        text = printable(text)
        if self.sharing:
            self.sharing.leases.table.say(text)
        else:
            launch.say(f"\r\033[K{text}" if self.live else text)
        with (self.group.folder / LOG).open("ab") as file:
            file.write(encode(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n"))

    def signal(self, sign: int) -> None:
        for active in self.going:
            active.signal(sign)

    def close(self) -> None:
        """Wait for stopping runs; kill a run that does not stop in time."""
        until = time.monotonic() + CLOSE_S
        while time.monotonic() < until and not all(active.ended for active in self.going):
            self.pass_time(POLL_S)
        for active in self.going:
            active.kill()
            self.find_folder(active)
        if self.sharing:
            self.sharing.leases.close()

    def pass_time(self, seconds: float) -> None:
        """Wait for this time; serve runs that share devices meanwhile."""
        if self.sharing:
            self.sharing.leases.serve(seconds)
        else:
            time.sleep(seconds)

    def end(self, todo: Sequence[Member], interruption: Interruption) -> int:
        """Print the results, the failed runs, and the commands that continue; returns the exit code."""
        todo = [member for member in self.group.members if member.key in {one.key for one in todo}]
        states = {member.key: self.group.state(member) for member in todo}
        left = [member for member in todo if states[member.key] not in OVER]
        report_or_say_why(self.group.folder)
        launch.say(f"\n{sum(state == FINISHED for state in states.values())} of {number(len(todo), 'run')} finished")
        for member in todo:
            where = self.group.path(member) or (self.log_of(member) if member.problem else "")
            cause = f", {member.problem}" if member.problem else ""
            launch.say(f"  {member}: {states[member.key]}{cause}{f' ({where})' if where else ''}")
        sets = sets_of(self.group)
        for line in in_words(sets):
            launch.say(f"  result      {line}")
        launch.say(f"  report      {self.group.folder / REPORT}")
        if self.sharing:
            report_or_say_why(self.sharing.leases.folder)
            launch.say(f"  devices     {self.sharing.leases.folder / REPORT}")
        over = {self.group.path(member) for member in todo if states[member.key] in OVER}
        best_first = (run.folder for one in in_order(sets) for run in one.runs)
        if one := next((folder for folder in best_first if folder in over), None):
            launch.say(f"  evaluate    python -m embodied.evaluate {quote(f'checkpoint={one}')}")
            launch.say(f"  resume      python -m embodied.train {quote(f'resume={one}')}")
        if left:
            launch.say(f"  continue    python -m {join(self.group.command)}")
        return interruption.exit_code if interruption.requested else int(bool(left))


def what_it_says(run: Path) -> dict:
    """The content of run.json; empty if there is none yet."""
    with suppress(CheckpointError):
        return read_json(run / "run.json")
    return {}


def last_line(active: ChildRun) -> str:
    """The last line that a run printed."""
    path = active.folder / "logs" / "driver.log" if active.folder else active.log
    with suppress(OSError):
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - 2000, 0))
            lines = file.read().decode(errors="replace").split("\n")
        if texts := [line for line in lines if line.strip()]:
            return re.sub(r"^\S+T\S+ ", "", texts[-1]).strip()
    return "begins"


def last_words(active: ChildRun) -> str:
    """One line on why a run did not finish: from run.json, else the last line of its output."""
    info = what_it_says(active.folder) if active.folder else {}
    if info.get("state") in ("stopped", "failed"):
        return (str(info.get("cause", "")).splitlines() or [""])[0]
    if (code := active.process.returncode) is not None and code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    lines = active.log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or [line for line in lines if line.strip()] or ["it printed nothing"])[-1].removeprefix("error: ")


def slug(text: str) -> str:
    """A name for files: letters, digits and . + - _ = alone."""
    return re.sub(r"_*-_*", "-", re.sub(r"[^A-Za-z0-9.+=-]+", "_", text)).strip("_.-")
