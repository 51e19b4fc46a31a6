"""Prepares camera frames for the vision towers like published processors, in one batch on the policy's device."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from embodied.core.arrays import host
from embodied.core.errors import ConfigError

# Resizing with exactly the grey levels of the libraries with which published models were trained.
#
# Pillow sums integers: weights in units of 2^-22, rounded (.5 up) to grey levels after each of two passes, columns and
# rows, so the result is equal on every device. TensorFlow rounds once, at the end.


def constants(make: Callable[..., Any], *arguments: Any, device: torch.device) -> tuple[Tensor, ...]:
    """Arrays that depend on sizes alone, as tensors. They stay on their device, since a graph cannot send them
    (`device_graphs.py`)."""
    traced = device.type == "meta" or torch.compiler.is_compiling()
    send = sent_constants.__wrapped__ if traced else sent_constants
    return send(make, arguments, device, torch.get_default_dtype())


@lru_cache(maxsize=256)
def sent_constants(
    make: Callable[..., Any], arguments: Any, device: torch.device, exact: torch.dtype
) -> tuple[Tensor, ...]:
    """`exact`: the precision of numbers that are no arrays."""
    with torch.inference_mode(False):
        parts = (
            constant if isinstance(constant, np.ndarray) else torch.tensor(constant, dtype=exact)
            for constant in make(*arguments)
        )
        return tuple(torch.as_tensor(constant).to(device) for constant in parts)


def given(*numbers: Any) -> Any:
    return numbers


BITS = 22
UNITS, HALF = 2.0**BITS, 2 ** (BITS - 1)  # units of Pillow's weights
AT_ONCE = 16  # frames per batch, to limit the memory of doubles
QUALITY = 95  # TensorFlow's default for JPEG; chroma is subsampled in both directions


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
    """[wanted, size]: the weight of every pixel of a line in each new pixel; the kernel is wider when a line
    shrinks."""
    scale = size / wanted
    middles = (np.arange(wanted)[:, None] + 0.5) * scale
    given = KERNELS[kernel](np.abs(np.arange(size) + 0.5 - middles) / max(scale, 1.0))
    return given / given.sum(1, keepdims=True)


@lru_cache(maxsize=64)
def resize_taps(kernel: str, size: int, wanted: int) -> tuple[np.ndarray, np.ndarray]:
    """[wanted, taps]: the pixels of a line for each new pixel, and their weights in Pillow's units."""
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
            places, units = constants(resize_taps, kernel, levels.shape[axis], wanted, device=pixels.device)
            across = [-1 if dimension == axis else 1 for dimension in range(4)]
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
    parts = [down @ frame.permute(0, 3, 1, 2).double() @ across.T for frame in frames.split(AT_ONCE)]
    return torch.cat(parts).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def through_jpeg(frames: Tensor) -> Tensor:
    """uint8 [N, H, W, 3] after JPEG compression."""
    if torch.compiler.is_exporting():
        raise ConfigError(
            "policy.rlds_images=true compresses frames as JPEG, which no exported program does; "
            "python -m embodied.serve answers with such a policy"
        )
    from PIL import Image

    back = np.empty(frames.shape, np.uint8)
    for number, frame in enumerate(host(frames)):
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "JPEG", quality=QUALITY, subsampling="4:2:0")
        back[number] = np.asarray(Image.open(file, formats=["JPEG"]))
    return torch.from_numpy(back).to(frames.device)


def as_in_rlds(frames: Tensor, size: int) -> Tensor:
    """Frames (uint8) as in RLDS data sets, on which published LIBERO models were tuned."""
    return as_tensorflow(through_jpeg(frames), size)


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALVES = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
STRATEGIES = ("resize-naive", "letterbox", "resize-crop")
FILTERS = {2: "bilinear", 3: "bicubic"}  # by Pillow's numbers

