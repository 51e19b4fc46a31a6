"""Questions from a data set (`core/files.py`). The content of an answer's last `\\boxed{...}` is compared with the
solutions as mathematics, by math-verify in a separate process.

A row has `question` or `problem` (asked as a message, with the request to box the result), `prompt` (text to be
continued as it is) or `messages`; and `answer`, or `solutions` with several accepted answers. With `images`, a question
or its messages show pictures, each at an <image> in the text, or all before a text without one. They are files beside
the data set, or bytes in its rows, as in geometry3k. `env.solve_rate` chooses training questions by their field
`solve_rate`, some model's share of right answers.
"""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from embodied.core.conversations import Said, pictures_in
from embodied.core.errors import ConfigError, MissingAsset
from embodied.core.files import read_rows
from embodied.core.types import EpisodeSpec
from embodied.envs.text.scoring_process import MATHEMATICS, Scorers
from embodied.envs.text.text_env import TextEnv, Turn

INSTRUCTION = "Reason step by step, and put the final answer into \\boxed{}."
SHARE, MOST = 0.05, 500  # held out if no file of held-out questions is given
FEW = 20  # fewer held-out questions than this say little
PLACE = "<image>"  # marks the place of a picture in a text
BOX = "\\boxed{"
RATE = "solve_rate"
ASKED, SOLVED = ("question", "problem", "prompt", "messages"), ("answer", "solutions")


@dataclass(frozen=True)
class Question:
    said: Said
    solutions: tuple[str, ...]
    solve_rate: float | None = None


@dataclass(frozen=True)
class MathQuestions:
    train: list[Question]
    held_out: list[Question]
    scorer: Scorers


class Math(TextEnv):
    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        if find_spec("math_verify") is None:
            raise MissingAsset("env.name=math needs math-verify: python -m pip install -c constraints.txt math-verify")
        if not questions(config)[0]:
            raise ConfigError(f"env.file={config.file}: no question is left to train on, all are held out")

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
        """A note if the file is so short that few of its questions are held out."""
        count = len(questions(config)[1])
        if config.held_out is not None or count >= FEW:
            return []
        every = len(read(config.file))
        return [
            f"{SHARE:.0%} of the {every} questions in {config.file} are held out for evaluations: {count} "
            f"prompt{'s' * (count > 1)}, fewer than {FEW}, so their success rate says little; name others with "
            "env.held_out=FILE.jsonl"
        ]

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

    def reset(self, spec: EpisodeSpec) -> Said:
        if spec.init_state_id >= 0:
            self.question = self.shared.held_out[spec.init_state_id % len(self.shared.held_out)]
        else:
            self.question = self.shared.train[self.choose(spec, len(self.shared.train))]
        return self.question.said

    def step(self, answer: str) -> Turn:
        solutions = self.question.solutions
        given, facts = boxed_answer(answer), {"expected": solutions[0]}
        if given is None:
            return Turn(facts={**facts, "problem": "nothing is boxed"})
        success, problem = given in solutions, ""
        if not success:
            score, problem = self.shared.scorer.score(self.config.score_s, answer=given, solutions=solutions)
            success = score == 1.0
        facts = {**facts, "given": given} | ({"problem": problem} if problem else {})
        return Turn(reward=float(success), success=success, facts=facts)

    def solution(self) -> str:
        return f"{BOX}{self.question.solutions[0]}}}"


def boxed_answer(text: str) -> str | None:
    """The content of the last box with balanced braces; None if the text has none."""
    begin = text.rfind(BOX)
    if begin < 0:
        return None
    begin += len(BOX)
    depth = 1
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[begin:at].strip()
    return None


def questions(config: Any) -> tuple[list[Question], list[Question]]:
    """The training questions, and the held-out questions."""
    if config.file is None:
        raise ConfigError(
            'env.name=math reads questions from a file: env.file=FILE.jsonl with lines {"question": ..., "answer": ...}'
        )
    every = read(config.file)
    if config.held_out is not None:
        held_out = read(config.held_out)
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


