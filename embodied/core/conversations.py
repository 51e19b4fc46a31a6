"""Carriers between text envs and language policies: conversations as token streams.

A token is a decision. A conversation is the env's messages and the policy's answers, in turns, as one stream of tokens
with a mask that is False for the env's tokens. Only the policy encodes text, and tokens are never encoded again: a
later turn only appends tokens.

Prompt "5 6 7", answer "8 9", the env's reply "3", answer "2": tokens 5 6 7 8 9 3 2, mask F F F T T F T.

If the chat template changes earlier turns, the stream *restarts*: it goes on with the whole conversation as the
template renders it now, so each answer follows the tokens that the engine saw. With a template that leaves out the
thought "8": tokens 5 6 7 8 9, then 5 6 7 9 3 2 with the mask F F F F F T. It restarts likewise if the env rewrites the
conversation.

A message may show pictures by name (`core.pictures`). The policy decides how many places of the stream a picture fills.
The token of a place is -1 minus its number within the picture: with a picture of three places before "5 6", tokens are
-1 -2 -3 5 6. So each -1 begins a picture; the names are kept separately, in order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Union

import numpy as np

from embodied.core.pictures import is_video, video
from embodied.core.types import SamplingRule

Message = dict[str, Any]
"""{"role": "user", "content": "..."}, or with pictures a list of parts as content: {"type": "image", "image": NAME} and
{"type": "text", "text": "..."}."""
# Text that is continued as it is, or messages that a chat template puts into words. (Read by Python 3.9 too.)
Said = Union[str, tuple[Message, ...]]  # noqa: UP007


WRITES = "assistant"  # the role of the policy
FIRST_PLACE = -1  # the token of a picture's first place; its next places are -2, -3
SAMPLE_CHARACTERS = 2_000  # of a text in a sampled conversation
ANOTHER_PROMPT = 2**40  # added to the number that keys the noise of a later prompt, which may reach the same places
TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)  # as Qwen and Hermes write a call


def parts_of(message: Message) -> list[dict[str, str]]:
    """The parts of a message's content; plain text is one part."""
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def pictures_in(said: Said) -> tuple[str, ...]:
    """The names of the shown pictures, in order."""
    messages = () if isinstance(said, str) else said
    return tuple(part["image"] for message in messages for part in parts_of(message) if part["type"] == "image")


def with_frames(said: Said, frames: int, every_s: float | None) -> Said:
    """The messages with this rule in the names of videos that have none."""

    def ruled(item: dict[str, str]) -> dict[str, str]:
        name = item.get("image", "")
        is_open = is_video(name) and "?frames=" not in name
        return item | {"image": video(name.removeprefix("video:"), frames, every_s)} if is_open else item

    if isinstance(said, str) or not any(map(is_video, pictures_in(said))):
        return said
    return tuple(message | {"content": [*map(ruled, parts_of(message))]} for message in said)


def in_words(message: Message, picture: str = "[picture]") -> str:
    """The content of a message as text, with `picture` in place of each picture."""
    return "".join(part["text"] if part["type"] == "text" else picture for part in parts_of(message))


def is_content(value: Any) -> bool:
    """True if a message may have this content."""
    if isinstance(value, str):
        return True
    keys = {"text": {"type", "text"}, "image": {"type", "image"}}
    return isinstance(value, (list, tuple)) and all(
        isinstance(part, dict)
        and all(isinstance(text, str) for text in part.values())
        and part.keys() == keys.get(part.get("type", ""))
        for part in value
    )


