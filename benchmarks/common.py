"""What the benchmarks share: the resolved recipe, commands run with their costs measured, and where it all happened."""

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
SAMPLE_S = 0.5  # between two looks at the memory of a running command


@dataclass(frozen=True)
class Cost:
    """What a command took with all its processes. Shared pages count in every process that maps them."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


def train_command(recipe: str, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "embodied.train", f"recipe={recipe}", *overrides]


def resolved(recipe: str, *overrides: str, defaults: bool = True) -> dict:
    """The recipe with every default spelt out, or with what differs from the defaults alone, as JSON has it."""
    from embodied.config.recipe import load

    return load([f"recipe={recipe}", *overrides]).config.model_dump(mode="json", exclude_defaults=not defaults)


def settings(config: dict) -> dict:
    """What a config says, apart from the seed and from where results go."""
    kept = {key: value for key, value in config.items() if key != "seed"}
    return kept | {"run": {key: value for key, value in config["run"].items() if key not in ("dir", "name")}}


def config_hash(config: dict) -> str:
    """Names what a recipe says."""
    return hashlib.sha256(json.dumps(settings(config), sort_keys=True).encode()).hexdigest()[:16]


def still_says(recipe: str, kept: dict, *overrides: str) -> bool:
    """Whether a recipe says what these settings of an earlier day say. An option that came since may have its default
    alone, with which everything is as it was; what evaluations record changes no result."""

    def same(kept: dict, now: dict, chosen: dict) -> bool:
        return not chosen.keys() - kept.keys() and all(
            same(value, now[key], chosen.get(key) or {})
            if isinstance(value, dict) and isinstance(now.get(key), dict)
            else key in now and value == now[key]
            for key, value in kept.items()
        )

    now, chosen = resolved(recipe, *overrides), {"run": {}} | resolved(recipe, *overrides, defaults=False)
    return same(unrecorded(kept), unrecorded(settings(now)), unrecorded(settings(chosen)))


def unrecorded(config: dict) -> dict:
    """The config without what says how many videos evaluations make."""
    kept = {key: value for key, value in config.get("eval", {}).items() if key not in ("videos", "failure_videos")}
    return config | {"eval": kept} if "eval" in config else config


def code_commit() -> str:
    """The commit, with a hash of the uncommitted changes where there are some; results do not count as changes."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    changes = git("diff", "HEAD", "--", ".", ":(exclude)benchmarks/results")
    dirty = f"-dirty-{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else ""
    return git("rev-parse", "--short=12", "HEAD").strip() + dirty


def packages() -> dict[str, str]:
    """Versions on our side."""
    from embodied.run.run_folder import provenance

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
    from embodied.system.vulkan_driver import ensure_vulkan

    ensure_vulkan()
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LP_NUM_THREADS")
    threads = dict.fromkeys(names, "1")
    return {**os.environ, **threads, "PYTHONWARNINGS": "ignore"}


def measure(
    command: Sequence[str], env: dict[str, str], timeout_s: float, look: Callable[[], None] = lambda: None
) -> Cost:
    """Run a command to its end, taking a `look` now and then. Its output is shown only if it fails."""
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
    """CPU seconds of the children that have ended, and of theirs that they waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tree_bytes(pid: int) -> int:
    """Resident memory of a process and all below it; one that ends meanwhile counts nothing."""
    try:
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except (OSError, IndexError):
        return 0
    return resident + sum(tree_bytes(int(child)) for told in children for child in told)


def only_run(parent: Path) -> Path:
    """The one run folder in a folder that was made for it."""
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
    """A table, columns padded so that it also reads well in a terminal."""
    table = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in table]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
