"""Examples for imitation: a text env's own solutions, or the rows of a file. Free of torch."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from embodied.core.conversations import Said, in_words, is_content
from embodied.core.errors import ConfigError
from embodied.core.files import read_rows
from embodied.core.types import EpisodeList
from embodied.envs import env_class

Example = tuple[tuple[Said, str], ...]  # the env's messages and the right answers, turn by turn
ROLES = ("system", "user", "assistant")
LINES = 'a line {"prompt": "...", "answer": "..."} each, or "messages" or a "question" in place of "prompt"'


def solved_examples(config: Any, seed: int, numbers: range) -> list[Example]:
    """Conversations with these numbers on training prompts of a text env that has solutions."""
    kind = env_class(config)
    episodes = EpisodeList(seed, "imitate", kind.tasks(config))
    shared = kind.load(config)
    try:
        env = kind(config, shared)
        return [conversation(env, env.reset(spec)) for spec in map(episodes.__getitem__, numbers)]
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


def read_examples(path: Path, count: int | None = None) -> list[Example]:
    """The first `count` examples of a data set, or all; one for each row."""
    try:
        with closing(read_rows(path)) as rows:
            examples = [example_of(row, where, path) for where, row in islice(rows, count)]
    except ConfigError as err:
        raise ConfigError(f"{err}; sft.data is JSONL or parquet, {LINES}") from None
    if not examples:
        raise ConfigError(f"{path} holds no examples; sft.data is JSONL or parquet, {LINES}")
    return examples


def example_of(row: dict[str, Any], where: str, data: Path) -> Example:
    """The example of a row of this data set."""
    try:
        asked, answer = said_in(row), text_in(row, "answer")
        if images := row.get("images"):
            from embodied.envs.text.math import with_pictures

            asked = with_pictures(asked, images, data, where)
        return ((asked, answer),)
    except (ValueError, TypeError) as err:
        raise ConfigError(f"{where}: {err}") from None


def said_in(content: Any) -> Said:
    """The prompt or messages of a row, or its question in the form of env.name=math."""
    asked = [key for key in ("prompt", "messages", "question", "problem") if content.get(key) is not None]
    if len(asked) != 1:
        raise ValueError('it should have either "prompt" or "messages" or "question"')
    if asked[0] in ("question", "problem"):
        from embodied.envs.text.math import INSTRUCTION

        return ({"role": "user", "content": f"{text_in(content, asked[0])}\n{INSTRUCTION}"},)
    if "prompt" in content:
        return text_in(content, "prompt")
    messages = content["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" should be a list of {"role": ..., "content": ...}')
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f'a message should have a "role": {", ".join(ROLES)}')
        if not is_content(message.get("content")) or not message["content"]:
            raise ValueError('"content" should be text, or a list of texts and pictures')
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def text_in(content: dict[str, Any], key: str) -> str:
    """The text under this key; raises ValueError if there is none."""
    if not isinstance(content.get(key), str) or not content[key]:
        raise ValueError(f'"{key}" should be text')
    return content[key]
