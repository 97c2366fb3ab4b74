"""One square of a size for every image.

Shapes: H and W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from forge_vlm.resolution.config import ResolutionConfig
from forge_vlm.resolution.layout import Layout
from forge_vlm.resolution.pictures import picture_of, resized, size_of, tensor_of

__all__ = ["FixedResolution"]


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
            picture = _padded(picture, self.color)
        return tensor_of([resized(picture, c.size, c.size, c.filter)])

    def text(self, layout: Layout, tokens: int, placeholder: str) -> str:
        """What stands for the image in a prompt: a placeholder for each of its tokens."""
        return placeholder * tokens


def _padded(picture: Any, color: tuple[int, ...]) -> Any:
    """The picture in the middle of a square of that colour."""
    from PIL import Image

    height, width = size_of(picture)
    side = max(height, width)
    square = Image.new("RGB", (side, side), color)
    square.paste(picture, ((side - width) // 2, (side - height) // 2))
    return square


def _cropped(picture: Any, size: int, filter: str) -> Any:
    """The middle of the picture with its shorter side at `size`."""
    height, width = size_of(picture)
    longer = int(size * max(height, width) / min(height, width))
    height, width = (size, longer) if height <= width else (longer, size)
    left, top = (width - size) // 2, (height - size) // 2
    return resized(picture, height, width, filter).crop((left, top, left + size, top + size))
