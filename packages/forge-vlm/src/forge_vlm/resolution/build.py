"""Resolutions by the name in a config."""

from __future__ import annotations

from collections.abc import Sequence

from forge_vlm.resolution.budget import BudgetResolution
from forge_vlm.resolution.config import ResolutionConfig
from forge_vlm.resolution.fixed import FixedResolution
from forge_vlm.resolution.tiles import AspectTilesResolution, TilesResolution

__all__ = ["Resolution", "build_resolution"]

Resolution = FixedResolution | TilesResolution | AspectTilesResolution | BudgetResolution

_RESOLUTIONS: dict[str, type[Resolution]] = {
    "fixed": FixedResolution,
    "tiles": TilesResolution,
    "aspect_tiles": AspectTilesResolution,
    "budget": BudgetResolution,
}


def build_resolution(
    config: ResolutionConfig, mean: Sequence[float] = (0.5, 0.5, 0.5)
) -> Resolution:
    """What makes the tiles of an image; `mean` is that of the encoder (`VisionConfig.mean`), the color of padding.

    resolution = build_resolution(ResolutionConfig("tiles"))
    tiles = resolution(image)                                           # (N, 3, H, W) uint8
    layout = resolution.layout(height, width)                           # the same N, without pixels
    prompt = resolution.text(layout, adapter.tokens(rows, columns), "<image>")
    """
    return _RESOLUTIONS[config.name](config, mean)
