"""Questions from a data set (`core/files.py`), or from several (`eval.sets`). The final answer, the content of the last
`\\boxed{...}` unless the question asks for it after `####` or `Answer:`, is compared with the solutions as mathematics,
by math-verify in a separate process. `env.solve_rate` chooses training questions by their field `solve_rate`, some
model's share of right answers. A row of a published data set has

- a question: `question` or `problem` (asked as a message, with the request to box the result); `prompt`, as text that
  is continued as it is (from the final answer if it ends with `\\boxed{`, `####` or `Answer:`), or as messages; or
  `messages`. With `images` it shows pictures, each at an <image> in the text,
  or all before a text without one: files beside the data set, or bytes in its rows, as in geometry3k. With `videos` it
  shows frames of video files, each video at a <video> (`env.frames`, `env.frame_s`);
- its answer: `answer`, `solutions` with several accepted answers, `reward_model.ground_truth` as in verl's data sets,
  or `solution`, a worked one. Of a text the last box counts, or what follows `####` as in GSM8K.

`env.columns` names the columns of other layouts: {question: query, answer: extra_info.result}.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from embodied.core.conversations import Said, in_words, is_content, pictures_in, with_frames
from embodied.core.errors import ConfigError, naming
from embodied.core.files import files_of, is_data_set, read_rows
from embodied.core.pictures import FRAMES, is_video
from embodied.core.types import EpisodeSpec
from embodied.envs.capabilities import EvaluationProtocol
from embodied.envs.config import ExternalEnvConfig
from embodied.envs.text.scoring_process import MATHEMATICS, Scorers
from embodied.envs.text.text_env import TextEnv, Turn

INSTRUCTION = "Reason step by step, and put the final answer into \\boxed{}."
SHOWN = {"images": "<image>", "videos": "<video>"}  # columns, and the marks of their places in a text
BOX = "\\boxed{"
MARKS = "####", "Answer:"  # a question that asks for one of these, not for a box, is answered after it
RATE = "solve_rate"
TEXTS = ("question", "problem")
ASKED, SOLVED = (*TEXTS, "prompt", "messages"), ("answer", "solutions", "reward_model.ground_truth", "solution")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
SHORT = 100  # characters of a solution that may be the bare answer
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Question:
    said: Said
    solutions: tuple[str, ...]
    solve_rate: float | None = None
    mark: str = ""  # precedes the final answer; empty: it is boxed

    @property
    def begins_answer(self) -> bool:
        """Whether the prompt is a text that ends with the mark or an open box, so that the model continues with the
        final answer."""
        return isinstance(self.said, str) and self.said.rstrip().endswith(self.mark or BOX)


def parsed(row: dict[str, Any], where: str, data: Path, columns: Mapping[str, str] = {}) -> Question | None:
    """The question of a row of this data set; None if its worked solution states no final answer."""
    row = with_columns(row, columns, where)
    said = question_in(row, where, data)
    key = answer_column(row, where)
    value = value_at(row, key)
    solutions = value if isinstance(value, list) else [value]
    if not all(isinstance(solution, str | int | float) and str(solution).strip() for solution in solutions):
        raise ConfigError(f"{where}: {key} must be text or a number, or a list of these")
    rate = row.get(RATE)
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float)):
        raise ConfigError(f"{where}: {RATE} must be a number, the share of answers that solve it")
    finals = [final_answer(str(solution)) for solution in solutions]
    if key == "solution" and (len(finals[0]) > SHORT or "\n" in finals[0]):
        return None
    return Question(said, tuple(finals), rate, mark_of(said))


def question_in(row: dict[str, Any], where: str, data: Path) -> Said:
    """The question of a row, as text or messages."""
    key = question_column(row, where)
    value = row[key]
    if key == "messages" or isinstance(value, list):
        said = messages_in(value, f"{where}: {key}")
    elif not isinstance(value, str):
        raise ConfigError(f"{where}: {key} must be text, it is {type(value).__name__}")
    elif key == "prompt" and any(name in row for name in SOLVED[:2]):
        said = value
    else:
        said = ({"role": "user", "content": f"{value}\n{INSTRUCTION}"},)
    shown = {column: row[column] for column in SHOWN if row.get(column)}
    return with_pictures(said, shown, data, where) if shown else said


def messages_in(value: Any, where: str) -> Said:
    fine = isinstance(value, list) and all(
        isinstance(message, dict)
        and message.get("role") in ROLES
        and message.get("content")
        and is_content(message["content"])
        for message in value
    )
    if not fine or not value:
        raise ConfigError(f'{where} must be a list of {{"role": "{"|".join(ROLES)}", "content": "..."}}')
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def question_column(row: dict[str, Any], where: str) -> str:
    """The column with the question; `messages` beside it repeat it, with an answer."""
    there = [key for key in ASKED if row.get(key) not in (None, "", [])]
    if there and there[0] in TEXTS:
        there = [key for key in there if key != "messages"]
    if len(there) != 1:
        found = f"several questions ({', '.join(there)})" if there else f"no question ({', '.join(ASKED)})"
        raise ConfigError(f"{where}: {found}; {which_columns(row)}")
    return there[0]


def answer_column(row: dict[str, Any], where: str) -> str:
    """The first column with an answer; a worked `solution` counts if there is no other."""
    if there := next((key for key in SOLVED if value_at(row, key) not in (None, "", [])), None):
        return there
    raise ConfigError(f"{where}: no answer ({', '.join(SOLVED)}); {which_columns(row)}")


def which_columns(row: dict[str, Any]) -> str:
    """The columns of a row and the option that names two of them: the longest text or messages as the question, the
    shortest text as the answer."""
    maps = {key: value for key, value in row.items() if isinstance(value, dict)}
    inside = {key: f" ({', '.join(value)})" for key, value in maps.items()}
    cells = row | {f"{key}.{name}": cell for key, value in maps.items() for name, cell in value.items()}
    sizes = {
        key: len(str(cell)) for key, cell in cells.items() if isinstance(cell, str | int | float) or in_turns(cell)
    }
    first = max((key for key in sizes if isinstance(cells[key], str | list)), key=sizes.__getitem__, default="COLUMN")
    last = min((key for key in sizes if key != first), key=sizes.__getitem__, default="COLUMN")
    columns = ", ".join(f"{key}{inside.get(key, '')}" for key in row) or "none"
    return f"its columns are {columns}; name them, such as env.columns={{question: {first}, answer: {last}}}"


def in_turns(cell: Any) -> bool:
    """Whether a cell holds messages."""
    return isinstance(cell, list) and bool(cell) and all(isinstance(message, dict) for message in cell)


def value_at(row: dict[str, Any], key: str) -> Any:
    """The value in a column, or inside one: `reward_model.ground_truth`."""
    if key in row:
        return row[key]
    above, _, below = key.partition(".")
    inside = row.get(above)
    return value_at(inside, below) if below and isinstance(inside, dict) else None


def with_columns(row: dict[str, Any], columns: Mapping[str, str], where: str) -> dict[str, Any]:
    """The row with the values of these columns under the names that are read."""
    if not columns:
        return row
    named = {key: value_at(row, column) for key, column in columns.items()}
    if lost := [columns[key] for key, value in named.items() if value is None]:
        raise ConfigError(f"{where}: no column {lost[0]}; {which_columns(row)}")
    hidden = {key.split(".")[0] for group in (ASKED, SOLVED) if {*group} & {*columns} for key in group}
    return {key: value for key, value in row.items() if key not in hidden} | named


def final_answer(text: str) -> str:
    """The answer in a text: in its last box, after ####, or all of it, without dollars around it."""
    inside = boxed_answer(text)
    if inside is None and MARKS[0] in text:
        inside = after_mark(text, MARKS[0])
    return text.strip().strip("$").strip() if inside is None else inside


