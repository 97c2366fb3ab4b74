"""Which images a token sees, as two numbers a token.

Shapes: B rows, S tokens of a row, N images of all rows, T tokens of an image, n images of a row at most, M = n T, D width of
the decoder's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge_vlm._shared.problems import invalid
from forge_vlm.vision.features import Features

__all__ = ["Seen", "check_images", "images_of_rows", "seen_images"]


class Seen(NamedTuple):
    """Images for cross-attention: token s of row b sees the keys m with first[b, s] <= image_ids[b, m] < stop[b, s].

    features (B, M, D), None where keys and values are in the cache; image_ids (B, M) the number of the image of a key
    among those of all rows, -1 for padding; first, stop (B, S).
    """

    features: Tensor | None
    image_ids: Tensor
    first: Tensor
    stop: Tensor

    def mask(self) -> Tensor:
        """(B, S, M) bool."""
        ids = self.image_ids[:, None]
        return (ids >= self.first[..., None]) & (ids < self.stop[..., None])

    def cut(self, split: Callable[[Tensor], Tensor]) -> Seen:
        """What is about tokens, split as the stream is."""
        return self._replace(first=split(self.first), stop=split(self.stop))

    def newest(self) -> Seen:
        """What the next token of each row sees, without the features."""
        return Seen(None, self.image_ids, self.first[:, -1:], self.stop[:, -1:])

    def still(self, tokens: Tensor, document_ids: Tensor | None, newest: Sequence[int]) -> Seen:
        """What tokens (B, S) behind the one that this is about see: the same, in the document `newest` of their row."""
        first, stop = self.first.expand(tokens.shape), self.stop.expand(tokens.shape)
        if document_ids is not None:
            last = torch.tensor(newest).to(document_ids.device, non_blocking=True)[:, None]
            same = (document_ids == last).cummin(dim=1).values.to(tokens.device, non_blocking=True)
            stop = torch.where(same, stop, first)
        return self._replace(first=first, stop=stop)


def seen_images(here: Tensor, document_ids: Tensor | None, sees: str) -> tuple[Tensor, Tensor]:
    """Numbers (B, S) of the first image that each token sees, and of the one behind the last; equal where it sees none.

    here (B, S) is True on the token of an image, which sees its own image. Images are counted over all rows; those of
    other documents are not seen. `sees` is "all" those before, the "last" alone, or with it the images whose tokens stand
    directly before its own (the "group": Llama 3.2 Vision). No host sync.
    """
    stop = here.flatten().cumsum(0).view(here.shape)
    begins = torch.zeros_like(here)  # of rows and documents
    begins[:, 0] = True
    if document_ids is not None:
        ids = document_ids.to(here.device, non_blocking=True)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    before = stop - here.long()
    first = torch.where(begins, before, 0).cummax(dim=1).values
    if sees == "last":
        first = torch.maximum(first, stop - 1)
    elif sees == "group":
        beside = torch.zeros_like(here)
        beside[:, 1:] = here[:, :-1]
        leads = here & (begins | ~beside)
        first = torch.maximum(first, torch.where(leads, before, 0).cummax(dim=1).values)
    return first, stop


def images_of_rows(
    features: Tensor, here: Tensor, valid: Tensor | None, media: Any
) -> tuple[Tensor, Tensor]:
    """Features (B, M, D) of the images of each row, from those of all images (N, T, D), and the image_ids (B, M).

    valid (N, T) bool is False on tokens that nothing sees. A row without images has padding alone. The most images of a
    row are read off `media.row_offsets`, on the host, or off `here`: that is one host sync on an accelerator.
    """
    count = here.sum(1)  # (B,)
    offsets = getattr(media, "row_offsets", None)
    most = int((count if offsets is None else offsets.diff()).max())
    slot = torch.arange(max(1, most), device=here.device)
    number = (count.cumsum(0) - count)[:, None] + slot  # (B, n)
    index = number.clamp(max=len(features) - 1)
    there = (slot < count[:, None])[..., None].expand(-1, -1, features.size(1))  # (B, n, T)
    if valid is not None:
        there = there & valid[index]
    image_ids = torch.where(there, number[..., None], -1).flatten(1)  # (B, M)
    rows = features.index_select(0, index.flatten()).unflatten(0, index.shape)  # (B, n, T, D)
    return rows.flatten(1, 2), image_ids


def check_images(
    here: Tensor, features: Features, given: int, document_ids: Tensor | None, media: Any
) -> None:
    """ValueError for features and document_ids that do not fit the tokens of images, and, where these are on the CPU,
    for another number of images than of their tokens, in a row whose part of `media` is known."""
    if features.layers:
        rule = "must be joint_decoder with an encoder that gives features for single layers"
        fix = f"this one gives {len(features.layers)}; use joint_decoder"
        raise invalid("fusion.name", "layers", "cross_attention", rule, fix)
    if given and len(features.tokens) != given:
        rule = f"must have an encoder that gives each of {given} images its own features, and this one gives {len(features.tokens)}"
        fix = "use images of one size, or joint_decoder"
        raise invalid("fusion.name", "packed", "cross_attention", rule, fix)
    if document_ids is not None and document_ids.shape != here.shape:
        rule = f"must have the shape {tuple(here.shape)} of full rows for images that come before"
        value = tuple(document_ids.shape)
        raise invalid("document_ids", "shape", value, rule, "give row_document_ids")
    tokens = int(here.sum()) if here.device.type == "cpu" else given
    if tokens != given:
        rule = f"must be as many as the tokens of images, {tokens}"
        fix = "put one token for each image, and give the images of all rows in order"
        raise invalid("images", "number", given, rule, fix)
    offsets = getattr(media, "row_offsets", None)
    if given and offsets is not None and here.device.type == "cpu":
        own, wanted = offsets.diff().tolist(), here.sum(1).tolist()
        if own + [0] * (len(wanted) - len(own)) != wanted:  # rows of text behind may have none
            rule = f"of each row must be as many as its tokens, {wanted}"
            fix = "give each row the images whose tokens it holds"
            raise invalid("images", "by_row", own, rule, fix)
