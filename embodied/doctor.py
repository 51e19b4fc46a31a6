"""Report what works on this machine and how to mend the rest: python -m embodied.doctor [--json]

usage: python -m embodied.doctor [--json] [--help]

  --json                        one JSON object: {"ok": ..., "findings": [{"check", "state", "detail", "fix"}, ...]}

Tests the parts of a run: package versions, torch, GPUs, a frame of every simulator, an mp4, Ray, memory and disk.
States: ok; warning (works, but not well); absent (optional, not installed); failed (an installed or required part does
not work). Exit code 1 if anything failed.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from embodied.core.errors import ConfigError
from embodied.core.options import RAY, ROOT, Requirement
from embodied.envs import plugin
from embodied.envs.config import ENV_CONFIGS, NamedWithKind
from embodied.run import launch
from embodied.system.drawing import Result
from embodied.system.machine import ENGINES, NO_VLLM, Machine, missing_packages, normal, why_no_engine, why_not

OK, WARNING, FAILED, ABSENT = "ok", "warning", "failed", "absent"
GIB = 1 << 30
AT_ONCE = 4  # simultaneous checks, at most: a simulator takes a gigabyte
NEWEST, OLDEST = (3, 12), (3, 11)
# With a CPU-only torch these packages break the import of other packages.
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec", "timm")
INSTALLED = {  # an env that needs the name of a task as well is not drawn
    kind: options.speaks
    for kind, options in ENV_CONFIGS.items()
    if options.needs.packages and (options.speaks or not issubclass(options, NamedWithKind))
}
DRAWN, SCORED = ([kind for kind, text in INSTALLED.items() if text is scored] for scored in (False, True))


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv, __doc__)


def start(argv: list[str]) -> int:
    if unknown := [word for word in argv if word != "--json"]:
        raise ConfigError(f"{unknown[0]}: there is only --json; see python -m embodied.doctor --help")
    return examine(Machine(), "--json" in argv)


def examine(machine: Machine, as_json: bool, checks: Sequence[Check] | None = None) -> int:
    """Run the checks, one per core at a time, and print their findings in order as they arrive. Returns the exit
    code."""
    findings: list[Finding] = []
    with ThreadPoolExecutor(max(1, min(machine.cores(), AT_ONCE))) as pool:
        try:
            begun = [pool.submit(check, machine) for check in (CHECKS if checks is None else checks)]
            for check in begun:
                for finding in check.result():
                    findings.append(finding)
                    if not as_json:
                        print(describe(finding), flush=True)
        except BaseException:  # Ctrl-C: do not wait for a simulator's frame
            pool.shutdown(wait=False, cancel_futures=True)
            machine.stop()
            raise
    failed, warned = (sum(finding.state == state for finding in findings) for state in (FAILED, WARNING))
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(f"\n{summary(failed, warned)}")
    return 1 if failed else 0


def describe(finding: Finding) -> str:
    line = f"{finding.state:<8} {finding.check:<26} {finding.detail}"
    return f"{line}\n{'':<8} {'':<26} fix: {finding.fix}" if finding.fix else line


def summary(failed: int, warned: int) -> str:
    warnings = f"{warned} warning{'s' * (warned != 1)}"
    return f"{failed} failed, {warnings}" if failed else f"everything that is installed works, {warnings}"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    state: str
    detail: str
    fix: str = ""  # a command or an advice


def set_up() -> str:
    """The command that restores the locked packages in a checkout."""
    return f"cd {ROOT} && rm -f .venv/set-up-for && make setup"


# The checks: each takes a `Machine` and returns findings with fixes

# Python and its packages


def check_python(machine: Machine) -> list[Finding]:
    version = ".".join(map(str, machine.python))
    if OLDEST <= machine.python[:2] <= NEWEST:
        return [Finding("Python", OK, version)]
    return [Finding("Python", FAILED, f"{version}; 3.11 or 3.12 is needed", "make setup PYTHON=python3.11")]


def check_packages(machine: Machine) -> list[Finding]:
    """Finds missing packages, and packages with another version than the locked one."""
    have, lock = machine.installed(), machine.lock()
    findings = []
    missing = [name for name in machine.required() if normal(name) not in have]
    if missing:
        fix = set_up() if lock else f"python -m pip install {' '.join(missing)}"
        findings.append(Finding("packages", FAILED, f"not installed: {', '.join(missing)}", fix))
    locked = {name: version for name, version in have.items() if lock and name in lock}
    if other := {name: version for name, version in locked.items() if lock[name] != version.partition("+")[0]}:
        detail = ", ".join(f"{name} {version} (locked: {lock[name]})" for name, version in list(other.items())[:5])
        more = f", and {len(other) - 5} more" if len(other) > 5 else ""
        pins = " ".join(f"{name}=={lock[name]}" for name in other)
        findings.append(Finding("packages", WARNING, detail + more, f"python -m pip install --no-deps {pins}"))
    if not findings:
        detail = (
            f"{len(locked)} as locked" if lock else "all there; no lock beside the package to compare versions with"
        )
        findings.append(Finding("packages", OK, detail))
    return [*findings, *check_unwanted(have)]


def check_unwanted(have: dict[str, str]) -> list[Finding]:
    """Finds installed packages that break other packages."""
    unwanted = {}
    if have.get("torch", "").endswith("+cpu"):
        unwanted |= {name: "it does not fit a torch without CUDA" for name in CUDA_ONLY if name in have}
    for need in (options.needs for options in ENV_CONFIGS.values()):
        hidden = [package for package in need.packages[:1] if package in have]
        unwanted |= {name: f"it hides {hidden[0]}" for name in need.hidden_by if hidden and name in have}
    if "opencv-python" in have and "opencv-python-headless" in have:
        unwanted["opencv-python-headless"] = "it overwrites opencv-python"
    return [
        Finding("packages", WARNING, f"{name} is installed; {why}", f"python -m pip uninstall -y {name}")
        for name, why in unwanted.items()
    ]


def check_torch(machine: Machine) -> list[Finding]:
    """Checks that torch computes, and finds the graphics cards."""
    done = machine.probe("torch")
    if done.problem:
        return [Finding("torch", FAILED, done.problem, set_up())]
    answer, cards = done.answer, graphics_cards(machine)
    detail = f"{answer['version']}, {', '.join(answer['gpus']) or 'CPU only'}"
    if cards and not answer["gpus"]:
        why = "is built without CUDA" if not answer["built_for"] else f"(CUDA {answer['built_for']}) cannot use them"
        fix = set_up() if not answer["built_for"] else "nvidia-smi; the driver must be as new as torch's CUDA"
        return [Finding("torch", WARNING, f"{detail}; there are {len(cards)} NVIDIA cards, but torch {why}", fix)]
    return [Finding("torch", OK, detail)]


# Parts that a probe tries in a process of its own

VULKAN_FIX, RAY_HELP = "python -m embodied.vulkan", "python -W ignore -m embodied.system.probes ray shows all it says"
EGL_FIX = "apt-get install -y --no-install-recommends libegl1 libgl1 libosmesa6"
FFMPEG_FIX = "python -m pip install --force-reinstall imageio-ffmpeg"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}


@dataclass(frozen=True)
class Part:
    """A part of runs: the packages that it needs, how it is tried, and what to do if it does not work."""

    name: str
    probe: str  # of `system.probes`, with its arguments
    fix: str
    detail: str  # about a working part, from the probe's answer
    needs: Requirement | None = None
    without: str = ""  # what runs lack if it is not installed
    broken: str = FAILED

    def __call__(self, machine: Machine) -> list[Finding]:
        if self.needs and (missing := missing_packages(self.needs, machine)):
            detail = "; ".join(filter(None, [f"not installed: {', '.join(missing)}", self.without]))
            return [Finding(self.name, ABSENT, detail, self.needs.install)]
        done = machine.probe(*self.probe.split(), env=QUIET)
        if done.problem:
            return [Finding(self.name, self.broken, done.problem, self.fix)]
        return [Finding(self.name, OK, self.detail.format(**done.answer))]


def frame(kind: str) -> Part:
    need = ENV_CONFIGS[kind].needs
    fix = VULKAN_FIX if need.vulkan else EGL_FIX
    return Part(f"{kind} frame", f"frame {kind}", fix, "{task}, physics {backend}", need)


def scoring(kind: str) -> Part:
    only = f"only env.name={kind} needs it"
    return Part(f"{kind} scoring", f"scoring {kind}", set_up(), "works", ENV_CONFIGS[kind].needs, only)


FFMPEG = Part("ffmpeg", "video", FFMPEG_FIX, "two frames are an mp4 of {bytes} bytes")
ONE_MACHINE = "one machine needs none"
CLUSTER = Part(
    "Ray", "ray", f"{RAY_HELP}; {ONE_MACHINE}: cluster.backend=local", "{version}", RAY, ONE_MACHINE, WARNING
)


# Devices, simulators and language models


def check_gpus(machine: Machine) -> list[Finding]:
    if not machine.exists("/dev/nvidiactl"):
        return [Finding("GPU", ABSENT, "no NVIDIA card; everything runs on the CPU")]
    cards = graphics_cards(machine)
    if not cards:
        fix = f"nvidia-smi; in a container: {CONTAINER}"
        return [Finding("GPU", FAILED, "there is an NVIDIA card, but nvidia-smi shows none", fix)]
    return [Finding("GPU", OK, card) for card in cards]


CONTAINER = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=all"
GRAPHICS_FIX = f"in a container: {CONTAINER}; elsewhere install the driver with its graphics part (libGLX_nvidia)"


def graphics_cards(machine: Machine) -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,memory.free,memory.total,driver_version", "--format=csv,noheader"]
    done = machine.run(query, 30)
    return [] if done.problem else [line.strip() for line in done.out.splitlines() if line.strip()]


def check_vulkan(machine: Machine) -> list[Finding]:
    drawing = [options.needs for options in ENV_CONFIGS.values() if options.needs.vulkan]
    if not any(not missing_packages(need, machine) for need in drawing):
        return []
    problem = machine.vulkan_problem()
    if problem:
        return [Finding("Vulkan driver", FAILED, problem, VULKAN_FIX)]
    driver = Finding("Vulkan driver", OK, machine.environ.get("VK_ICD_FILENAMES") or "the system's")
    return [driver, *check_gpu_rendering(machine)] if graphics_cards(machine) else [driver]


def check_gpu_rendering(machine: Machine) -> list[Finding]:
    """Renders on the GPU: the driver found may be the software renderer, since containers often lack the graphics part
    of NVIDIA's driver."""
    done = machine.probe("renderer")
    if done.problem:
        return [Finding("GPU rendering", WARNING, f"SAPIEN finds no GPU: {done.problem}", GRAPHICS_FIX)]
    name = done.answer["name"]
    if not done.answer["draws"]:
        detail = f"{name} computes but does not draw, the driver's graphics part is missing: no images, no videos there"
        return [Finding("GPU rendering", WARNING, detail, GRAPHICS_FIX)]
    return [Finding("GPU rendering", OK, name)]


