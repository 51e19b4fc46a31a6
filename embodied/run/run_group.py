"""Runs that belong together, the seeds of a recipe or the settings of a sweep: a folder that names them.

The runs themselves are ordinary ones beside it. `group.json` says which there are and where; a command that asks for
the same runs, or for more of them, finds it again.
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
from typing import Any

from embodied.config.recipe import RunConfig
from embodied.config.yaml_values import write_yaml
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.files import read_object, reading, replace_text
from embodied.run.run_folder import is_held, lost, provenance, taken

GROUP, LOG = "group.json", "logs/group.log"
FORMAT = "embodied-group/1"
FINISHED, ENDED, GOING_ON, UNFINISHED, MISSING = "finished", "ended early", "going on", "unfinished", "not begun"
OVER = (FINISHED, ENDED)


@dataclass(frozen=True)
class Member:
    """One run of a group: what sets it apart, and where it is once it has begun."""

    settings: dict[str, Any]  # swept key -> value
    seed: int
    recipe: str = ""  # names the resolved recipe, but for seed and name
    folder: str = ""  # relative to the group's
    problem: str = ""  # why it has no folder, or did not end well

    @property
    def key(self) -> str:
        return json.dumps([self.settings, self.seed], sort_keys=True)

    @property
    def setting(self) -> str:
        return describe_setting(self.settings)

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.setting, f"seed {self.seed}"]))


@dataclass(frozen=True)
class RunGroup:
    """A group of runs, as group.json has it."""

    folder: Path
    name: str  # of the recipe
    asked: dict[str, Any]  # what the command line said, but for seeds and swept values
    swept: tuple[str, ...]
    members: tuple[Member, ...]
    command: tuple[str, ...] = ()  # the words after `python`
    made: dict[str, Any] = field(default_factory=dict)

    def path(self, member: Member) -> Path | None:
        """The folder of its run."""
        return Path(os.path.normpath(self.folder / member.folder)) if member.folder else None

    def state(self, member: Member) -> str:
        """Its state: finished, ended early (more training would not help), going on, unfinished or not begun."""
        path = self.path(member)
        return MISSING if path is None else state_of(path)

    def write(self) -> None:
        content = {key: value for key, value in vars(self).items() if key not in ("folder", "members")}
        runs = [asdict(member) for member in self.members]
        replace_text(self.folder / GROUP, json.dumps({"format": FORMAT, **content, "runs": runs}, indent=1) + "\n")

    def with_member(self, changed: Member) -> RunGroup:
        """The group with this changed member, written to disk."""
        others = [changed if member.key == changed.key else member for member in self.members]
        group = replace(self, members=tuple(others))
        group.write()
        return group


def describe_setting(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}={write_yaml(value)}" for key, value in settings.items())


def state_of(run: Path) -> str:
    if not (run / "run.json").is_file():
        return MISSING
    info = read_object(run / "run.json")
    state, cause = info.get("state"), info.get("cause", "")
    if state == "finished":
        return FINISHED
    if state == "stopped" and cause not in ("", "second Ctrl-C"):  # nothing to learn from
        return ENDED
    return UNFINISHED if state != "running" or lost(run, info) or not is_held(run) else GOING_ON


def recipe_mark(config: RunConfig) -> str:
    """Names a resolved recipe, whatever its seed and its run's name."""
    said = config.model_dump(mode="json", exclude={"seed": True, "resume": True, "run": {"name": True}})
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:12]


def is_group(folder: Path) -> bool:
    return (folder / GROUP).is_file()


def read_group(folder: Path) -> RunGroup:
    path = folder / GROUP
    content = read_object(path)
    with reading(path):
        if content.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        members = tuple(Member(**one) for one in content["runs"])
        asked, made = dict(content["asked"]), dict(content["made"])
        swept, command = tuple(content["swept"]), tuple(content["command"])
        return RunGroup(folder, content["name"], asked, swept, members, command, made)


def find_group(parent: Path, wanted: RunGroup, named: Path | None) -> tuple[RunGroup, bool]:
    """The group of these runs, or of some of them, with those added that it lacks; -> also whether it is new. `named`:
    the folder that the command line names, else the newest that fits."""
    if named and is_group(named):
        found = read_group(named)
        if reason := other(found, wanted):
            raise ConfigError(f"group={named} holds other runs: {reason}; name another folder")
        return joined(found, wanted), False
    if named is None:
        folders = sorted(parent.glob(f"*/{GROUP}"), key=lambda path: path.stat().st_mtime, reverse=True)
        for folder in (path.parent for path in folders):
            try:
                found = read_group(folder)
            except EmbodiedError:
                continue  # damaged: not this one
            if not other(found, wanted):
                return joined(found, wanted), False
    kind = "sweep" if wanted.swept else "seeds"
    folder = named or parent / f"{wanted.name}-{kind}-{datetime.now():%Y%m%d-%H%M%S}"
    if folder.exists():
        raise ConfigError(f"{folder} exists already and has no {GROUP}; name another folder: group=FOLDER")
    return replace(wanted, folder=folder, made=provenance()), True


def other(found: RunGroup, wanted: RunGroup) -> str:
    """Why these are not the same runs; "" where they are."""
    if found.swept != wanted.swept:
        return f"they differ in {', '.join(found.swept) or 'their seeds alone'}"
    if found.asked != wanted.asked:
        keys = [key for key in {**found.asked, **wanted.asked} if found.asked.get(key) != wanted.asked.get(key)]
        return f"of other {', '.join(sorted(keys))}"
    marks = {member.setting: member.recipe for member in found.members}
    changed = [one.setting for one in wanted.members if marks.get(one.setting, one.recipe) != one.recipe]
    return f"the recipe has changed since{f' ({changed[0]})' if changed[0] else ''}" if changed else ""


def joined(found: RunGroup, wanted: RunGroup) -> RunGroup:
    """The group with the wanted runs that it lacks, and the command that asked for all of them last."""
    known = {member.key for member in found.members}
    more = [member for member in wanted.members if member.key not in known]
    return replace(found, members=(*found.members, *more), command=wanted.command)


@contextmanager
def lock_runs(folder: Path, file: str = LOG) -> Iterator[None]:
    """Keeps other commands from going on with the runs that this folder names; `file` in it is locked meanwhile."""
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if taken(lock) is False:
            raise EmbodiedError(f"{folder}: another process continues these runs; stop it first")
        yield
    finally:
        os.close(lock)
