"""What OpenVLA-OFT adds: a head that regresses numbers, a projector for what the robot feels, FiLM in vision blocks.

Key names are upstream's. What surprises: FiLM sits between a block's attention and its MLP.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embodied.policies.openvla.vision import Block


class ResidualBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class ResidualMLP(nn.Module):
    def __init__(self, inputs: int, dim: int, outputs: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(inputs)
        self.fc1 = nn.Linear(inputs, dim)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(dim) for _ in range(2))
        self.layer_norm2 = nn.LayerNorm(dim)
        self.fc2 = nn.Linear(dim, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(self.layer_norm1(x)).relu()
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class L1Head(nn.Module):
    """From the hidden states of an action's numbers, [N, C, A * D], to the action [N, C, A]."""

    def __init__(self, dim: int, actions: int) -> None:
        super().__init__()
        self.model = ResidualMLP(actions * dim, dim, actions)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.model(hidden)


class ProprioProjector(nn.Module):
    def __init__(self, inputs: int, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, dim)
        self.fc2 = nn.Linear(dim, dim)

    def forward(self, state: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(state)))


class FiLM(nn.Module):
    """A vision block whose features the mean word scales and shifts."""

    def __init__(self, block: Block, words: int, dim: int) -> None:
        super().__init__()
        self.block = block
        self.scale = nn.Linear(words, dim)
        self.shift = nn.Linear(words, dim)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        x = self.block.attend(x)
        x = x * (1 + self.scale(words)[:, None]) + self.shift(words)[:, None]
        return self.block.think(x)


def laplace(center: Tensor, log_scale: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Log-density of numbers around a center, and its entropy. Its maximum is the L1 regression."""
    log_width = log_scale + torch.log(torch.tensor(2.0, dtype=center.dtype))
    return -(numbers - center).abs() * (-log_scale).exp() - log_width, (1 + log_width).expand_as(center)


def laplace_noise(uniform: Tensor) -> Tensor:
    """Standard Laplace numbers of uniform ones, by the inverse of the distribution function."""
    side = (uniform.double() - 0.5).clamp(-0.5 + 1e-12, 0.5 - 1e-12)
    return -side.sign() * torch.log1p(-2 * side.abs())