def check_drawing(machine: Machine) -> list[Finding]:
    """Checks that GPUs draw while they compute, for each simulator that draws there."""
    if not graphics_cards(machine):
        return []
    here = [kind for kind in DRAWN if not why_not(ENV_CONFIGS[kind].needs, machine) and plugin(kind).draws_on_gpus]
    return [drawing_of(kind, machine) for kind in here]


def drawing_of(kind: str, machine: Machine) -> Finding:
    done = machine.probe("drawing", kind)
    if done.problem:
        return Finding(f"{kind} on GPUs", WARNING, done.problem, "env.renderer=cores")
    result = Result(**done.answer)
    fix = "" if result.on_gpus else result.ways_out(ENV_CONFIGS[kind]) if result.problem else GRAPHICS_FIX
    return Finding(f"{kind} on GPUs", OK if result.on_gpus else WARNING, result.describe(), fix)


def check_egl(machine: Machine) -> list[Finding]:
    """Checks that MuJoCo draws without a screen, through EGL or at least through OSMesa."""
    if machine.version("mujoco") is None:
        return []
    first = machine.environ.get("MUJOCO_GL") or "egl"
    done = machine.probe("mujoco", env={"MUJOCO_GL": first})
    if not done.problem:
        return [Finding("MuJoCo frame", OK, f"through {first}")]
    problem = f"nothing is drawn through {first}: {done.problem}"
    if first != "osmesa" and not machine.probe("mujoco", env={"MUJOCO_GL": "osmesa"}).problem:
        return [Finding("MuJoCo frame", WARNING, f"{problem}; OSMesa works", f"export MUJOCO_GL=osmesa, or: {EGL_FIX}")]
    return [Finding("MuJoCo frame", FAILED, problem, EGL_FIX)]


