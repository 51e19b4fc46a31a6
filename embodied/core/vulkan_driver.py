"""Finds the Vulkan driver that SAPIEN needs even without rendering; without a GPU, a software driver.

`ensure_vulkan` runs before sapien is imported and installs nothing. It uses the graphics card's driver, a new enough
system lavapipe, or the driver that `python -m embodied.vulkan` has put into the user's cache folder. Standard library
only.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

from embodied.core.errors import EmbodiedError

CHOSEN_BY_USER = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
SYSTEM_FOLDERS = (
    "/etc/vulkan/icd.d",
    "/usr/share/vulkan/icd.d",
    "/usr/local/etc/vulkan/icd.d",
    "/usr/local/share/vulkan/icd.d",
)
DEVICES = Path("/dev/dri")
OLDEST_HEADER = 270  # lavapipe built against Vulkan headers x.y.270 or later is Mesa 24 or later


def ensure_vulkan(on_cores: bool = False) -> None:
    """Make sure that importing sapien finds a driver, `on_cores` a software driver also beside a graphics card's.
    Raises EmbodiedError with the fix if there is none."""
    if any(os.environ.get(name) for name in CHOSEN_BY_USER) or (has_system_driver() and not on_cores):
        return
    icds = [private_icd(), *(icd for icd in system_icds() if on_cores and "lvp" in icd.name and is_usable(icd))]
    if icd := next((icd for icd in icds if icd.is_file()), None):
        os.environ["VK_ICD_FILENAMES"] = str(icd)
        return
    lack = (
        "no Vulkan driver that draws on cores"
        if on_cores
        else (
            "no usable Vulkan driver: ManiSkill needs one even where nothing is rendered, and this machine has neither "
            "a graphics card with its driver nor Mesa's software driver of version 24 or later"
        )
    )
    raise EmbodiedError(
        f"{lack}.\nPut one into {private_icd().parent}: {sys.executable} -m embodied.vulkan{' on_cores' * on_cores}\n"
        "or name your own: VK_ICD_FILENAMES=/path/to/icd.json"
    )


def private_icd() -> Path:
    """The file that describes our own driver, written by `python -m embodied.vulkan`."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "embodied-loop" / "vulkan" / "icd.json"


def has_system_driver() -> bool:
    return has_nvidia() or any(map(is_usable, system_icds()))


def system_icds() -> list[Path]:
    return [icd for folder in SYSTEM_FOLDERS for icd in sorted(Path(folder).glob("*.json"))]


def has_nvidia() -> bool:
    """True if there is an NVIDIA card whose driver has its graphics part (containers often leave that out)."""
    return Path("/dev/nvidiactl").exists() and loads("libGLX_nvidia.so.0")


def is_usable(icd: Path) -> bool:
    """True if a system driver can be used: Mesa's with a GPU, or a new enough lavapipe.

    NVIDIA's is decided by `has_nvidia`.
    """
    try:
        described = json.loads(icd.read_text())["ICD"]
        header = int(str(described["api_version"]).split(".")[2])
        library = str(described["library_path"])
    except (OSError, ValueError, LookupError, TypeError):
        return False
    name = Path(library).name
    if "nvidia" in name or "gfxstream" in name or "virtio" in name:
        return False
    if "lvp" in name or "lavapipe" in name:
        return header >= OLDEST_HEADER and loads(library)
    return any(DEVICES.glob("renderD*")) and loads(library)


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
