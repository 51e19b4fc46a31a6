"""Text to tokens and back: a model's own tokenizer and chat template, or a small tokenizer of characters.

A conversation of several turns is encoded once: a later turn appends the text that the template writes after an answer.
Some templates change earlier turns, such as Qwen3's and R1's, which leave out thoughts. Then a later turn is a prompt
of its own (`conversation`), in which answers keep the tokens that were written.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer, PreTrainedConfig

from embodied.core.conversations import WRITES, Message, Said, in_words, pictures_in
from embodied.core.errors import CheckpointError, ConfigError, in_a_line, nearest
from embodied.core.files import as_path
from embodied.core.pictures import is_video
from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.folder import GENERATION, read_config
from embodied.policies.language.sight import Sight
from embodied.policies.policy_folder import read_json

END, UNKNOWN, PADDING = "<end>", "<unk>", "<pad>"
PICTURE = ("<picture>", "<place>", "</picture>")  # tokens that begin, fill and end a picture
CHARACTERS = [*map(chr, range(ord(" "), ord("~") + 1)), "\n", "\t"]
ANSWER = "ANSWER-1"  # the answer in sample conversations, unchanged by templates that trim texts
THOUGHT = f"<think>\nTHOUGHT-1\n</think>\n\n{ANSWER}"
ASKED: Message = {"role": "user", "content": "QUESTION-1"}
THINK, THOUGHT_END = "<think>", "</think>"
STANDS_FOR = "\ue000{}\ue000", "\ue001{}\ue001"  # an answer and its thought by number; no text has these characters
READERS = "take a model that sees, such as Qwen2.5-VL or SmolVLM (policy.preset=tiny_vl is a small one)"
ADVICE = "set policy.chat=false, or put a chat_template.jinja that does into a copy of the folder"


class SplitAnswer(NamedTuple):
    """An answer's text in parts."""

    thought: str | None  # None: it has none
    space: str  # white space between the end of the thought and the answer
    said: str


def split_answer(text: str) -> SplitAnswer:
    thought, end, behind = text.rpartition(THOUGHT_END)
    if not end:
        return SplitAnswer(None, "", text)
    said = behind.lstrip()
    return SplitAnswer(thought, behind[: len(behind) - len(said)], said)