def mark_of(said: Said) -> str:
    """What a question wants before the final answer; empty for a box."""
    text = text_of(said)
    return "" if BOX in text else next((mark for mark in MARKS if mark in text), "")


def text_of(said: Said) -> str:
    return said if isinstance(said, str) else "\n".join(map(in_words, said))


def after_mark(text: str, mark: str) -> str | None:
    """The rest of the line after the last mark, numbers without commas; None if there is no mark."""
    begin = text.lower().rfind(mark.lower())
    line = text[begin + len(mark) :].strip().partition("\n")[0] if begin >= 0 else ""
    return THOUSANDS.sub("", line.strip(" .*$")) or None


def final_answer_in(answer: str, mark: str, begun: bool = False) -> str | None:
    """The final answer of a model: after the mark that the question asks for, else in its last box, else after the mark
    or open box that the prompt ends with (`begun`); None if missing."""
    if begun and not mark and (inside := before_brace(answer)):
        return inside
    after = after_mark(answer, mark) if mark else None
    found = boxed_answer(answer) if after is None else boxed_answer(after) or after
    return after_mark(mark + answer, mark) if begun and mark and found is None else found


def boxed_answer(text: str) -> str | None:
    """The content of the last box with balanced braces; None if the text has none."""
    _, opened, inside = text.rpartition(BOX)
    return before_brace(inside) if opened else None


