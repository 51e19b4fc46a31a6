"""Text to tokens and back: a model's own tokenizer and chat template, or a small one of characters.

A conversation is encoded turn by turn, and encoded tokens never change: a later turn is the text that the chat template
adds after the previous answer. So a template must only append.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied.core.conversations import Message, Said, in_words, pictures_in
from embodied.core.errors import CheckpointError, ConfigError, in_a_line

if TYPE_CHECKING:
    from embodied.policies.language.sight import Sight

END, UNKNOWN, PADDING = "<end>", "<unk>", "<pad>"
PICTURE = ("<picture>", "<place>", "</picture>")  # tokens that begin, fill and end a picture
CHARACTERS = [*map(chr, range(ord(" "), ord("~") + 1)), "\n", "\t"]
ANSWER = "ANSWER-1"  # the answer in sample conversations, unchanged by templates that trim texts
THOUGHT = f"<think>\nTHOUGHT-1\n</think>\n\n{ANSWER}"
ASKED: Message = {"role": "user", "content": "QUESTION-1"}
READERS = "take a model that sees, such as Qwen2.5-VL or SmolVLM (policy.preset=tiny_vl is a small one)"
ADVICE = "set policy.chat=false, or put a chat_template.jinja that does into a copy of the folder"


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

    def __deepcopy__(self, _: dict) -> ConversationTokenizer:
        """Shared by copies of a policy, since it never changes."""
        return self

    def encode(self, said: Said, first: bool, ended: bool = True, max_tokens: int | None = None) -> list[int]:
        """Encodes text or messages. The `first` turn begins with the model's initial token, if any; later turns follow
        an answer. If the answer was cut off (not `ended`), messages end it first. A text that cannot fit into
        `max_tokens` is refused before it is encoded. Places of pictures are tokens below 0."""
        pictures = pictures_in(said)
        if pictures and self.sight is None:
            raise ConfigError(f"this model reads only text, but the conversation shows a picture; {READERS}")
        if isinstance(said, str) or not self.chat:
            place = self.sight.opening() if self.sight else ""
            text = said if isinstance(said, str) else "\n".join(in_words(message, place) for message in said)
            begin = self.begin if first else []
        else:
            text, begin = self.render(said) if first else self.continuation(said, ended), []
        if max_tokens is not None and len(text) > max_tokens * self.longest_token:
            why = f"a prompt of {len(text)} characters leaves no room for an answer within {max_tokens} tokens"
            raise ConfigError(f"{why}, the longest conversation")
        ids = begin + (self.sight.encode(text, pictures) if self.sight and pictures else self.encode_text(text))
        # A network needs at least one input token.
        return ids or ([min(self.stops)] if first else [])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, including tokens that end an answer."""
        return self.base.decode(list(map(int, ids)), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def plain_text(self, ids: Sequence[int]) -> str:
        """The text of tokens without special ones, such as a chat template's, and without pictures."""
        words = [int(one) for one in ids if one >= 0]
        return self.base.decode(words, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def check_turns(self) -> None:
        """Refuse a chat template that changes the text of earlier turns when a turn is added."""
        if not self.chat:
            return
        before, more = self.render((ASKED,)), {"role": "user", "content": "QUESTION-2"}
        for answer in (ANSWER, THOUGHT):
            now = self.render((ASKED, {"role": "assistant", "content": answer}, more))
            if not now.startswith(before + answer):
                what = "leaves out the thoughts of earlier answers" if answer == THOUGHT else "does not"
                why = f"a chat template must say a longer conversation in the same words and more, and this one {what}"
                raise ConfigError(f"{why}; {ADVICE}, or ask for one answer only (env.max_episode_steps=1)")

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

    def continuation(self, said: Iterable[Message], ended: bool) -> str:
        """The text that a template writes after an answer, without the end token if the answer has `ended`."""
        text = self.render((ASKED, {"role": "assistant", "content": ANSWER}, *said))
        _, answer, behind = text.rpartition(ANSWER)
        if not answer:
            raise ConfigError(f"the model's chat template leaves out the model's answers; {ADVICE}")
        end = next((end for end in map(self.base.decode, sorted(self.stops)) if end and behind.startswith(end)), "")
        return behind.removeprefix(end) if ended else behind

    def render(self, messages: Iterable[Message]) -> str:
        """Renders messages by the chat template, as a prompt for an answer. A message may have the `tools` that can be
        called."""
        plain = [dict(message) for message in messages]
        tools = [tool for message in plain for tool in message.pop("tools", ())]
        try:
            return self.base.apply_chat_template(plain, tools=tools or None, tokenize=False, add_generation_prompt=True)
        except Exception as err:  # whatever the template raises
            text = " ".join(str(err).split())
            raise ConfigError(f"the model's chat template refuses this conversation ({text}); {ADVICE}") from None


def beginning(base: Any) -> list[int]:
    """The token that this tokenizer puts before a text; [] if none."""
    plain, usual = (base("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    return usual[:1] if usual[:1] == [base.bos_token_id] != plain[:1] else []


def of_folder(folder: Path, stops: Iterable[int], vocabulary: int, chat: bool | None) -> ConversationTokenizer:
    """The tokenizer of a published model; answers end with `stops` or the tokenizer's end token."""
    from transformers import AutoTokenizer

    try:
        base = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as err:  # of many kinds
        raise CheckpointError(f"{folder} has no tokenizer that can be read: {in_a_line(err)}") from None
    if len(base) > vocabulary and max(base.get_vocab().values()) >= vocabulary:
        sizes = f"its tokenizer has {len(base)} tokens, its model {vocabulary}"
        raise CheckpointError(f"{folder}: {sizes}; they do not belong together")
    ends = {*stops, *([] if base.eos_token_id is None else [base.eos_token_id])}
    if not ends:
        raise CheckpointError(f"{folder} names no token that ends an answer: generation_config.json lacks eos_token_id")
    return ConversationTokenizer(base, ends, chat)


def of_characters(chat: bool | None = None, sees: bool = False) -> ConversationTokenizer:
    """A tokenizer with a token for every printable ASCII character, newline and tab, and one token for all other
    characters. With `sees` it has tokens for pictures."""
    from tokenizers import Regex
    from tokenizers import Tokenizer as Fast
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    known = [PADDING, END, UNKNOWN, *CHARACTERS]
    fast = Fast(WordLevel({word: number for number, word in enumerate(known)}, unk_token=UNKNOWN))
    fast.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    fast.decoder = Fuse()
    base = PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token=END, unk_token=UNKNOWN, pad_token=PADDING, clean_up_tokenization_spaces=False
    )
    if sees:
        base.add_tokens(list(PICTURE), special_tokens=True)
    return ConversationTokenizer(base, [base.eos_token_id], chat)
