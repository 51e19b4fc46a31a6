"""The tables of docs/faults.md, from benchmarks/results/fault_table.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from benchmarks.common import markdown
from benchmarks.fault_cases import HOSTS, MODES, OF_A_LEARNER, PHASES, RECOVERED, SCHEDULES, SIMULATOR, SYNC, TOLD
from benchmarks.fault_table import OUT

PHASE_WORDS = {
    "start": "while it is constructed",
    "rollout": "rollout",
    "reset": "a reset in a rollout",
    "update": "update",
    "long_update": "an update that goes on 5 s longer",
    "publish": "publish",
    "weights": "while policies take the new weights",
    "saving": "saving",
    "evaluation": "evaluation",
    "rebuild": "and its successor while it builds",
}
FAULT_WORDS = {
    "exception": "code raises",
    "exit": "`sys.exit(0)`",
    "os_exit": "`os._exit(0)`",
    "nan_observation": "NaN in the state",
    "nan_action": "NaN in the actions",
    "inf_reward": "an infinite reward",
    "wrong_shape": "an array of the wrong shape",
    "memory_error": "`MemoryError`",
    "out_of_memory": "memory really runs out (a limit on the process)",
    "sigkill": "killed (SIGKILL)",
    "sigsegv": "SIGSEGV",
    "sigabrt": "SIGABRT",
    "sigstop": "stopped (SIGSTOP)",
    "hang": "hangs in Python",
    "hang_with_gil": "hangs in native code that holds the interpreter",
}
Rows = list[dict]


def rows() -> Rows:
    """Those of sync."""
    return [row for row in all_rows() if row.get("schedule", SYNC) == SYNC]


def all_rows() -> Rows:
    return json.loads(OUT.read_text())["rows"]


def count(found: Iterable[dict]) -> str:
    """How many ended as they should."""
    found = list(found)
    return f"{sum(row['outcome'] == row['wanted'] for row in found)} of {len(found)}" if found else ""


def seconds(found: Rows) -> str:
    told = sorted(row["seconds"] for row in found if row["seconds"] is not None)
    return f"{told[0]:.1f} to {told[-1]:.1f} s, half within {told[len(told) // 2]:.1f} s" if told else ""


def by_mode(found: Rows, phases: Iterable[str], dies: Callable[[str], Iterable[str]]) -> str:
    """How many of every mode, phase by phase."""
    modes = [mode for mode in MODES if any(row["mode"] == mode for row in found)]
    header = ["struck in", *(f"{mode}: {', '.join(f'{{{victim}}}' for victim in dies(mode))}" for mode in modes)]
    table = []
    for phase in phases:
        mine = [row for row in found if row["phase"] == phase]
        if mine:
            table.append([PHASE_WORDS[phase], *(count(row for row in mine if row["mode"] == mode) for mode in modes)])
    return markdown(header, table)


def kills() -> str:
    """The table of processes that are started again."""
    struck = [row for row in rows() if not row["inside"] and row["recipe"] != SIMULATOR and row["wanted"] == RECOVERED]
    return f"{by_mode(struck, PHASES, lambda mode: HOSTS[mode][0])}\n\n{total(struck)}"


def simulator_kills() -> str:
    struck = [row for row in rows() if row["recipe"] == SIMULATOR]
    return f"{by_mode(struck, PHASES, lambda mode: (*HOSTS[mode][0], HOSTS[mode][1]))}\n\n{total(struck)}"


def schedule_kills() -> str:
    """The table of any process, where learners work beside the others."""
    struck = [row for row in all_rows() if row.get("schedule", SYNC) != SYNC]
    cells = [(schedule, recipe) for schedule, recipes in SCHEDULES.items() for recipe in recipes]
    table = []
    for phase in PHASES:
        mine = [row for row in struck if row["phase"] == phase]
        table.append(
            [
                PHASE_WORDS[phase],
                *(count(row for row in mine if (row["schedule"], row["recipe"]) == cell) for cell in cells),
            ]
        )
    header = ["struck in", *(f"{schedule}: {recipe}" for schedule, recipe in cells)]
    return f"{markdown(header, table)}\n\n{total(struck)}"


def ends() -> str:
    """The table of processes whose death ends the run."""
    struck = [row for row in rows() if not row["inside"] and row["recipe"] != SIMULATOR and row["wanted"] == TOLD]
    killed = [row for row in struck if row["fault"] == "sigkill"]
    learners = [row for row in killed if "learner" in row["victim"]]
    stopped = [row for row in struck if row["fault"] == "sigstop"]
    table = by_mode(learners, OF_A_LEARNER, lambda mode: (HOSTS[mode][1],))
    mortals = [row for row in killed if row not in learners]
    told = (
        f"The message came after {seconds(learners)}. Stopped (SIGSTOP) in an update, with `faults.hang_s=10`: "
        f"{count(stopped)}, after {seconds(stopped)}. Sim and policy processes that were killed while they were "
        f"constructed the first time: {count(mortals)}, after {seconds(mortals)}."
    )
    return f"{table}\n\n{told}"


def faults() -> str:
    """The table of code that goes wrong inside a worker."""
    found = [row for row in rows() if row["inside"] and row["wanted"] == RECOVERED]
    cells = [(victim, backend) for victim in ("sim", "policy") for backend in ("local", "ray")]
    header = ["what goes wrong", *(f"in a {victim} worker, `{backend}`" for victim, backend in cells)]
    table = []
    for fault, words in FAULT_WORDS.items():
        mine = [row for row in found if row["fault"] == fault]
        chosen = [[row for row in mine if (row["victim"], row["backend"]) == cell] for cell in cells]
        if mine:
            table.append([words, *map(count, chosen)])
    start = [row for row in rows() if row["inside"] and row["wanted"] == TOLD]
    ended = f"In a constructor, where they end the run: {count(start)}, after {seconds(start)}."
    return f"{markdown(header, table)}\n\n{ended}"


def total(struck: Rows) -> str:
    commits = sorted({row["commit"] for row in struck})
    went_on = [row for row in struck if row["wanted"] == RECOVERED]
    return (
        f"Together {count(struck)}; two more iterations had ended {seconds(went_on)} after the strike "
        f"(commit {', '.join(commits)})."
    )
