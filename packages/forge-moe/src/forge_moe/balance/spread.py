"""Rows whose tokens lie on several ranks: what these must tell each other for exact router losses.

Shapes: B rows, S tokens of a row here, T = B S, W ranks that share the rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from forge_moe._torch_compat import all_gather

V = TypeVar("V")


class Documents(NamedTuple):
    """Segment of each token of all ranks (W T,) and of those here (T,), below `most`.

    Tokens of documents that have no token here all have segment most - 1.
    """

    everywhere: Tensor
    here: Tensor
    most: int


class Spread:
    """The groups of a layer's `sequence_group`, one or several, for a forward with context `ctx`.

    Several are crossed axes (context and tensor parallel): reduced or gathered over one after the other.
    What all layers of a forward need alike is asked for once where ctx offers `once(key, make)`.
    """

    def __init__(self, groups: Any, ctx: Any) -> None:
        several = isinstance(groups, tuple | list)
        self.groups = tuple(groups) if several else () if groups is None else (groups,)
        self.ctx = ctx

    def sum(self, counts: Tensor) -> Tensor:
        """Integers added over the ranks: one all-reduce per group."""
        counts = counts.contiguous()
        for group in self.groups:
            dist.all_reduce(counts, group=group)
        return counts

    def gather(self, x: Tensor) -> Tensor:
        """x (n, ...) of all ranks, (W n, ...), in the same order on each; one all-gather per group."""
        for group in self.groups:
            x = all_gather(x, group)
        return x

    def tokens(self, valid: Tensor | None, here: int, device: torch.device) -> Tensor:
        """Number of tokens of all ranks without pads, 0-dim int64; `here` of them here."""

        def make() -> Tensor:
            if valid is None:  # other ranks may have pads all the same
                return self.sum(torch.full((), here, dtype=torch.int64, device=device))
            return self.sum(valid.sum())

        return self._once("tokens", make)

    def documents(self, ids: Tensor) -> Documents:
        """Which tokens of all ranks belong to documents that have tokens here, from ids (B, S) here.

        An id names one document of its row, in whatever order ranks hold its tokens. No host sync.
        """

        def make() -> Documents:
            rows, size = ids.shape
            known = ids.sort(dim=1).values  # (B, S)
            first = torch.arange(0, rows * size, size, device=ids.device).unsqueeze(1)  # (B, 1)
            others = self.gather(ids).view(-1, rows, size).transpose(0, 1).flatten(1)  # (B, W S)
            place = torch.searchsorted(known, others).clamp_max(max(size - 1, 0))
            meant = known.gather(1, place) == others
            found = torch.where(meant, place + first, rows * size)
            everywhere = found.view(rows, -1, size).transpose(0, 1).flatten()
            here = (torch.searchsorted(known, ids) + first).flatten()
            return Documents(everywhere, here, rows * size + 1)

        return self._once("documents", make)

    def _once(self, name: str, make: Callable[[], V]) -> V:
        once = getattr(self.ctx, "once", None)
        key = ("rows over ranks", name, *map(id, self.groups))
        found: V = make() if once is None else once(key, make)
        return found