def shortened_turn(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn's message and answer, at most SAMPLE_CHARACTERS of each."""
    said = turn["said"]
    if not isinstance(said, str):
        said = [{"role": message["role"], "content": shortened_content(message["content"])} for message in said]
    facts = {name: middle_left_out(str(fact)) for name, fact in turn["facts"].items()}
    words = middle_left_out(said) if isinstance(said, str) else said
    return {"said": words, "answer": middle_left_out(turn["answer"]), "facts": facts}


def shortened_content(content: Any) -> Any:
    """The content of a message with its texts shortened; pictures stay."""
    if isinstance(content, str):
        return middle_left_out(content)
    return [
        content_part | {"text": middle_left_out(content_part["text"])}
        if content_part["type"] == "text"
        else content_part
        for content_part in content
    ]


def middle_left_out(text: str) -> str:
    """The text, or its beginning and end."""
    half = SAMPLE_CHARACTERS // 2
    if len(text) <= SAMPLE_CHARACTERS:
        return text
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters left out ...] {text[-half:]}"


@dataclass(frozen=True)
class WrittenTokens:
    """The beginning of an answer."""

    tokens: np.ndarray  # int32 [A]
    logprobs: np.ndarray  # float32 [A]


@dataclass(frozen=True)
class Prompt:
    """A conversation that a policy worker has to continue: its earlier tokens, and the env's new message."""

    number: int  # number of the request, unique within its source and round
    episode: int  # EpisodeSpec.index: with a token's place in the stream it keys the token's noise
    said: Said  # the new message; empty if an interrupted answer continues
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # int32 [n], the conversation before it
    pictures: tuple[str, ...] = ()  # pictures in `tokens`
    max_tokens: int | None = None  # limit of the answer; None: the policy's own limit
    override: SamplingRule | None = None  # None: the round's rule
    has_more_turns: bool = False  # True if the env may reply to the answer and ask for another one
    written: WrittenTokens | None = None  # beginning of the answer, by a worker that had to stop
    history: tuple[tuple[Said, np.ndarray], ...] = ()  # earlier messages, each with its answer's tokens, if needed
    forgotten: int = 0  # earlier answers that are in neither: the env has rewritten the conversation


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of one sim worker, to a policy worker."""

    source: str  # receiver of the answers, as in `ActRequest`
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Completion:
    """The tokens after a prompt's `tokens`: the encoded message of the env, and the answer. P + A tokens; none if the
    message left no room for an answer."""

    number: int  # number of the request
    tokens: np.ndarray  # int32 [P + A]
    logprobs: np.ndarray  # float32 [A], of the answer's tokens at SamplingRule.logprob_temperature
    version: int  # version of the weights
    text: str  # the answer as text, without its end token
    pieces: tuple[str, ...] = ()  # the text of each token, if it is recorded
    truncated: bool = False  # cut off by max_tokens or the model's length
    dropped: str = ""  # reason why the answer is unusable (a log-prob was NaN) and ignored
    needs_history: bool = False  # True if the next prompt must have the `history`
    restarts: bool = False  # True if `tokens` begin with the whole conversation, in place of the prompt's `tokens`

    @property
    def num_sampled(self) -> int:
        """A, the number of sampled tokens."""
        return len(self.logprobs)

    @property
    def num_said(self) -> int:
        """P, the number of tokens of the env's message."""
        return len(self.tokens) - len(self.logprobs)


@dataclass(frozen=True)
class CompletionBatch:
    """Finished answers to some prompts of a source."""

    source: str
    completions: tuple[Completion, ...]


@dataclass(frozen=True)
class Remark:
    """A language engine's sentence for the user, and what the run should do about a server that was dropped."""

    sentence: str
    suspects: tuple[int, ...] = ()  # training's conversations with answers of the server, in this round
    since: int | None = None  # the first version of weights with used answers of the server: the run ends
    dropped: str = ""  # the name of the server


@dataclass(frozen=True)
class Vacancy:
    """An engine's message that it takes prompts, or has answered some."""

    engine: str  # its name in this round
    room: int  # largest number of conversations at a time
    answered: tuple[tuple[str, int], ...] = ()  # source and number of answered prompts
    unfinished: tuple[tuple[tuple[str, int], WrittenTokens], ...] = ()  # the answers that it had begun when it stopped
