"""Conversations in a page: prompts, answers with their tokens marked by probability, rewards and expected answers.
Messages are text: markup in an answer is shown, never interpreted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from embodied.core.conversations import is_content, parts_of
from embodied.core.types import EpisodeResult
from embodied.reporting.html import Html, join, tag
from embodied.reporting.results import check
from embodied.reporting.svg import short

LEVELS = (0.9, 0.5, 0.1, 0.01, 0.0)  # least probabilities of a token, from those not marked to the strongest mark
IN_WORDS = ("90% or more", "50% to 90%", "10% to 50%", "1% to 10%", "below 1%")
MOST_SAMPLES = 150  # of training, about
PAGE_TOKENS = 60_000  # of the page that are marked; later answers are plain
MOST_CHARACTERS = 20_000  # of an answer or a prompt; the rest is in the file
LARGEST_SIDE = 320  # largest side in pixels of a picture in a page
SNIPPET = 60  # characters of the last answer, and of its facts, in a folded line

CUT_OFF = tag("span", "cut off", class_="cut")

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


def can_be_shown(transcript: dict[str, Any]) -> bool:
    """True if a line of transcripts.jsonl has the fields of a page."""
    try:
        check(transcript, TranscriptShown)
    except ValueError:
        return False
    return True


class Conversations:
    """Puts conversations into a page, marking tokens while there is room."""

    def __init__(self) -> None:
        self.left = PAGE_TOKENS

    def show(
        self, episode: EpisodeResult, transcript: dict[str, Any], kind: str, name: str, unfolded: bool, **more: object
    ) -> Html:
        """A conversation that can be folded into a line; `kind` is its outcome, `name` says which it is, and `more` are
        attributes of the element."""
        turns = transcript["turns"]
        last = turns[-1]
        words = [f"reward {short(episode.total_reward)}", f"{episode.tokens:,} tokens"]
        words += [f"{len(turns)} turns"] if len(turns) > 1 else []
        return tag(
            "details",
            tag(
                "summary",
                tag("span", kind, class_="outcome"),
                f" {name} ",
                tag("small", f"{', '.join(words)} "),
                CUT_OFF if episode.truncated else None,
                " ",
                tag("code", snippet(last["answer"])),
                tag("small", f" {snippet(facts_of(last))}"),
            ),
            *[self.turn(turn) for turn in turns],
            tag("p", episode.error, class_="note") if episode.error else None,
            class_=f"conversation {kind}{' cut-off' if episode.truncated else ''}",
            open=unfolded,
            **more,
        )

    def turn(self, turn: dict[str, Any]) -> Html:
        """A turn: the env's message, the answer, and the env's response."""
        said = turn["said"]
        messages = [{"role": "prompt", "content": said}] if isinstance(said, str) else said
        known = [one for one in turn["logprobs"] if one is not None]
        words = [f"reward {short(turn['reward'])}"] if turn["reward"] is not None else []
        words += [f"{len(turn['logprobs']):,} tokens"] if turn["logprobs"] else []
        words += [f"mean log-prob {sum(known) / len(known):.2f}"] if known else []
        return tag(
            "dl",
            *[row(one["role"], *contents(one)) for one in messages],
            row("answer", self.answer(turn), class_="answer"),
            row("", tag("small", f"{', '.join(words)} "), CUT_OFF if turn["truncated"] else None),
            row("facts", tag("small", clipped(facts_of(turn)))) if turn["facts"] else None,
        )

    def answer(self, turn: dict[str, Any]) -> Html:
        """An answer with its tokens marked; plain where they are not known or the page is full."""
        tokens, logprobs = turn["tokens"], turn["logprobs"]
        if not tokens or len(tokens) != len(logprobs) or self.left < len(tokens):
            return clipped(turn["answer"])
        self.left -= len(tokens)
        return join(*[marked(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)])


class SampleShown(TranscriptShown):
    iteration: int
    version: int
    index: int
    task: str
    success: bool | None
    reward: Number | None
    truncated: bool | None
    tokens: int


def samples_shown(samples: Sequence[dict[str, Any]]) -> list[Html]:
    """Conversations of training by iteration, the latest first, with a form that filters by iteration and reward. Of
    many iterations an even selection is shown."""
    whole = [sample for sample in samples if is_sample(sample)]
    iterations = sorted({sample["iteration"] for sample in whole}, reverse=True)
    step = max(1, -(-len(whole) // MOST_SAMPLES))
    wanted = {*iterations[::step], *iterations[-1:]}
    room, shown = Conversations(), []
    for sample in sorted(whole, key=lambda each: (-each["iteration"], each["index"])):
        if sample["iteration"] not in wanted:
            continue
        success, reward = sample["success"], sample["reward"] or 0.0
        kind = "played" if success is None else "success" if success else "failure"
        episode = EpisodeResult(
            index=sample["index"],
            task=sample["task"],
            init_state_id=-1,
            seed=0,
            length=len(sample["turns"]),
            total_reward=reward,
            success_once=success,
            success_at_end=success,
            truncated=sample["truncated"],
            tokens=sample["tokens"],
        )
        name = f"iteration {sample['iteration']}, version {sample['version']}, episode {sample['index']}"
        more = {"data_iteration": sample["iteration"], "data_reward": reward}
        shown.append(room.show(episode, sample, kind, name, False, **more))
    if not shown:
        return []
    fields = [("iteration", "Iterations", 1), ("reward", "rewards", "any")]
    inputs = [
        join(
            tag("label", f"{words} from ", tag("input", type="number", step=step, data_least=name)),
            tag("label", " to ", tag("input", type="number", step=step, data_most=name), " "),
        )
        for name, words, step in fields
    ]
    part = f"{len(shown)} of {len(whole)} are shown. " if len(shown) < len(whole) else ""
    form = tag("p", *inputs, class_="note")
    return [tag("p", part, class_="note") if part else Html(), tag("div", form, *shown, class_="conversations samples")]


def is_sample(sample: dict[str, Any]) -> bool:
    """True if a line of samples.jsonl has the fields of a page."""
    try:
        check(sample, SampleShown)
    except ValueError:
        return False
    return True


def contents(message: Any) -> list[Html]:
    """The texts and pictures of a message."""
    return [
        clipped(part["text"]) if part["type"] == "text" else picture(part["image"])
        for part in parts_of(message)
        if is_content([part])
    ]


@lru_cache(MOST_SAMPLES)
def picture(name: str) -> Html:
    """A picture within the page, made small; its name where it cannot be loaded."""
    from embodied.core.pictures import PictureError, data_url, load_picture, shown

    try:
        pixels = load_picture(name)
    except PictureError as err:
        return tag("small", f"[{err}]")
    step = -(-max(pixels.shape) // LARGEST_SIDE)
    return tag("img", src=data_url(pixels[::step, ::step]), alt=shown(name), title=shown(name), class_="shown")


def row(name: str, *content: object, **how: object) -> Html:
    return join(tag("dt", name), tag("dd", *content, **how))


def facts_of(turn: dict[str, Any]) -> str:
    return "; ".join(f"{key}: {value}" for key, value in turn["facts"].items())


def snippet(text: str) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text[: 4 * SNIPPET].split())
    return line[:SNIPPET] + ("\u2026" if len(line) > SNIPPET or len(text) > 4 * SNIPPET else "")


def clipped(text: str) -> Html:
    """The text, or its beginning and how much is missing."""
    if len(text) <= MOST_CHARACTERS:
        return join(text)
    more = tag("small", f" \u2026 and {len(text) - MOST_CHARACTERS:,} more characters, in the file")
    return join(text[:MOST_CHARACTERS], more)


def marked(token: str, logprob: float | None) -> Html:
    """A token, marked where the policy was unsure of it."""
    level, numbers = len(LEVELS) - 1, "unknown"
    if logprob is not None:
        probability = math.exp(min(0.0, logprob))
        level = next(level for level, least in enumerate(LEVELS) if probability >= least)
        numbers = f"{probability:.2g}, log-prob {logprob:.2f}"
    if not level:
        return join(token)
    visible = token.replace("\n", "\u21b5\n") or "\u2205"
    return tag("span", visible, class_=f"p{level}", title=f"probability {numbers}")


def legend() -> Html:
    """The legend of the marks of tokens."""
    entries = [tag("span", words, class_=f"p{level}" if level else None) for level, words in enumerate(IN_WORDS)]
    shown = [join(entry, " ") for entry in entries]
    return tag("p", "Probability of a token at temperature 1: ", *shown, class_="note")


def filters(kinds: Sequence[tuple[str, str]]) -> list[Html]:
    """Buttons that leave only conversations of one class, before these in the same element: (class, words)."""
    parts = []
    for place, (kind, words) in enumerate(kinds):
        name = f"only-{kind}"
        parts.append(tag("input", type="radio", name="only", id=name, checked=not place))
        parts.append(tag("label", words, for_=name))
    return parts
