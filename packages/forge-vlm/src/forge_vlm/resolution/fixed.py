"""One square of a size for every image.

Shapes: H and W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from forge_vlm.resolution.config import ResolutionConfig
from forge_vlm.resolution.layout import Layout
from forge_vlm.resolution.pictures import picture_of, resized, size_of, tensor_of

__all__ = ["FixedResolution"]

_MOST = 1 << 24  # pixels of an intermediate image, unless the image itself has a quarter of them


class FixedResolution:
    """Every image is one square: `FixedResolution(config, mean)(image)` is (1, 3, size, size) uint8."""

    def __init__(self, config: ResolutionConfig, mean: Sequence[float]) -> None:
        self.config = config.fixed
        self.color = tuple(int(255 * value) for value in mean)

    def layout(self, height: int, width: int) -> Layout:
        """The one tile of an image of that size."""
        return Layout(self.config.size, self.config.size)

    def __call__(self, image: Any) -> Tensor:
        """(H, W, 3) uint8, or an image of pillow -> (1, 3, size, size) uint8."""
        picture, c = picture_of(image), self.config
        if c.fit == "crop":
            return tensor_of([_cropped(picture, c.size, c.filter)])
        if c.fit == "pad":
            picture = _padded(_narrowed(picture, c.size, c.filter), self.color)
        return tensor_of([resized(picture, c.size, c.size, c.filter)])

    def text(self, layout: Layout, tokens: int, placeholder: str) -> str:
        """What stands for the image in a prompt: a placeholder for each of its tokens."""
        return placeholder * tokens


def _narrowed(image: Any, size: int, filter: str) -> Any:
    """The image; smaller where its square would take much more memory than it does: 1 x 16,000 pixels 1 GB."""
    height, width = size_of(image)
    side, most = max(height, width), max(size, math.isqrt(_MOST))
    if side <= most or side * side <= 4 * height * width:
        return image
    return resized(image, max(1, height * most // side), max(1, width * most // side), filter)


def _padded(picture: Any, color: tuple[int, ...]) -> Any:
    """The picture in the middle of a square of that color."""
    from PIL import Image

    height, width = size_of(picture)
    side = max(height, width)
    square = Image.new("RGB", (side, side), color)
    square.paste(picture, ((side - width) // 2, (side - height) // 2))
    return square


def _cropped(picture: Any, size: int, filter: str) -> Any:
    """The middle of the picture with its shorter side at `size`."""
    from PIL import Image

    height, width = size_of(picture)
    longer = int(size * max(height, width) / min(height, width))
    tall, wide = (size, longer) if height <= width else (longer, size)
    left, top = (wide - size) // 2, (tall - size) // 2
    right, bottom = left + size, top + size
    if tall * wide <= max(_MOST, 4 * height * width):
        return resized(picture, tall, wide, filter).crop((left, top, right, bottom))
    # equal within rounding, without pixels that are cropped: of 1 x 10,000 they are 3.4 GB
    x, y = width / wide, height / tall
    box = (left * x, top * y, right * x, bottom * y)
    return picture.resize((size, size), Image.Resampling[filter.upper()], box)
