"""Camera frames as the vision tower wants them: shrunk or grown without distortion, black bars, in one batch."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.policies.vla.images import resize


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
