"""Pictures in conversations. An episode names a picture; policy workers, learners and reports load it by its name. So
conversations are sent without pixels.

A name is the path of a file, `data:image/png;base64,...` for a small picture within its name, a drawing of this
module with its random seed, `drawn:count?seed=7&pixels=48`, or frames of a video: `video:/data/a.mp4?frames=16&every=2`
has a frame for every two seconds, 16 at most, spread evenly.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
VIDEO = re.compile(r"video:(.+?)(?:\?frames=(\d+)(?:&every=([\d.e-]+))?)?", re.DOTALL)
FRAMES = 8  # of a video whose name says nothing else
MOST_VIDEO_PIXELS = 2**28  # of all frames of a video that are read
VIDEO_S = 300  # seconds in which all frames of a video can be decoded
SIZE_AND_COUNT = re.compile(  # at the end of what ffmpeg says
    rb"Output #0.*Video:.*? (?P<width>\d+)x(?P<height>\d+)[ ,].*frame=\s*(?P<frames>\d+) .*time=(?P<time>[\d:.]+)",
    re.DOTALL,
)
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (240, 220, 60)}
MOST_DOTS = 6


class PictureError(EmbodiedError):
    """A picture cannot be loaded."""


def load_picture(name: str | bytes) -> np.ndarray:
    """The picture of this name, or of a file with these bytes, uint8 [H, W, 3]; a video's frames side by side."""
    if isinstance(name, str) and is_video(name):
        return np.concatenate(load_video(name).frames, axis=1)
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
            if any(tile[0] == "bmp_rle" for tile in image.tile):  # decoded byte by byte in Python
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
    if is_video(name):
        raise PictureError(f"{short_name(name)}: servers read no videos; policy.engine=transformers does")
    if DATA.match(name):
        return name
    if DRAWN.fullmatch(name):
        return data_url(load_picture(name))
    with opened_picture(name):  # or says what is wrong
        return f"data:image/png;base64,{base64.b64encode(Path(name).read_bytes()).decode()}"


# Videos


@dataclass(frozen=True)
class Video:
    """Frames of a video, at these seconds of its `total_s`."""

    frames: np.ndarray  # uint8 [T, H, W, 3]
    seconds: tuple[float, ...]  # [T]
    total_s: float


def video(path: str | Path, frames: int = FRAMES, every_s: float | None = None) -> str:
    """The name of frames of a video, spread evenly: one for every `every_s` seconds, but at most so many."""
    return f"video:{Path(path).absolute()}?frames={frames}" + (f"&every={every_s:g}" if every_s else "")


def is_video(name: str) -> bool:
    return name.startswith("video:")


def load_video(name: str) -> Video:
    """The frames that this name says. Of 10 frames in two seconds, four are frames 0, 2, 5 and 7."""
    path, most, every = VIDEO.fullmatch(name).groups()  # type: ignore[union-attr]
    if not Path(path).is_file():
        raise PictureError(f"there is no video {path}")
    counted = SIZE_AND_COUNT.search(ffmpeg(path, "-f", "null").stderr)
    if counted is None or not (total := int(counted["frames"])):
        raise PictureError(f"the video {path} has no frames that ffmpeg reads; leave it out, or convert it")
    width, height = int(counted["width"]), int(counted["height"])
    total_s = sum(60**place * float(digits) for place, digits in enumerate(counted["time"].split(b":")[::-1]))
    wanted = max(1, round(total_s / float(every))) if every else total
    count = min(wanted, int(most or FRAMES), total)
    if width * height * count > MOST_VIDEO_PIXELS:
        size = f"{count} frames of {width} x {height} pixels"
        raise PictureError(f"the video {path}: {size} are too many; ask for fewer frames, or shrink the file")
    chosen = [at * total // count for at in range(count)]
    select = ["-vf", f"select='{'+'.join(f'eq(n,{at})' for at in chosen)}'", "-fps_mode", "passthrough"]
    pixels = ffmpeg(path, *select, "-pix_fmt", "rgb24", "-f", "rawvideo").stdout
    if len(pixels) != count * height * width * 3:
        raise PictureError(f"the video {path} is damaged: not all of its {total} frames can be read")
    frames = np.frombuffer(pixels, np.uint8).reshape(count, height, width, 3)
    return Video(frames, tuple(at * total_s / total for at in chosen), total_s)


def ffmpeg(path: str, *options: str) -> subprocess.CompletedProcess[bytes]:
    """Runs ffmpeg on the first video in a file."""
    from imageio_ffmpeg import get_ffmpeg_exe

    command = [get_ffmpeg_exe(), "-nostdin", "-hide_banner", "-i", path, "-map", "0:v:0", *options, "-"]
    try:
        return subprocess.run(command, capture_output=True, timeout=VIDEO_S)
    except subprocess.TimeoutExpired:
        raise PictureError(f"the video {path} is not read within {VIDEO_S} s; shorten it") from None


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
