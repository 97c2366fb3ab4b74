"""Adapters that give fewer tokens: windows of neighbors as one token, and a resampler to a fixed number.

Shapes: N images, T tokens of an image, W width of a feature, D width of the stream, P = factor^2 tokens of a window,
K latents, H heads, C width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_vlm._shared.problems import invalid
from forge_vlm.adapters.config import AdapterConfig
from forge_vlm.flops import ImageWork, Part, attended, image_work
from forge_vlm.vision.features import Features

__all__ = [
    "AttentionalPool",
    "AveragePool",
    "PixelShuffle",
    "PixelShuffleMLP",
    "Resampler",
    "width_of_heads",
    "windows",
]


def width_of_heads(adapter: str, num_heads: int, width: int) -> int:
    """width / num_heads; ValueError where it is no integer."""
    if width % num_heads:
        rule = f"must divide the width {width} that the heads share"
        raise invalid(f"adapter.{adapter}.num_heads", "divides", num_heads, rule, "use a divisor")
    return width // num_heads


class _Windows(nn.Module):
    """What adapters of windows share: their name in the config, and the side of a window."""

    name: str

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.factor: int = getattr(config, self.name).factor

    def tokens(self, rows: int, columns: int) -> int:
        """How many tokens an image of rows * columns patches becomes; ValueError where windows do not fit."""
        f = self.factor
        if not rows or rows % f or columns % f:
            rule = f"must divide the {rows} rows and {columns} columns of an image's tokens, without a class token"
            fix = "change it, or use vision.select_feature 'patch'"
            raise invalid(f"adapter.{self.name}.factor", "divides", f, rule, fix)
        return (rows // f) * (columns // f)

    def image_work(self, seen: ImageWork) -> ImageWork:
        """Linear layers on each window of an image that the encoder has `seen`."""
        tokens = self.tokens(seen.rows, seen.columns)
        rows, columns = seen.rows // self.factor, seen.columns // self.factor
        return image_work(tokens, rows, columns, [(self, tokens)])

    def cut(self, features: Features) -> Tensor:
        """(N, T, W) -> (N, T / P, P, W)."""
        self.tokens(features.rows, features.columns)
        return windows(features.tokens, features.rows, features.columns, self.factor)


class PixelShuffle(_Windows):
    """The tokens of a window side by side, then a linear layer."""

    name = "pixel_shuffle"

    def __init__(self, config: AdapterConfig, width: int, dim: int) -> None:
        super().__init__(config)
        self.proj = nn.Linear(width * self.factor**2, dim, bias=config.pixel_shuffle.bias)

    def forward(self, features: Features) -> Tensor:
        """(N, T, W) -> (N, T / P, D)."""
        out: Tensor = self.proj(self.cut(features).flatten(2))
        return out


class PixelShuffleMLP(_Windows):
    """The tokens of a window side by side, then a norm and two linear layers around a GELU."""

    name = "pixel_shuffle_mlp"

    def __init__(self, config: AdapterConfig, width: int, dim: int) -> None:
        super().__init__(config)
        self.norm = nn.LayerNorm(width * self.factor**2)
        self.linear_1 = nn.Linear(width * self.factor**2, dim)
        self.linear_2 = nn.Linear(dim, dim)

    def forward(self, features: Features) -> Tensor:
        """(N, T, W) -> (N, T / P, D)."""
        x = self.norm(self.cut(features).flatten(2))  # (N, T / P, P * W)
        out: Tensor = self.linear_2(F.gelu(self.linear_1(x)))
        return out


class AveragePool(_Windows):
    """The mean of a window, then a linear layer."""

    name = "average_pool"

    def __init__(self, config: AdapterConfig, width: int, dim: int) -> None:
        super().__init__(config)
        self.proj = nn.Linear(width, dim, bias=config.average_pool.bias)

    def forward(self, features: Features) -> Tensor:
        """(N, T, W) -> (N, T / P, D)."""
        out: Tensor = self.proj(self.cut(features).mean(2))
        return out


class AttentionalPool(_Windows):
    """Attention of the mean of a window, the query, over the tokens of that window (arXiv 2409.17146, section 2)."""

    name = "attentional_pool"

    def __init__(self, config: AdapterConfig, width: int, dim: int) -> None:
        super().__init__(config)
        self.head_dim = width_of_heads(self.name, config.attentional_pool.num_heads, width)
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, dim)

    def forward(self, features: Features) -> Tensor:
        """(N, T, W) -> (N, T / P, D)."""
        x = self.cut(features)  # (N, T / P, P, W)
        q, k, v = (
            proj(of).unflatten(-1, (-1, self.head_dim)).transpose(2, 3)  # (N, T / P, H, 1 or P, C)
            for proj, of in (
                (self.q_proj, x.mean(2, keepdim=True)),
                (self.k_proj, x),
                (self.v_proj, x),
            )
        )
        seen = F.scaled_dot_product_attention(q, k, v)  # (N, T / P, H, 1, C)
        out: Tensor = self.o_proj(seen.flatten(2))
        return out

    def image_work(self, seen: ImageWork) -> ImageWork:
        """Queries and outputs of each window, keys and values of each token."""
        own, rows, columns = super().image_work(seen).tokens, seen.rows, seen.columns
        parts: list[Part] = [(proj, own) for proj in (self.q_proj, self.o_proj)]
        parts += [(proj, seen.tokens) for proj in (self.k_proj, self.v_proj)]
        scores = attended(1, seen.tokens, self.q_proj.out_features)
        return image_work(own, rows // self.factor, columns // self.factor, parts, scores)


def windows(tokens: Tensor, rows: int, columns: int, factor: int) -> Tensor:
    """Neighbors of a grid, row by row outside and inside: (N, rows * columns, W) -> (N, T / P, P, W)."""
    f = factor
    x = tokens.unflatten(1, (rows // f, f, columns // f, f))  # (N, h, f, w, f, W)
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


class Resampler(nn.Module):
    """K trained latents that ask the features, and one another, in each layer (Flamingo, section 3.1.1).

    Features are those of images of one size: of several images one after the other it would make K tokens.
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
    """Attention of the latents over features and latents, then a feed-forward, each after a norm and added."""

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