def read(path: Path) -> list[Question]:
    """The questions of a data set, one for each row."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    try:
        stamps = [file.stat() for file in files]
    except OSError as err:
        raise ConfigError(f"{path}: {err.strerror}") from None
    return _read(path, *((stamp.st_mtime_ns, stamp.st_size) for stamp in stamps))


@lru_cache(4)
def _read(path: Path, *stamps: tuple[int, int]) -> list[Question]:
    with closing(read_rows(path)) as rows:
        questions = [parsed(row, where, path) for where, row in rows]
    if not questions:
        raise ConfigError(f"{path}: no questions are in it")
    return questions


def parsed(entry: dict[str, Any], where: str, data: Path) -> Question:
    """The question of a row of this data set."""
    asked = [key for key in ASKED if entry.get(key)]
    solved = [key for key in SOLVED if entry.get(key) not in (None, "", [])]
    for keys, known in ((asked, ASKED), (solved, SOLVED)):
        if len(keys) != 1:
            raise ConfigError(f"{where}: one of {', '.join(known)} is needed, and it has {', '.join(keys) or 'none'}")
    solutions = entry[solved[0]] if isinstance(entry[solved[0]], list) else [entry[solved[0]]]
    if not all(isinstance(solution, str | int | float) and str(solution).strip() for solution in solutions):
        raise ConfigError(f"{where}: {solved[0]} must be text or a number, or a list of these")
    rate = entry.get(RATE)
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float)):
        raise ConfigError(f"{where}: {RATE} must be a number, the share of answers that solve it")
    asks = question_of(asked[0], entry[asked[0]], where)
    if images := entry.get("images"):
        asks = with_pictures(asks, images, data, where)
    return Question(asks, tuple(without_box(str(solution)) for solution in solutions), rate)


def with_pictures(asks: Said, images: Any, data: Path, where: str) -> Said:
    """The messages with these pictures of a data set, each in place of an <image>, or all before the text of the first
    message."""
    texts_alone = not isinstance(asks, str) and all(isinstance(message["content"], str) for message in asks)
    names = [picture_file(each, data.absolute()) for each in images] if isinstance(images, list) else [None]
    if not texts_alone or None in names:
        raise ConfigError(f"{where}: images must be a list of files or their bytes, shown with a question or messages")
    if lost := next((name for name in names if not Path(name).is_file()), None):
        raise ConfigError(f"{where}: there is no picture {lost}")
    marks = [message["content"].count(PLACE) for message in asks]
    if sum(marks) not in (0, len(names)):
        raise ConfigError(f"{where}: {PLACE} stands {sum(marks)} times, and images are {len(names)}")
    texts = [message["content"].split(PLACE) for message in asks]
    if not sum(marks):
        texts[0] = [""] * len(names) + texts[0]
    left, shown = iter(names), []
    for message, pieces in zip(asks, texts, strict=True):
        parts = [{"type": "text", "text": pieces[0]}]
        for piece in pieces[1:]:
            parts += [{"type": "image", "image": next(left)}, {"type": "text", "text": piece}]
        shown.append(message | {"content": [part for part in parts if part.get("text") != ""]})
    return tuple(shown)


def picture_file(image: Any, data: Path) -> str | None:
    """The file of a picture: beside the data set, or in a new folder if the row holds the picture's bytes."""
    name, blob = (image.get("path"), image.get("bytes")) if isinstance(image, dict) else (image, None)
    if not isinstance(blob, bytes):
        return str((data if data.is_dir() else data.parent) / name) if isinstance(name, str) else None
    folder = data.with_name(f"{data.name}.pictures")
    file = folder / f"{sha256(blob).hexdigest()[:32]}{Path(name or '').suffix or '.png'}"
    try:
        folder.mkdir(exist_ok=True)
        if not file.exists():
            with NamedTemporaryFile(dir=folder, delete=False) as draft:  # several processes may write it at once
                draft.write(blob)
            os.replace(draft.name, file)
    except OSError as err:
        raise ConfigError(
            f"{folder}, where pictures of {data} are written: {err.strerror}; copy the data set"
        ) from None
    return str(file)


def question_of(key: str, value: Any, where: str) -> Said:
    """The question of a line, as text or messages."""
    if key == "messages":
        if not isinstance(value, list) or not all(
            isinstance(message, dict) and is_message(message) for message in value
        ):
            raise ConfigError(f'{where}: messages must be a list of {{"role": "user", "content": "..."}}')
        return tuple(value)
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {key} must be text, it is {type(value).__name__}")
    return value if key == "prompt" else ({"role": "user", "content": f"{value}\n{INSTRUCTION}"},)


def is_message(value: dict[str, Any]) -> bool:
    return all(isinstance(value.get(key), str) for key in ("role", "content"))


def without_box(solution: str) -> str:
    """A solution without the box or the dollars around it."""
    inside = boxed_answer(solution)
    return solution.strip().strip("$").strip() if inside is None else inside