def before_brace(text: str) -> str | None:
    """The text before the brace that closes an earlier one; None if there is none."""
    depth = 1
    for at, letter in enumerate(text):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return text[:at].strip()
    return None


def with_pictures(asks: Said, shown: Mapping[str, Any], data: Path, where: str) -> Said:
    """The messages with these pictures and videos of a data set, by column, each in place of its mark, or all before
    the text of the first message."""
    if isinstance(asks, str) or not all(isinstance(message["content"], str) for message in asks):
        raise ConfigError(f"{where}: {' and '.join(shown)} are shown with a question, or with messages of text alone")
    marked: dict[str, Iterator[str]] = {}  # names by their mark
    parts: list[dict[str, str]] = []  # of the next message; it begins with what has no mark
    for column, given in shown.items():
        names, mark = names_of(column, given, data, where), SHOWN[column]
        marks = sum(message["content"].count(mark) for message in asks)
        if marks not in (0, len(names)):
            raise ConfigError(f"{where}: {mark} stands {marks} times, and {column} are {len(names)}")
        if marks:
            marked[mark] = iter(names)
        else:
            parts += [{"type": "image", "image": name} for name in names]
    messages = []
    for message in asks:
        for piece in re.split(f"({'|'.join(marked)})", message["content"]) if marked else [message["content"]]:
            name = next(marked[piece]) if piece in marked else None
            parts.append({"type": "image", "image": name} if name else {"type": "text", "text": piece})
        messages.append(message | {"content": [part for part in parts if part.get("text") != ""]})
        parts = []
    return tuple(messages)


def names_of(column: str, given: Any, data: Path, where: str) -> list[str]:
    """The names of a row's pictures or videos."""
    file_of = picture_file if column == "images" else video_file
    names = [file_of(file, data.absolute()) for file in given] if isinstance(given, list) else [None]
    if None in names:
        raise ConfigError(f"{where}: {column} must be a list of files{' or their bytes' * (column == 'images')}")
    if lost := next((name for name in names if not Path(name).is_file()), None):
        raise ConfigError(f"{where}: there is no {column.removesuffix('s').replace('image', 'picture')} {lost}")
    return names if column == "images" else [f"video:{name}" for name in names]


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


def video_file(video: Any, data: Path) -> str | None:
    """The file of a video beside the data set; rows name it as text, or as {"video": FILE} or {"path": FILE}."""
    name = (video.get("video") or video.get("path")) if isinstance(video, dict) else video
    return str((data if data.is_dir() else data.parent) / name) if isinstance(name, str) else None


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
        """Notes on rows without a final answer, and on a file so short that few of its questions are held out."""
        paths = filter(None, (config.file, config.held_out))
        notes = [line for path in paths for line in notes_on_file(path, config.columns)]
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
    def asked(cls, config: Any) -> list[Question]:
        """All questions."""
        return [question for part in questions(config) for question in part] if config.file else []

    @classmethod
    def shows_pictures(cls, config: Any) -> bool:
        return any(pictures_in(question.said) for question in cls.asked(config))

    @classmethod
    def shows_videos(cls, config: Any) -> bool:
        return any(is_video(name) for question in cls.asked(config) for name in pictures_in(question.said))

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
        return with_frames(self.question.said, self.config.frames, self.config.frame_s)

    def step(self, answer: str) -> Turn:
        solutions = self.question.solutions
        mark = self.question.mark
        given, facts = final_answer_in(answer, mark, self.question.begins_answer), {"expected": solutions[0]}
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
        before = "" if self.question.begins_answer else mark or BOX
        return f"{before} {solution}" if mark else f"{before}{solution}}}"


def questions(config: Any) -> tuple[list[Question], list[Question]]:
    """The training questions, and the held-out questions."""
    if config.file is None:
        raise ConfigError(
            'env.name=math reads questions from a file: env.file=FILE.jsonl with lines {"question": ..., "answer": ...}'
        )
    with naming("env.file"):
        every = read(config.file, config.columns)
    if config.held_out is not None:
        with naming("env.held_out"):
            held_out = read(config.held_out, config.columns)
    else:
        held_out = every[: max(1, min(MOST, int(SHARE * len(every))))]
    held_out_questions = {repr(question.said) for question in held_out}
    left = [question for question in every if repr(question.said) not in held_out_questions]
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