Moments = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True)
class ImageProcessor:
    """`normalize` has mean and deviation of each tower's pixels, from 0 to 1; `bars` is the colour of a letterbox."""

    size: int
    strategy: str
    normalize: tuple[Moments, ...]
    crop_area: float = 1.0  # the kept part of the frame's area, at its centre
    bars: tuple[int, ...] = (127, 127, 127)
    rlds: bool = False  # True: frames are first processed as in RLDS data sets
    filter: str = "bicubic"  # the filter for resizing

    def through_rlds(self, frames: Tensor) -> Tensor:
        """Frames as in RLDS data sets, if asked for; on the host."""
        return as_in_rlds(frames, self.size) if self.rlds else frames

    def __call__(self, frames: Tensor, ready: bool = False) -> Tensor:
        """uint8 [N, H, W, 3] -> float32 [N, 3 * towers, size, size]. `ready`: frames have gone `through_rlds`."""
        frames = frames if ready else self.through_rlds(frames)
        pixels = frames.permute(0, 3, 1, 2).float()
        if self.strategy == "letterbox":
            pixels = letterbox(pixels, self.bars)
        pixels = resize(pixels, self._shape(*pixels.shape[2:]), self.filter)
        pixels = central_square(pixels, self.size)
        if self.crop_area < 1.0:
            pixels = crop(pixels, self.crop_area)
        pixels = pixels / 255
        return torch.cat([(pixels - column(mean)) / column(std) for mean, std in self._moments(pixels)], dim=1)

    def _shape(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of a resized frame."""
        if self.strategy == "resize-naive":
            return self.size, self.size
        short = min(height, width)  # the short side fits; the long side is cut (with a letterbox by a pixel or two)
        return int(self.size * height / short), int(self.size * width / short)

    def _moments(self, like: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [constants(given, *moments, device=like.device) for moments in self.normalize]


def processor_of(
    published: dict, kinds: list[str], size: int, strategy: str, crop_area: float, rlds: bool = False
) -> ImageProcessor:
    """`published` is preprocessor_config.json (or empty); its normalisation replaces the default one. Raises ValueError
    and the like for a file that is damaged or asks for something else."""
    usual = {"dinov2": IMAGENET, "siglip": HALVES}
    stored = published.get("tvf_normalize_params")
    moments = tuple(usual[kind] for kind in kinds) if stored is None else read_moments(stored)
    if len(moments) != len(kinds):
        raise ValueError(f"it normalises {len(moments)} images for {len(kinds)} towers")
    strategy = published.get("image_resize_strategy", strategy)
    if strategy not in STRATEGIES:
        raise ValueError(f"image_resize_strategy={strategy!r} is unknown; known: {', '.join(STRATEGIES)}")
    fill = published.get("tvf_letterbox_fill")
    bars = tuple(int(255 * value) for value in moments[-1][0]) if fill is None else tuple(map(int, fill))
    return ImageProcessor(size, strategy, moments, crop_area, bars, rlds, filter_of(published, size, strategy))


def filter_of(published: dict, size: int, strategy: str) -> str:
    """The file's filter for resizing. Published processors follow the file's steps, not its strategy, so files whose
    steps differ from their strategy are refused."""
    square = [size, size]
    resized, cut = (published.get(key) or [] for key in ("tvf_resize_params", "tvf_crop_params"))
    kernels = {FILTERS.get(step.get("interpolation", 3)) for step in resized} or {"bicubic"}
    sizes = [step["size"] for step in resized] + [step["output_size"] for step in cut]
    whole = square if strategy == "resize-naive" else size
    boxed = published.get("tvf_do_letterbox", strategy == "letterbox")
    if sizes != [whole] * len(resized) + [square] * len(cut) or boxed != (strategy == "letterbox"):
        raise ValueError(
            f"it resizes and cuts images to {sizes} (tvf_do_letterbox={boxed}), which is not its "
            f"image_resize_strategy={strategy} for {size} pixels; such a processor is not supported"
        )
    if len(kernels) > 1 or None in kernels:
        raise ValueError("tvf_resize_params should name one filter, 2 (bilinear) or 3 (bicubic)")
    return kernels.pop()


def read_moments(stored: list[dict]) -> tuple[Moments, ...]:
    moments = tuple((tuple(map(float, colors["mean"])), tuple(map(float, colors["std"]))) for colors in stored)
    if any(len(mean) != 3 or len(std) != 3 or min(std) <= 0 for mean, std in moments):
        raise ValueError(f"tvf_normalize_params should hold mean and std of three colours for each tower, not {stored}")
    return moments


def column(numbers: Tensor) -> Tensor:
    return numbers.view(1, -1, 1, 1)


def resize(pixels: Tensor, shape: tuple[int, int], mode: str = "bicubic") -> Tensor:
    return pixels if tuple(pixels.shape[2:]) == shape else as_pillow(pixels, shape, mode)


def with_bars(frames: Tensor, size: int, in_middle: bool = True, as_pillow: bool = True) -> Tensor:
    """uint8 [N, H, W, 3] -> grey levels [N, 3, size, size] without distortion (bilinear, like Pillow or torch), with
    black bars around, or above and left."""
    height, width = frames.shape[1:3]
    ratio = max(height, width) / size
    high, wide = max(1, int(height / ratio)), max(1, int(width / ratio))
    pixels = frames.permute(0, 3, 1, 2).float()
    if as_pillow:
        pixels = resize(pixels, (high, wide), "bilinear")
    else:
        pixels = F.interpolate(pixels, (high, wide), mode="bilinear", align_corners=False)
    top, left = ((size - length) // 2 if in_middle else size - length for length in (high, wide))
    return F.pad(pixels, (left, size - wide - left, top, size - high - top))


def letterbox(pixels: Tensor, colour: tuple[int, ...]) -> Tensor:
    """Make frames square with bars. If an odd number of rows or columns is missing, the result is one short, like the
    published processor's."""
    height, width = pixels.shape[2:]
    side = max(height, width)
    bars = [(side - width) // 2, (side - height) // 2]
    (grey,) = constants(given, tuple(map(float, colour)), device=pixels.device)
    canvas = column(grey)
    canvas = canvas.expand(pixels.shape[0], 3, height + 2 * bars[1], width + 2 * bars[0]).clone()
    canvas[:, :, bars[1] : bars[1] + height, bars[0] : bars[0] + width] = pixels
    return canvas


def central_square(pixels: Tensor, size: int) -> Tensor:
    """The central square of this size."""
    top, left = (round((side - size) / 2) for side in pixels.shape[2:])
    return pixels[:, :, top : top + size, left : left + size]


def crop(pixels: Tensor, area: float) -> Tensor:
    """Crops this part of a square frame's area and resizes it: bilinear with aligned corners, rounded to grey levels
    like TensorFlow, with which published models were tuned."""
    reach = math.sqrt(area)
    (theta,) = constants(given, ((reach, 0.0, 0.0), (0.0, reach, 0.0)), device=pixels.device)
    theta = theta.expand(pixels.shape[0], 2, 3)
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=True)
    looked = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=True)
    return (looked * (255.5 / 255)).floor().clamp(0, 255)
