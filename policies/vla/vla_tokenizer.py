"""Words to ids: the tokenizer of a folder, hashed words for small models, and padding."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Protocol

import numpy as np

from embodied.core.errors import CheckpointError, ConfigError
from embodied.policies.policy_folder import TOKENIZER


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]:
        """The ids of a text, after the begin token."""
        ...


def fast_tokenizer(folder: Path | None, model: str, advice: str):
    """The tokenizer of a published folder's tokenizer.json; `advice` says where to get that file."""
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
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as err:  # the package raises nothing more specific
        raise CheckpointError(f"{path} is damaged: {err}") from None
    tokenizer.no_padding()  # a saved tokenizer may still pad or truncate as in training
    tokenizer.no_truncation()
    return tokenizer


def hashed_words(text: str, count: int) -> list[int]:
    """A number below `count` for every word: for small models without a vocabulary file."""
    return [zlib.crc32(word.encode()) % count for word in text.split()]


def padded(
    sequences: list[list[int]], pad: int = 0, most: int | None = None, least: int = 0, in_front: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Pads rows to ids [N, L] and a mask, with at most and at least so many ids per row. Padding comes last, or with
    `in_front` after a row's first id."""
    rows = [sequence[:most] for sequence in sequences]
    width = max(least, *map(len, rows))
    ids, present = np.full((len(rows), width), pad, np.int64), np.zeros((len(rows), width), bool)
    for row, sequence in enumerate(rows):
        places = np.arange(len(sequence))
        places[1:] += (width - len(sequence)) * in_front
        ids[row, places], present[row, places] = sequence, True
    return ids, present
