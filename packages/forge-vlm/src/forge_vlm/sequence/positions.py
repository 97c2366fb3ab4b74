"""Positions of tokens, and image features at their placeholders.

Shapes: B sequences, S tokens of a sequence, D width of the stream, M tokens of all media.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forge_core import KVCache
from forge_core.model import default_positions
from forge_vlm._renamed import renamed
from forge_vlm._shared.problems import invalid
from forge_vlm.fusion.cross_attention import VisibleImages
from forge_vlm.sequence.plan import SequencePlan
from forge_vlm.vision.features import values_of

__all__ = ["VLMCache", "check_placeholders", "grids_of", "place_features", "plan_of"]

Grid = tuple[int, int, int]


class VLMCache(KVCache):
    """Keys and values of a sequence, the position after its newest token, which is not the number of tokens, and which
    images the newest token sees."""

    next_positions: Tensor | None = None  # (B, 1)
    seen: VisibleImages | None = None

    def continued(
        self, positions: Tensor | None, tokens: Tensor, ids: Tensor | None
    ) -> Tensor | None:
        """Positions that count from 0 in each document, (B or 1, S) or (B, 3, S), from where the cached rows end; None
        stands for one position a token, and is given back for the model to count where none was ever other."""
        ends = self.next_positions
        if ends is None:
            if positions is None or self.length == 0:
                return positions
            first = torch.tensor(self.history.first).to(tokens.device, non_blocking=True)
            ends = self.length - first[:, None]
        if positions is None:
            positions = default_positions(tokens.size(1), ids, tokens.device)
        if ids is not None:  # a document that begins here begins at 0
            newest = torch.tensor(self.history.last_id)[:, None]
            ends = ends * (ids.cpu() == newest).cumprod(1).to(ends.device)  # (B, S)
        return positions + (ends if positions.dim() == 2 else ends[:, None])

    def advance(self, positions: Tensor | None, ids: Tensor | None) -> None:
        """Take note of the positions of new tokens; padding and all documents but the newest of a sequence do not count."""
        if positions is None:
            return
        ends = positions if positions.dim() == 2 else positions.amax(1)  # (B, S)
        if ids is not None:
            others = (ids != ids[:, -1:]).flip(1).cumsum(1).flip(1)  # from here to the end
            earlier = (others > 0).to(ends.device)
            ends = ends.masked_fill(earlier, -1)
        self.next_positions = ends.amax(1, keepdim=True) + 1


def plan_of(
    tokens: Tensor,
    ids: Tensor | None,
    placeholders: Sequence[int],
    grids: Sequence[Grid],
    branch_ids: Tensor | None = None,
) -> SequencePlan:
    """The plan of tokens (B, S) with images of these `grids`, in order over all sequences. One host sync where they lie on an
    accelerator. ValueError where they are not the images'."""
    host, documents, branches = (None if t is None else t.cpu() for t in (tokens, ids, branch_ids))
    assert host is not None
    counts = torch.isin(host, torch.tensor(list(placeholders))).sum(1).tolist()
    rows: list[list[Grid]] = []
    first = 0
    for number, wanted in enumerate(counts):
        stop, held = first, 0
        while held < wanted and stop < len(grids):
            held += math.prod(grids[stop])
            stop += 1
        rows.append(list(grids[first : stop if number + 1 < len(host) else None]))
        first = stop
    return SequencePlan.of(host, documents, dict.fromkeys(placeholders, 1), rows, branches)


def grids_of(
    encoder: Any, media: Mapping[str, Any], name: str, tokens: Tensor, placeholders: Sequence[int]
) -> list[Grid]:
    """Grids in tokens of all images: those that the encoder tells, or those of images of one size, which share the
    placeholders of tokens (B, S) evenly and, for "mrope", are squares."""
    if hasattr(encoder, "token_grids"):
        told: list[Grid] = encoder.token_grids(**media)
        return told
    number = len(values_of(media[encoder.extra_inputs[0]]))
    size = int(torch.isin(tokens.cpu(), torch.tensor(list(placeholders))).sum()) // number
    side = math.isqrt(size)
    if name == "mrope" and side * side != size:
        rule = (
            f"needs images whose tokens form rows and columns, and each of the {number} has {size}"
        )
        fix = "give positions, or use vision.select_feature 'patch'"
        raise invalid("positions", "not_square", name, rule, fix)
    return [(1, side, side) if name == "mrope" else (1, 1, size)] * number


def place_features(
    stream: Tensor,
    features: Tensor,
    here: Tensor,
    part: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The stream (B, S, D) with features (M, D), in order, where `here` (B, S) is True.

    There is at least one feature; those without a place get zero gradients. Where the stream is a part of the tokens,
    `part` is what makes the same part of (B, S). No host sync: the number of places is the caller's to check
    (`check_placeholders`).
    """
    index = (here.flatten().cumsum(0) - 1).clamp(0, len(features) - 1).unflatten(0, here.shape)
    if part is not None:
        here, index = part(here), part(index)
    spread = features.index_select(0, index.flatten()).unflatten(0, here.shape)  # (B, S, D)
    return torch.where(here[..., None], spread.to(stream.dtype), stream)


def check_placeholders(here: Tensor, num_features: int) -> None:
    """ValueError where the media have another number of tokens than there are places; reads `here`."""
    places = int(here.sum())
    if places != num_features:
        rule = f"tokens must be as many as the placeholders of media, {places}"
        fix = "put as many placeholders as each image has tokens, and give the images of all rows in order"
        raise invalid("media", "number", num_features, rule, fix)


__getattr__ = renamed(__name__)
