"""A group of runs: the seeds of a recipe, or the settings of a sweep. Its folder names the runs.

The runs are ordinary run folders beside it. `group.json` lists them; a command with the same runs, or with more seeds
or values, finds the group again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from embodied.config.recipe import RunConfig
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.files import read_object, reading, replace_text
from embodied.core.yaml_text import write_yaml
from embodied.records.progress import provenance
from embodied.run.run_folder import STOPPED_AT_ONCE, is_held, try_lock, was_killed

GROUP, LOG = "group.json", "logs/group.log"
FORMAT = "embodied-group/1"
FINISHED, ENDED, GOING_ON, UNFINISHED, MISSING = "finished", "ended early", "going on", "unfinished", "not begun"
OVER = (FINISHED, ENDED)


@dataclass(frozen=True)
class Member:
    """One run of a group: its settings and seed, and its folder once it has begun."""

    settings: dict[str, Any]  # swept key -> value
    seed: int
    recipe: str = ""  # hash of the resolved recipe without seed and name
    folder: str = ""  # relative to the group's folder
    problem: str = ""  # why it failed

    @property
    def key(self) -> str:
        return json.dumps([self.settings, self.seed], sort_keys=True)

    @property
    def setting(self) -> str:
        return describe_setting(self.settings)

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.setting, f"seed {self.seed}"]))


class ListedRuns:
    """Runs that a file in their common folder lists. A dataclass with `members`; each has a `key` and a `folder`."""

    FILE: ClassVar[str]
    FORMAT: ClassVar[str]
    folder: Path
    members: tuple[Any, ...]

    def path(self, member: Any) -> Path | None:
        """The folder of a member's run; None before it began."""
        return Path(os.path.normpath(self.folder / member.folder)) if member.folder else None

    def state(self, member: Any) -> str:
        """A member's state: finished, ended early (more training would not help), going on, unfinished or not begun."""
        path = self.path(member)
        return MISSING if path is None else state_of(path)

    def write(self) -> None:
        content = {key: value for key, value in vars(self).items() if key not in ("folder", "members", "rates")}
        content |= {"runs": [asdict(member) for member in self.members]}
        replace_text(self.folder / self.FILE, json.dumps({"format": self.FORMAT, **content}, indent=1) + "\n")

    def change(self, member: Any, **facts: Any) -> Any:
        """Record facts about a member, at once; returns the member with them."""
        changed = replace(member, **facts)
        self.members = tuple(changed if other.key == member.key else other for other in self.members)
        self.write()
        return changed


def read_listed(path: Path, form: str) -> dict[str, Any]:
    """The content of a file that lists runs."""
    content = read_object(path)
    with reading(path):
        if content.get("format") != form:
            raise ValueError(f"its format is not {form}")
    return content


@dataclass
class RunGroup(ListedRuns):
    """A group of runs, as stored in group.json."""

    FILE = GROUP
    FORMAT = FORMAT

    folder: Path
    name: str  # of the recipe
    asked: dict[str, Any]  # the command line's values, except seeds and swept keys
    swept: tuple[str, ...]
    members: tuple[Member, ...]
    command: tuple[str, ...] = ()  # the words after `python`
    made: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, Any] = field(
        default_factory=dict
    )  # by setting and figure: IQM and interval over seeds; of a sweep


def describe_setting(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}={write_yaml(value)}" for key, value in settings.items())


def state_of(run: Path) -> str:
    if not (run / "run.json").is_file():
        return MISSING
    info = read_object(run / "run.json")
    state, cause = info.get("state"), info.get("cause", "")
    if state == "finished":
        return FINISHED
    if state == "stopped" and cause and not cause.startswith(STOPPED_AT_ONCE):  # ended by NothingToLearn
        return ENDED
    return UNFINISHED if state != "running" or was_killed(run, info) or not is_held(run) else GOING_ON


def recipe_mark(config: RunConfig) -> str:
    """A hash of a resolved recipe, independent of the seed and the run's name."""
    settings = config.model_dump(mode="json", exclude={"seed": True, "resume": True, "run": {"name": True}})
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:12]


def is_group(folder: Path) -> bool:
    return (folder / GROUP).is_file()


def read_group(folder: Path) -> RunGroup:
    content = read_listed(folder / GROUP, FORMAT)
    with reading(folder / GROUP):
        members = tuple(Member(**entry) for entry in content["runs"])
        asked, made = dict(content["asked"]), dict(content["made"])
        swept, command = tuple(content["swept"]), tuple(content["command"])
        return RunGroup(folder, content["name"], asked, swept, members, command, made)


def find_group(parent: Path, wanted: RunGroup, named: Path | None) -> tuple[RunGroup, bool]:
    """The existing group with these runs, to which missing runs are added, or a new group; and True if it is new.
    `named`: the group's folder on the command line; without it the newest fitting group is taken."""
    if named and is_group(named):
        group = read_group(named)
        if reason := why_different(group, wanted):
            raise ConfigError(f"group={named} holds other runs: {reason}; name another folder")
        return with_missing_runs(group, wanted), False
    if named is None:
        folders = sorted(parent.glob(f"*/{GROUP}"), key=lambda path: path.stat().st_mtime, reverse=True)
        for folder in (path.parent for path in folders):
            try:
                group = read_group(folder)
            except EmbodiedError:
                continue  # damaged
            if not why_different(group, wanted):
                return with_missing_runs(group, wanted), False
    kind = "sweep" if wanted.swept else "seeds"
    folder = named or parent / f"{wanted.name}-{kind}-{datetime.now():%Y%m%d-%H%M%S}"
    if folder.exists():
        raise ConfigError(f"{folder} exists already and has no {GROUP}; name another folder: group=FOLDER")
    return replace(wanted, folder=folder, made=provenance()), True


def why_different(group: RunGroup, wanted: RunGroup) -> str:
    """Why these groups have different runs; "" if they have the same."""
    if group.swept != wanted.swept:
        return f"they differ in {', '.join(group.swept) or 'their seeds alone'}"
    if group.asked != wanted.asked:
        keys = [key for key in {**group.asked, **wanted.asked} if group.asked.get(key) != wanted.asked.get(key)]
        return f"of other {', '.join(sorted(keys))}"
    marks = {member.setting: member.recipe for member in group.members}
    changed = [new.setting for new in wanted.members if marks.get(new.setting, new.recipe) != new.recipe]
    return f"the recipe has changed since{f' ({changed[0]})' if changed[0] else ''}" if changed else ""


def with_missing_runs(group: RunGroup, wanted: RunGroup) -> RunGroup:
    """The group with the missing runs added, and the newest command."""
    present = {member.key for member in group.members}
    more = [member for member in wanted.members if member.key not in present]
    return replace(group, members=(*group.members, *more), command=wanted.command)


@contextmanager
def lock_runs(folder: Path, file: str = LOG) -> Iterator[None]:
    """Inside, no other command can continue this folder's runs: `file` in it is locked."""
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if try_lock(lock) is False:
            raise EmbodiedError(f"{folder}: another process continues these runs; stop it first")
        yield
    finally:
        os.close(lock)