class ConversationTokenizer:
    """Wraps a tokenizer of transformers for conversations."""

    def __init__(self, base: Any, stops: Iterable[int], chat: bool | None = None) -> None:
        """`stops` end an answer; `chat`: whether messages go through the chat template, None: if there is one."""
        self.base = base
        self.stops = frozenset(stops)
        if chat and not base.chat_template:
            raise ConfigError("policy.chat=true, but this model has no chat template; leave it out")
        self.chat = bool(base.chat_template) if chat is None else chat
        self.begin = beginning(base)
        self.sight: Sight | None = None  # for a model that reads pictures
        self.system: str | None = None  # before conversations of messages that have no system message
        self.arguments: dict[str, Any] = {}  # of the chat template
        self.rewrites = False  # True if later turns are prompts of their own (`conversation`)

    def __deepcopy__(self, _: dict) -> ConversationTokenizer:
        """Shared by copies of a policy, since it never changes."""
        return self

    def encode(self, said: Said, first: bool, max_tokens: int | None = None) -> list[int]:
        """Encodes text or messages. The `first` turn begins with the model's initial token, if any; later turns follow
        an answer with its end token. A text that cannot fit into `max_tokens` is refused before it is encoded. Places
        of pictures are tokens below 0."""
        pictures = pictures_in(said)
        if pictures and self.sight is None:
            raise ConfigError(f"this model reads only text, but the conversation shows a picture; {READERS}")
        if isinstance(said, str) or not self.chat:
            place = self.sight.opening() if self.sight else ""
            text = said if isinstance(said, str) else "\n".join(in_words(message, place) for message in said)
            begin = self.begin if first else []
        else:
            text, begin = self.render(self.with_system(said)) if first else self.continuation(said), []
        if max_tokens is not None and len(text) > max_tokens * self.longest_token:
            why = f"a prompt of {len(text)} characters leaves no room for an answer within {max_tokens} tokens"
            raise ConfigError(f"{why}, the longest conversation")
        ids = begin + self.encode_shown(text, said)
        # A network needs at least one input token.
        return ids or ([min(self.stops)] if first else [])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, including tokens that end an answer."""
        return self.base.decode(list(map(int, ids)), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def plain_text(self, ids: Sequence[int]) -> str:
        """The text of tokens without special ones, such as a chat template's, and without pictures."""
        words = [int(token) for token in ids if token >= 0]
        return self.base.decode(words, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def use(self, system: str | None, arguments: Mapping[str, Any]) -> None:
        """Begin conversations with this system message, and render them with these arguments of the chat template."""
        if (system or arguments) and not self.chat:
            raise ConfigError(f"policy.{'system' if system else 'template_arguments'}: this model has no chat template")
        read = set(re.findall(r"[A-Za-z_]\w*", str(self.base.chat_template)))
        if unread := next((name for name in arguments if name not in read), None):
            suggestion = nearest(unread, read)
            raise ConfigError(f"policy.template_arguments: this model's chat template has no {unread}{suggestion}")
        self.system, self.arguments = system, dict(arguments)

    def with_system(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if self.system is None or messages[0]["role"] == "system":
            return messages
        return ({"role": "system", "content": self.system}, *messages)

    def prepare_turns(self, thoughts: str) -> None:
        """Set `rewrites` for conversations of several turns: True if the chat template changes the text of earlier
        turns when a turn is added, and `policy.thoughts` does not keep it."""
        if not self.chat:
            return
        before, more = self.render((ASKED,)), {"role": "user", "content": "QUESTION-2"}
        self.continuation((more,))  # refuses a template without the model's answers
        whole = [self.render((ASKED, {"role": WRITES, "content": answer}, more)) for answer in (ANSWER, THOUGHT)]
        extends = all(text.startswith(before + answer) for text, answer in zip(whole, (ANSWER, THOUGHT), strict=True))
        self.rewrites = thoughts == "template" and not extends

    def conversation(self, turns: Sequence[tuple[Said, Sequence[int]]], said: Said) -> list[int] | None:
        """Encodes a whole conversation as the chat template renders it with the new messages `said`; None if earlier
        turns stay as they are. `turns`: the env's earlier messages, and the tokens of each answer. Answers keep their
        tokens, except the thoughts that the template leaves out."""
        if not self.rewrites or not turns or isinstance(said, str) or any(isinstance(each, str) for each, _ in turns):
            return None
        parts = [split_answer(self.decode(answer[:-1] if answer[-1] in self.stops else answer)) for _, answer in turns]
        messages: list[Message] = []
        for number, ((asked, _), piece) in enumerate(zip(turns, parts, strict=True)):
            content, thought = (mark.format(number) for mark in STANDS_FOR)
            opened = "" if piece.thought is None else f"{THINK}\n{thought}\n{THOUGHT_END}{piece.space}"
            messages += [*asked, {"role": WRITES, "content": opened + content}]
        ids: list[int] = []
        rest = self.render(self.with_system((*messages, *said)))
        for number, ((asked, answer), piece) in enumerate(zip(turns, parts, strict=True)):
            content, thought = (mark.format(number) for mark in STANDS_FOR)
            before, there, rest = rest.partition(content)
            if not there:
                raise ConfigError(f"the model's chat template leaves out the model's answers; {ADVICE}")
            before, is_kept, _ = before.partition(thought)
            shown = piece.said
            if is_kept:
                before = before[: before.rindex(THINK)] if THINK in str(piece.thought) else before
                shown = f"{piece.thought}{THOUGHT_END}{piece.space}{piece.said}"
            elif before.endswith(piece.space):
                before, shown = before.removesuffix(piece.space), piece.space + piece.said
            ids += self.encode_shown(before, asked) + self.last_tokens(answer, shown)
            rest = self.without_end(rest)
        return ids + self.encode_shown(rest, said)

    def last_tokens(self, answer: Sequence[int], text: str) -> list[int]:
        """The last tokens of an answer, with this text and the end token, if any: those that were written, unless one
        of them only ends with a part of the text."""
        tokens = list(map(int, answer))
        stop = tokens[-1:] if tokens[-1] in self.stops else []
        body = tokens[: len(tokens) - len(stop)]
        first = bisect_left(range(len(body)), -len(text), key=lambda at: -len(self.decode(body[at:])))
        return (body[first:] if self.decode(body[first:]) == text else self.encode_text(text)) + stop

    def save(self, folder: Path) -> None:
        """Write the tokenizer in transformers' format."""
        self.base.save_pretrained(folder)

    # Inside

    @cached_property
    def longest_token(self) -> int:
        """The most characters of a token."""
        return max(map(len, self.base.get_vocab()))

    def encode_text(self, text: str) -> list[int]:
        return self.base(text, add_special_tokens=False)["input_ids"]

    def encode_shown(self, text: str, said: Said) -> list[int]:
        """The tokens of a text with the pictures of `said`."""
        pictures = pictures_in(said)
        return self.sight.encode(text, pictures) if self.sight and pictures else self.encode_text(text)

    def continuation(self, said: Iterable[Message]) -> str:
        """The text that a template writes after an answer and its end token."""
        text = self.render((ASKED, {"role": WRITES, "content": ANSWER}, *said))
        _, answer, behind = text.rpartition(ANSWER)
        if not answer:
            raise ConfigError(f"the model's chat template leaves out the model's answers; {ADVICE}")
        return self.without_end(behind)

    def without_end(self, text: str) -> str:
        """The text after an answer, without the end token that belongs to the answer."""
        ends = map(self.base.decode, sorted(self.stops))
        return text.removeprefix(next((end for end in ends if end and text.startswith(end)), ""))

    def as_template_reads(self, message: Message) -> Message:
        """A copy of a message, in which videos are called so if the chat template has a place for them."""
        content = message.get("content")
        if not isinstance(content, (list, tuple)) or "video" not in str(self.base.chat_template):
            return dict(message)
        return message | {"content": [{"type": "video"} if is_video(p.get("image", "")) else p for p in content]}

    def render(self, messages: Iterable[Message]) -> str:
        """Renders messages by the chat template, as a prompt for an answer. A message may have the `tools` that can be
        called."""
        plain = [self.as_template_reads(message) for message in messages]
        tools = [tool for message in plain for tool in message.pop("tools", ())]
        try:
            fixed = {"tools": tools or None, "tokenize": False, "add_generation_prompt": True}
            return self.base.apply_chat_template(plain, **self.arguments | fixed)
        except Exception as err:  # whatever the template raises
            text = " ".join(str(err).split())
            raise ConfigError(f"the model's chat template refuses this conversation ({text}); {ADVICE}") from None


def beginning(base: Any) -> list[int]:
    """The token that this tokenizer puts before a text; [] if none."""
    plain, usual = (base("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    return usual[:1] if usual[:1] == [base.bos_token_id] != plain[:1] else []


def tokenizer_of(config: LanguageConfig, talks: bool, shape: PreTrainedConfig | None = None) -> ConversationTokenizer:
    """The tokenizer of a policy with these options. `talks`: conversations have several turns; `shape`: the model's
    config, if already read."""
    if config.pretrained is None:
        tokenizer = of_characters(config.chat, sees=config.preset == "tiny_vl")
    else:
        origin = as_path(config.pretrained)
        tokenizer = published_tokenizer(origin, shape or read_config(origin), config.chat)
    tokenizer.use(config.system, config.template_arguments)
    if talks:
        tokenizer.prepare_turns(config.thoughts)
    return tokenizer


def published_tokenizer(folder: Path, shape: PreTrainedConfig, chat: bool | None) -> ConversationTokenizer:
    """The tokenizer of a published model."""
    try:
        base = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as err:  # of many kinds
        raise CheckpointError(f"{folder} has no tokenizer that can be read: {in_a_line(err)}") from None
    vocabulary = shape.get_text_config().vocab_size
    if len(base) > vocabulary and max(base.get_vocab().values()) >= vocabulary:
        sizes = f"its tokenizer has {len(base)} tokens, its model {vocabulary}"
        raise CheckpointError(f"{folder}: {sizes}; they do not belong together")
    ends = stops_of(folder, shape) | ({base.eos_token_id} - {None})
    if not ends:
        raise CheckpointError(f"{folder} names no token that ends an answer: generation_config.json lacks eos_token_id")
    return ConversationTokenizer(base, ends, chat)


def stops_of(folder: Path, config: PreTrainedConfig) -> set[int]:
    """The tokens that end an answer, from generation_config.json and config.json."""
    generation = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    configs = (config, config.get_text_config())
    ends = [generation.get("eos_token_id"), *(getattr(source, "eos_token_id", None) for source in configs)]
    return {stop for end in ends if end is not None for stop in (end if isinstance(end, list) else [end])}


def of_characters(chat: bool | None = None, sees: bool = False) -> ConversationTokenizer:
    """A tokenizer with a token for every printable ASCII character, newline and tab, and one token for all other
    characters. With `sees` it has tokens for pictures."""
    from tokenizers import Regex
    from tokenizers import Tokenizer as Fast
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    words = [PADDING, END, UNKNOWN, *CHARACTERS]
    fast = Fast(WordLevel({word: number for number, word in enumerate(words)}, unk_token=UNKNOWN))
    fast.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    fast.decoder = Fuse()
    base = PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token=END, unk_token=UNKNOWN, pad_token=PADDING, clean_up_tokenization_spaces=False
    )
    if sees:
        base.add_tokens(list(PICTURE), special_tokens=True)
    return ConversationTokenizer(base, [base.eos_token_id], chat)
