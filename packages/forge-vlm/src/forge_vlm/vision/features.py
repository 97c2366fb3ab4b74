"""What an encoder gives to an adapter.

Shapes: N images (or tiles, frames) of one size, T tokens of an image, W width of a token, M tokens of all images, D width
of the decoder's stream.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Features"]


class Features(NamedTuple):
    """Features of images: `tokens` (N, T, W), or (1, M, W) of images of any sizes one behind the other.

    `rows` and `columns` of the T tokens, row by row; 0 where they are no grid (a class token among them, any sizes).
    `valid` (N, T) bool: False on tokens that fill an image up (tiles that it does not have), for cross-attention.
    `layers`: further features (M, D) that already have the decoder's width, for its first blocks (DeepStack).
    """

    tokens: Tensor
    rows: int = 0
    columns: int = 0
    layers: tuple[Tensor, ...] = ()
    valid: Tensor | None = None
