"""What size images have when they reach the encoder: one square, tiles, or their own aspect under a budget.

Resizing needs pillow (the extra `images`); counting tiles and tokens does not.
"""

from forge_vlm.resolution.config import (
    AspectTilesConfig,
    BudgetConfig,
    FixedConfig,
    ResolutionConfig,
    TilesConfig,
)
from forge_vlm.resolution.images import Layout
from forge_vlm.resolution.policies import Resolution, build_resolution

__all__ = [
    "AspectTilesConfig",
    "BudgetConfig",
    "FixedConfig",
    "Layout",
    "Resolution",
    "ResolutionConfig",
    "TilesConfig",
    "build_resolution",
]
