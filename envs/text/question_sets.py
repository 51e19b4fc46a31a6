"""The data sets of `eval.sets` as one env, each a task: their questions are asked in order, none is for training. Rows
and answers are those of `env.name=math`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodied.core.conversations import Said, pictures_in
from embodied.core.errors import ConfigError
from embodied.core.types import EpisodeSpec
from embodied.envs.capabilities import EvaluationProtocol
from embodied.envs.config import ExternalEnvConfig
from embodied.envs.text.math import Math, left_out, questions, read
from embodied.envs.text.question_rows import Question
from embodied.envs.text.scoring_process import MATHEMATICS, Scorers
from embodied.envs.text.text_env import TextEnv


@dataclass(frozen=True)
class LoadedSets:
    questions: dict[str, list[Question]]
    scorer: Scorers


class QuestionSets(Math):
    @classmethod
    def check(cls, config: Any) -> None:
        TextEnv.check.__func__(cls, config)  # type: ignore[attr-defined]
        cls.check_packages()
        sets_of(config)

    @classmethod
    def missing_files(cls, config: Any, machine: Any) -> dict[str, str]:
        return {}

    @classmethod
    def held_out(cls, config: Any) -> int:
        return max(map(len, sets_of(config).values()))

    @classmethod
    def protocols(cls, config: Any) -> tuple[EvaluationProtocol, ...]:
        counts = {name: len(asked) for name, asked in sets_of(config).items()}
        named = ", ".join(f"{name} ({count:,})" for name, count in counts.items())
        rules = f"all questions of {named}, in order; an answer ends where the policy ends it"
        return (EvaluationProtocol("sets-v1", rules, stored_states=sum(counts.values())),)

    @classmethod
    def remarks(cls, config: Any, proofs: Path) -> list[str]:
        return []  # `notes_on_sets` of the run's own env says more

    @classmethod
    def shows_pictures(cls, config: Any) -> bool:
        return any(pictures_in(question.said) for each in sets_of(config).values() for question in each)

    @classmethod
    def num_questions(cls, config: Any, task: str) -> int | None:
        return None

    @classmethod
    def load(cls, config: Any) -> LoadedSets:  # type: ignore[override]
        return LoadedSets(sets_of(config), Scorers(MATHEMATICS))

    @property
    def score_s(self) -> float:
        return self.config.kwargs["score_s"]

    def reset(self, spec: EpisodeSpec) -> Said:
        asked = self.shared.questions[spec.task]
        self.question = asked[spec.init_state_id % len(asked)]
        return self.question.said


def env_of_sets(sets: Mapping[str, Any], env: Any) -> ExternalEnvConfig:
    """The env that asks the questions of these sets (`eval.sets`), with the rows of the run's env."""
    name = f"{QuestionSets.__module__}:{QuestionSets.__name__}"
    named = {
        each: {"file": str(one.file), "columns": one.columns, "questions": one.questions} for each, one in sets.items()
    }
    kwargs = {"sets": named, "score_s": getattr(env, "score_s", 5.0)}
    rows = {"num_envs": env.num_envs, "side_by_side": env.side_by_side, "modules": env.modules}
    return ExternalEnvConfig(name=name, task=tuple(sets), kwargs=kwargs, **rows)


def notes_on_sets(sets: Mapping[str, Any], env: Any) -> list[str]:
    """Notes on rows that are left out, and on questions that training asks, too."""
    trained, notes = set(), []
    if env.name == "math" and env.file:
        trained, notes = {repr(each.said) for each in questions(env)[0]}, left_out(env.file, env.columns)
    for name, asked in sets_of(env_of_sets(sets, env)).items():
        notes += left_out(sets[name].file, sets[name].columns)
        if both := sum(repr(each.said) in trained for each in asked):
            notes.append(f"{both} of the {len(asked)} questions of eval.sets.{name} are trained on, too (env.file)")
    return notes


def sets_of(config: Any) -> dict[str, list[Question]]:
    """The questions of every set, by its name."""
    return {name: questions_of(name, each) for name, each in config.kwargs["sets"].items()}


def questions_of(name: str, options: dict[str, Any]) -> list[Question]:
    try:
        return read(Path(options["file"]), options["columns"])[: options["questions"]]
    except ConfigError as err:
        raise ConfigError(f"eval.sets.{name}: {str(err).replace('env.columns=', 'columns: ')}") from None
