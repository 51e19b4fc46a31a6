"""Rows of published data sets as questions with known answers. A row has

- a question: `question` or `problem` (asked as a message, with the request to box the result); `prompt`, as text that
  is continued as it is, or as messages; or `messages`. With `images` it shows pictures, each at an <image> in the text,
  or all before a text without one: files beside the data set, or bytes in its rows, as in geometry3k;
- its answer: `answer`, `solutions` with several accepted answers, `reward_model.ground_truth` as in verl's data sets,
  or `solution`, a worked one. Of a text the last box counts, or what follows `####` as in GSM8K.

`env.columns` names the columns of other layouts: {question: query, answer: extra_info.result}.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from embodied.core.conversations import Said, in_words, is_content
from embodied.core.errors import ConfigError

INSTRUCTION = "Reason step by step, and put the final answer into \\boxed{}."
PLACE = "<image>"  # marks the place of a picture in a text
BOX = "\\boxed{"
MARKS = "####", "Answer:"  # a question that asks for one of these, not for a box, is answered after it
RATE = "solve_rate"
TEXTS = ("question", "problem")
ASKED, SOLVED = (*TEXTS, "prompt", "messages"), ("answer", "solutions", "reward_model.ground_truth", "solution")
COLUMNS = ("question", "prompt", "messages", "answer", "images", RATE)  # keys of env.columns
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
SHORT = 100  # characters of a solution that may be the bare answer
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Question:
    said: Said
    solutions: tuple[str, ...]
    solve_rate: float | None = None
    mark: str = ""  # precedes the final answer; empty: it is boxed


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
    if key == "messages" or (key == "prompt" and isinstance(value, list)):
        said = messages_in(value, f"{where}: {key}")
    elif not isinstance(value, str):
        raise ConfigError(f"{where}: {key} must be text, it is {type(value).__name__}")
    elif key == "prompt" and any(name in row for name in SOLVED[:2]):
        said = value
    else:
        said = ({"role": "user", "content": f"{value}\n{INSTRUCTION}"},)
    return with_pictures(said, images, data, where) if (images := row.get("images")) else said


def messages_in(value: Any, where: str) -> Said:
    fine = isinstance(value, list) and all(
        isinstance(each, dict) and each.get("role") in ROLES and each.get("content") and is_content(each["content"])
        for each in value
    )
    if not fine or not value:
        raise ConfigError(f'{where} must be a list of {{"role": "{"|".join(ROLES)}", "content": "..."}}')
    return tuple({"role": each["role"], "content": each["content"]} for each in value)


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
    """The columns of a row and the option that names two of them: the longest text as the question, the shortest as the
    answer."""
    inside = {key: f" ({', '.join(value)})" for key, value in row.items() if isinstance(value, dict)}
    sizes = {key: len(str(value)) for key, value in row.items() if isinstance(value, str | int | float)}
    first = max((key for key in sizes if isinstance(row[key], str)), key=sizes.__getitem__, default="COLUMN")
    last = min((key for key in sizes if key != first), key=sizes.__getitem__, default="COLUMN")
    columns = ", ".join(f"{key}{inside.get(key, '')}" for key in row) or "none"
    return f"its columns are {columns}; name them, such as env.columns={{question: {first}, answer: {last}}}"


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
    text = said if isinstance(said, str) else "\n".join(map(in_words, said))
    return "" if BOX in text else next((mark for mark in MARKS if mark in text), "")


def after_mark(text: str, mark: str) -> str | None:
    """The rest of the line after the last mark, numbers without commas; None if there is no mark."""
    begin = text.lower().rfind(mark.lower())
    line = text[begin + len(mark) :].strip().partition("\n")[0] if begin >= 0 else ""
    return THOUSANDS.sub("", line.strip(" .*$")) or None


def final_answer_in(answer: str, mark: str) -> str | None:
    """The final answer of a model: after the mark that the question asks for, else in its last box; None if missing."""
    after = after_mark(answer, mark) if mark else None
    return boxed_answer(answer) if after is None else boxed_answer(after) or after


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
