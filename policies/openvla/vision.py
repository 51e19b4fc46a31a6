"""The vision towers: DINOv2 and SigLIP transformers with timm's key names, their patch features side by side.

Features come from the second to last block, without the final norm. The last block, the norm and SigLIP's pooling exist
only because published checkpoints contain them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.policies.openvla.settings import TowerSettings
from embodied.policies.vla.layers import MLP, patch_tokens


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, dim = x.shape
        q, k, v = self.qkv(x).view(rows, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, dim))


class LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class VisionBlock(nn.Module):
    def __init__(self, tower: TowerSettings) -> None:
        super().__init__()
        scale = LayerScale if tower.kind == "dinov2" else lambda dim: nn.Identity()
        self.norm1 = nn.LayerNorm(tower.dim, eps=1e-6)
        self.attn = Attention(tower.dim, tower.heads)
        self.ls1 = scale(tower.dim)
        self.norm2 = nn.LayerNorm(tower.dim, eps=1e-6)
        self.mlp = MLP(tower.dim, tower.mlp)
        self.ls2 = scale(tower.dim)

    def attend(self, x: Tensor) -> Tensor:
        return x + self.ls1(self.attn(self.norm1(x)))

    def think(self, x: Tensor) -> Tensor:
        return x + self.ls2(self.mlp(self.norm2(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.think(self.attend(x))


class PatchEmbed(nn.Module):
    def __init__(self, dim: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch, stride=patch)

    def forward(self, pixels: Tensor) -> Tensor:
        return patch_tokens(pixels, self.proj)


class UnusedPool(nn.Module):
    """The weights of SigLIP's attention pooling, for saving a checkpoint unchanged."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.empty(1, 1, dim))
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, hidden)


class Tower(nn.Module):
    def __init__(self, tower: TowerSettings, image_size: int) -> None:
        super().__init__()
        self.skip = tower.prefix
        self.patch_embed = PatchEmbed(tower.dim, tower.patch)
        self.pos_embed = nn.Parameter(torch.empty(1, (image_size // tower.patch) ** 2, tower.dim))
        if tower.kind == "dinov2":
            self.cls_token = nn.Parameter(torch.empty(1, 1, tower.dim))
            self.reg_token = nn.Parameter(torch.empty(1, tower.registers, tower.dim))
        self.blocks = nn.ModuleList(VisionBlock(tower) for _ in range(tower.depth))
        self.norm = nn.LayerNorm(tower.dim, eps=1e-6)
        unused = [self.blocks[-1], self.norm]
        if tower.kind == "siglip":
            self.attn_pool = UnusedPool(tower.dim, tower.mlp)
            unused.append(self.attn_pool)
        for module in unused:
            module.requires_grad_(False)

    def forward(self, pixels: Tensor, *words: Tensor) -> Tensor:
        """[N, 3, H, W] -> [N, patches, dim]; blocks with FiLM want the mean word too."""
        x = self.patch_embed(pixels) + self.pos_embed
        if self.skip:
            prefix = torch.cat([self.cls_token, self.reg_token], dim=1).expand(len(x), -1, -1)
            x = torch.cat([prefix.to(x.dtype), x], dim=1)
        for block in self.blocks[:-1]:
            x = block(x, *words)
        return x[:, self.skip :]


class VisionBackbone(nn.Module):
    """The first tower is `featurizer`, an optional second tower `fused_featurizer`."""

    def __init__(self, towers: tuple[TowerSettings, ...], image_size: int) -> None:
        super().__init__()
        self.featurizer = Tower(towers[0], image_size)
        if len(towers) > 1:
            self.fused_featurizer = Tower(towers[1], image_size)

    def towers(self) -> list[Tower]:
        return list(self.children())

    def forward(self, pixels: Tensor, *words: Tensor) -> Tensor:
        """[N, 3 * towers, H, W] -> [N, patches, sum of the towers' dims]."""
        parts = pixels.split(3, dim=1)
        return torch.cat([tower(part, *words) for tower, part in zip(self.towers(), parts, strict=True)], dim=-1)


class Projector(nn.Module):
    """Maps vision features to the language model's embeddings."""

    def __init__(self, vision_dim: int, dim: int, fused: bool) -> None:
        super().__init__()
        first = 4 * vision_dim if fused else dim
        self.fc1 = nn.Linear(vision_dim, first)
        self.fc2 = nn.Linear(first, dim)
        if fused:
            self.fc3 = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        for layer in list(self.children())[1:]:
            x = layer(F.gelu(x))
        return x
