"""Helpers of the benchmarks: the resolved recipe, commands with measured costs, and the machine."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PINNED = ROOT / "benchmarks" / "recipes"  # copies of shipped recipes, for comparisons between commits
SAMPLE_S = 0.5  # between two measurements of a command's memory


@dataclass(frozen=True)
class Cost:
    """The cost of a command with all its processes. Shared pages count in every process that maps them."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


def train_command(recipe: str, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "embodied.train", f"recipe={recipe}", *overrides]


def resolved(recipe: str, *overrides: str) -> dict:
    """The recipe as JSON, with all options."""
    from embodied.config.recipe import load

    return load([f"recipe={recipe}", *overrides]).config.model_dump(mode="json")


def config_hash(config: dict) -> str:
    """A hash of a recipe's settings, without the seed and the folders of results."""
    kept = {key: value for key, value in config.items() if key != "seed"}
    kept |= {"run": {key: value for key, value in config["run"].items() if key not in ("dir", "name")}}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def code_commit() -> str:
    """The commit, with a hash of uncommitted changes, if any; results are ignored."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    changes = git("diff", "HEAD", "--", ".", ":(exclude)benchmarks/results")
    dirty = f"-dirty-{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else ""
    return git("rev-parse", "--short=12", "HEAD").strip() + dirty


def packages() -> dict[str, str]:
    """Versions of our packages."""
    from embodied.records.progress import provenance

    return provenance()["packages"]


def machine() -> dict:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_before": round(os.getloadavg()[0], 2),
    }


def environment() -> dict[str, str]:
    """The environment of every process of a benchmark: a Vulkan driver, and one thread unless it sets more."""
    from embodied.core.vulkan_driver import ensure_vulkan

    ensure_vulkan()
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LP_NUM_THREADS")
    threads = dict.fromkeys(names, "1")
    return {**os.environ, **threads, "PYTHONWARNINGS": "ignore"}


def peer_environment(packages: Path | None, needs: Sequence[str]) -> dict[str, str]:
    """The environment of a process that imports another project's packages, which are in a folder of their own. Exits
    with the command that installs them, if the first one is missing."""
    paths = [str(packages.resolve()) if packages else "", os.environ.get("PYTHONPATH", "")]
    env = {**environment(), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    name = needs[0].partition("==")[0]
    look = [sys.executable, "-c", f"import importlib.metadata as m; m.version({name!r})"]
    if subprocess.run(look, env=env, capture_output=True, timeout=300).returncode:
        install = f"{sys.executable} -m pip install --target FOLDER --no-deps {' '.join(needs)}"
        print(f"{name} is not installed{f' in {packages}' if packages else ''}; try: {install}", file=sys.stderr)
        print("and then --packages FOLDER: our own packages stay as they are", file=sys.stderr)
        raise SystemExit(2)
    return env


def measure(
    command: Sequence[str], env: dict[str, str], timeout_s: float, look: Callable[[], None] = lambda: None
) -> Cost:
    """Run a command to its end, and call `look` from time to time. Its output is shown only if it fails."""
    started, cpu_before, peak = time.perf_counter(), children_cpu_s(), 0
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT) as process:
            while process.poll() is None:
                peak = max(peak, tree_bytes(process.pid))
                look()
                if time.perf_counter() - started > timeout_s:
                    process.kill()
                    raise SystemExit(f"not done after {timeout_s:.0f} s: {' '.join(command)}")
                try:
                    process.wait(SAMPLE_S)
                except subprocess.TimeoutExpired:
                    continue
        wall_s = time.perf_counter() - started
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)}\nended with {process.returncode}:\n{output.read()[-4000:]}")
    return Cost(wall_s, children_cpu_s() - cpu_before, peak)


def children_cpu_s() -> float:
    """CPU seconds of ended children and of their awaited children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tree_pids(pid: int) -> list[int]:
    """A process and all its descendants; a process that ends meanwhile has none."""
    try:
        children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return [pid]
    return [pid, *(descendant for told in children for child in told for descendant in tree_pids(int(child)))]


def tree_bytes(pid: int) -> int:
    """Resident memory of a process and all its descendants; a process that ends meanwhile counts nothing."""
    return sum(map(resident_bytes, tree_pids(pid)))


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def only_run(parent: Path) -> Path:
    """The only run folder in this folder."""
    runs = [path.parent for path in parent.glob("*/run.json")]
    if len(runs) != 1:
        raise SystemExit(f"{parent} holds {len(runs)} runs where one was started")
    return runs[0]


def read_metrics(run: Path) -> list[dict]:
    """One row per iteration."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def write_json(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content, indent=2) + "\n")
    draft.replace(path)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with padded columns, readable in a terminal."""
    table = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in table]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
