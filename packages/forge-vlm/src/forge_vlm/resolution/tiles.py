"""An image as squares of the encoder's size, and once more as a whole: Idefics3, SmolVLM and InternVL.

Shapes: N tiles, H and W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from forge_vlm.resolution.config import ResolutionConfig
from forge_vlm.resolution.layout import Layout
from forge_vlm.resolution.pictures import picture_of, resized, size_of, tensor_of

__all__ = ["AspectTilesResolution", "TilesResolution"]

_AROUND = "<fake_token_around_image>"


class TilesResolution:
    """Squares row by row, then the whole image as one of them (arXiv 2408.12637, section 3.2.1).

    The sides of the image become multiples of a tile's, its longer one first `longest_edge`.
    """

    def __init__(self, config: ResolutionConfig, mean: Sequence[float]) -> None:
        self.config = config.tiles

    def layout(self, height: int, width: int) -> Layout:
        """Rows and columns of an image of that size."""
        tall, wide = self._covered(height, width)
        size = self.config.tile_size
        if not self.config.split or (tall, wide) == (size, size):
            return Layout(size, size)
        return Layout(size, size, tall // size, wide // size)

    def __call__(self, image: Any) -> Tensor:
        """(H, W, 3) uint8, or an image of pillow -> (N, 3, tile_size, tile_size) uint8."""
        picture, c = picture_of(image), self.config
        layout, whole = self.layout(*size_of(picture)), self._covered(*size_of(picture))
        picture = resized(picture, *_enlarged(*size_of(picture), c.longest_edge), c.filter)
        if c.split:  # the tile of the whole image is made of the tiles' pixels, not of the image's
            picture = resized(picture, *whole, c.filter)
        return _cut(picture, layout, resized(picture, c.tile_size, c.tile_size, c.filter))

    def text(self, layout: Layout, tokens: int, placeholder: str) -> str:
        """What stands for the image in a prompt; a tile has `tokens`: row and column before each, a line for each row."""
        lines = [
            "".join(
                f"{_AROUND}<row_{row}_col_{column}>{placeholder * tokens}"
                for column in range(1, layout.columns + 1)
            )
            for row in range(1, layout.rows + 1)
        ]
        whole = f"{_AROUND}<global-img>{placeholder * tokens}{_AROUND}"
        return "\n".join([*lines, "", whole]) if lines else whole

    def _covered(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in whole tiles: the longer side first, the other from its aspect."""
        size = self.config.tile_size
        height, width = _enlarged(height, width, self.config.longest_edge)
        aspect = width / height
        if width >= height:
            wide = _up(width, size)
            return _up(int(wide / aspect), size), wide
        tall = _up(height, size)
        return tall, _up(int(tall * aspect), size)


class AspectTilesResolution:
    """The grid of squares nearest to the image's aspect, and the whole image behind (arXiv 2404.16821, section 3.2)."""

    def __init__(self, config: ResolutionConfig, mean: Sequence[float]) -> None:
        self.config = config.aspect_tiles

    def layout(self, height: int, width: int) -> Layout:
        """Rows and columns of an image of that size."""
        c, aspect = self.config, width / height
        sides = range(1, c.max_tiles + 1)
        grids = [(h, w) for w in sides for h in sides if c.min_tiles <= h * w <= c.max_tiles]
        best, nearest = (1, 1), math.inf
        for rows, columns in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            far = abs(aspect - columns / rows)
            # of one aspect, more tiles only where the image has more than half of their pixels
            fills = height * width > 0.5 * c.tile_size**2 * rows * columns
            if far < nearest or (far == nearest and fills):
                best, nearest = (rows, columns), far
        return Layout(c.tile_size, c.tile_size, *(best if best != (1, 1) else (0, 0)))

    def __call__(self, image: Any) -> Tensor:
        """(H, W, 3) uint8, or an image of pillow -> (N, 3, tile_size, tile_size) uint8."""
        picture, c = picture_of(image), self.config
        layout, size = self.layout(*size_of(picture)), c.tile_size
        whole = resized(picture, size, size, c.filter)
        if layout.rows:
            picture = resized(picture, layout.rows * size, layout.columns * size, c.filter)
        return _cut(picture, layout, whole)

    def text(self, layout: Layout, tokens: int, placeholder: str) -> str:
        """What stands for the image in a prompt; a tile has `tokens`: all of them between two marks."""
        return f"<img>{placeholder * (tokens * layout.num_tiles)}</img>"


def _enlarged(height: int, width: int, longest: int) -> tuple[int, int]:
    """The size with its longer side at `longest`; the other is even where it would be odd, and at least 1."""
    aspect = width / height
    if width >= height:
        tall = int(longest / aspect)
        return max(tall + tall % 2, 1), longest
    wide = int(longest * aspect)
    return longest, max(wide + wide % 2, 1)


def _up(side: int, size: int) -> int:
    return math.ceil(side / size) * size


def _cut(picture: Any, layout: Layout, whole: Any) -> Tensor:
    """The tiles of a picture that is as large as all of them, row by row, and `whole`."""
    size = layout.height
    boxes = [
        (column * size, row * size, (column + 1) * size, (row + 1) * size)
        for row in range(layout.rows)
        for column in range(layout.columns)
    ]
    return tensor_of([*(picture.crop(box) for box in boxes), whole])
