"""Encoded images as media of an encoder, and their numbers of tokens.

H, W   pixels of a tile        N   tiles of an image        P   patches of an image, of E numbers each
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forge_vlm._renamed import renamed
from forge_vlm._shared.problems import ProblemError, problems_of
from forge_vlm.data.files import InvalidSample, invalid
from forge_vlm.data.records import MOST_BYTES, MOST_PIXELS, NO_CAPS, Caps, EncodedImage
from forge_vlm.resolution import Layout, ResolutionConfig, build_resolution
from forge_vlm.vision.features import cut_patches

__all__ = ["FORMATS", "ImageProcessor"]

#: Formats of pillow that are read; of others, as PostScript, some start programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "JPEG2000", "PPM")
_ORIENTATION, _ON_SIDE = 0x0112, (5, 6, 7, 8)  # of EXIF
_PNG_TEXTS = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")  # chunks with an orientation
Media = dict[str, Tensor]


class ImageProcessor:
    """What an image is for an encoder that takes `images` (N, 3, H, W) uint8, the tiles of a resolution with `tokens` each;
    under "budget", for one that takes `patches` (P, E) uint8 and `grids` (1, 3), `merge` * `merge` patches a token.

        pictures = ImageProcessor(ResolutionConfig("tiles"), tokens=64, placeholder="<image>")
        layout = pictures.layout(content, "a.png")                      # the header is read, not the pixels
    """

    def __init__(
        self,
        resolution: ResolutionConfig,
        tokens: int,
        placeholder: str,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        patch_size: int = 16,
        merge: int = 2,
        time: int = 2,
        max_pixels: int = MOST_PIXELS,
        max_bytes: int = MOST_BYTES,
    ) -> None:
        self.resolution = build_resolution(resolution, mean)
        self._config, self._mean = resolution, mean
        self.budget = resolution.name == "budget"
        self._tokens, self._placeholder = tokens, placeholder
        self._patch_size, self._merge, self._time = patch_size, merge, time
        self._max_pixels, self._max_bytes = max_pixels, max_bytes
        self._color = torch.tensor([int(255 * value) for value in mean], dtype=torch.uint8)

    def read(self, picture: EncodedImage) -> bytes:
        """Its bytes, still encoded; InvalidSample where they cannot be read, or are more than the limit."""
        return picture.read(self._max_bytes)

    def resolution_of(self, caps: Caps, name: str) -> Any:
        """The resolution of an image with bounds of its own; InvalidSample for those that it cannot have."""
        own = {key: value for key, value in caps._asdict().items() if value is not None}
        if not own:
            return self.resolution
        key, value = next(iter(own.items()))
        if not self.budget:
            rule = f"means nothing when resolution.name is {self._config.name!r}"
            fix = "remove it, or set resolution.name = 'budget'"
            raise invalid(key, "foreign", value, rule, fix, where=name)
        try:
            budget = replace(self._config.budget, **own)
        except ValueError as error:
            origin = "a bound that its part leaves out is that of resolution.budget"
            problems = [replace(p, origin=origin) for p in problems_of(error)]
            raise InvalidSample(problems, name) from None
        return build_resolution(replace(self._config, budget=budget), self._mean)

    def layout(self, content: bytes, name: str, caps: Caps = NO_CAPS) -> Layout:
        """How an image is split, by its header; InvalidSample where that cannot be read."""
        resolution = self.resolution_of(caps, name)
        image = self._opened(content, name)
        from PIL.Image import Image

        try:
            # a PNG's own method would read the pixels, which only chunks after them need
            if image.format == "PNG" and _ends_with_exif(content):
                image.load()
            on_side = Image.getexif(image).get(_ORIENTATION) in _ON_SIDE
            # pillow opens a TIFF with its sides exchanged if it has the tag, not if XMP has it
            if image.format == "TIFF" and image.tag_v2.get(_ORIENTATION) in _ON_SIDE:
                on_side = False
            size = image.height, image.width
            found: Layout = resolution.layout(*(size[::-1] if on_side else size))
        except Exception as error:
            raise _damaged(name, error) from None
        most = max(self._max_pixels, MOST_PIXELS)
        if (pixels := found.num_tiles * found.height * found.width) > most:
            rule = f"pixels after resizing must be at most {most}"
            fix = "lower the bounds of its pixels, or raise max_image_pixels"
            raise invalid("", "pixels", pixels, rule, fix, where=name)
        return found

    def blank_layout(self) -> Layout:
        """That of what stands for an image without a header: a small square."""
        return self.resolution.layout(32, 32)

    def text(self, layout: Layout) -> str:
        """What stands for an image in a conversation, with one placeholder for each of its `grids`."""
        return self.resolution.text(layout, 1, self._placeholder)

    def grids(self, layout: Layout) -> list[tuple[int, int, int]]:
        """(time, rows, columns) in tokens of each placeholder: of a tile, or of the full image under "budget"."""
        if self.budget:
            side = self._patch_size * self._merge
            return [(1, layout.height // side, layout.width // side)]
        side = int(self._tokens**0.5)
        grid = (1, side, side) if side * side == self._tokens else (1, 1, self._tokens)
        return [grid] * layout.num_tiles

    def media(self, content: bytes, layout: Layout, name: str, caps: Caps = NO_CAPS) -> Media:
        """Media by name of an image; InvalidSample where it cannot be decoded, or is no longer of that layout."""
        resolution = self.resolution_of(caps, name)
        from PIL.ImageOps import exif_transpose

        image = self._opened(content, name)
        try:
            tiles = resolution(exif_transpose(image))
        except Exception as error:  # decoders of damaged files raise whatever they meet
            raise _damaged(name, error) from None
        if tiles.shape != (layout.num_tiles, 3, layout.height, layout.width):
            rule = "has another size than when it was opened"
            raise invalid("", "changed", ..., rule, "start again", where=name)
        return self._cut(tiles)

    def blank(self, layout: Layout) -> Media:
        """Media of that layout in the encoder's mean color."""
        shape = (layout.num_tiles, 3, layout.height, layout.width)
        return self._cut(self._color[:, None, None].expand(shape).contiguous())

    def nothing(self) -> Media:
        """Media of no image, which have the shapes of those of one."""
        return {name: value[:0] for name, value in self.blank(self.blank_layout()).items()}

    def _opened(self, content: bytes, name: str) -> Any:
        """An image of FORMATS whose header was read, of no more pixels than the limit."""
        try:
            from PIL import Image
        except ImportError:
            rule, fix = "pictures need pillow", "pip install 'forge-vlm[data]'"
            raise invalid("", "requires", ..., rule, fix, kind=ProblemError) from None
        try:
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        except Exception as error:
            raise _damaged(name, error) from None
        if (pixels := image.width * image.height) > self._max_pixels:
            rule = f"pixels ({image.width} x {image.height}) must be at most {self._max_pixels}"
            fix = "make it smaller, or raise max_image_pixels"
            raise invalid("", "pixels", pixels, rule, fix, where=name)
        return image

    def _cut(self, tiles: Tensor) -> Media:
        if not self.budget:
            return {"images": tiles}
        patches, grid = cut_patches(tiles, self._patch_size, self._merge, self._time)
        return {"patches": patches, "grids": grid}


def _ends_with_exif(png: bytes) -> bool:
    pixels = png.find(b"IDAT")
    return any(png.find(text, pixels) > 0 for text in _PNG_TEXTS)


def _damaged(name: str, error: Exception) -> Any:
    # pillow names the buffer that it reads, whose address is of no use
    said = re.sub(r" <_io\.BytesIO object at \w+>", "", str(error))
    rule = f"cannot be decoded ({type(error).__name__}: {said:.120})"
    fix = "restore it, or set corrupt = 'mask' or 'skip'"
    return invalid("", "damaged", ..., rule, fix, where=name)


__getattr__ = renamed(__name__)
