"""Resizing images to the very grey levels that other libraries give, which published models were trained on.

Pillow sums whole numbers: weights in units of 2^-22, rounded .5 up to grey levels after each of two passes, across and
down, so the result is the same on every device. TensorFlow rounds once, at the end.
"""

from __future__ import annotations

import io
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from embodied.core.arrays import host

BITS = 22
UNITS, HALF = 2.0**BITS, 2 ** (BITS - 1)  # of Pillow's weights
AT_ONCE = 16  # frames, so that doubles do not fill the memory
QUALITY = 95  # TensorFlow's default for JPEG; colours are halved in both directions


def bilinear(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - x, 0)


def bicubic(x: np.ndarray) -> np.ndarray:
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def lanczos3(x: np.ndarray) -> np.ndarray:
    return np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0.0)


KERNELS = {"bilinear": bilinear, "bicubic": bicubic, "lanczos3": lanczos3}


@lru_cache(maxsize=64)
def weights(kernel: str, size: int, wanted: int) -> np.ndarray:
    """[wanted, size]: what every pixel gives to each of a line's new ones; wider where a line shrinks."""
    scale = size / wanted
    middles = (np.arange(wanted)[:, None] + 0.5) * scale
    given = KERNELS[kernel](np.abs(np.arange(size) + 0.5 - middles) / max(scale, 1.0))
    return given / given.sum(1, keepdims=True)


@lru_cache(maxsize=64)
def taps(kernel: str, size: int, wanted: int) -> tuple[np.ndarray, np.ndarray]:
    """[wanted, taps]: which pixels of a line make its new ones, and their weights in Pillow's units."""
    given = weights(kernel, size, wanted)
    units = np.trunc(given * UNITS + np.copysign(0.5, given)).astype(np.int32)
    count = int((units != 0).sum(1).max())
    first = np.minimum((units != 0).argmax(1), size - count)
    places = first[:, None] + np.arange(count)
    return places, np.take_along_axis(units, places, 1)


def as_pillow(pixels: Tensor, shape: tuple[int, int], kernel: str) -> Tensor:
    """[N, 3, H, W] -> [N, 3, *shape], grey levels as floats."""
    levels = pixels.to(torch.int32)
    for axis, wanted in ((3, shape[1]), (2, shape[0])):
        if levels.shape[axis] != wanted:
            places, units = (
                torch.from_numpy(part).to(pixels.device) for part in taps(kernel, levels.shape[axis], wanted)
            )
            across = [-1 if each == axis else 1 for each in range(4)]
            summed = sum(
                levels.index_select(axis, places[:, n]) * units[:, n].view(across) for n in range(units.shape[1])
            )
            levels = ((summed + HALF) >> BITS).clamp(0, 255)
    return levels.float()


def as_tensorflow(frames: Tensor, size: int) -> Tensor:
    """uint8 [N, H, W, 3] -> [N, size, size, 3], as tf.image.resize with its antialiased Lanczos filter."""
    down, across = (
        torch.from_numpy(weights("lanczos3", length, size)).to(frames.device) for length in frames.shape[1:3]
    )
    parts = [down @ part.permute(0, 3, 1, 2).double() @ across.T for part in frames.split(AT_ONCE)]
    return torch.cat(parts).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def through_jpeg(frames: Tensor) -> Tensor:
    """uint8 [N, H, W, 3] as they come back from a JPEG file."""
    from PIL import Image

    back = np.empty(frames.shape, np.uint8)
    for number, frame in enumerate(host(frames)):
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "JPEG", quality=QUALITY, subsampling="4:2:0")
        back[number] = np.asarray(Image.open(file))
    return torch.from_numpy(back).to(frames.device)


def as_in_rlds(frames: Tensor, size: int) -> Tensor:
    """As the frames of the data sets in RLDS's layout that published LIBERO models were tuned on, uint8."""
    return as_tensorflow(through_jpeg(frames), size)