def check_language(machine: Machine) -> list[Finding]:
    """Finds language engines, and language models on this machine."""
    findings = []
    for name, engine in ENGINES.items():
        if problem := why_no_engine(name, machine):
            fix = f"cd {ROOT} && make vllm" if problem == NO_VLLM else engine.needs[0].install
            findings.append(Finding("engines", ABSENT, f"{problem}; only {engine.users} needs it", fix))
        else:
            findings.append(Finding("engines", OK, name))
    named = ", ".join(machine.models())
    detail = named or "none here; policy.pretrained=ORG/NAME fetches one from the Hugging Face hub"
    return [*findings, Finding("language models", OK if named else ABSENT, detail)]


# Disk, memory and cores


def check_disk(machine: Machine) -> list[Finding]:
    """Checks the free space of the default run folder and of temporary files."""
    folders = {"disk": Path.cwd(), "disk for temporary files": Path(machine.environ.get("TMPDIR") or "/tmp")}
    return [check_amount(name, machine.free_bytes(at), 1, 10, f"{at}", DISK_FIX) for name, at in folders.items()]


DISK_FIX = "free some space, or put runs elsewhere: run.dir=/somewhere/larger"


def check_shared_memory(machine: Machine) -> list[Finding]:
    if not machine.exists("/dev/shm"):
        return [Finding("shared memory", FAILED, "/dev/shm is missing", "mount -t tmpfs -o size=8g tmpfs /dev/shm")]
    fix = "docker run --shm-size=8g, or: mount -o remount,size=8g /dev/shm"
    return [check_amount("shared memory", machine.free_bytes("/dev/shm"), 0.25, 1, "/dev/shm", fix)]


