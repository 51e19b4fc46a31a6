"""Put a software Vulkan driver into the user's cache folder if the machine has no driver: python -m embodied.vulkan

With `python -m embodied.vulkan on_cores` it does so beside a graphics card's driver, for env.renderer=cores.
Debian 12's Mesa is too old for SAPIEN, but the Mesa of its backports works. Its package is downloaded with apt from the
machine's mirror and unpacked; no system file changes. The libraries it needs are packages of Debian 12: root installs
them, other users get their names. The drivers of newer distributions work. Standard library only. It belongs to the
package since errors and `embodied.doctor` name it to users of pip too, who have no scripts/.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from embodied.core import vulkan_driver
from embodied.core.errors import ConfigError, EmbodiedError

# Libraries of SAPIEN and OpenCV, and their packages
LIBRARIES = {"libGL.so.1": "libgl1", "libEGL.so.1": "libegl1", "libgthread-2.0.so.0": "libglib2.0-0"}
PACKAGE = "mesa-vulkan-drivers"
NOT_NEEDED = ("libc6", "libdrm-amdgpu1")  # always installed; only for AMD cards, and newer than Debian 12's
TIMEOUT_S = 600


def main(argv: list[str] | None = None) -> int:
    asked = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & {*asked}:
        print(__doc__)
        return 0
    try:
        if odd := [word for word in asked if word != "on_cores"]:
            raise ConfigError(f"{odd[0]}: there is only on_cores; see python -m embodied.vulkan --help")
        print(install("on_cores" in asked))
    except EmbodiedError as err:
        print(f"error: {err}", file=sys.stderr)
        return err.exit_code
    return 0


def install(on_cores: bool = False) -> str:
    """Install a driver and the libraries that SAPIEN loads with it, `on_cores` also beside a graphics card's driver.
    Returns a line that names the driver."""
    absent = [name for name in LIBRARIES if not vulkan_driver.loads(name)]
    if absent and shutil.which("apt-get"):
        apt_install([LIBRARIES[name] for name in absent], f"libraries SAPIEN needs ({', '.join(absent)})")
    elif absent:
        raise EmbodiedError(
            f"SAPIEN needs the libraries {', '.join(absent)}; install them with your distribution's tools"
        )
    chosen = next((os.environ[name] for name in vulkan_driver.CHOSEN_BY_USER if os.environ.get(name)), None)
    if chosen:
        return f"Vulkan driver: {chosen} (from the environment)"
    if vulkan_driver.has_system_driver() and not on_cores:
        return "Vulkan driver: the system's"
    icd = vulkan_driver.private_icd()
    if is_working(icd):
        return f"Vulkan driver: {icd}"
    if not shutil.which("apt-get"):
        raise EmbodiedError(
            "no usable Vulkan driver, and it can be fetched only on Debian and Ubuntu. Install your "
            "distribution's Mesa Vulkan drivers (lavapipe, version 24 or later), or set VK_ICD_FILENAMES."
        )
    if codename() == "bookworm":
        return fetch_from_backports(icd)
    apt_install([PACKAGE], f"the system's software Vulkan driver ({PACKAGE}, version 24 or later)")
    if not vulkan_driver.has_system_driver():
        raise EmbodiedError(
            f"{PACKAGE} of this distribution ({codename() or 'unknown'}) is too old for SAPIEN, which needs version 24 "
            "or later. Install a newer Mesa, or name a driver: VK_ICD_FILENAMES=/path/to/icd.json"
        )
    return "Vulkan driver: the system's"


def is_working(icd: Path) -> bool:
    try:
        return vulkan_driver.loads(json.loads(icd.read_text())["ICD"]["library_path"])
    except (OSError, ValueError, LookupError):
        return False


def fetch_from_backports(icd: Path) -> str:
    """Download and unpack the driver, install the libraries it needs, and describe it for the Vulkan loader."""
    folder = icd.parent
    unpacked = folder / "unpacked"
    package = download(folder)
    shutil.rmtree(unpacked, ignore_errors=True)
    run(["dpkg-deb", "-x", str(package), str(unpacked)])
    library = next(unpacked.rglob("libvulkan_lvp.so")).replace(folder / "libvulkan_lvp.so")
    if absent := missing_libraries(library):
        needs = run(["dpkg-deb", "-f", str(package), "Depends"])
        names = [name for name in re.findall(r"(?:^|, )([a-z0-9.+-]+)", needs) if name not in NOT_NEEDED]
        apt_install(names, f"libraries of the software Vulkan driver ({', '.join(absent)})")
        if absent := missing_libraries(library):
            raise EmbodiedError(f"the software Vulkan driver still lacks {', '.join(absent)}")
    described = json.loads(next(unpacked.rglob("lvp_icd*.json")).read_text())
    described["ICD"]["library_path"] = str(library)
    draft = icd.with_suffix(".draft")
    draft.write_text(json.dumps(described, indent=2) + "\n")
    draft.replace(icd)
    package.unlink()
    shutil.rmtree(unpacked)
    return f"Vulkan driver: {icd}"


def download(folder: Path) -> Path:
    """Download the package with a source list, an index and a cache of our own; returns its file."""
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    mirror = bookworm_mirror()
    sources = folder / "sources.list"
    sources.write_text(f"deb {mirror.options}{mirror.uri} bookworm-backports main\n")
    settings = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "",
    }
    apt = ["apt-get", "-qq", *[f"-o{key}={value}" for key, value in settings.items()]]
    run([*apt, "update"])
    for old in folder.glob("*.deb"):
        old.unlink()
    run([*apt, "download", PACKAGE], cwd=folder)
    for leftover in ("lists", "cache"):
        shutil.rmtree(folder / leftover)
    sources.unlink()
    return next(folder.glob("*.deb"))


@dataclass(frozen=True)
class Mirror:
    uri: str
    options: str = ""  # "[signed-by=...] ", as in a source line


def bookworm_mirror(etc: Path = Path("/etc/apt")) -> Mirror:
    """The mirror from which this machine takes Debian 12, in either format of apt's sources."""
    texts = [
        path.read_text() for path in [etc / "sources.list", *sorted(etc.glob("sources.list.d/*"))] if path.is_file()
    ]
    for mirror in map(read_mirror, texts):
        if mirror:
            return mirror
    raise EmbodiedError(
        f"{etc} names no mirror of Debian 12 (bookworm main), from which the software Vulkan driver could be fetched"
    )


