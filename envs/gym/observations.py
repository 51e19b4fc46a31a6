"""Sorts a Gymnasium observation into images, one flat state and an instruction.

Dict and Tuple spaces are walked; the parts of {"arm": {"wrist": ..., "joints": ...}} are called arm_wrist and
arm_joints. A Box in the shape of a picture is an image, other numbers join the state in the order of the space
(discrete ones one-hot, as Gymnasium flattens them), and texts are the instruction.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from embodied.core.errors import ConfigError, NotFinite, WrongShape, in_a_line

LEAST_SIDE = 8  # pixels of an image; smaller arrays, such as a grid of 7x7 cells, are numbers
MOST_IMAGES = 16  # in a stack of images
MOST_NUMBERS = 2**20  # of a state
ALONE = "camera"  # the camera of an observation that is one image


@dataclass(frozen=True)
class Part:
    """A part of an observation that has no parts itself."""

    path: tuple[Any, ...]  # its key in every Dict or Tuple around it
    space: spaces.Space
    images: tuple[str, ...] = ()  # the cameras of its images; empty if it is none

    def __str__(self) -> str:
        return "".join(["observation", *(f"[{key!r}]" for key in self.path)])

    def of(self, seen: Any) -> Any:
        for key in self.path:
            seen = seen[key]
        return seen


class ObservationParts:
    """The parts of an env's observation, and where each goes."""

    def __init__(self, env_name: str, space: spaces.Space) -> None:
        self.env_name = env_name
        parts = [Part(path, leaf, cameras_of(name_of(path), leaf)) for path, leaf in walk(space)]
        self.images = [part for part in parts if part.images]
        self.texts = [part for part in parts if isinstance(part.space, spaces.Text)]
        self.numbers = [part for part in parts if part not in self.images and part not in self.texts]
        for part in self.numbers:
            self._refuse_unfit(part)
        self.state_dim = sum(spaces.flatdim(part.space) for part in self.numbers) or None
        self.cameras = {camera: size_of(part.space) for part in self.images for camera in part.images}
        if len(self.cameras) < sum(len(part.images) for part in self.images):
            names = ", ".join(self.cameras)
            raise ConfigError(f"env.name={env_name!r}: two images share one of the names {names}; rename a key")
        if not parts:
            raise ConfigError(f"env.name={env_name!r} observes nothing: {space}")

    def _refuse_unfit(self, part: Part) -> None:
        where = f"env.name={self.env_name!r}: {part} is {part.space!s:.200}"
        leave_out = "leave it out (gymnasium.wrappers.FilterObservation does)"
        if not isinstance(part.space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            raise ConfigError(
                f"{where}; only Box, Discrete, MultiDiscrete, MultiBinary and Text spaces, in Dict or Tuple, can be "
                f"observed: give it a fixed size, a padded Box for example, or {leave_out}"
            )
        if part.space.dtype.kind not in "biuf":
            raise ConfigError(f"{where}; its numbers must be real: make it a Box of float32, or {leave_out}")
        if (size := spaces.flatdim(part.space)) > MOST_NUMBERS:
            raise ConfigError(f"{where}, {size:,} numbers for each env; make it a smaller Box, or {leave_out}")

    def sort(self, seen: Any) -> tuple[np.ndarray, dict[str, np.ndarray], str]:
        """The state [S], the images by camera, uint8 [H, W, 3], and the instruction of one observation. Raises
        WrongShape if it is not in the env's space."""
        state = [numbers_of(part.space, self._check_part(part, seen)) for part in self.numbers]
        images: dict[str, np.ndarray] = {}
        for part in self.images:
            pixels = self._pixels(part, self._check_part(part, seen))
            images |= zip(part.images, stack_of(pixels), strict=True)
        texts = [str(self._check_part(part, seen)) for part in self.texts]
        return np.concatenate(state) if state else np.empty(0), images, "\n".join(texts)

    def _check_part(self, part: Part, seen: Any) -> Any:
        """This part, of the shape and kind that the space has."""
        space = part.space
        try:
            value: Any = part.of(seen)
            array = np.asarray(value)
        except (LookupError, TypeError, ValueError) as err:
            raise WrongShape(f"{self.env_name}: {part} cannot be read ({in_a_line(err)})") from err
        if isinstance(space, spaces.Text):
            fits = isinstance(value, str)
        elif isinstance(space, spaces.Box):  # simulators exceed the bounds a little
            fits, value = array.shape == space.shape and array.dtype.kind in "biuf", array
        else:
            value = array.astype(space.dtype) if array.dtype.kind in "biu" else array
            fits = array.shape == space.shape and space.contains(value)
        if not fits:
            given = (
                f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) and value.ndim else repr(value)
            )
            raise WrongShape(f"{self.env_name}: {part} is {given:.200}, not in {space!s:.200}")
        return value

    def _pixels(self, part: Part, array: np.ndarray) -> np.ndarray:
        """The image or images as uint8, whatever their numbers."""
        whole = part.space.high.flat[0]
        if array.dtype == np.uint8 and whole == 255:
            return array
        if not np.isfinite(array).all():
            raise NotFinite(f"{self.env_name}: {part} is NaN or infinite")
        if array.min() < 0 or array.max() > whole:
            raise WrongShape(
                f"{self.env_name}: {part} has values from {array.min():g} to {array.max():g}, it must be "
                f"from 0 to {whole:g}"
            )
        return np.rint(array * (255 / whole)).astype(np.uint8)


