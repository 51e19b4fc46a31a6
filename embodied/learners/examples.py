"""Examples for imitation: a text env's own solutions, or the rows of a file. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from embodied.core.conversations import WRITES, Said, in_words
from embodied.core.errors import ConfigError
from embodied.core.files import files_of, is_data_set, read_rows
from embodied.core.types import EpisodeList
from embodied.envs import env_class

Example = tuple[tuple[Said, str], ...]  # the env's messages and the right answers, turn by turn
LINES = 'a line {"prompt": "...", "answer": "..."} each, or "messages" or a "question" in place of "prompt"'


def solved_examples(config: Any, seed: int, numbers: range, sign: Callable[[], None] = lambda: None) -> list[Example]:
    """Conversations with these numbers on training prompts of a text env that has solutions. `sign`: called after each,
    since an env's tools may be slow."""
    kind = env_class(config)
    episodes = EpisodeList(seed, "imitate", kind.tasks(config))
    shared = kind.load(config)
    try:
        env = kind(config, shared)
        solved = []
        for number in numbers:
            solved.append(conversation(env, env.reset(episodes[number])))
            sign()
        return solved
    finally:
        kind.unload(shared)


def conversation(env: Any, said: Said) -> Example:
    """All turns of a conversation with the env's own solutions as the answers."""
    turns: list[tuple[Said, str]] = []
    while said:
        answer = env.solution()
        if answer is None:
            raise ConfigError(f"{no_solution(env.config)} (to {beginning_of(said)})")
        turns.append((said, answer))
        turn = env.step(answer)
        said = () if turn.done else turn.said
    return tuple(turns)


def no_solution(env: Any) -> str:
    """The message for an env that cannot be imitated, with both remedies."""
    return (
        f"env.name={env.name} does not know the right answers to its own questions; give examples with "
        f"sft.data=FILE.jsonl ({LINES}), or let the env's method `solution` return them"
    )


def beginning_of(said: Said) -> str:
    """The beginning of a message, for error messages."""
    text = said if isinstance(said, str) else in_words(said[-1])
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def read_examples(path: Path, count: int | None = None, names: Mapping[str, str] = {}) -> list[Example]:
    """The first `count` examples of a data set, or all; one for each row. `names`: its own names for columns."""
    try:
        beside = files_of(path)[0] if is_data_set(path) else path
        with closing(read_rows(path)) as rows:
            examples = [example_of(row, where, beside, names) for where, row in islice(rows, count)]
    except ConfigError as err:
        raise ConfigError(f"{err}; sft.data is JSONL or parquet, {LINES}".replace("env.columns", "sft.names")) from None
    if not examples:
        raise ConfigError(f"{path} holds no examples; sft.data is JSONL or parquet, {LINES}")
    return examples


def example_of(row: dict[str, Any], where: str, data: Path, names: Mapping[str, str]) -> Example:
    """The example of a row of this data set: the last of its messages if that is the assistant's, else its worked
    solution or its answer."""
    from embodied.envs.text.math import TEXTS, messages_in, question_in, which_columns, with_columns

    row = with_columns(row, names, where)
    if row.get("messages") and (messages := messages_in(row["messages"], f"{where}: messages"))[-1]["role"] == WRITES:
        row = {key: value for key, value in row.items() if key not in TEXTS}
        row |= {"messages": [*messages[:-1]], "solution": in_words(messages[-1])}
    answer = row.get("solution") or row.get("answer")
    if not isinstance(answer, str) or not answer:
        raise ConfigError(f"{where}: no answer as text; {which_columns(row)}")
    return ((question_in(row, where, data), answer),)


def check_shares(count: int, items: str, learners: int) -> None:
    """Refuse fewer examples or demonstrations than learners, each of which has a part of them."""
    if count < learners:
        raise ConfigError(f"{learners} learners share {count} {items}; give more, or use fewer learners")
