"""The image's own aspect, with a number of pixels between two bounds.

Shapes: H and W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from forge_vlm._shared.problems import invalid
from forge_vlm.resolution.config import ResolutionConfig
from forge_vlm.resolution.layout import Layout
from forge_vlm.resolution.pictures import picture_of, resized, size_of, tensor_of

__all__ = ["BudgetResolution"]

_MOST_ASPECT = 200


class BudgetResolution:
    """Sides are multiples near the image's own (Qwen2-VL, arXiv 2409.12191, section 2.1)."""

    def __init__(self, config: ResolutionConfig, mean: Sequence[float]) -> None:
        self.config = config.budget

    def layout(self, height: int, width: int) -> Layout:
        """The one tile of an image of that size; ValueError where one side is more than 200 times the other."""
        c = self.config
        if max(height, width) > _MOST_ASPECT * min(height, width):
            rule = (
                f"(height, width) must be sides that differ by a factor of at most {_MOST_ASPECT}"
            )
            raise invalid("image", "aspect", (height, width), rule, "crop it or leave it out")
        tall, wide = (round(side / c.multiple) * c.multiple for side in (height, width))
        if tall * wide > c.max_pixels:
            scale = math.sqrt(height * width / c.max_pixels)
            tall, wide = (
                max(c.multiple, math.floor(side / scale / c.multiple) * c.multiple)
                for side in (height, width)
            )
        elif tall * wide < c.min_pixels:
            scale = math.sqrt(c.min_pixels / (height * width))
            tall, wide = (
                math.ceil(side * scale / c.multiple) * c.multiple for side in (height, width)
            )
        return Layout(tall, wide)

    def __call__(self, image: Any) -> Tensor:
        """(H, W, 3) uint8, or an image of pillow -> (1, 3, H', W') uint8."""
        picture = picture_of(image)
        layout = self.layout(*size_of(picture))
        return tensor_of([resized(picture, layout.height, layout.width, self.config.filter)])

    def text(self, layout: Layout, tokens: int, placeholder: str) -> str:
        """What stands for the image in a prompt: a placeholder for each of its tokens."""
        return placeholder * tokens
