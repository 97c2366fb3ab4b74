"""Resolution policies by name: one square, tiles (Idefics3, SmolVLM, InternVL), or the image's own aspect (Qwen2-VL).

Shapes: N tiles, H and W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from forge_vlm._shared.problems import invalid
from forge_vlm.resolution.config import ResolutionConfig
from forge_vlm.resolution.images import Layout, picture_of, resized, size_of, tensor_of

__all__ = [
    "AspectTilesResolution",
    "BudgetResolution",
    "FixedResolution",
    "Resolution",
    "TilesResolution",
    "build_resolution",
]

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
    """The image in the middle of a square of that color."""
    from PIL import Image

    height, width = size_of(picture)
    side = max(height, width)
    square = Image.new("RGB", (side, side), color)
    square.paste(picture, ((side - width) // 2, (side - height) // 2))
    return square


def _cropped(picture: Any, size: int, filter: str) -> Any:
    """The middle of the image with its shorter side at `size`."""
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


_AROUND = "<fake_token_around_image>"


class TilesResolution:
    """Squares row by row, then the full image as one of them (arXiv 2408.12637, section 3.2.1).

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
        if c.split:  # the tile of the full image is made of the tiles' pixels, not of the image's
            picture = resized(picture, *whole, c.filter)
        return _cut(picture, layout, resized(picture, c.tile_size, c.tile_size, c.filter))

    def text(self, layout: Layout, tokens: int, placeholder: str) -> str:
        """What stands for the image in a prompt; a tile has `tokens`: row and column before each, a line for each sequence."""
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
        """Height and width in full tiles: the longer side first, the other from its aspect."""
        size = self.config.tile_size
        height, width = _enlarged(height, width, self.config.longest_edge)
        aspect = width / height
        if width >= height:
            wide = _up(width, size)
            return _up(int(wide / aspect), size), wide
        tall = _up(height, size)
        return tall, _up(int(tall * aspect), size)


class AspectTilesResolution:
    """The grid of squares nearest to the image's aspect, and the full image after (arXiv 2404.16821, section 3.2)."""

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
    """The tiles of an image that is as large as all of them, row by row, and `whole`."""
    size = layout.height
    boxes = [
        (column * size, row * size, (column + 1) * size, (row + 1) * size)
        for row in range(layout.rows)
        for column in range(layout.columns)
    ]
    return tensor_of([*(picture.crop(box) for box in boxes), whole])


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
