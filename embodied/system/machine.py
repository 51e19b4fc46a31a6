"""What `doctor` and `list` ask of this machine: packages, files, memory, and what a process of its own says.

Nothing heavy is imported here. Every answer comes through a method, so that tests can ask another machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from embodied.core.errors import EmbodiedError
from embodied.system import vulkan

ROOT = Path(__file__).resolve().parents[2]
END_S = 10.0  # for a process that was killed
PROBE_S = 180.0  # the first frame of a simulator compiles shaders; a loaded machine takes its time


@dataclass(frozen=True)
class Done:
    """How a process ended; `code` is None where it had to be stopped, -11 for a SIGSEGV."""

    code: int | None
    out: str = ""
    err: str = ""

    @property
    def answer(self) -> dict[str, Any]:
        """The JSON on a probe's last line."""
        return json.loads(self.out.strip().splitlines()[-1])

    @property
    def problem(self) -> str:
        """Why it failed, in a line; empty where it did not."""
        if self.code is not None and self.code < 0:
            return f"its process died with {signal.Signals(-self.code).name}{self._last_words(': ')}"
        return "" if self.code == 0 else self._last_words() or f"exit code {self.code}"

    def _last_words(self, before: str = "") -> str:
        lines = [line.strip() for line in self.err.strip().splitlines() if line.strip()]
        return f"{before}{lines[-1]}" if lines else ""


@cache
def version_of(package: str) -> str | None:
    """Of an installed distribution. Its whole description is parsed for that, so once in a process."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Machine:
    python = sys.version_info[:3]
    environ: Mapping[str, str] = os.environ

    def version(self, package: str) -> str | None:
        """Of an installed distribution."""
        return version_of(package)

    def installed(self) -> dict[str, str]:
        """Version by normalised name of every distribution."""
        return {normal(one.metadata["Name"]): one.version for one in metadata.distributions() if one.metadata["Name"]}

    def required(self) -> list[str]:
        """Names of what embodied-loop itself needs, without extras."""
        try:
            lines = metadata.requires("embodied-loop") or []
        except metadata.PackageNotFoundError:
            return []
        return [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line]

    def lock(self) -> dict[str, str] | None:
        """The locked version by normalised name; None where no lock lies beside the package (an installed wheel)."""
        text = self.read(ROOT / "constraints.txt")
        pins = [line.split("==") for line in text.splitlines() if "==" in line]
        return {normal(name): version.strip() for name, version in pins} or None

    def vulkan_problem(self) -> str:
        """Why SAPIEN would find no driver; empty where it does."""
        try:
            vulkan.ensure_vulkan()
        except EmbodiedError as err:
            return str(err).splitlines()[0]
        return ""

    def exists(self, path: str | Path) -> bool:
        return Path(path).exists()

    def read(self, path: str | Path) -> str:
        """A text file's content; empty where there is none."""
        try:
            return Path(path).read_text(encoding="utf-8")
        except OSError:
            return ""

    def free_bytes(self, folder: str | Path) -> int:
        return shutil.disk_usage(folder).free

    def cores(self) -> int:
        return len(os.sched_getaffinity(0))

    def run(self, command: list[str], timeout_s: float, env: Mapping[str, str] | None = None) -> Done:
        """Run a program in a session of its own; all of it is ended when the time is over."""
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**self.environ, **(env or {})},
                start_new_session=True,
                text=True,
                errors="replace",
            )
        except OSError as err:
            return Done(127, err=f"{command[0]}: {err.strerror}")
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return Done(None, err=f"no answer within {timeout_s:.0f} s")
        finally:  # what it started as well, also when we are interrupted
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_S)
            process.stdout.close()
            process.stderr.close()
        return Done(process.returncode, out, err)

    def probe(self, name: str, *arguments: str, env: Mapping[str, str] | None = None) -> Done:
        """Try something out in a process of its own, so that a crash or a hang is no harm; its files are removed."""
        command = [sys.executable, "-W", "ignore", "-m", "embodied.system.probes", name, *arguments]
        with tempfile.TemporaryDirectory(prefix="probe-", ignore_cleanup_errors=True) as folder:
            return self.run(command, PROBE_S, {**(env or {}), "TMPDIR": folder})


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
