"""Tools that a policy calls in the middle of a conversation: Python in a box, search in documents, functions of yours.

Calls have the format of the model's own chat template: the tags of Qwen and Hermes, the bare JSON of Llama 3, or
Mistral's list. The template gets the tools with the first message (`with_tools`), and a tool's reply as a message of
the role `tool`.
"""

from __future__ import annotations

import json
import math
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

from embodied.core.conversations import TOOL_CALL, Message, Said
from embodied.envs.text.text_env import Turn

MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL)
LLAMA = re.compile(r"\A\s*(?:<\|python_tag\|>)?\s*(\{.*\})\s*\Z", re.DOTALL)
MOST_CALLS = 8  # in an answer; further ones are left out
LONGEST_REPLY = 4_000  # characters


@dataclass(frozen=True)
class Tool:
    """A function that a policy may call with named arguments. If it raises or takes too long, the reply is an error."""

    name: str
    about: str
    run: Callable[..., str]
    arguments: Mapping[str, str] = field(default_factory=dict)  # name -> description; all are text
    seconds: float = 60.0  # for a call

    def schema(self) -> dict[str, Any]:
        """The description for chat templates."""
        told = {name: {"type": "string", "description": about} for name, about in self.arguments.items()}
        shape = {"type": "object", "properties": told, "required": [*told]}
        return {"type": "function", "function": {"name": self.name, "description": self.about, "parameters": shape}}


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


class ToolUser:
    """A mixin for text envs, placed before `TextEnv`. A subclass implements `answered` instead of `step`."""

    tools: Sequence[Tool] = ()

    @abstractmethod
    def answered(self, answer: str) -> Turn:
        """Score an answer that calls no tool."""

    def step(self, answer: str) -> Turn:
        calls = parsed_calls(answer)
        if not calls:
            return self.answered(answer)
        replies = [reply_of(self.tools, call) for call in calls]
        said = tuple(
            {"role": "tool", "name": call.name, "content": reply} for call, reply in zip(calls, replies, strict=True)
        )
        return Turn(said=said, done=False, facts={"called": [call.name for call in calls]})


def with_tools(said: Sequence[Message], tools: Iterable[Tool]) -> Said:
    """The first messages of a conversation in which these tools may be called."""
    first, *others = said
    return ({**first, "tools": [tool.schema() for tool in tools]}, *others)  # type: ignore[dict-item]


def parsed_calls(answer: str) -> list[ToolCall]:
    """The calls in an answer, in any of the formats above; incomplete calls are ignored."""
    contents: list[Any] = [json_in(text) for text in TOOL_CALL.findall(answer)]
    if not contents and (listed := MISTRAL.search(answer)):
        contents = calls if isinstance(calls := json_in(listed[1]), list) else []
    if not contents and (bare := LLAMA.match(answer)):
        contents = [json_in(bare[1])]
    return [call for content in contents[:MOST_CALLS] if (call := call_of(content))]


def json_in(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def call_of(entry: Any) -> ToolCall | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return None
    arguments = entry.get("arguments", entry.get("parameters"))
    arguments = json_in(arguments) if isinstance(arguments, str) else arguments
    return ToolCall(entry["name"], arguments) if isinstance(arguments, dict) else None


def reply_of(tools: Iterable[Tool], call: ToolCall) -> str:
    known = {tool.name: tool for tool in tools}
    if call.name not in known:
        return f"error: there is no tool {call.name}; there are {', '.join(known)}"
    tool = known[call.name]
    if call.arguments.keys() != tool.arguments.keys():
        return f"error: {call.name} takes {', '.join(tool.arguments) or 'nothing'}"
    done: Future[str] = Future()

    def run() -> None:
        try:
            done.set_result(tool.run(**{name: str(value) for name, value in call.arguments.items()}))
        except BaseException as err:  # a tool may raise anything
            done.set_exception(err)

    Thread(target=run, name=f"tool-{tool.name}", daemon=True).start()  # a tool that never ends is abandoned
    if not wait([done], tool.seconds).done:
        return f"error: {tool.name} took longer than {tool.seconds:g} seconds"
    err = done.exception()
    reply = f"error: {type(err).__name__}: {err}" if err else done.result()
    return reply if len(reply) <= LONGEST_REPLY else f"{reply[:LONGEST_REPLY]} ..."


# Search


class Search:
    """Finds documents by the words of a query, the best first (BM25)."""

    K, B = 1.5, 0.75

    def __init__(self, documents: Mapping[str, str]) -> None:
        """`documents`: texts by title."""
        self.documents = dict(documents)
        self.counts = {title: Counter(words_of(f"{title} {text}")) for title, text in self.documents.items()}
        self.mean = sum(sum(each.values()) for each in self.counts.values()) / max(1, len(self.counts))
        self.holding = Counter(word for each in self.counts.values() for word in each)

    def find(self, query: str, count: int = 3) -> list[str]:
        """The titles of the best documents that have a word of the query."""
        scores = {title: self.score(words_of(query), title) for title in self.documents}
        return sorted((title for title in scores if scores[title] > 0), key=lambda title: (-scores[title], title))[
            :count
        ]

    def score(self, words: Sequence[str], title: str) -> float:
        counts, total = self.counts[title], len(self.documents)
        norm = self.K * (1 - self.B + self.B * sum(counts.values()) / self.mean)
        rarity = {word: math.log(1 + (total - self.holding[word] + 0.5) / (self.holding[word] + 0.5)) for word in words}
        return sum(rarity[word] * counts[word] * (self.K + 1) / (counts[word] + norm) for word in words)

    def tool(self, count: int = 3) -> Tool:
        def search(query: str) -> str:
            titles = self.find(query, count)
            return "\n\n".join(f"{title}\n{self.documents[title]}" for title in titles) or "nothing was found"

        return Tool("search", "Finds documents by words.", search, {"query": "words to look for"})


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
