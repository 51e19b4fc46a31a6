"""The vision tower of PaliGemma, SigLIP with transformers' key names: all blocks and the last norm are used, and the
activation is the approximate GELU, unlike in OpenVLA's tower."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from embodied.policies.pi0.settings import VisionSettings
from embodied.policies.vla.layers import patch_tokens

EPS = 1e-6


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


class VisionMLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    def __init__(self, settings: VisionSettings) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(settings.dim, eps=EPS)
        self.self_attn = VisionAttention(settings.dim, settings.heads)
        self.layer_norm2 = nn.LayerNorm(settings.dim, eps=EPS)
        self.mlp = VisionMLP(settings.dim, settings.mlp)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class VisionEmbeddings(nn.Module):
    def __init__(self, settings: VisionSettings) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, settings.dim, settings.patch, stride=settings.patch)
        self.position_embedding = nn.Embedding((settings.image_size // settings.patch) ** 2, settings.dim)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = patch_tokens(pixels.to(self.patch_embedding.weight.dtype), self.patch_embedding)
        return patches + self.position_embedding.weight


class VisionEncoder(nn.Module):
    def __init__(self, settings: VisionSettings) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VisionBlock(settings) for _ in range(settings.depth))


class VisionModel(nn.Module):
    def __init__(self, settings: VisionSettings) -> None:
        super().__init__()
        self.embeddings = VisionEmbeddings(settings)
        self.encoder = VisionEncoder(settings)
        self.post_layernorm = nn.LayerNorm(settings.dim, eps=EPS)

    def forward(self, pixels: Tensor) -> Tensor:
        """[N, 3, S, S] -> [N, patches, dim]."""
        x = self.embeddings(pixels).to(self.post_layernorm.weight.dtype)
        for block in self.encoder.layers:
            x = block(x)
        return self.post_layernorm(x)


class VisionTower(nn.Module):
    def __init__(self, settings: VisionSettings) -> None:
        super().__init__()
        self.vision_model = VisionModel(settings)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.vision_model(pixels)


class MultiModalProjector(nn.Module):
    """Maps patches to the language model's width."""

    def __init__(self, vision_dim: int, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(vision_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)
