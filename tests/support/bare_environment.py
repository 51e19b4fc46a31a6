"""A virtual environment that has numpy and gymnasium, as they are here, and nothing else. No network is needed."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = ("numpy", "gymnasium", "cloudpickle", "farama-notifications", "typing_extensions")


def make(folder: Path) -> Path:
    """Make it in this folder. Returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    (packages,) = folder.glob("lib/python*/site-packages")
    for package in PACKAGES:
        found = metadata.distribution(package)
        for name in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (packages / name).symlink_to(found.locate_file(name))
    return folder / "bin" / "python"
