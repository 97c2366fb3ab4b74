"""Rows split over several ranks: the reductions and gathers that exact router losses need.

Shapes: B rows, S tokens of a row on this rank, T = B S, W ranks that share the rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from forge_moe._torch_compat import all_gather
from forge_moe.protocols import TokenContext

V = TypeVar("V")


class DocumentSegments(NamedTuple):
    """Segment ids below `num_segments` of the tokens of all ranks (W T,) and of this rank (T,).

    Tokens of documents that have no token on this rank share segment num_segments - 1.
    """

    all_ranks: Tensor
    this_rank: Tensor
    num_segments: int


class SequenceGroup:
    """The process groups of a layer's `sequence_group`, in a forward with context `ctx`.

    Several groups are crossed axes (context and tensor parallel): reduced or gathered over one after the
    other. Values that all layers of a forward share are computed once if ctx is a `CachingContext`.
    """

    def __init__(self, groups: Any, ctx: TokenContext | None) -> None:
        several = isinstance(groups, tuple | list)
        self.groups = tuple(groups) if several else () if groups is None else (groups,)
        self.ctx = ctx

    def sum(self, counts: Tensor) -> Tensor:
        """Integers added over the ranks, in place: one all-reduce per group."""
        counts = counts.contiguous()
        for group in self.groups:
            dist.all_reduce(counts, group=group)
        return counts

    def gather(self, x: Tensor) -> Tensor:
        """x (n, ...) of all ranks, (W n, ...), in the same order on each; one all-gather per group."""
        for group in self.groups:
            x = all_gather(x, group)
        return x

    def num_tokens(self, valid: Tensor | None, local: int, device: torch.device) -> Tensor:
        """Number of tokens of all ranks without pads, 0-dim int64; `local` tokens are on this rank."""

        def make() -> Tensor:
            if valid is None:  # other ranks may have pads all the same
                return self.sum(torch.full((), local, dtype=torch.int64, device=device))
            return self.sum(valid.sum())

        return self._once("num_tokens", make)

    def documents(self, ids: Tensor) -> DocumentSegments:
        """Segments of the documents that have tokens on this rank, from its document ids (B, S).

        An id names one document of its row, in whatever order ranks hold its tokens. No host sync.
        """

        def make() -> DocumentSegments:
            rows, size = ids.shape
            # A segment is the position of the first token with its id in the sorted ids of its row: ids are
            # not dense, and their number on the host would cost a sync.
            known = ids.sort(dim=1).values  # (B, S)
            offset = torch.arange(0, rows * size, size, device=ids.device).unsqueeze(1)  # (B, 1)
            gathered = self.gather(ids).view(-1, rows, size).transpose(0, 1).flatten(1)  # (B, W S)
            position = torch.searchsorted(known, gathered).clamp_max(max(size - 1, 0))
            found = known.gather(1, position) == gathered
            segments = torch.where(found, position + offset, rows * size)
            all_ranks = segments.view(rows, -1, size).transpose(0, 1).flatten()
            this_rank = (torch.searchsorted(known, ids) + offset).flatten()
            return DocumentSegments(all_ranks, this_rank, rows * size + 1)

        return self._once("documents", make)

    def _once(self, name: str, make: Callable[[], V]) -> V:
        once = getattr(self.ctx, "once", None)
        key = ("forge_moe.sequence_group", name, *map(id, self.groups))
        found: V = make() if once is None else once(key, make)
        return found
