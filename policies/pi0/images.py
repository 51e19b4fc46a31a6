"""Camera frames as the vision tower wants them: shrunk or grown without distortion, black bars, in one batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

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
