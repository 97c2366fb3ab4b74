"""A plain vision transformer, without other libraries.

Shapes: N images, T patches of an image, W width, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core import Init
from forge_vlm.vision.config import VisionConfig, ViTConfig
from forge_vlm.vision.features import Features
from forge_vlm.vision.pixels import check_size, normalised, values_of
from forge_vlm.vision.select import select
from forge_vlm.work import ImageWork, attended, image_work

__all__ = ["ViT"]

#: q, k and v (N, T, H, D) -> (N, T, H, D).
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class ViT(nn.Module):
    """Patches with learnt positions, blocks of full attention, a norm (Dosovitskiy et al. 2021, without class token).

        ViT(VisionConfig())(images=torch.zeros(2, 3, 32, 32)).tokens         # (N, T, W)

    Images are (N, 3, H, W): uint8, or floats that are normalised already.
    """

    extra_inputs: tuple[str, ...] = ("images",)

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config, c = config, config.vit
        self.width = c.dim * max(1, len(config.select_layer))
        self.patches = nn.Linear(3 * c.patch_size**2, c.dim)
        self.positions = nn.Embedding(c.side**2, c.dim)
        self.layers = nn.ModuleList(_Block(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.dim)

    def forward(self, images: Any) -> Features:
        """Features of images (N, 3, H, W), or of the entries of a ragged extra."""
        c = self.config.vit
        given = values_of(images)
        check_size(given, c.image_size)
        pixels = normalised(given, *self.config.pixels, self.patches.weight.dtype)
        x = self.patches(_cut(pixels, c.patch_size))  # (N, T, W)
        # by a call, as other code than its own module may not read a weight that is sharded
        x = x + self.positions(torch.arange(c.side**2, device=x.device))
        return Features(self.encoded(x, _of_images), c.side, c.side)

    def encoded(self, x: Tensor, attend: Attend) -> Tensor:
        """Patches (N, T, W) through the blocks, whose attention is `attend`."""
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1], attend))
        return select(states, self.norm(states[-1]), self.config, front=0)

    def blocks(self) -> list[nn.Module]:
        """In order of depth."""
        return list(self.layers)

    def dummy(self, device: Any) -> dict[str, Tensor]:
        """Media of one image, for a batch without any."""
        return self.media_of(1, None, device)

    def media_of(self, images: int, pixels: int | None, device: Any) -> dict[str, Tensor]:
        """Media of so many black images."""
        size = self.config.vit.image_size
        return {"images": torch.zeros(images, 3, size, size, device=device)}

    def image_work(self, pixels: int | None = None) -> ImageWork:
        """One image."""
        side, blocks = self.config.vit.side, len(self.layers)
        tokens = side * side
        parts = [(self.patches, tokens), (self.layers, tokens)]
        scores = blocks * attended(tokens, tokens, self.config.vit.dim)
        return image_work(tokens, side, side, parts, scores)

    def init_table(self, std: float, residual_std: float) -> dict[str, Init]:
        """Positions begin as the other weights do; Linear and LayerNorm have their defaults."""
        return {"positions.weight": Init("normal", std)}


class _Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): (N, T, W) -> (N, T, W)."""

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        hidden = c.hidden_dim or 4 * c.dim
        self.num_heads = c.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(c.dim), nn.LayerNorm(c.dim)
        self.qkv, self.out = nn.Linear(c.dim, 3 * c.dim), nn.Linear(c.dim, c.dim)
        self.up, self.down = nn.Linear(c.dim, hidden), nn.Linear(hidden, c.dim)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1))  # (N, T, 3, H, D)
        x = x + self.out(attend(*qkv.unbind(2)).flatten(2))
        fed: Tensor = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + fed


def _of_images(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each patch sees all of its image."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (N, H, T, D)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _cut(images: Tensor, size: int) -> Tensor:
    """Patches of images, row by row: (N, 3, H, W) -> (N, T, 3 * size * size)."""
    rows = images.unflatten(2, (-1, size)).unflatten(4, (-1, size))  # (N, 3, h, size, w, size)
    return rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
