"""Reads groups of runs, the seeds of a recipe or the settings of a sweep, as sets of runs that differ in their seed."""

from __future__ import annotations

from dataclasses import dataclass, field

from embodied.reporting.runs import Run, read_run
from embodied.run.run_group import MISSING, OVER, RunGroup


@dataclass(frozen=True)
class SeedSet:
    """Runs that are alike but for their seed."""

    label: str
    runs: list[Run]
    seeds: list[int | None]  # one for each run; None where the run does not say
    over: list[bool]  # whether each has come to its end
    missing: list[str] = field(default_factory=list)  # runs that have no folder, and why

    @property
    def done(self) -> list[Run]:
        """The runs that came to their end and were evaluated."""
        return [run for run, over in zip(self.runs, self.over) if over and run.last]

    def name(self, place: int) -> str:
        """The label of the run at this place."""
        seed = self.seeds[place]
        return self.runs[place].name if seed is None else f"seed {seed}"


def alone(run: Run, label: str) -> SeedSet:
    """A run that is compared by itself."""
    return SeedSet(label, [run], [None], [True])


def sets_of(group: RunGroup, beside_others: bool = False) -> list[SeedSet]:
    """A set for each setting of a group, in the order in which they were asked for; `beside_others`: named with the
    group."""
    found = []
    for setting in dict.fromkeys(member.setting for member in group.members):
        mine = [member for member in group.members if member.setting == setting]
        states = {member.key: group.state(member) for member in mine}
        there = [member for member in mine if states[member.key] != MISSING]
        missing = [
            f"seed {one.seed} has not begun{f': {one.problem}' if one.problem else ''}"
            for one in mine
            if one not in there
        ]
        runs = [read_run(path) for member in there if (path := group.path(member))]
        over = [states[member.key] in OVER for member in there]
        folder = group.folder.resolve().name
        label = ", ".join(filter(None, [folder, setting])) if beside_others else setting or folder
        found.append(SeedSet(label, runs, [one.seed for one in there], over, missing))
    return found
