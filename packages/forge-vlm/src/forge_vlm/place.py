"""Features of media at the places of their tokens.

Shapes: B rows, S tokens of a row, D width of the stream, M tokens of all media.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forge_vlm._shared.problems import invalid

__all__ = ["check_places", "place"]


def place(
    stream: Tensor,
    features: Tensor,
    here: Tensor,
    part: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The stream (B, S, D) with features (M, D), in order, where `here` (B, S) is True.

    There is at least one feature; those without a place get zero gradients. Where the stream is a part of the tokens,
    `part` is what makes the same part of (B, S). No host sync: the number of places is the caller's to check
    (`check_places`).
    """
    index = (here.flatten().cumsum(0) - 1).clamp(0, len(features) - 1).unflatten(0, here.shape)
    if part is not None:
        here, index = part(here), part(index)
    spread = features.index_select(0, index.flatten()).unflatten(0, here.shape)  # (B, S, D)
    return torch.where(here[..., None], spread.to(stream.dtype), stream)


def check_places(here: Tensor, num_features: int) -> None:
    """ValueError where the media have another number of tokens than there are places; reads `here`."""
    places = int(here.sum())
    if places != num_features:
        rule = f"tokens must be as many as the placeholders of media, {places}"
        fix = "put as many placeholders as each image has tokens, and give the images of all rows in order"
        raise invalid("media", "number", num_features, rule, fix)
