"""Conversations in a page: prompts, answers with the log-probs of their tokens, rewards and expected answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from embodied.core.conversations import is_content, parts_of
from embodied.core.types import EpisodeResult
from embodied.records.results import check
from embodied.reporting.page import Block, short, text

MOST_SAMPLES = 150  # of training, approximately
PAGE_TOKENS = 60_000  # marked tokens of a page; later answers are plain text
MOST_CHARACTERS = 20_000  # of an answer or a prompt; the file has the rest
LARGEST_SIDE = 320  # largest side in pixels of a picture in a page
SNIPPET = 60  # characters of the last answer, and of its facts, in a folded line

Number = float | int


class Message(TypedDict):
    role: str
    content: str | list[dict[str, str]]


class TurnShown(TypedDict):
    said: str | list[Message]
    answer: str
    tokens: list[str]
    logprobs: list[Number | None]
    truncated: bool
    reward: Number | None
    facts: dict[str, Any]


class TranscriptShown(TypedDict):
    turns: Annotated[list[TurnShown], Field(min_length=1)]


class SampleShown(TranscriptShown):
    iteration: int
    version: int
    index: int
    task: str
    success: bool | None
    reward: Number | None
    truncated: bool | None
    tokens: int


def can_be_shown(line: dict[str, Any], kind: type = TranscriptShown) -> bool:
    """True if a line of transcripts.jsonl or samples.jsonl has all fields that a page shows."""
    try:
        check(line, kind)
    except ValueError:
        return False
    return True


def conversations(items: Sequence[Block], filter_by: str = "", columns: int = 1, legend: bool = True) -> Block:
    """`filter_by`: "outcome", or "samples" for iterations and rewards; `columns`: how many stand side by side."""
    how = {"filter": filter_by, "columns": columns, "legend": legend}
    return {"kind": "conversations", **how, "items": items}


class Conversations:
    """Gathers conversations for a page, with tokens and log-probs while there is room."""

    def __init__(self) -> None:
        self.left = PAGE_TOKENS

    def show(self, episode: EpisodeResult, transcript: dict[str, Any], kind: str, name: str, unfolded: bool) -> Block:
        """Add an evaluation's conversation; `kind` is its outcome, and `name` identifies it."""
        words = [f"reward {short(episode.total_reward)}", f"{episode.tokens:,} tokens"]
        how = {"open": unfolded, "error": episode.error, "cut_off": bool(episode.truncated)}
        return self.talk(transcript["turns"], words, outcome=kind, name=name, **how)

    def sample(self, sample: dict[str, Any]) -> Block:
        """Add a conversation of training, with the numbers for the page's filter."""
        success, reward = sample["success"], sample["reward"] or 0.0
        words = [f"reward {short(reward)}", f"{sample['tokens']:,} tokens"]
        how = {"iteration": sample["iteration"], "reward": reward, "cut_off": bool(sample["truncated"])}
        how["outcome"] = "played" if success is None else "success" if success else "failure"
        name = f"iteration {sample['iteration']}, version {sample['version']}, episode {sample['index']}"
        return self.talk(sample["turns"], words, name=name, **how)

    def talk(self, turns: Sequence[dict[str, Any]], words: list[str], **how: object) -> Block:
        words += [f"{len(turns)} turns"] if len(turns) > 1 else []
        last = {"answer": snippet(turns[-1]["answer"]), "facts": snippet(facts_of(turns[-1]))}
        return {"words": ", ".join(words), **last, **how, "turns": [self.turn(turn) for turn in turns]}

    def turn(self, turn: dict[str, Any]) -> Block:
        """The prompt, the answer and the env's response; with tokens if they are known and the page has room."""
        said, tokens, logprobs = turn["said"], turn["tokens"], turn["logprobs"]
        messages = [{"role": "prompt", "content": said}] if isinstance(said, str) else said
        known = [logprob for logprob in logprobs if logprob is not None]
        words = [f"reward {short(turn['reward'])}"] if turn["reward"] is not None else []
        words += [f"{len(logprobs):,} tokens"] if logprobs else []
        words += [f"mean log-prob {sum(known) / len(known):.2f}"] if known else []
        marked = bool(tokens) and len(tokens) == len(logprobs) and self.left >= len(tokens)
        self.left -= len(tokens) * marked
        answer = {"tokens": tokens, "logprobs": logprobs} if marked else {"answer": clip_text(turn["answer"])}
        return {
            "said": [{"role": message["role"], "parts": contents(message)} for message in messages],
            **answer,
            "words": ", ".join(words),
            "cut_off": turn["truncated"],
            "facts": clip_text(facts_of(turn)),
        }


def samples_shown(samples: Sequence[dict[str, Any]]) -> list[Block]:
    """Conversations of training by iteration, the latest first. Of many iterations, evenly spaced ones are shown."""
    whole = [sample for sample in samples if can_be_shown(sample, SampleShown)]
    iterations = sorted({sample["iteration"] for sample in whole}, reverse=True)
    step = max(1, -(-len(whole) // MOST_SAMPLES))
    wanted = {*iterations[::step], *iterations[-1:]}
    room = Conversations()
    ordered = sorted(whole, key=lambda sample: (-sample["iteration"], sample["index"]))
    shown = [room.sample(sample) for sample in ordered if sample["iteration"] in wanted]
    if not shown:
        return []
    part = [text(f"{len(shown)} of {len(whole)} are shown.")] if len(shown) < len(whole) else []
    return [*part, conversations(shown, "samples", legend=False)]


def contents(message: Any) -> list[Block]:
    """The texts and pictures of a message."""
    return [
        clip_text(part["text"]) if part["type"] == "text" else picture(part["image"])
        for part in parts_of(message)
        if is_content([part])
    ]


@lru_cache(MOST_SAMPLES)
def picture(name: str) -> Block:
    """A small copy of a picture in the page; its name if it cannot be loaded."""
    from embodied.core.pictures import PictureError, data_url, load_picture, short_name

    try:
        pixels = load_picture(name)
    except PictureError as err:
        return {"text": f"[{err}]"}
    step = -(-max(pixels.shape) // LARGEST_SIDE)
    return {"src": data_url(pixels[::step, ::step]), "text": short_name(name)}


def facts_of(turn: dict[str, Any]) -> str:
    return "; ".join(f"{key}: {value}" for key, value in turn["facts"].items())


def snippet(words: str) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(words[: 4 * SNIPPET].split())
    return line[:SNIPPET] + ("\u2026" if len(line) > SNIPPET or len(words) > 4 * SNIPPET else "")


def clip_text(words: str) -> Block:
    """The text, or its beginning and the number of characters after it."""
    return {"text": words[:MOST_CHARACTERS], "more": max(0, len(words) - MOST_CHARACTERS)}
