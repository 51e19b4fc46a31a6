"""A training run that others strike: its gates, its processes by name, and what it says while it goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chaos.gates import FOLDER, HOLD, reached_file
from run_processes import hosts

ROOT = Path(__file__).resolve().parents[2]
LOOK_S = 0.002


class Ended(Exception):
    """The run is over."""


class TooLong(Exception):
    """What was waited for did not come."""


@dataclass(frozen=True)
class Line:
    at: float  # time.monotonic
    text: str


class StruckRun:
    def __init__(self, recipe: str, options: dict[str, object], folder: Path) -> None:
        """Start it, in a folder of its own."""
        self.recipe, self.folder, self.gates = recipe, folder, folder / "gates"
        self.gates.mkdir()
        self.lines: list[Line] = []
        command = [sys.executable, "-m", "chaos.gates", f"recipe={recipe}", "run.dir=runs"]
        paths = (str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", ""))
        more = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), FOLDER: str(self.gates), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, *(f"{key}={value}" for key, value in options.items())],
            cwd=folder,
            env={**os.environ, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> StruckRun:
        return self

    def __exit__(self, *args: object) -> None:
        self.process.kill()
        self.process.wait()
        self._listener.join(10)
        self.process.stdout.close()

    def _listen(self) -> None:
        for text in self.process.stdout:
            self.lines.append(Line(time.monotonic(), text.rstrip("\n")))

    # What it is and says

    @property
    def output(self) -> str:
        return self.relative("\n".join(line.text for line in self.lines))

    def relative(self, said: str) -> str:
        """The text without the folder of this run, which says nothing elsewhere."""
        return said.replace(f"{self.folder}/", "")

    def iteration(self) -> int:
        """The newest that has ended."""
        ended = (re.match(r"iteration (\d+)/", line.text) for line in reversed(self.lines))
        return next((int(found[1]) for found in ended if found), 0)

    @property
    def error(self) -> str:
        """What it ended with."""
        found = self.output
        return found[max(found.rfind("\nerror: "), 0) :].strip() if "error: " in found else found[-300:].strip()

    @property
    def path(self) -> Path:
        (run,) = (self.folder / "runs").iterdir()
        return run

    def hosts(self) -> dict[str, int]:
        """Name -> process of its hosts now."""
        runs = list((self.folder / "runs").glob("*/logs"))
        return hosts(runs[0]) if runs else {}

    def host_of(self, role: str, turn: int = 0) -> str:
        """One of the hosts that run this role, another every turn."""
        named = sorted(name for name in self.hosts() if role in name.rpartition("-")[0].split("+"))
        if not named:
            raise Ended(f"no process runs a {role}")
        return named[turn % len(named)]

    def wait(self, what: str, done: Callable[[], object], seconds: float) -> object:
        """Wait until `done` returns something."""
        until = time.monotonic() + seconds
        while not (found := done()):
            if self.process.poll() is not None:
                self._listener.join(10)
                raise Ended(f"ended with {self.process.returncode}: {self.error}")
            if time.monotonic() > until:
                raise TooLong(f"{what} did not come within {seconds:g} s")
            time.sleep(LOOK_S)
        return found

    def said(self, pattern: str, since: int, seconds: float) -> int:
        """The number of the first line from `since` on that matches, waited for."""

        def look() -> int | None:
            numbered = list(enumerate(self.lines))[since:]
            return next((number + 1 for number, line in numbered if re.search(pattern, line.text)), None)

        return self.wait(f"a line like {pattern!r}", look, seconds) - 1

    def end(self, seconds: float) -> int:
        """Its exit code."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TooLong(f"it had not ended after {seconds:g} s") from None
        self._listener.join(10)
        return code

    # Striking

    def arm(self, who: str, place: str, fault: str = HOLD) -> Path:
        gate = self.gates / f"{who}.{place}"
        draft = gate.with_name(f"{gate.name}.draft")
        draft.write_text(fault)
        draft.replace(gate)
        return reached_file(gate)

    def open(self, reached: Path) -> None:
        """Let go who stays at this gate."""
        reached.unlink(missing_ok=True)
