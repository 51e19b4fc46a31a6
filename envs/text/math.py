"""Questions from a data set (`core/files.py`, rows as in `question_rows.py`). The final answer, the content of the last
`\\boxed{...}` unless the question asks for it after `####` or `Answer:`, is compared with the solutions as mathematics,
by math-verify in a separate process. `env.solve_rate` chooses training questions by their field `solve_rate`, some
model's share of right answers.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from embodied.core.conversations import Said, pictures_in
from embodied.core.errors import ConfigError, MissingAsset
from embodied.core.files import files_of, is_data_set, read_rows
from embodied.core.types import EpisodeSpec
from embodied.envs.text.question_rows import BOX, RATE, Question, final_answer_in, parsed
from embodied.envs.text.scoring_process import MATHEMATICS, Scorers
from embodied.envs.text.text_env import TextEnv, Turn

SHARE, MOST = 0.05, 500  # held out if no file of held-out questions is given
FEW = 20  # fewer held-out questions than this say little


@dataclass(frozen=True)
class MathQuestions:
    train: list[Question]
    held_out: list[Question]
    scorer: Scorers


class Math(TextEnv):
    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        cls.check_packages()
        if not questions(config)[0]:
            raise ConfigError(f"env.file={config.file}: no question is left to train on, all are held out")

    @staticmethod
    def check_packages() -> None:
        if find_spec("math_verify") is None:
            raise MissingAsset("env.name=math needs math-verify: python -m pip install -c constraints.txt math-verify")

    @classmethod
    def missing_files(cls, config: Any, machine: Any) -> dict[str, str]:
        return {} if config.file else {"questions": "env.file=FILE.jsonl"}

    @classmethod
    def scored_example(cls) -> tuple[str, str, dict[str, Any]]:
        return MATHEMATICS, "0.5", {"solutions": ["\\frac{1}{2}"]}

    @classmethod
    def held_out(cls, config: Any) -> int:
        return len(questions(config)[1])

    @classmethod
    def remarks(cls, config: Any, proofs: Path) -> list[str]:
        """Notes on rows without a final answer, and on a file so short that few of its questions are held out."""
        paths = filter(None, (config.file, config.held_out))
        notes = [line for path in paths for line in left_out(path, config.columns)]
        count = len(questions(config)[1])
        if config.held_out is None and count < FEW:
            every = len(read(config.file, config.columns))
            notes.append(
                f"{SHARE:.0%} of the {every} questions in {config.file} are held out for evaluations: {count} "
                f"prompt{'s' * (count > 1)}, fewer than {FEW}, so their success rate says little; name others with "
                "env.held_out=FILE.jsonl"
            )
        return notes

    @classmethod
    def shows_pictures(cls, config: Any) -> bool:
        return config.file is not None and any(
            pictures_in(question.said) for part in questions(config) for question in part
        )

    @classmethod
    def num_questions(cls, config: Any, task: str) -> int:
        return len(questions(config)[0])

    @classmethod
    def load(cls, config: Any) -> MathQuestions:
        """The questions, and the process that compares answers."""
        return MathQuestions(*questions(config), Scorers(MATHEMATICS))

    @classmethod
    def unload(cls, shared: MathQuestions) -> None:
        shared.scorer.close()

    @property
    def score_s(self) -> float:
        return self.config.score_s

    def reset(self, spec: EpisodeSpec) -> Said:
        if spec.init_state_id >= 0:
            self.question = self.shared.held_out[spec.init_state_id % len(self.shared.held_out)]
        else:
            self.question = self.shared.train[self.choose(spec, len(self.shared.train))]
        return self.question.said

    def step(self, answer: str) -> Turn:
        solutions = self.question.solutions
        mark = self.question.mark
        given, facts = final_answer_in(answer, mark), {"expected": solutions[0]}
        if given is None:
            return Turn(facts={**facts, "problem": f"nothing follows {mark}" if mark else "nothing is boxed"})
        success, problem = given in solutions, ""
        if not success:
            score, problem = self.shared.scorer.score(self.score_s, answer=given, solutions=solutions)
            success = score == 1.0
        facts = {**facts, "given": given} | ({"problem": problem} if problem else {})
        return Turn(reward=float(success), success=success, facts=facts)

    def solution(self) -> str:
        mark, solution = self.question.mark, self.question.solutions[0]
        return f"{mark} {solution}" if mark else f"{BOX}{solution}}}"


def questions(config: Any) -> tuple[list[Question], list[Question]]:
    """The training questions, and the held-out questions."""
    if config.file is None:
        raise ConfigError(
            'env.name=math reads questions from a file: env.file=FILE.jsonl with lines {"question": ..., "answer": ...}'
        )
    every = read(config.file, config.columns)
    if config.held_out is not None:
        held_out = read(config.held_out, config.columns)
    else:
        held_out = every[: max(1, min(MOST, int(SHARE * len(every))))]
    known = {repr(question.said) for question in held_out}
    left = [question for question in every if repr(question.said) not in known]
    if config.solve_rate is None:
        return left, held_out
    low, high = config.solve_rate
    kept = [question for question in left if question.solve_rate is not None and low <= question.solve_rate <= high]
    if not kept:
        rated = sum(question.solve_rate is not None for question in left)
        raise ConfigError(
            f"env.solve_rate=[{low:g}, {high:g}] leaves none of the {len(left)} questions of {config.file}, of which "
            f"{rated} have a {RATE}"
        )
    return kept, held_out


def read(path: Path, columns: dict[str, str]) -> list[Question]:
    """The questions of a data set, one for each row whose solution states a final answer."""
    return read_counted(path, columns)[0]


def left_out(path: Path, columns: dict[str, str]) -> list[str]:
    """A note on rows without a final answer, if there are any."""
    kept, rows = read_counted(path, columns)
    lost = rows - len(kept)
    return [f"{lost} of the {rows} rows of {path} state no final answer and are left out"] if lost else []


def read_counted(path: Path, columns: dict[str, str]) -> tuple[list[Question], int]:
    """The questions of a data set, and the number of its rows."""
    if is_data_set(path):
        files = files_of(path)
    else:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
    try:
        stamps = [file.stat() for file in files]
    except OSError as err:
        raise ConfigError(f"{path}: {err.strerror}") from None
    known = tuple(sorted(columns.items()))
    return _read(path, known, *((stamp.st_mtime_ns, stamp.st_size) for stamp in stamps))


@lru_cache(4)
def _read(path: Path, columns: tuple[tuple[str, str], ...], *stamps: tuple[int, int]) -> tuple[list[Question], int]:
    beside = files_of(path)[0] if is_data_set(path) else path
    with closing(read_rows(path)) as rows:
        every = [parsed(row, where, beside, dict(columns)) for where, row in rows]
    if not (questions := [question for question in every if question]):
        why = "no solution states a final answer, in \\boxed{} or after ####" if every else "no questions are in it"
        raise ConfigError(f"{path}: {why}")
    return questions, len(every)
