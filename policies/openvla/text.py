"""The prompt, and the tokenisers that turn it into ids."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from embodied.errors import CheckpointError, ConfigError
from embodied.policies.openvla.settings import Settings
from embodied.policies.vla.text import fast_tokenizer, hashed_words

TOKENIZER = "tokenizer.json"
BOS = 1
SPACE = 29871  # Llama's "▁", which every published model has seen in front of the first action token


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...


def prompt(instruction: str) -> str:
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


class FolderTokenizer:
    """The tokeniser of a published folder."""

    def __init__(self, path: Path) -> None:
        self._fast = fast_tokenizer(path)

    def encode(self, text: str) -> list[int]:
        ids = self._fast.encode(text).ids
        ids = ids if ids[:1] == [BOS] else [BOS, *ids]
        return ids if ids[-1] == SPACE else [*ids, SPACE]


class WordTokenizer:
    """For small models without a vocabulary file: a word's id is a hash of it."""

    def __init__(self, settings: Settings) -> None:
        self.words = settings.first_action_id - 3  # 0, 1 and 2 are unknown, begin and end

    def encode(self, text: str) -> list[int]:
        return [BOS, *(3 + number for number in hashed_words(text, self.words))]


def tokenizer_of(folder: Path | None, settings: Settings) -> Tokenizer:
    if settings.tokenizer == "words":
        return WordTokenizer(settings)
    path = None if folder is None else folder / TOKENIZER
    if path is None:
        raise ConfigError(
            "policy.preset=full has no vocabulary of its own; give policy.pretrained=FOLDER of a published OpenVLA"
        )
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {TOKENIZER}; a folder with only tokenizer.model needs one: "
            "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes it"
        )
    return FolderTokenizer(path)
