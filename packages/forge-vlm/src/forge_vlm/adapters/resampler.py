"""An image of any size as a fixed number of tokens.

Shapes: N images, T tokens of an image, W width of a feature, D width of the stream, K latents, H heads, C width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_vlm.adapters.config import AdapterConfig
from forge_vlm.adapters.heads import width_of_heads
from forge_vlm.vision.features import Features
from forge_vlm.work import ImageWork, Part, attended, image_work

__all__ = ["Resampler"]


class Resampler(nn.Module):
    """K learnt latents that ask the features, and one another, in each layer (Flamingo, section 3.1.1).

    Features are those of images of one size: of several images one behind the other it would make K tokens.
    """

    def __init__(self, config: AdapterConfig, width: int, dim: int) -> None:
        super().__init__()
        c = config.resampler
        head_dim = width_of_heads("resampler", c.num_heads, dim)
        self.proj = nn.Linear(width, dim)
        self.latents = nn.Embedding(c.num_latents, dim)
        self.layers = nn.ModuleList(
            _Layer(dim, c.hidden_dim or 4 * dim, head_dim) for _ in range(c.num_layers)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, features: Features) -> Tensor:
        """(N, T, W) -> (N, K, D)."""
        x = self.proj(features.tokens)  # (N, T, D)
        latents = self.latents.weight.expand(len(x), -1, -1)  # (N, K, D)
        for layer in self.layers:
            latents = layer(latents, x)
        out: Tensor = self.norm(latents)
        return out

    def tokens(self, rows: int, columns: int) -> int:
        """How many tokens an image of rows * columns patches becomes."""
        return self.latents.num_embeddings

    def image_work(self, seen: ImageWork) -> ImageWork:
        """Features once, and in each layer the latents, and keys and values of both."""
        latents = self.latents.num_embeddings
        both = latents + seen.tokens
        parts: list[Part] = [(self.proj, seen.tokens)]
        for layer in self.layers:
            parts += [
                (m, both if name in ("k_proj", "v_proj") else latents)
                for name, m in layer.named_children()
            ]
        scores = len(self.layers) * attended(latents, both, self.proj.out_features)
        return image_work(latents, 0, 0, parts, scores)


class _Layer(nn.Module):
    """Attention of the latents over features and latents, then a feed-forward, each behind a norm and added."""

    def __init__(self, dim: int, hidden_dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.features_norm, self.latents_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, latents: Tensor, x: Tensor) -> Tensor:
        """(N, K, D), (N, T, D) -> (N, K, D)."""
        own = self.latents_norm(latents)
        asked = torch.cat([self.features_norm(x), own], dim=1)  # (N, T + K, D)
        q, k, v = (
            proj(of).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (N, H, K or T + K, C)
            for proj, of in ((self.q_proj, own), (self.k_proj, asked), (self.v_proj, asked))
        )
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)  # (N, K, D)
        latents = latents + self.o_proj(seen)
        fed: Tensor = self.down(F.gelu(self.up(self.feed_forward_norm(latents))))
        return latents + fed
