"""The plain vision transformer on images of any sizes, packed one behind the other.

Shapes: N images, F frames of all images, P patches of all frames, E numbers of a patch, M tokens of all frames, W width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core.model import SegmentPlan, attend_segments
from forge_vlm.vision.config import VisionConfig
from forge_vlm.vision.features import Features
from forge_vlm.vision.patches import Grid, check_patches, checked_grids, grids_on_host
from forge_vlm.vision.pixels import normalised, values_of
from forge_vlm.vision.vit import ViT
from forge_vlm.work import ImageWork, attended, image_work

__all__ = ["PackedViT"]


class PackedViT(ViT):
    """A `ViT` that takes `patches` (P, E) of all images one behind the other, and `grids` (N, 3) int64 with the (time,
    rows, columns) in patches of each: `cut_patches` with time 1 makes both. Weights have the names of the ViT.

        encoder = PackedViT(VisionConfig("packed_vit"))
        patches, grids = cut_patches(torch.zeros(1, 3, 16, 40), patch_size=8, merge=1, time=1)
        encoder(patches, grids).tokens                                       # (1, 10, W)

    Patches of a frame see each other and none of another frame. The learnt side * side positions are resized to the grid
    of each image, bilinear with antialiasing and corners that are not aligned, as SigLIP 2 NaFlex does
    (arXiv 2502.14786); on a grid of side * side they are themselves. `merge` * `merge` neighbors become one token, their
    features side by side. Patches are uint8, or floats that are normalised already.

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
        return normalised(by_channel, *self.config.pixels, self.patches.weight.dtype).flatten(1)

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
        """Tokens in a row of a square image."""
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
