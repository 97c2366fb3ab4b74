"""Images of pillow as tensors, and their layout in tiles. Resizing needs pillow, the layout does not.

Shapes: N tiles, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge_vlm._shared.problems import invalid

__all__ = ["Layout", "picture_of", "resized", "size_of", "tensor_of"]


class Layout(NamedTuple):
    """`height` and `width` of each tile in pixels, and `rows` and `columns` of the tiles that cover the image.

    Behind these comes the image as a full, as one more tile; it is only where rows and columns are 0.
    """

    height: int
    width: int
    rows: int = 0
    columns: int = 0

    @property
    def num_tiles(self) -> int:
        """How many tiles there are, the image as a full among them."""
        return self.rows * self.columns + 1


def size_of(picture: Any) -> tuple[int, int]:
    """Height and width."""
    return picture.height, picture.width


def picture_of(image: Any) -> Any:
    """An RGB image of pillow from another of pillow, or from (H, W, 3) uint8 of numpy or torch.

    What is transparent becomes white; of grey of 16 bits the upper 8 stay. Raises ValueError for anything else, for grey
    beyond 16 bits, and where pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        fix = "install 'forge-vlm[images]'"
        raise invalid("", "requires", ..., "images need pillow", fix) from error
    if isinstance(image, Image.Image):
        return _opaque(image)
    shape, dtype = tuple(getattr(image, "shape", ())), str(getattr(image, "dtype", type(image)))
    if len(shape) != 3 or shape[2] != 3 or 0 in shape or dtype.rpartition(".")[2] != "uint8":
        rule = f"and {dtype} must be (height, width, 3) of uint8, or an image of pillow"
        raise invalid("image", "shape", shape, rule, "convert it")
    return Image.fromarray(image.numpy() if isinstance(image, Tensor) else image)


def _opaque(picture: Any) -> Any:
    from PIL import Image

    if picture.mode[0] in "IF":  # `convert` would clip all from 256 on to white
        picture = _eight_bits(picture)
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture.convert("RGBA"))
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def _eight_bits(picture: Any) -> Any:
    """Grey of 16 bits, in a mode that may hold more, as grey of 8."""
    wide = picture if picture.mode == "F" else picture.convert("I")
    least, most = wide.getextrema()
    if picture.mode == "F" or least < 0 or most > 0xFFFF:
        rule = f"of a picture of mode {picture.mode!r} must be gray from 0 to 65535"
        raise invalid("values", "range", (least, most), rule, "save it with 8 or 16 bits")
    return wide.point(lambda value: value / 256).convert("L")


def resized(picture: Any, height: int, width: int, filter: str) -> Any:
    """The image at another size, resampled by the filter of that name."""
    from PIL import Image

    if size_of(picture) == (height, width):
        return picture
    return picture.resize((width, height), Image.Resampling[filter.upper()])


def tensor_of(pictures: Sequence[Any]) -> Tensor:
    """Images of one size as (N, 3, H, W) uint8."""
    height, width = size_of(pictures[0])
    rows = [torch.frombuffer(bytearray(p.tobytes()), dtype=torch.uint8) for p in pictures]
    return torch.stack(rows).view(-1, height, width, 3).permute(0, 3, 1, 2).contiguous()
