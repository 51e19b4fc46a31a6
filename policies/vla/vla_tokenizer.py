"""Words to ids: the tokenizer of a folder, hashed words for small models, and rows of unequal length side by side."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Protocol

import numpy as np

from embodied.core.errors import CheckpointError, ConfigError
from embodied.policies.policy_folder import TOKENIZER


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]:
        """The ids of a text, behind that of the beginning."""
        ...


def fast_tokenizer(folder: Path | None, model: str, advice: str):
    """The tokenizer that tokenizer.json of a published folder describes; `advice` says how to come by that file."""
    if folder is None:
        raise ConfigError(f"policy.preset=full has no vocabulary of its own; give policy.pretrained=FOLDER of {model}")
    path = folder / TOKENIZER
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {TOKENIZER}; {advice}")
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise ConfigError(
            f"{path} needs the package tokenizers, which is not installed: python -m pip install 'embodied-loop[vla]'"
        ) from None
    try:
        found = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as err:  # the package knows no narrower one
        raise CheckpointError(f"{path} is damaged: {err}") from None
    found.no_padding()  # a saved tokenizer may still pad or cut as it did in training
    found.no_truncation()
    return found


def hashed_words(text: str, count: int) -> list[int]:
    """A number below `count` for every word: for small models without a vocabulary file."""
    return [zlib.crc32(word.encode()) % count for word in text.split()]


def padded(
    sequences: list[list[int]], pad: int = 0, most: int | None = None, least: int = 0, in_front: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Ids [N, L] and which of them are there, of at most so many a row, and rows of at least so many. Padding comes
    last, or with `in_front` right behind a row's first id."""
    rows = [sequence[:most] for sequence in sequences]
    width = max(least, *map(len, rows))
    ids, present = np.full((len(rows), width), pad, np.int64), np.zeros((len(rows), width), bool)
    for row, sequence in enumerate(rows):
        places = np.arange(len(sequence))
        places[1:] += (width - len(sequence)) * in_front
        ids[row, places], present[row, places] = sequence, True
    return ids, present
