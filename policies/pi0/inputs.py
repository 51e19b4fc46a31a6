"""What goes into the network: camera frames, shrunk or grown without distortion with black bars, and the prompt, for
Pi0.5 with the state as numbers from 0 to 255.

States and actions are converted to the model's units and back: by mean and deviation (Pi0) or from quantile to quantile
(Pi0.5). The figures are found in a published folder (openpi's assets/NAME/norm_stats.json, lerobot's normalising step),
or in any dataset in LeRobot's layout. They become buffers of the policy and so travel with its weights.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.core.errors import CheckpointError, ConfigError
from embodied.policies.pi0.settings import MEAN_STD, Pi0Settings
from embodied.policies.policy_folder import TOKENIZER, read_json
from embodied.policies.vla.image_processor import resize
from embodied.policies.vla.statistics import choose_key
from embodied.policies.vla.vla_tokenizer import fast_tokenizer, hashed_words
from embodied.runtime.tensor_bytes import array_of, read_safetensors

BOS = 2
EDGES = np.linspace(-1, 1, 257)[:-1]  # borders of the state's numbers in the prompt


def resize_with_pad(frames: Tensor, size: int) -> Tensor:
    """uint8 [N, H, W, 3] -> uint8 [N, size, size, 3], bilinear."""
    height, width = frames.shape[1:3]
    if height == width == size:
        return frames
    ratio = max(height, width) / size
    high, wide = max(1, int(height / ratio)), max(1, int(width / ratio))
    pixels = resize(frames.permute(0, 3, 1, 2).float(), (high, wide), "bilinear")
    top, left = (size - high) // 2, (size - wide) // 2
    canvas = torch.zeros(len(frames), size, size, 3, dtype=torch.uint8, device=frames.device)
    canvas[:, top : top + high, left : left + wide] = pixels.permute(0, 2, 3, 1).to(torch.uint8)
    return canvas


def pixels_of(frames: Tensor) -> Tensor:
    """uint8 [N, S, S, 3] -> [-1, 1] [N, 3, S, S]."""
    return frames.permute(0, 3, 1, 2).float() / 255 * 2 - 1


# How openpi changes images at random while it trains, here drawn for each image on its own.
#
# The base camera's are cut to 95% somewhere, stretched to the old size and turned by up to 5 degrees (black comes in);
# all get another brightness, contrast and saturation.

DRAWS = 6  # uniform numbers for an image: down, across, turn, brightness, contrast, saturation
CUT, DEGREES, STILL = 0.95, 5.0, 0.1  # a turn of less than STILL degrees is none


def augmented(pixels: Tensor, uniform: Tensor) -> Tensor:
    """Pixels [B, cameras, 3, S, S] from -1 to 1, the base camera first, by uniform numbers [B, cameras, 6]."""
    pixels, uniform = pixels / 2 + 0.5, uniform.to(pixels.dtype)
    base = turned(cut(pixels[:, 0], uniform[:, 0, :2]), uniform[:, 0, 2])
    pixels = torch.cat([base[:, None], pixels[:, 1:]], dim=1)
    return coloured(pixels, uniform[:, :, 3:, None, None, None].unbind(2)) * 2 - 1


def cut(pixels: Tensor, uniform: Tensor) -> Tensor:
    """A part [B, 3, S, S] of images, stretched to their size, bilinear; it begins at one of the whole pixels."""
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
    """`state` in the model's units; None: the prompt does not contain it."""
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
        body = text.removesuffix("\n")  # the answer begins after a line end, which is a token of its own
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


