"""The images of a vector env, drawn only when they are needed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from embodied.core.errors import WrongShape

Images = dict[str, np.ndarray]  # camera -> uint8 [rows, H, W, 3]


class ImageCache:
    """The last images of each row's cameras. Drawing is expensive, so a row is drawn again only if it has moved since
    and its images are needed: at the decision border, and where an episode ends inside a chunk."""

    def __init__(
        self, num_envs: int, sizes: dict[str, tuple[int, int, int]], paint: Callable[[np.ndarray], Images]
    ) -> None:
        """`paint(rows)` gives the images of these rows, in their order."""
        self.paint = paint
        self.last = {camera: np.zeros((num_envs, *size), np.uint8) for camera, size in sizes.items()}
        self.stale = np.zeros(num_envs, bool)

    def images(self, rows: np.ndarray | None = None) -> Images:
        """The images of all rows. The images of the given rows (default: all rows that ever began an episode) are up to
        date."""
        stale = self.stale if rows is None else self.stale & np.isin(np.arange(len(self.stale)), rows)
        rows = np.flatnonzero(stale)
        if len(rows):
            for camera, frames in self._painted(rows).items():
                self.last[camera][rows] = frames
            self.stale[rows] = False
        return {camera: frames.copy() for camera, frames in self.last.items()}

    def _painted(self, rows: np.ndarray) -> Images:
        images = self.paint(rows)
        for camera, whole in self.last.items():
            wanted, frames = (len(rows), *whole.shape[1:]), images.get(camera)
            if frames is None or frames.dtype != np.uint8 or frames.shape != wanted:
                what = "missing" if frames is None else f"{frames.dtype} {list(frames.shape)}"
                raise WrongShape(f"image {camera!r} is {what}, it must be uint8 {list(wanted)}")
        return images
