"""Count floating point operations of one image from the matrices that its tokens meet.

Shapes: T tokens of an image, W width of attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from forge_core.kinds import is_matrix, parameter_kinds

__all__ = ["ImageWork", "attended", "image_work", "work_of_media"]

#: A module, and how many tokens of an image meet each of its matrices.
Part = tuple[nn.Module, float]


class ImageWork(NamedTuple):
    """One image: `tokens` with their `rows` and `columns` (0 where they are no grid), FLOPs of a forward, and of the
    backward those that frozen matrices `spare`."""

    tokens: int
    rows: int
    columns: int
    flops: float
    spared: float

    def then(self, other: ImageWork) -> ImageWork:
        """This and what comes after it. Where neither trains, no backward runs at all."""
        return other._replace(flops=self.flops + other.flops, spared=self.spared + other.spared)


def image_work(
    tokens: int, rows: int, columns: int, parts: Iterable[Part], scores: float = 0.0
) -> ImageWork:
    """`parts` with two operations for each weight of their matrices, and `scores` of attention."""
    flops, frozen, trains = scores, 0.0, False
    for module, times in parts:
        for inner in module.modules():
            if isinstance(inner, nn.Embedding):
                continue
            for p in inner.parameters(recurse=False):
                trains |= p.requires_grad
                if p.ndim > 1:
                    flops += 2.0 * p.numel() * times
                    frozen += 0.0 if p.requires_grad else 2.0 * p.numel() * times
    return ImageWork(tokens, rows, columns, flops, frozen if trains else 2.0 * flops)


def attended(queries: float, keys: float, width: int) -> float:
    """FLOPs of scores and weighted sum."""
    return 4.0 * queries * keys * width


def work_of_media(vision: nn.Module, adapter: nn.Module, pixels: int | None) -> ImageWork | None:
    """An image through encoder and adapter, `pixels` in size where the encoder takes any; None for an encoder without
    `image_work`. An adapter without it has each matrix counted once for each token of the encoder."""
    count = getattr(vision, "image_work", None)
    if count is None:
        return None
    seen: ImageWork = count(pixels)
    own = getattr(adapter, "image_work", None)
    if own is not None:
        return seen.then(own(seen))
    tokens = getattr(adapter, "tokens", lambda rows, columns: seen.tokens)(seen.rows, seen.columns)
    return seen.then(image_work(tokens, 0, 0, [(adapter, float(seen.tokens))]))


def expert_flops(experts: Any, num: int, *, frozen: bool = False) -> float:
    """Forward FLOPs of one of `num` experts for one token: two for each weight of its matrices; of frozen ones only."""
    kinds = parameter_kinds(experts)
    matrices = (p for n, p in experts.named_parameters() if is_matrix(kinds[n]))
    return 2.0 * sum(p.numel() for p in matrices if not (frozen and p.requires_grad)) / num
