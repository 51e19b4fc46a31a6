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


def align(sequences: list[list[int]], pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids [N, L] and which of them are there: the first id of a row comes first, its others last, padding between."""
    width = max(map(len, sequences))
    ids = np.full((len(sequences), width), pad, np.int64)
    present = np.zeros((len(sequences), width), bool)
    for row, sequence in enumerate(sequences):
        ids[row, 0], present[row, 0] = sequence[0], True
        rest = len(sequence) - 1
        ids[row, width - rest :], present[row, width - rest :] = sequence[1:], True
    return ids, present
