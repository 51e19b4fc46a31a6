"""What is added to the frames of a video: cameras side by side, and a caption below."""

from __future__ import annotations

from functools import cache

import numpy as np

TEXT, PAPER, MARGIN = (235, 235, 235), (24, 24, 28), 3
WIDEST = 640  # a picture wider than this gets no larger letters


def beside(frame: np.ndarray, others: list[np.ndarray]) -> np.ndarray:
    """Pictures in a row, all as high as the first."""
    return np.concatenate([frame, *[of_height(other, len(frame)) for other in others]], axis=1)


def of_height(picture: np.ndarray, height: int) -> np.ndarray:
    """Enlarged or reduced, pixel for pixel."""
    width = max(1, round(picture.shape[1] * height / picture.shape[0]))
    rows = np.arange(height) * picture.shape[0] // height
    columns = np.arange(width) * picture.shape[1] // width
    return picture[rows][:, columns]


def captioned(frame: np.ndarray, lines: list[str]) -> np.ndarray:
    """The frame with lines of text below it, so that they hide nothing; a line that is too long is cut."""
    from PIL import Image, ImageDraw

    width = frame.shape[1]
    size = max(9, min(width, WIDEST) // 22)
    page = Image.new("RGB", (width, len(lines) * (size + MARGIN) + 2 * MARGIN), PAPER)
    pen = ImageDraw.Draw(page)
    for number, line in enumerate(lines):
        pen.text((MARGIN, MARGIN + number * (size + MARGIN)), fitting(line, width - 2 * MARGIN, size), TEXT, font(size))
    return np.concatenate([frame, np.asarray(page)])


@cache
def font(size: int):
    from PIL import ImageFont

    return ImageFont.load_default(size)


def fitting(line: str, width: int, size: int) -> str:
    if font(size).getlength(line) <= width:
        return line
    while line and font(size).getlength(line + "...") > width:
        line = line[:-1]
    return line + "..."
