"""The prompt: the instruction, for Pi0.5 with the state as numbers from 0 to 255, and the tokenisers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from embodied.policies.pi0.settings import Pi0Settings
from embodied.policies.vla.text import TOKENIZER, Tokenizer, fast_tokenizer, hashed_words

BOS = 2
EDGES = np.linspace(-1, 1, 257)[:-1]


def prompt(instruction: str, state: np.ndarray | None) -> str:
    """`state` in the model's units; None: the prompt does not contain it."""
    text = instruction.strip().replace("_", " ").replace("\n", " ")
    if state is None:
        return f"{text}\n"
    numbers = " ".join(str(number) for number in np.digitize(state, EDGES) - 1)
    return f"Task: {text}, State: {numbers};\nAction: "


class GemmaTokenizer:
    """The tokeniser of a published folder."""

    def __init__(self, folder: Path | None) -> None:
        self._fast = fast_tokenizer(
            folder,
            "a Pi0",
            f"Pi0 reads with the tokeniser of google/paligemma-3b-pt-224: put its {TOKENIZER} beside the weights",
        )

    def encode(self, text: str) -> list[int]:
        body = text.removesuffix("\n")  # the answer begins after a line end, which is a token of its own
        ids = self._ids(body) + (self._ids("\n") if body != text else [])
        return [BOS, *ids]

    def _ids(self, text: str) -> list[int]:
        return self._fast.encode(text, add_special_tokens=False).ids


class GemmaWords:
    """Tokeniser of small models without a vocabulary file: numbers up to 255 have ids of their own, words a hash."""

    def __init__(self, settings: Pi0Settings) -> None:
        self.words = settings.vocab - 260

    def encode(self, text: str) -> list[int]:
        return [BOS, *(self._id(word) for word in re.findall(r"-?\d+|\w+|[^\w ]", text))]

    def _id(self, word: str) -> int:
        if word.lstrip("-").isdecimal() and -1 <= int(word) < 256:
            return 4 + int(word)
        return 260 + (hashed_words(word, self.words) or [0])[0]


def tokenizer_of(folder: Path | None, settings: Pi0Settings) -> Tokenizer:
    """The tokeniser of a published folder, or that of a small model."""
    return GemmaWords(settings) if settings.tokenizer == "words" else GemmaTokenizer(folder)


def padded(sequences: list[list[int]], most: int, least: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ids [N, L] and which of them are there, of at most so many a row, and rows of at least so
    many; padding comes last."""
    sequences = [sequence[:most] for sequence in sequences]
    width = max(least, *map(len, sequences))
    ids, there = np.zeros((len(sequences), width), np.int64), np.zeros((len(sequences), width), bool)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)], there[row, : len(sequence)] = sequence, True
    return ids, there
