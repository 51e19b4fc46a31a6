"""The network's inputs: augmented images, and the prompt, for Pi0.5 with the state as numbers from 0 to 255."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from embodied.policies.pi0.settings import Pi0Settings
from embodied.policies.policy_folder import TOKENIZER
from embodied.policies.vla.vla_tokenizer import fast_tokenizer, hashed_words

BOS = 2
EDGES = np.linspace(-1, 1, 257)[:-1]  # bin edges of the state's numbers in the prompt


# openpi's image augmentation, drawn separately for each image.
#
# The base camera's images are cropped to 95% at a random place, resized and rotated by up to 5 degrees (with black
# borders); all images change in brightness, contrast and saturation.

DRAWS = 6  # uniform numbers per image: row, column, rotation, brightness, contrast, saturation
CUT, DEGREES, STILL = 0.95, 5.0, 0.1  # rotations below STILL degrees are skipped


def augmented(pixels: Tensor, uniform: Tensor) -> Tensor:
    """Pixels [B, cameras, 3, S, S] from -1 to 1, the base camera first, by uniform numbers [B, cameras, 6]."""
    pixels, uniform = pixels / 2 + 0.5, uniform.to(pixels.dtype)
    base = turned(cut(pixels[:, 0], uniform[:, 0, :2]), uniform[:, 0, 2])
    pixels = torch.cat([base[:, None], pixels[:, 1:]], dim=1)
    return coloured(pixels, uniform[:, :, 3:, None, None, None].unbind(2)) * 2 - 1


def cut(pixels: Tensor, uniform: Tensor) -> Tensor:
    """Crops images [B, 3, S, S] at a whole pixel and resizes them (bilinear)."""
    size = pixels.shape[-1]
    part = int(size * CUT)
    first = (uniform * (size - part + 1)).floor().clamp(max=size - part)  # [B, 2]
    inside = ((torch.arange(size, device=pixels.device) + 0.5) * part / size - 0.5).clamp(0, part - 1)
    rows, columns = (2 * (begin[:, None] + inside) / (size - 1) - 1 for begin in first.unbind(1))
    grid = torch.stack([columns[:, None].expand(-1, size, -1), rows[:, :, None].expand(-1, -1, size)], dim=-1)
    return F.grid_sample(pixels, grid, mode="bilinear", align_corners=True)


def turned(pixels: Tensor, uniform: Tensor) -> Tensor:
    degrees = (2 * uniform - 1) * DEGREES
    angle = torch.where(degrees.abs() > STILL, degrees, 0.0)[:, None, None] * math.pi / 180
    line = torch.linspace(-1, 1, pixels.shape[-1], device=pixels.device, dtype=pixels.dtype)
    y, x = torch.meshgrid(line, line, indexing="ij")
    grid = torch.stack([x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()], dim=-1)
    after = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return torch.where(angle[:, None] == 0, pixels, after)


def coloured(pixels: Tensor, uniform: tuple[Tensor, ...]) -> Tensor:
    """[B, cameras, 3, S, S], each image by uniform numbers [B, cameras, 1, 1, 1] of its own."""
    brightness, contrast, saturation = uniform
    pixels = pixels * (0.7 + 0.6 * brightness)
    mean = pixels.mean(dim=(2, 3, 4), keepdim=True)
    pixels = mean + (pixels - mean) * (0.6 + 0.8 * contrast)
    grey = pixels.mean(dim=2, keepdim=True)
    return (grey + (pixels - grey) * (0.5 + saturation)).clamp(0, 1)


# The prompt, and the tokenizers


def prompt(instruction: str, state: np.ndarray | None) -> str:
    """`state` is in the model's units; None: the prompt has no state."""
    text = instruction.strip().replace("_", " ").replace("\n", " ")
    if state is None:
        return f"{text}\n"
    numbers = " ".join(str(number) for number in np.digitize(state, EDGES) - 1)
    return f"Task: {text}, State: {numbers};\nAction: "


class GemmaTokenizer:
    """The tokenizer of a published folder."""

    def __init__(self, folder: Path | None) -> None:
        self._fast = fast_tokenizer(
            folder,
            "a Pi0",
            f"Pi0 reads with the tokenizer of google/paligemma-3b-pt-224: put its {TOKENIZER} beside the weights",
        )

    def encode(self, text: str) -> list[int]:
        body = text.removesuffix("\n")  # the answer begins after a newline, which is a separate token
        ids = self._ids(body) + (self._ids("\n") if body != text else [])
        return [BOS, *ids]

    def _ids(self, text: str) -> list[int]:
        return self._fast.encode(text, add_special_tokens=False).ids


class GemmaWords:
    """Tokenizer of small models without a vocabulary file: numbers up to 255 have ids of their own, words a hash."""

    def __init__(self, settings: Pi0Settings) -> None:
        self.words = settings.vocab - 260

    def encode(self, text: str) -> list[int]:
        return [BOS, *(self._id(word) for word in re.findall(r"-?\d+|\w+|[^\w ]", text))]

    def _id(self, word: str) -> int:
        if word.lstrip("-").isdecimal() and -1 <= int(word) < 256:
            return 4 + int(word)
        return 260 + (hashed_words(word, self.words) or [0])[0]
