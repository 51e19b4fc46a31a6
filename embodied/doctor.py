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
from functools import partial
from pathlib import Path

from embodied.core.errors import ConfigError
from embodied.envs import plugin
from embodied.envs.config import ENV_CONFIGS
from embodied.envs.text.config import TextConfig
from embodied.run import launch
from embodied.system.machine import HTTP, RAY, ROOT, VLLM, Machine, absent, install, normal, why_no_engine, why_not

OK, WARNING, FAILED, ABSENT = "ok", "warning", "failed", "absent"
GIB = 1 << 30
AT_ONCE = 4  # simultaneous checks, at most: a simulator takes a gigabyte
NEWEST, OLDEST = (3, 12), (3, 11)
# With a CPU-only torch these packages break the import of other packages.
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec", "timm")
INSTALLED = {kind: issubclass(options, TextConfig) for kind, options in ENV_CONFIGS.items() if options.needs.packages}
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


# Devices, simulators and videos


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
    if not any(not absent(need, machine) for need in drawing):
        return []
    problem = machine.vulkan_problem()
    if problem:
        return [Finding("Vulkan driver", FAILED, problem, "python -m embodied.vulkan")]
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


def check_env(kind: str, machine: Machine) -> list[Finding]:
    """Renders a frame of a simulator as a run does, or scores an answer with a text env's library, if it is
    installed."""
    need, draws = ENV_CONFIGS[kind].needs, kind in DRAWN
    probe = "frame" if draws else "scoring"
    name = f"{kind} {probe}"
    if missing := absent(need, machine):
        only = "" if draws else f"; only env.name={kind} needs it"
        return [Finding(name, ABSENT, f"not installed: {', '.join(missing)}{only}", install(need, machine))]
    done = machine.probe(probe, kind)
    if done.problem:
        fix = "python -m embodied.vulkan" if need.vulkan else EGL_FIX if draws else set_up()
        return [Finding(name, FAILED, done.problem, fix)]
    if not draws:
        return [Finding(name, OK, f"{need} {machine.version(need.packages[0])}")]
    return [Finding(name, OK, f"{done.answer['task']}, physics {done.answer['backend']}")]


EGL_FIX = "apt-get install -y --no-install-recommends libegl1 libgl1 libosmesa6"


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


def check_ffmpeg(machine: Machine) -> list[Finding]:
    done = machine.probe("video")
    if done.problem:
        return [Finding("ffmpeg", FAILED, done.problem, "python -m pip install --force-reinstall imageio-ffmpeg")]
    return [Finding("ffmpeg", OK, f"two frames are an mp4 of {done.answer['bytes']} bytes")]


def check_language(machine: Machine) -> list[Finding]:
    """Finds language engines, and language models on this machine."""
    transformers = machine.version("transformers")
    if transformers is None:
        return [Finding("engines", ABSENT, "not installed: transformers; only policy.name=language needs it", set_up())]
    findings = [Finding("engines", OK, f"transformers {transformers}")]
    if why_no_engine("vllm", machine):
        findings.append(Finding("engines", ABSENT, "vllm is not installed; only policy.engine=vllm needs it", VLLM_FIX))
    else:
        version = next(filter(None, map(machine.version, VLLM)))
        findings.append(Finding("engines", OK, f"vllm {version}"))
    if missing := why_no_engine("http", machine):
        detail = f"{missing}; only policy.engine=http and embodied.serve of language models need it"
        findings.append(Finding("engines", ABSENT, detail, install(HTTP, machine)))
    else:
        findings.append(Finding("engines", OK, f"http, by aiohttp {machine.version('aiohttp')}"))
    named = ", ".join(machine.models())
    detail = named or "none here; policy.pretrained=ORG/NAME fetches one from the Hugging Face hub"
    return [*findings, Finding("language models", OK if named else ABSENT, detail)]


VLLM_FIX = f"cd {ROOT} && make vllm"


def check_ray(machine: Machine) -> list[Finding]:
    """Starts Ray. It is only for several machines, so a failure is a warning."""
    if absent(RAY, machine):
        return [Finding("Ray", ABSENT, "not installed; one machine needs none", install(RAY, machine))]
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    done = machine.probe("ray", env=quiet)
    if done.problem:
        more = "python -W ignore -m embodied.system.probes ray shows all it says"
        return [Finding("Ray", WARNING, done.problem, f"{more}; one machine needs none: cluster.backend=local")]
    return [Finding("Ray", OK, done.answer["version"])]


# Disk, memory and cores


def check_disk(machine: Machine) -> list[Finding]:
    """Checks the free space of the default run folder and of temporary files."""
    folders = {"disk": Path.cwd(), "disk for temporary files": Path(machine.environ.get("TMPDIR") or "/tmp")}
    return [amount(name, machine.free_bytes(at), 1, 10, f"{at}", DISK_FIX) for name, at in folders.items()]


DISK_FIX = "free some space, or put runs elsewhere: run.dir=/somewhere/larger"


def check_shared_memory(machine: Machine) -> list[Finding]:
    if not machine.exists("/dev/shm"):
        return [Finding("shared memory", FAILED, "/dev/shm is missing", "mount -t tmpfs -o size=8g tmpfs /dev/shm")]
    fix = "docker run --shm-size=8g, or: mount -o remount,size=8g /dev/shm"
    return [amount("shared memory", machine.free_bytes("/dev/shm"), 0.25, 1, "/dev/shm", fix)]


def amount(name: str, free: int, least: float, enough: float, where: str, fix: str) -> Finding:
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
    return [amount("memory", free, 1, 4, "memory", fix)]


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
        return [Finding(name, FAILED, done.problem, install(ENV_CONFIGS[kind].needs, machine))]
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
    check_ffmpeg,
    check_vulkan,
    *(partial(check_env, kind) for kind in DRAWN),
    check_egl,
    check_assets,
    *(partial(check_env, kind) for kind in SCORED),
    check_language,
    check_ray,
)


if __name__ == "__main__":
    raise SystemExit(main())
