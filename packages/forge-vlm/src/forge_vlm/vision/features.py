"""Inputs of vision encoders (pixels, patches and their grids), and the features that they return.

Shapes: N images (or tiles, frames), T tokens of an image, W width of a token, P patches of all images, E numbers of a patch,
M tokens of all images, D width of the decoder's stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge_vlm._renamed import renamed
from forge_vlm._shared.problems import invalid
from forge_vlm.vision.config import VisionConfig

__all__ = [
    "Features",
    "Grid",
    "check_patches",
    "check_size",
    "checked_grids",
    "cut_patches",
    "grids_on_host",
    "normalize_pixels",
    "select",
    "values_of",
]


class Features(NamedTuple):
    """Features of images: `tokens` (N, T, W), or (1, M, W) of images of any sizes one after the other.

    `rows` and `columns` of the T tokens, row by row; 0 where they are no grid (a class token among them, any sizes).
    `valid` (N, T) bool: False on tokens that fill an image up (tiles that it does not have), for cross-attention.
    `layers`: further features (M, D) that already have the decoder's width, for its first blocks (DeepStack).
    """

    tokens: Tensor
    rows: int = 0
    columns: int = 0
    layers: tuple[Tensor, ...] = ()
    valid: Tensor | None = None


def select(states: Sequence[Tensor], last: Tensor, config: VisionConfig, *, front: int) -> Tensor:
    """The states of `select_layer` side by side, or `last` without any: (N, T, W) each -> (N, T, W * number).

    `front` tokens before the patches, a class token and registers, are left out by "patch"."""
    try:
        chosen = [states[layer] for layer in config.select_layer] or [last]
    except IndexError:
        rule = f"must be hidden states of the encoder, from {-len(states)} to {len(states) - 1}"
        value = config.select_layer
        raise invalid("vision.select_layer", "range", value, rule, "correct it") from None
    if config.select_feature == "patch":
        chosen = [state[:, front:] for state in chosen]
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=-1)


def values_of(media: Any) -> Tensor:
    """The entries (N, ...) of all sequences, of a tensor (N, ...) or of an object with `values` and row offsets; ValueError
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


def normalize_pixels(
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


Grid = tuple[int, int, int]


def grids_on_host(grids: Any) -> Tensor:
    """The grids (N, 3) int64 of all sequences; ValueError for another shape or dtype."""
    found = values_of(grids).cpu()
    if found.dim() != 2 or found.size(1) != 3 or found.dtype not in (torch.int64, torch.int32):
        rule = f"and {found.dtype} must be (N, 3) and int64: (time, rows, columns) in patches of each image"
        raise invalid("grids", "shape", tuple(found.shape), rule, "cut_patches makes them")
    return found


def checked_grids(grids: Sequence[Sequence[int]], merge: int) -> Sequence[Sequence[int]]:
    """The (time, rows, columns) of images as they are; ValueError where `merge` does not divide rows and columns."""
    for grid in grids:
        if min(grid) < 1 or grid[1] % merge or grid[2] % merge:
            rule = f"must be (time, rows, columns) in patches, with rows and columns that {merge} divides"
            raise invalid("grids", "divides", list(grid), rule, "resize the image")
    return grids


def check_patches(patches: Tensor, lengths: Sequence[int], width: int) -> None:
    """ValueError for patches that are not (P, E = `width`), with those of images of `lengths`."""
    wanted = (sum(lengths), width)
    if patches.shape != wanted:
        rule = f"must be {wanted}, those of the {len(lengths)} images of grids"
        value = tuple(patches.shape)
        raise invalid("patches", "shape", value, rule, "give both of the same images")


def cut_patches(
    frames: Tensor, patch_size: int = 16, merge: int = 2, time: int = 2
) -> tuple[Tensor, Tensor]:
    """Patches (P, E) and grid (1, 3) of an image or of the frames of a video (F, C, H, W).

        patches, grid = cut_patches(torch.zeros(1, 3, 64, 96))       # (24, 1536), [[1, 4, 6]]

    `time` frames are split together, and the last one is repeated until it divides them. The patches of a token stand
    together. ValueError unless patch_size * merge divides height and width.
    """
    height, width = frames.shape[-2:]
    side = patch_size * merge
    if height % side or width % side:
        rule = f"(height, width) must be sides that {side} divides"
        raise invalid("frames", "divides", (height, width), rule, "resize it")
    missing = -len(frames) % time
    frames = torch.cat([frames, frames[-1:].expand(missing, -1, -1, -1)])
    x = frames.unflatten(0, (-1, time))  # (T, time, C, H, W)
    x = x.unflatten(4, (-1, merge, patch_size)).unflatten(3, (-1, merge, patch_size))
    # (T, time, C, rows, merge, size, columns, merge, size): tokens, then their patches, then what a patch holds
    x = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    grid = torch.tensor([[len(x), height // patch_size, width // patch_size]])
    return x.reshape(-1, x[0, 0, 0, 0, 0].numel()), grid


__getattr__ = renamed(__name__)
