"""Pixels of images as the floats that an encoder was trained on.

Shapes: N images, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forge_vlm._shared.problems import invalid

__all__ = ["check_size", "normalised", "values_of"]


def values_of(media: Any) -> Tensor:
    """The entries (N, ...) of all rows, of a tensor (N, ...) or of an object with `values` and row offsets; ValueError
    for anything else."""
    values = media if isinstance(media, Tensor) else getattr(media, "values", None)
    if not isinstance(values, Tensor):
        rule = "must be one tensor of those of all rows, or an object with such `values`"
        fix = "stack them, or leave the keyword out where there are none"
        raise invalid("media", "type", type(media).__name__, rule, fix)
    return values


def check_size(images: Tensor, size: int) -> None:
    """ValueError for images that are not (N, 3, size, size): others would have the positions of other patches."""
    if images.shape[1:] != (3, size, size):
        rule = f"must be (N, 3, {size}, {size}), the size that the encoder has positions for"
        fix = "resize them, or use packed_vit for images of any sizes"
        raise invalid("images", "shape", tuple(images.shape), rule, fix)


def normalised(
    images: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """(x / 255 - mean) / std in fp32 of 8-bit images (N, 3, H, W), then `dtype`; floats are taken as they are. ValueError
    for other whole numbers, which may be either."""
    if images.dtype == torch.uint8:
        # made on the host: torch.tensor(..., device="cuda") waits for the device
        both = torch.tensor([mean, std]).to(images.device, non_blocking=True)
        shift, scale = both[:, :, None, None]
        images = (images.float() / 255 - shift) / scale
    elif not images.is_floating_point():
        rule = "must be torch.uint8, or floats that are normalized already"
        raise invalid("images", "dtype", images.dtype, rule, "convert them")
    return images.to(dtype)
