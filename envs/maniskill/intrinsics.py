"""What a simulated camera needs to draw only a region of its image."""

from __future__ import annotations

import math

import numpy as np

from embodied.envs.common_config import Region


def intrinsics(
    height: int, width: int, region: Region, whole: tuple[float, float], focal: float, middle: tuple[float, float]
) -> np.ndarray:
    """[3, 3] for `height` x `width` pixels of this region. Size of the whole image (width, height), focal length and
    middle are in one unit."""
    left, top, right, bottom = region
    across, down = width / (whole[0] * (right - left)), height / (whole[1] * (bottom - top))
    at = (middle[0] - left * whole[0]) * across, (middle[1] - top * whole[1]) * down
    return np.array([[focal * across, 0, at[0]], [0, focal * down, at[1]], [0, 0, 1]])


def of_square(height: int, width: int, region: Region, fov: float) -> np.ndarray:
    """The same of a square image of so many degrees."""
    return intrinsics(height, width, region, (1, 1), 0.5 / math.tan(math.radians(fov) / 2), (0.5, 0.5))
