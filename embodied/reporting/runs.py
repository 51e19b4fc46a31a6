"""Reads the files of a run or of one evaluation for a report. Unreadable files are reported in `problems`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from yaml import YAMLError

from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.files import as_path, read_object, reading
from embodied.core.types import EpisodeResult
from embodied.core.yaml_text import read_yaml
from embodied.records.results import PARTIAL, RESULTS, check_info, check_row, partial_in, read_results
from embodied.run.run_folder import was_killed

IN_TRAINING = re.compile(r"v\d{6,}")  # evaluations during training, not those started by hand
CHOOSES_EPISODES = ("episodes", "seed", "samples", "temperature", "top_p", "top_k", "min_p")
LOST = "It ended before it could say why: it was killed, or its machine went down. {resume} goes on {where}."


@dataclass(frozen=True)
class Evaluation:
    """One evaluation on disk."""

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
    def success_once(self) -> float | None:
        """The rate of successful episodes; None if the env does not report success."""
        return (self.results["overall"].get("success_once") or {}).get("rate")

    @property
    def of_text(self) -> bool:
        """True if a language policy was evaluated."""
        return "text" in self.results["overall"]

    @property
    def in_training(self) -> bool:
        return bool(IN_TRAINING.fullmatch(self.name))


@dataclass(frozen=True)
class Run:
    """The files of a run, or of one evaluation, which has neither metrics nor a state."""

    folder: Path
    info: dict[str, Any] = field(default_factory=dict)
    config: str = ""  # config.yaml
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)  # by version; those started by hand come last
    problems: list[str] = field(default_factory=list)
    partial: dict[str, str] = field(default_factory=dict)  # interrupted evaluations: progress by name

    def __repr__(self) -> str:
        state = self.info.get("state", "evaluation")
        last = (
            f", success_once {self.last.success_once:.1%}" if self.last and self.last.success_once is not None else ""
        )
        return f"Run({str(self.folder)!r}: {state}, {len(self.metrics)} iterations{last})"

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def last(self) -> Evaluation | None:
        """The newest evaluation during training; if there is none, the last evaluation started by hand."""
        in_training = [evaluation for evaluation in self.evaluations if evaluation.in_training]
        candidates = in_training or self.evaluations
        return candidates[-1] if candidates else None

    @property
    def provenance(self) -> dict[str, Any]:
        """The provenance of the run, or of the evaluation if there is no run."""
        return self.info.get("provenance") or (self.last.results.get("provenance", {}) if self.last else {})

    def env_steps(self, version: int) -> int | None:
        """The env steps of training up to this version; None if metrics.jsonl lacks it."""
        if version == 0:
            return 0
        return next((row["env_steps"] for row in self.metrics if row["policy_version"] == version), None)


def read_run(folder: Path | str) -> Run:
    """Read the folder of a run or of an evaluation."""
    folder = as_path(folder)
    if (folder / "run.json").is_file():
        problems: list[str] = []
        info = read_info(folder / "run.json", problems)
        if was_killed(folder, info):
            where = "from its last checkpoint" if any(folder.glob("checkpoints/v*")) else "from its start"
            resume = f"python -m embodied.{info.get('command', 'train')} {quote(f'resume={folder}')}"
            info |= {"state": "killed", "cause": LOST.format(resume=resume, where=where)}
        config = read_config(folder / "config.yaml", problems)
        metrics = read_metrics(folder / "metrics.jsonl", problems)
        return Run(folder, info, config, metrics, read_evaluations(folder, problems), problems, read_partial(folder))
    if (folder / RESULTS).is_file():
        return Run(folder, evaluations=[Evaluation(folder, *read_results(folder))])
    if partial := partial_in(folder):
        return Run(folder, partial={folder.resolve().name: how_far(partial)})
    neither = f"is neither a run's folder (with run.json) nor an evaluation's (with {RESULTS})"
    raise ConfigError(
        f"{folder} {neither if folder.exists() else 'is not there'}; name a run: "
        "python -m embodied.report runs/NAME-DATE"
    )


def read_evaluations(run: Path, problems: list[str]) -> list[Evaluation]:
    evaluations = []
    for path in sorted(run.glob(f"eval/*/{RESULTS}")):
        with collecting_problems(problems):
            evaluations.append(Evaluation(path.parent, *read_results(path.parent)))
    return sorted(evaluations, key=lambda entry: (not entry.in_training, entry.version, entry.name))


def read_partial(run: Path) -> dict[str, str]:
    """The progress of each interrupted evaluation, by name."""
    contents = {path.parent.name: partial_in(path.parent) for path in sorted(run.glob(f"eval/*/{PARTIAL}"))}
    return {name: how_far(partial) for name, partial in contents.items() if partial}


def how_far(partial: dict[str, Any]) -> str:
    return f"{partial.get('over', 0)} of {partial.get('episodes', 'several')} episodes"


def start_of(run: Run) -> Evaluation | None:
    """The evaluation of the policy that a run started from, if its own run played it on the same episodes."""
    folder = (run.info.get("started_from") or {}).get("folder")
    if not folder or not run.last:
        return None
    checkpoint = Path(folder).parent
    evaluation = checkpoint.parent.parent / "eval" / checkpoint.name
    try:
        start = Evaluation(evaluation, *read_results(evaluation))
    except EmbodiedError:  # it was not evaluated, or was deleted
        return None
    return start if episodes_of(start) == episodes_of(run.last) else None


def episodes_of(evaluation: Evaluation) -> dict[str, Any]:
    """The part of the results that identifies an evaluation's episodes and the sampling of its answers."""
    protocol = evaluation.results.get("protocol", {})
    env = {key: value for key, value in (protocol.get("env") or {}).items() if key != "num_envs"}
    how = protocol.get("eval") or {}
    return {"name": protocol.get("name"), "env": env} | {key: how.get(key) for key in CHOOSES_EPISODES}


def read_metrics(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl up to the first damaged one, without the unfinished last line of a killed run."""
    if not path.is_file():
        return []
    rows: list[dict[str, Any]] = []
    with collecting_problems(problems), reading(path):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.endswith("}"):
                row = json.loads(line)
                check_row(row)
                rows.append(row)
    return rows


def read_info(path: Path, problems: list[str]) -> dict[str, Any]:
    with collecting_problems(problems), reading(path):
        info = read_object(path)
        check_info(info)
        return info
    return {}


def read_config(path: Path, problems: list[str]) -> str:
    """The text of config.yaml, if it holds a mapping."""
    with collecting_problems(problems), reading(path):
        text = path.read_text(encoding="utf-8")
        try:
            recipe = read_yaml(text)
        except YAMLError as err:
            raise ValueError(str(err)) from None
        if not isinstance(recipe, dict):
            raise ValueError("it holds no mapping")
        if odd := [key for key in ("env", "policy", "algo") if not isinstance(recipe.get(key) or {}, dict)]:
            raise ValueError(f"{odd[0]} is no mapping")
        return text
    return ""


@contextmanager
def collecting_problems(problems: list[str]) -> Iterator[None]:
    """Append an EmbodiedError to `problems` instead of raising it."""
    try:
        yield
    except EmbodiedError as err:
        problems.append(str(err))
