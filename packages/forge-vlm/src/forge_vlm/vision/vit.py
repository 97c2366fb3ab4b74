"""A plain vision transformer without other libraries: on images of one size, or packed images of any sizes.

Shapes: N images, T patches of an image, P patches of all frames, E numbers of a patch, M tokens of all frames, W width,
H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core import Init
from forge_core.model import SegmentPlan, attend_segments
from forge_vlm.flops import ImageWork, attended, image_work
from forge_vlm.vision.config import VisionConfig, ViTConfig
from forge_vlm.vision.features import (
    Features,
    Grid,
    check_patches,
    check_size,
    checked_grids,
    grids_on_host,
    normalize_pixels,
    select,
    values_of,
)

__all__ = ["PackedViT", "ViT"]

#: q, k and v (N, T, H, D) -> (N, T, H, D).
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class ViT(nn.Module):
    """Patches with trained positions, blocks of full attention, a norm (Dosovitskiy et al. 2021, without class token).

        ViT(VisionConfig())(images=torch.zeros(2, 3, 32, 32)).tokens         # (N, T, W)

    Images are (N, 3, H, W): uint8, or floats that are normalized already.
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

    @classmethod
    def from_config(cls, config: VisionConfig) -> Self:
        """Return the encoder of a config, with initial values."""
        return cls(config)

    def forward(self, images: Any) -> Features:
        """Features of images (N, 3, H, W), or of the entries of a ragged extra."""
        c = self.config.vit
        given = values_of(images)
        check_size(given, c.image_size)
        pixels = normalize_pixels(given, *self.config.pixels, self.patches.weight.dtype)
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


class PackedViT(ViT):
    """A `ViT` that takes `patches` (P, E) of all images one after the other, and `grids` (N, 3) int64 with the (time,
    rows, columns) in patches of each: `cut_patches` with time 1 makes both. Weights have the names of the ViT.

        encoder = PackedViT(VisionConfig("packed_vit"))
        patches, grids = cut_patches(torch.zeros(1, 3, 16, 40), patch_size=8, merge=1, time=1)
        encoder(patches, grids).tokens                                       # (1, 10, W)

    Patches of a frame see each other and none of another frame. The trained side * side positions are resized to the grid
    of each image, bilinear with antialiasing and corners that are not aligned, as SigLIP 2 NaFlex does
    (arXiv 2502.14786); on a grid of side * side they are themselves. `merge` * `merge` neighbors become one token, their
    features side by side. Patches are uint8, or floats that are normalized already.

    Cost: no mask, and no sync where grids lie on the host; on the CPU a call of attention for each length that occurs.
    """

    extra_inputs = ("patches", "grids")
    host_inputs = ("grids",)
    patch_time = 1

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config)
        self.merge, self.patch_size = config.vit.merge, config.vit.patch_size
        self.width *= self.merge**2

    def forward(self, patches: Any, grids: Any) -> Features:  # type: ignore[override]
        """Features (1, M, W * merge^2) of patches (P, E); ValueError where the grids are not theirs."""
        values, frames = values_of(patches), self._frames(grids)
        lengths = [rows * columns for rows, columns in frames]
        check_patches(values, lengths, self.patches.in_features)
        x = self.patches(self._pixels(values)) + self._positions(frames, values.device)
        plan = SegmentPlan.of_lengths([lengths])
        tokens = self.encoded(x[None], partial(attend_segments, plan=plan))  # (1, P, W)
        return Features(tokens.unflatten(1, (-1, self.merge**2)).flatten(2))

    def token_grids(self, patches: Any, grids: Any) -> list[Grid]:
        """(time, rows, columns) in tokens of each frame: frames of a video are images of their own, which the text of
        their timestamps parts."""
        m = self.merge
        return [(1, rows // m, columns // m) for rows, columns in self._frames(grids)]

    def _frames(self, grids: Any) -> list[tuple[int, int]]:
        """Rows and columns of each frame."""
        found = grids if isinstance(grids, list) else grids_on_host(grids).tolist()
        return [
            (rows, columns)
            for time, rows, columns in checked_grids(found, self.merge)
            for _ in range(time)
        ]

    def _pixels(self, patches: Tensor) -> Tensor:
        by_channel = patches.unflatten(1, (3, -1, 1))  # (P, 3, E / 3, 1)
        return normalize_pixels(by_channel, *self.config.pixels, self.patches.weight.dtype).flatten(
            1
        )

    def _positions(self, frames: list[tuple[int, int]], device: torch.device) -> Tensor:
        """Of the patches of all frames (P, W), in fp32 at least."""
        side = self.config.vit.side
        table = self.positions(torch.arange(side**2, device=device))  # by a call, as in the ViT
        precise = table.to(torch.promote_types(table.dtype, torch.float32))
        of_grid = {
            grid: self._resized(precise.unflatten(0, (side, side)), *grid)
            for grid in dict.fromkeys(frames)
        }
        return torch.cat([of_grid[grid] for grid in frames]).to(table.dtype)

    def _resized(self, table: Tensor, rows: int, columns: int) -> Tensor:
        """The table (side, side, W) on a grid of rows * columns, the patches of a token together: (P, W).

        By products, as the backward of torch's own resize is not deterministic on CUDA."""
        x = torch.einsum("cj,ijw->icw", _weights(columns, table), table)
        x = torch.einsum("ri,icw->rcw", _weights(rows, table), x)
        m = self.merge
        x = x.unflatten(1, (-1, m)).unflatten(0, (-1, m))  # (rows / m, m, columns / m, m, W)
        return x.transpose(1, 2).flatten(0, 3)

    def dummy(self, device: Any) -> dict[str, Any]:
        """Media of one image of one token, for a batch without any."""
        return self._black(1, self.merge, device)

    def media_of(self, images: int, pixels: int | None, device: Any) -> dict[str, Any]:
        """Media of so many black images. Grids are a list, as values of fake tensors cannot be read."""
        return self._black(images, self._side(pixels) * self.merge, device)

    def _black(self, images: int, side: int, device: Any) -> dict[str, Any]:
        patches = torch.zeros(images * side * side, self.patches.in_features, device=device)
        return {"patches": patches, "grids": [(1, side, side)] * images}

    def _side(self, pixels: int | None) -> int:
        """Tokens of one side of a square image."""
        long = self.config.vit.image_size if pixels is None else pixels**0.5
        return max(1, round(long / (self.patch_size * self.merge)))

    def image_work(self, pixels: int | None = None) -> ImageWork:
        """An image of about so many pixels, by default of image_size. To resize positions, once for each grid of a batch,
        is not counted."""
        side, blocks = self._side(pixels), len(self.layers)
        patches = (side * self.merge) ** 2
        scores = blocks * attended(patches, patches, self.config.vit.dim)
        parts = [(self.patches, patches), (self.layers, patches)]
        return image_work(side * side, side, side, parts, scores)


def _weights(size: int, table: Tensor) -> Tensor:
    """What each of `size` places takes of each place of the table's side: torch's own resize of the identity."""
    side = table.size(0)
    one = torch.eye(side, dtype=table.dtype, device=table.device)[None, None]
    options: dict[str, Any] = {"mode": "bilinear", "align_corners": False, "antialias": True}
    return F.interpolate(one, size=(size, side), **options)[0, 0]
