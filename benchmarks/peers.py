"""An environment of its own for the libraries we measure against, so that none of them is among our dependencies.

It borrows the project's packages, which makes torch, ManiSkill and Gymnasium the same builds on both sides.

    python -m benchmarks.peers        # makes it, prints its python
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.common import ROOT

PLACE = ROOT / ".deps" / "peers"
PEERS = ("stable-baselines3==2.9.2",)  # everything it needs is in the project's environment


def peers_python(place: Path = PLACE) -> Path:
    """The python of the peers' environment, made at the first call and whenever what belongs in it changes."""
    python, stamp = place / "bin" / "python", place / "made-of.json"
    wanted = {"peers": list(PEERS), "borrows": sysconfig.get_path("purelib"), "base": sys.version}
    if stamp.is_file() and json.loads(stamp.read_text()) == wanted:
        return python
    stamp.unlink(missing_ok=True)
    make_venv = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(place)]
    subprocess.run(make_venv, check=True, timeout=120)
    lend(python, wanted["borrows"])
    install(python)
    stamp.write_text(json.dumps(wanted))
    return python


def lend(python: Path, packages: str) -> None:
    """Let this environment find the packages in another folder, after its own."""
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = subprocess.run(ask, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    (Path(own) / "project.pth").write_text(packages + "\n")


def install(python: Path) -> None:
    """The peers alone; pip then confirms that the borrowed packages are what they ask for."""
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "install", "--quiet", *constraints, *PEERS], check=True, timeout=900)


if __name__ == "__main__":
    print(peers_python())
