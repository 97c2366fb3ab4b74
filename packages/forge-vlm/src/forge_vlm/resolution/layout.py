"""How an image is laid out in tiles."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Layout"]


class Layout(NamedTuple):
    """`height` and `width` of each tile in pixels, and `rows` and `columns` of the tiles that cover the image.

    Behind these comes the image as a whole, as one more tile; it is alone where rows and columns are 0.
    """

    height: int
    width: int
    rows: int = 0
    columns: int = 0

    @property
    def num_tiles(self) -> int:
        """How many tiles there are, the image as a whole among them."""
        return self.rows * self.columns + 1