def padded(sequences: list[list[int]], most: int, least: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ids [N, L] and which of them are there, of at most so many a row, and rows of at least so
    many; padding comes last."""
    sequences = [sequence[:most] for sequence in sequences]
    width = max(least, *map(len, sequences))
    ids, there = np.zeros((len(sequences), width), np.int64), np.zeros((len(sequences), width), bool)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)], there[row, : len(sequence)] = sequence, True
    return ids, there


NORM_STATS, STEPS = "norm_stats.json", "policy_preprocessor.json"
STATS_FILES = (NORM_STATS, f"assets/**/{NORM_STATS}", f"*/*/{NORM_STATS}")  # the last is RLinf's, ORG/NAME
WANTED = {"state": ("state", "observation.state"), "actions": ("actions", "action")}  # openpi's name, lerobot's
ZERO = 1e-9  # openpi's quantiles of zeros are about as far from zero as its histogram is fine
Figures = dict[str, dict[str, list[float]]]  # "state" and "actions" -> "mean", "std", "q01", "q99" -> numbers


class Scale(nn.Module):
    """Numbers of a robot are `unit * scale + shift`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(width, dtype=torch.float64))

    def adopt(self, figures: dict[str, list[float]], mode: str, eps: float, what: str) -> None:
        names = ("mean", "std") if mode == MEAN_STD else ("q01", "q99")
        if lost := [name for name in names if figures.get(name) is None]:
            raise CheckpointError(f"{what} lack {' and '.join(lost)}, by which this model is normalised")
        width, known = len(self.shift), min(len(figures[name]) for name in names)
        if width and not width_of(figures) <= width <= known:
            found = known if known < width else width_of(figures)
            raise ConfigError(f"{what} are of {found} numbers, the env has {width}")
        one, two = (torch.tensor(figures[name][:width], dtype=torch.float64) for name in names)
        scale = two + eps if mode == MEAN_STD else (two - one + eps) / 2
        if not (one.isfinite() & scale.isfinite() & (scale > 0)).all():
            raise CheckpointError(f"{what} are damaged: {' and '.join(names)} are {one.tolist()} and {two.tolist()}")
        self.shift.copy_(one if mode == MEAN_STD else one + scale)
        self.scale.copy_(scale)

    def to_unit(self, numbers: Tensor) -> Tensor:
        return (numbers.to(torch.float64) - self.shift) / self.scale

    def from_unit(self, unit: Tensor) -> Tensor:
        return unit.to(torch.float64) * self.scale + self.shift


def read_figures(path: Path) -> dict[str, Figures]:
    """All that a folder holds, by name; empty where it holds none."""
    found = {}
    for file in sorted({file for pattern in STATS_FILES for file in path.glob(pattern)}):
        name = str(file.parent.relative_to(path)).removeprefix("assets").strip("/.")
        found[name or "own"] = _chosen(read_json(file).get("norm_stats", {}), file)
    if (path / STEPS).is_file():
        for file in _state_files(path / STEPS):
            found["own"] = _from_step(file)
    if (path / "meta" / "stats.json").is_file():
        found["own"] = _chosen(read_json(path / "meta" / "stats.json"), path / "meta" / "stats.json")
    return found


def figures_of(found: dict[str, Figures], where: str, name: str | None) -> tuple[Figures | None, str]:
    """The figures `name` of those `found` at `where`, or of a dataset's folder of this name, and whose they are."""
    if name and name not in found and Path(name).is_dir():
        found, where, name = read_figures(Path(name)), name, None
        if not found:
            raise CheckpointError(
                f"policy.statistics={where} holds neither meta/stats.json nor norm_stats.json; of LeRobot 2.1's "
                f"datasets python -m embodied.datasets.quantiles {where} writes the former"
            )
    if not found and name:
        raise ConfigError(f"policy.statistics={name}: there is no such folder")
    return (found[choose_key(found, name, where)] if found else None), where


def width_of(figures: dict[str, list[float]]) -> int:
    """The count of numbers that the figures describe, without the zeros that fill them up to a model's width."""
    columns = [enumerate(column, 1) for column in figures.values()]
    return max((at for column in columns for at, number in column if abs(number) > ZERO), default=0)


def _state_files(path: Path) -> list[Path]:
    """Files of the steps that normalise."""
    try:
        steps = read_json(path).get("steps", [])
        files = [step.get("state_file") for step in steps if step.get("registry_name") == "normalizer_processor"]
        return [path.with_name(Path(file).name) for file in files if file]
    except (TypeError, AttributeError):
        raise CheckpointError(f"{path} is damaged: it holds no list of steps") from None


def _from_step(path: Path) -> Figures:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, which holds the figures that {STEPS} normalises by")
    nested: dict[str, dict[str, Any]] = {}
    for key, blob in read_safetensors(path).items():
        feature, _, figure = key.rpartition(".")
        nested.setdefault(feature, {})[figure] = array_of(blob)
    return _chosen(nested, path)


def _chosen(figures: dict[str, Any], where: Path) -> Figures:
    chosen = {}
    for ours, names in WANTED.items():
        name = next((name for name in names if name in figures), None)
        if name is None:
            raise CheckpointError(f"{where} has no figures of {' or '.join(names)}")
        try:
            chosen[ours] = {
                key: np.array(value, np.float64).flatten().tolist()
                for key, value in figures[name].items()
                if key in ("mean", "std", "q01", "q99") and value is not None
            }
        except (TypeError, ValueError, AttributeError) as err:
            raise CheckpointError(f"{where} is damaged: its figures of {name} cannot be read ({err})") from None
    return chosen
