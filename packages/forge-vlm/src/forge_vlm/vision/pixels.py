"""Pixels of images as the floats that an encoder was trained on.

Shapes: N images, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["normalised", "values_of"]


def values_of(media: Any) -> Tensor:
    """The entries (N, ...) of all rows, of a tensor (N, ...) or of an object with `values` and row offsets."""
    values: Tensor = media if isinstance(media, Tensor) else media.values
    return values


def normalised(
    images: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """(x / 255 - mean) / std in fp32 of 8-bit images (N, 3, H, W), then `dtype`; floats are taken as they are."""
    if images.dtype == torch.uint8:
        shift = torch.tensor(mean, device=images.device)[:, None, None]
        scale = torch.tensor(std, device=images.device)[:, None, None]
        images = (images.float() / 255 - shift) / scale
    return images.to(dtype)