def name_of(path: tuple[Any, ...]) -> str:
    """The name of a part: ("arm", "wrist") is arm_wrist."""
    return re.sub(r"\W", "_", "_".join(map(str, path))) or ALONE


def walk(space: spaces.Space, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], spaces.Space]]:
    """The parts of a space without parts of their own, in its order."""
    if isinstance(space, spaces.Dict):
        inner = list(space.spaces.items())
    elif isinstance(space, spaces.Tuple):
        inner = list(enumerate(space.spaces))
    else:
        return [(path, space)]
    return [part for key, value in inner for part in walk(value, (*path, key))]


def numbers_of(space: spaces.Space, value: Any) -> np.ndarray:
    """The numbers of a part in one row; discrete ones are one-hot."""
    return value.ravel() if isinstance(space, spaces.Box) else spaces.flatten(space, value)


# Images


def cameras_of(name: str, space: spaces.Space) -> tuple[str, ...]:
    """The cameras that this space shows: one, several for a stack of images, none if it is no image."""
    if not isinstance(space, spaces.Box) or not shows_pixels(space):
        return ()
    if is_image(space.shape):
        return (name,)
    stacked = len(space.shape) > 2 and 1 < space.shape[0] <= MOST_IMAGES and is_image(space.shape[1:])
    return tuple(f"{name}_{i}" for i in range(space.shape[0])) if stacked else ()


def shows_pixels(space: spaces.Box) -> bool:
    """True for values from 0 to 255, or fractions from 0 to 1."""
    low, high = float(space.low.flat[0]), float(space.high.flat[0])
    alike = (space.low == low).all() and (space.high == high).all()
    return alike and low == 0 and (high == 255 or (high == 1 and space.dtype.kind == "f"))


def is_image(shape: tuple[int, ...]) -> bool:
    """True for [H, W], [H, W, C] and [C, H, W]: in grey, in three colours, or with opacity behind them."""
    if len(shape) == 3:
        shape = shape[:2] if shape[2] in (1, 3, 4) else shape[1:] if shape[0] in (1, 3) else ()
    return len(shape) == 2 and min(shape) >= LEAST_SIDE


def size_of(space: spaces.Space) -> tuple[int, int, int]:
    """Height, width and 3 of the space's images."""
    height, width, _ = stack_of(np.broadcast_to(np.uint8(0), space.shape))[0].shape
    return height, width, 3


def stack_of(pixels: np.ndarray) -> list[np.ndarray]:
    """The image, or the images of a stack, each [H, W, 3]."""
    if not is_image(pixels.shape):
        return [image for frame in pixels for image in stack_of(frame)]
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    elif pixels.shape[2] not in (1, 3, 4):
        pixels = pixels.transpose(1, 2, 0)
    return [np.repeat(pixels, 3, 2) if pixels.shape[2] == 1 else pixels[..., :3]]
