"""LIBERO's five suites: how many tasks each has, how long an episode may last and how long things settle before it, and
what `env.task` may say.

A task is called `libero_spatial/3`: suite and number, in the order of the benchmark. Free of heavy imports, so that a
recipe is checked before anything starts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from embodied.core.errors import nearest


@dataclass(frozen=True)
class Suite:
    num_tasks: int
    max_steps: int  # env steps of an episode, as published evaluations use them

    def __str__(self) -> str:
        return f"tasks 0 to {self.num_tasks - 1}, {self.max_steps} steps"


SUITES = {
    "libero_spatial": Suite(10, 220),
    "libero_object": Suite(10, 280),
    "libero_goal": Suite(10, 300),
    "libero_10": Suite(10, 520),
    "libero_90": Suite(90, 400),
}
SETTLING_STEPS = 10  # played with an open gripper before an episode begins, so that objects come to rest


OWN_STEPS = 300  # env steps of an episode of a task of one's own that does not say


def is_own(task: str) -> bool:
    """True if a task is the user's: path/to/task.bddl or my_tasks:MyTask."""
    return task.endswith(".bddl") or ":" in task


def tasks_of(selection: str | Sequence[str]) -> tuple[str, ...]:
    """Task names that `env.task` means: a task, a suite, or a list of these. ValueError says what is wrong."""
    names = [selection] if isinstance(selection, str) else list(selection)
    found: list[str] = []
    for name in names:
        suite, _, number = name.partition("/")
        if is_own(name):
            found.append(name)
            continue
        if suite not in SUITES:
            hint = nearest(suite, SUITES, 0.4)
            raise ValueError(
                f"env.task={name!r}: the suites are {', '.join(SUITES)}{hint}; a task of your own is "
                "path/to/task.bddl or my_tasks:MyTask"
            )
        count = SUITES[suite].num_tasks
        if "/" not in name:
            found += [f"{suite}/{index}" for index in range(count)]
        elif re.fullmatch(r"\d+", number) and int(number) < count:
            found.append(f"{suite}/{int(number)}")
        else:
            raise ValueError(f"env.task={name!r}: {suite} has the tasks {suite}/0 to {suite}/{count - 1}")
    if len(set(found)) < len(found):
        twice = next(name for name in found if found.count(name) > 1)
        raise ValueError(f"env.task names {twice} twice")
    if len({is_own(name) for name in found}) > 1:
        raise ValueError("env.task mixes tasks of your own with the benchmark's, which are evaluated in another way")
    return tuple(found)


def max_steps(tasks: Sequence[str]) -> int:
    """The longest limit of these tasks' suites; each episode ends at that of its own."""
    return max(OWN_STEPS if is_own(task) else SUITES[task.partition("/")[0]].max_steps for task in tasks)