def check_amount(name: str, free: int, least: float, enough: float, where: str, fix: str) -> Finding:
    detail = f"{free / GIB:.1f} GiB free in {where}"
    if free < least * GIB:
        return Finding(name, FAILED, f"{detail}; at least {least:g} GiB are needed", fix)
    if free < enough * GIB:
        return Finding(name, WARNING, f"{detail}; {enough:g} GiB are comfortable", fix)
    return Finding(name, OK, detail)


def check_memory(machine: Machine) -> list[Finding]:
    """Checks the free memory, also under a container's limit."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB", machine.read("/proc/meminfo"), re.M)
    if not available:
        return []
    free = int(available[1]) * 1024
    limit = machine.read("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit():
        used = machine.read("/sys/fs/cgroup/memory.current").strip()
        free = min(free, int(limit) - int(used or 0))
    fix = 'close other programs; or fewer simulators at once: placement={"sim,policy": "cpu:0", learner: "cpu:0"}'
    return [check_amount("memory", free, 1, 4, "memory", fix)]


def check_cores(machine: Machine) -> list[Finding]:
    """Checks the cores of this process; a container may get less processor time than its cores suggest."""
    cores = machine.cores()
    quota, _, period = machine.read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and int(quota) / int(period) < cores - 0.5:
        share = int(quota) / int(period)
        detail = f"{cores} cores are visible, but this container may use {share:.1f} of them"
        fix = f"taskset -c 0-{max(int(share), 1) - 1} python -m embodied.train ..., or raise the limit"
        return [Finding("cores", WARNING, detail, fix)]
    return [Finding("cores", OK, f"{cores}")]


def check_assets(machine: Machine) -> list[Finding]:
    """Lists the downloads that tasks of the installed simulators need."""
    here = [kind for kind in DRAWN if not why_not(ENV_CONFIGS[kind].needs, machine) and plugin(kind).catalogue]
    return [finding for kind in here for finding in assets_of(kind, machine)]


def assets_of(kind: str, machine: Machine) -> list[Finding]:
    simulator, done = plugin(kind), machine.probe("tasks", kind)
    name = f"{simulator.catalogue} tasks"
    if done.problem:
        return [Finding(name, FAILED, done.problem, ENV_CONFIGS[kind].needs.install)]
    needed = [task["missing"] for task in done.answer.values()]
    lacking = Counter(asset for missing in needed for asset in missing)
    findings = [
        Finding(name, OK, f"{sum(not missing for missing in needed)} of {len(needed)} need no further download")
    ]
    if lacking:
        detail = ", ".join(f"{asset} ({count} task{'s' * (count > 1)})" for asset, count in sorted(lacking.items()))
        source = next(missing[asset] for asset in sorted(lacking) for missing in needed if asset in missing)
        fix = f"{source}, and so on; or {simulator.other_folder}"
        findings.append(Finding(f"{simulator.catalogue} assets", ABSENT, detail, fix))
    return findings


Check = Callable[[Machine], list[Finding]]
CHECKS: tuple[Check, ...] = (
    check_python,
    check_packages,
    check_cores,
    check_memory,
    check_shared_memory,
    check_disk,
    check_gpus,
    check_torch,
    FFMPEG,
    check_vulkan,
    *map(frame, DRAWN),
    check_egl,
    check_drawing,
    check_assets,
    *map(scoring, SCORED),
    check_language,
    CLUSTER,
)


if __name__ == "__main__":
    raise SystemExit(main())
