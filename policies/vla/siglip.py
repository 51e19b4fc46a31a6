"""SigLIP with transformers' key names, the vision tower of Pi0 and SmolVLA: all blocks and the last norm are used, and
the activation is the approximate GELU, unlike in OpenVLA's tower.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from embodied.policies.vla.layers import MLP, NamedParts, patch_tokens

EPS = 1e-6


@dataclass(frozen=True)
class VisionSettings:
    dim: int
    depth: int
    mlp: int
    heads: int
    patch: int
    image_size: int

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch) ** 2


class VisionAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.q_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class SiglipBlock(nn.Module):
    def __init__(self, settings: VisionSettings) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(settings.dim, eps=EPS)
        self.self_attn = VisionAttention(settings.dim, settings.heads)
        self.layer_norm2 = nn.LayerNorm(settings.dim, eps=EPS)
        self.mlp = MLP(settings.dim, settings.mlp, "tanh")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class VisionEmbeddings(nn.Module):
    def __init__(self, settings: VisionSettings) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, settings.dim, settings.patch, stride=settings.patch)
        self.position_embedding = nn.Embedding(settings.patches, settings.dim)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = patch_tokens(pixels.to(self.patch_embedding.weight.dtype), self.patch_embedding)
        return patches + self.position_embedding.weight


class VisionModel(nn.Module):
    def __init__(self, settings: VisionSettings) -> None:
        super().__init__()
        self.embeddings = VisionEmbeddings(settings)
        self.encoder = NamedParts(layers=nn.ModuleList(SiglipBlock(settings) for _ in range(settings.depth)))
        self.post_layernorm = nn.LayerNorm(settings.dim, eps=EPS)

    def forward(self, pixels: Tensor) -> Tensor:
        """[N, 3, S, S] -> [N, patches, dim]."""
        x = self.embeddings(pixels).to(self.post_layernorm.weight.dtype)
        for block in self.encoder.layers:
            x = block(x)
        return self.post_layernorm(x)
