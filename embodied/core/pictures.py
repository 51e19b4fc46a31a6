"""Pictures in conversations. An episode names a picture; policy workers, learners and reports load it by its name. So
conversations are sent without pixels.

A name is the path of a file, `data:image/png;base64,...` for a small picture within its name, or a drawing of this
module with its random seed: `drawn:count?seed=7&pixels=48`.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embodied.core.errors import EmbodiedError
from embodied.core.rng import generator

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # others may start programs
MOST_PIXELS = 2**25  # largest size of a decoded picture
DRAWN = re.compile(r"drawn:(\w+)\?seed=(\d+)&pixels=(\d+)")
DATA = re.compile(r"data:image/[\w.+-]+;base64,")
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (240, 220, 60)}
MOST_DOTS = 6


class PictureError(EmbodiedError):
    """A picture cannot be loaded."""


def load_picture(name: str | bytes) -> np.ndarray:
    """The picture of this name, or of a file with these bytes, uint8 [H, W, 3]."""
    if isinstance(name, str) and (drawing := DRAWN.fullmatch(name)):
        kind, seed, pixels = drawing[1], int(drawing[2]), int(drawing[3])
        return np.asarray(draw(kind, seed, pixels)[0])
    with opened_picture(name) as image:
        return np.asarray(image.convert("RGB"))


def picture_size(name: str) -> tuple[int, int]:
    """Height and width of the picture of this name. Its pixels are not decoded."""
    if drawing := DRAWN.fullmatch(name):
        return int(drawing[3]), int(drawing[3])
    with opened_picture(name) as image:
        return image.height, image.width


@contextmanager
def opened_picture(name: str | bytes) -> Iterator[Image]:
    """The file of this picture, whose pixels are decoded on use."""
    from PIL import Image

    source: io.BytesIO | str
    if isinstance(name, bytes):
        source, name = io.BytesIO(name), "of this message"
    elif header := DATA.match(name):
        try:
            source = io.BytesIO(base64.b64decode(name[header.end() :], validate=True))
        except (binascii.Error, ValueError):
            raise PictureError(f"the picture {short_name(name)} is not base64") from None
    elif not Path(source := name).is_file():
        raise PictureError(f"there is no picture {short_name(name)}")
    try:
        with Image.open(source, formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                size = f"{image.width} x {image.height} pixels"
                raise PictureError(f"the picture {short_name(name)} has {size}; at most {MOST_PIXELS:,} are read")
            if any(part[0] == "bmp_rle" for part in image.tile):  # decoded byte by byte in Python
                raise PictureError(f"the picture {short_name(name)} is a compressed BMP; send a PNG")
            yield image
    except Image.UnidentifiedImageError:
        raise PictureError(f"the picture {short_name(name)} is no {', '.join(FORMATS)}, or damaged") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as err:
        raise PictureError(f"the picture {short_name(name)} cannot be read: {err or type(err).__name__}") from None


def short_name(name: str) -> str:
    """The name, or the beginning of a long one, for a message."""
    return name if len(name) <= 100 else f"{name[:40]}..."


def data_url(picture: np.ndarray) -> str:
    """A name that contains the picture."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@lru_cache(64)
def as_data_url(name: str) -> str:
    """A name that contains the picture of this name."""
    if DATA.match(name):
        return name
    if DRAWN.fullmatch(name):
        return data_url(load_picture(name))
    with opened_picture(name):  # or says what is wrong
        return f"data:image/png;base64,{base64.b64encode(Path(name).read_bytes()).decode()}"


# Drawings


def drawing(kind: str, seed: int, pixels: int) -> str:
    """The name of a drawing."""
    return f"drawn:{kind}?seed={seed}&pixels={pixels}"


def draw(kind: str, seed: int, pixels: int = 48) -> tuple[Image, str]:
    """A square drawing with this many pixels a side, and the answer to its kind's question."""
    from PIL import Image, ImageDraw

    if kind not in DRAWINGS:
        raise PictureError(f"there is no drawing {kind!r}; there are {', '.join(DRAWINGS)}")
    if not 16 <= pixels <= 4096:
        raise PictureError(f"a drawing has 16 to 4096 pixels a side, not {pixels}")
    rng = generator(seed, "drawing", kind)
    paper = Image.new("RGB", (pixels, pixels), (int(rng.integers(225, 256)),) * 3)
    return paper, DRAWINGS[kind](ImageDraw.Draw(paper), rng, pixels)


def draw_dots(pen: ImageDraw, rng: np.random.Generator, pixels: int) -> str:
    """Dots of one colour, in some of nine cells; the answer is their number."""
    count, cell = int(rng.integers(1, MOST_DOTS + 1)), pixels / 3
    colour = list(COLOURS.values())[rng.integers(len(COLOURS))]
    for place in rng.permutation(9)[:count]:
        radius = cell * rng.uniform(0.25, 0.35)
        centre = cell * (np.array(divmod(int(place), 3)) + rng.uniform(0.4, 0.6, 2))
        pen.ellipse([*(centre - radius), *(centre + radius)], fill=colour)
    return str(count)


def draw_shapes(pen: ImageDraw, rng: np.random.Generator, pixels: int) -> str:
    """A disc beside a square of another colour; the answer is the colour of the disc."""
    names = [list(COLOURS)[at] for at in rng.permutation(len(COLOURS))[:2]]
    cell, places = pixels / 2, rng.permutation(4)[:2]
    for name, place, outline in zip(names, places, (pen.ellipse, pen.rectangle), strict=True):
        radius = cell * rng.uniform(0.3, 0.4)
        centre = cell * (np.array(divmod(int(place), 2)) + rng.uniform(0.45, 0.55, 2))
        outline([*(centre - radius), *(centre + radius)], fill=COLOURS[name])
    return names[0]


def draw_digits(pen: ImageDraw, rng: np.random.Generator, pixels: int) -> str:
    """Two digits from 1 to 5, side by side; the answer is their sum."""
    from PIL import ImageFont

    font = ImageFont.load_default(pixels * 0.6)
    numbers = rng.integers(1, 6, 2)
    for place, number in enumerate(numbers):
        centre = pixels * (np.array([0.27 + 0.46 * place, 0.5]) + rng.uniform(-0.03, 0.03, 2))
        pen.text(tuple(centre), str(number), fill=(0, 0, 0), font=font, anchor="mm")
    return str(numbers.sum())


DRAWINGS: dict[str, Callable[[ImageDraw, np.random.Generator, int], str]] = {
    "count": draw_dots,
    "colour": draw_shapes,
    "add": draw_digits,
}
