"""`embodied.train` with gates: the same recipe, placement and processes, whose moments can be struck from outside.

    STRIKE_GATES=FOLDER python -m chaos.gates recipe=pointmass_ppo [key=value ...]

A gate is a moment of one process: the driver about to publish, sim-0 resetting an env. Whoever writes a file
`FOLDER/driver.publish` arms it; the process that arrives renames it to `...reached` and stays there until that file is
gone, or goes wrong in the way that the file names. A gate that is not armed costs one look at the folder.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from embodied import train
from embodied.config.recipe import load
from embodied.run import launch
from embodied.runtime import Handle
from embodied.workflows import rl_loop
from embodied.workflows.rl_loop import EmbodiedLoop, LaggingVersions

FOLDER = "STRIKE_GATES"
HOLD = "hold"
HOLD_S = 60.0  # at most, at a gate that nobody opens
GATED = {"sim": "GatedSim", "policy": "GatedPolicy", "learner": "GatedLearner"}


def arrive(who: str, place: str) -> str:
    """Stay where this gate says hold; returns the fault that is armed there instead, if there is one."""
    gate = Path(os.environ[FOLDER], f"{who}.{place}")
    try:
        fault = gate.read_text()
        gate.rename(reached := reached_file(gate))
    except FileNotFoundError:
        return ""
    if fault != HOLD:
        return fault
    until = time.monotonic() + HOLD_S
    while reached.exists() and time.monotonic() < until:
        time.sleep(0.001)
    return ""


def reached_file(gate: Path) -> Path:
    return gate.with_name(f"{gate.name}.reached")


class GatedLoop(EmbodiedLoop):
    roles = tuple(replace(role, worker=f"chaos.gated_workers:{GATED[role.name]}") for role in EmbodiedLoop.roles)

    def publish(self, version: int) -> float:
        arrive("driver", "publish")
        return super().publish(version)

    def save(self, checkpoints: Path, state: dict[str, Any]) -> Path:
        arrive("driver", "save")
        return super().save(checkpoints, state)


class GatedVersions(LaggingVersions):
    """With a lag, a version is published when learners begin to copy it."""

    def _copy(self, version: int) -> Handle | None:
        if version > self.copied:
            arrive("driver", "publish")
        return super()._copy(version)


def main() -> int:
    rl_loop.LaggingVersions = GatedVersions
    return launch.run(lambda argv: train.follow(load(argv), GatedLoop), lost=launch.UNSAVED)


if __name__ == "__main__":
    raise SystemExit(main())
