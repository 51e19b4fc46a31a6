"""Reads what is on disk of a run, or of one evaluation, for a report. What cannot be read is named, never guessed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yaml import YAMLError

from embodied.config.cli import read_yaml
from embodied.core.errors import EmbodiedError
from embodied.core.files import read_object, reading
from embodied.core.types import EpisodeResult
from embodied.reporting.partial_evaluation import PARTIAL, partial_in
from embodied.reporting.results import RESULTS, read_results
from embodied.run.folder import lost

IN_TRAINING = re.compile(r"v\d{6,}")  # evaluations of the run itself; others were asked for by hand
LOST = (
    "It ended before it could say why: it was killed, or its machine went down. "
    "python -m embodied.{command} resume={run} goes on {where}."
)


@dataclass(frozen=True)
class Evaluation:
    folder: Path
    results: dict[str, Any]
    episodes: list[EpisodeResult]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def version(self) -> int:
        return int(self.results["policy_version"])

    @property
    def in_training(self) -> bool:
        return bool(IN_TRAINING.fullmatch(self.name))


@dataclass(frozen=True)
class Run:
    """A run's folder, or one evaluation's: that has neither metrics nor a state."""

    folder: Path
    info: dict[str, Any] = field(default_factory=dict)
    config: str = ""  # config.yaml
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)  # by version; those asked for by hand come last
    problems: list[str] = field(default_factory=list)
    partial: dict[str, str] = field(default_factory=dict)  # evaluations that were interrupted: how far they are

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def last(self) -> Evaluation | None:
        """The newest evaluation of the run itself, or what there is."""
        own = [one for one in self.evaluations if one.in_training]
        return (own or self.evaluations or [None])[-1]

    def env_steps(self, version: int) -> int | None:
        """How many env steps had been trained on when this version was published."""
        if version == 0:
            return 0
        return next((row["env_steps"] for row in self.metrics if row["policy_version"] == version), None)


def read_run(folder: Path) -> Run:
    """A run's folder or an evaluation's."""
    if (folder / "run.json").is_file():
        problems: list[str] = []
        info = read_info(folder / "run.json", problems)
        if lost(folder, info):
            where = "from its last checkpoint" if any(folder.glob("checkpoints/v*")) else "from its start"
            cause = LOST.format(command=info.get("command", "train"), run=folder, where=where)
            info |= {"state": "killed", "cause": cause}
        config = read_config(folder / "config.yaml", problems)
        metrics = read_metrics(folder / "metrics.jsonl", problems)
        return Run(folder, info, config, metrics, read_evaluations(folder, problems), problems, read_partial(folder))
    if (folder / RESULTS).is_file():
        return Run(folder, evaluations=[Evaluation(folder, *read_results(folder))])
    if told := partial_in(folder):
        return Run(folder, partial={folder.resolve().name: how_far(told)})
    raise EmbodiedError(
        f"{folder} is neither a run's folder (with run.json) nor an evaluation's (with {RESULTS}); "
        "for example: python -m embodied.report runs/NAME-DATE"
    )


def read_evaluations(run: Path, problems: list[str]) -> list[Evaluation]:
    found = []
    for path in sorted(run.glob(f"eval/*/{RESULTS}")):
        try:
            found.append(Evaluation(path.parent, *read_results(path.parent)))
        except EmbodiedError as err:
            problems.append(str(err))
    return sorted(found, key=lambda one: (not one.in_training, one.version, one.name))


def read_partial(run: Path) -> dict[str, str]:
    """The evaluations that were interrupted, by name."""
    found = {path.parent.name: partial_in(path.parent) for path in sorted(run.glob(f"eval/*/{PARTIAL}"))}
    return {name: how_far(told) for name, told in found.items() if told}


def how_far(told: dict[str, Any]) -> str:
    return f"{told.get('over', 0)} of {told.get('episodes', 'several')} episodes"


def read_metrics(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; the line a killed run was writing is left out, and what follows one that is odd."""
    from embodied.reporting.result_types import check_row

    if not path.is_file():
        return []
    rows: list[dict[str, Any]] = []
    with noted(problems), reading(path):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.endswith("}"):
                row = json.loads(line)
                check_row(row)
                rows.append(row)
    return rows


def read_info(path: Path, problems: list[str]) -> dict[str, Any]:
    from embodied.reporting.result_types import check_info

    with noted(problems), reading(path):
        info = read_object(path)
        check_info(info)
        return info
    return {}


def read_config(path: Path, problems: list[str]) -> str:
    """The resolved recipe, which must be one."""
    with noted(problems), reading(path):
        text = path.read_text(encoding="utf-8")
        try:
            recipe = read_yaml(text)
        except YAMLError as err:
            raise ValueError(str(err)) from None
        if not isinstance(recipe, dict):
            raise ValueError("it holds no mapping")
        return text
    return ""


@contextmanager
def noted(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except EmbodiedError as err:
        problems.append(str(err))