def notes_on_file(path: Path, columns: dict[str, str]) -> list[str]:
    """Notes on rows without a final answer, and on questions that do not say how to mark it, if there are any."""
    kept, rows = read_counted(path, columns)
    notes = [f"{rows - len(kept)} of the {rows} rows of {path} state no final answer and are left out"]
    unmarked = sum(not question.mark and BOX not in text_of(question.said) for question in kept)
    unasked = (
        f"{unmarked} of the {len(kept)} questions of {path} do not ask for the answer in {BOX}}}, after #### or after "
        "Answer:, and an answer without a box is wrong; policy.system can ask for the box"
    )
    return notes * (len(kept) < rows) + [unasked] * (unmarked > 0)


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
    column_items = tuple(sorted(columns.items()))
    return _read(path, column_items, *((stamp.st_mtime_ns, stamp.st_size) for stamp in stamps))


@lru_cache(4)
def _read(path: Path, columns: tuple[tuple[str, str], ...], *stamps: tuple[int, int]) -> tuple[list[Question], int]:
    beside = files_of(path)[0] if is_data_set(path) else path
    with closing(read_rows(path)) as rows:
        every = [parsed(row, where, beside, dict(columns)) for where, row in rows]
    if not (questions := [question for question in every if question]):
        why = "no solution states a final answer, in \\boxed{} or after ####" if every else "no questions are in it"
        raise ConfigError(f"{path}: {why}")
    return questions, len(every)


@dataclass(frozen=True)
class LoadedSets:
    questions: dict[str, list[Question]]
    scorer: Scorers


class QuestionSets(Math):
    """The data sets of `eval.sets` as one env, each a task: their questions are asked in order, not in training."""

    @classmethod
    def check(cls, config: Any) -> None:
        TextEnv.check.__func__(cls, config)  # type: ignore[attr-defined]
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
    def asked(cls, config: Any) -> list[Question]:
        return [question for questions_of_set in sets_of(config).values() for question in questions_of_set]

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
        return with_frames(self.question.said, *self.config.kwargs["frames"])


def env_of_sets(sets: Mapping[str, Any], env: Any) -> ExternalEnvConfig:
    """The env that asks the questions of these sets (`eval.sets`), with the rows of the run's env."""
    name = f"{QuestionSets.__module__}:{QuestionSets.__name__}"
    named = {
        set_name: {"file": str(chosen.file), "columns": chosen.columns, "questions": chosen.questions}
        for set_name, chosen in sets.items()
    }
    frames = [getattr(env, "frames", FRAMES), getattr(env, "frame_s", None)]
    kwargs = {"sets": named, "score_s": getattr(env, "score_s", 5.0), "frames": frames}
    rows = {"num_envs": env.num_envs, "side_by_side": env.side_by_side, "modules": env.modules}
    return ExternalEnvConfig(name=name, task=tuple(sets), kwargs=kwargs, **rows)


def notes_on_sets(sets: Mapping[str, Any], env: Any) -> list[str]:
    """Notes on rows that are left out, and on questions that training asks, too."""
    trained, notes = set(), []
    if env.name == "math" and env.file:
        trained, notes = {repr(question.said) for question in questions(env)[0]}, notes_on_file(env.file, env.columns)
    for name, asked in sets_of(env_of_sets(sets, env)).items():
        notes += notes_on_file(sets[name].file, sets[name].columns)
        if (wanted := sets[name].questions or 0) > len(asked):
            notes.append(f"eval.sets.{name}.questions={wanted} is more than there are: all {len(asked)} are asked")
        if both := sum(repr(question.said) in trained for question in asked):
            notes.append(f"{both} of the {len(asked)} questions of eval.sets.{name} are trained on, too (env.file)")
    return notes


def sets_of(config: Any) -> dict[str, list[Question]]:
    """The questions of every set, by its name."""
    return {name: questions_of(name, options) for name, options in config.kwargs["sets"].items()}


def questions_of(name: str, options: dict[str, Any]) -> list[Question]:
    try:
        return read(Path(options["file"]), options["columns"])[: options["questions"]]
    except ConfigError as err:
        raise ConfigError(f"eval.sets.{name}: {str(err).replace('env.columns=', 'columns: ')}") from None