def read_mirror(text: str) -> Mirror | None:
    """The first mirror of bookworm main in the text of a source list; None without one."""
    for line in text.splitlines():
        one_line = re.match(r"deb\s+(\[[^\]]*\]\s+)?(\S+)\s+bookworm\s+(.*)", line.strip())
        if one_line and "main" in one_line[3].split():
            return Mirror(one_line[2], re.sub(r"\s+", " ", one_line[1] or ""))
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.splitlines() if not line.lstrip().startswith("#")]
        fields = dict(re.findall(r"^([\w-]+):[ \t]*(.*(?:\n[ \t]+.*)*)", "\n".join(lines), flags=re.MULTILINE))
        fields = {key.lower(): value.split() for key, value in fields.items()}
        wanted = {"types": "deb", "suites": "bookworm", "components": "main"}
        if "no" not in fields.get("enabled", []) and all(word in fields.get(key, []) for key, word in wanted.items()):
            options = [f"{key}={fields[key][0]}" for key in ("signed-by", "trusted") if len(fields.get(key, [])) == 1]
            return Mirror(fields["uris"][0], f"[{' '.join(options)}] " if options else "")
    return None


def missing_libraries(library: Path) -> list[str]:
    return re.findall(r"(\S+) => not found", run(["ldd", str(library)]))


def apt_install(packages: list[str], what: str) -> None:
    """Install system packages as root; for other users raise an error with the command that installs them."""
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if os.geteuid() != 0:
        raise EmbodiedError(f"missing: {what}. Run this once, or ask an administrator:\n  sudo {' '.join(command)}")
    run(["apt-get", "-qq", "update"])
    run([*command[:1], "-qq", *command[1:]], env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


def codename() -> str:
    """Debian's or Ubuntu's name of this release, such as bookworm."""
    try:
        return platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    except OSError:
        return ""


def run(command: list[str], **options) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, **options)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise EmbodiedError(f"{' '.join(command)}: {err}") from None
    if done.returncode:
        last_lines = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise EmbodiedError(f"{' '.join(command)} failed:\n{last_lines}")
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
