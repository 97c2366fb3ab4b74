"""Which tokens belong to which group of modalities, once per forward for all layers.

Shapes: B rows, S tokens of a row, N = B S tokens, G groups, n tokens of a group, D any width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forge_core import TokenContext

__all__ = ["NOWHERE", "Routes", "routes_of"]

NOWHERE = -1  # the group of what no group sees


@dataclass(frozen=True)
class Routes:
    """Tokens by group. `order` (N,) lists tokens of group 0, then 1, ..., last those of no group, each in the order of
    the batch; `back` (N,) is its inverse; `sizes` are the G numbers. Without an order all tokens are of group 0.
    """

    order: Tensor | None
    back: Tensor | None
    sizes: tuple[int, ...]

    def split(self, tokens: Tensor) -> list[Tensor]:
        """Rows of each group, (n, D) each, of tokens (N, D)."""
        if self.order is None:
            return [tokens, *(tokens[:0] for _ in self.sizes[1:])]
        inside = self.order[: sum(self.sizes)]
        return list(tokens.index_select(0, inside).split(self.sizes))

    def join(self, parts: list[Tensor]) -> Tensor:
        """Tokens (N, D) of the rows of each group; zeros where a token is of no group.

        Groups without rows are part of the graph, so that their parameters have gradients of zero.
        """
        joined = torch.cat(parts)
        if self.back is None:
            return joined
        outside = len(self.back) - len(joined)
        if outside:
            joined = torch.cat((joined, joined.new_zeros(outside, joined.size(1))))
        return joined.index_select(0, self.back)


def routes_of(ctx: TokenContext, groups: tuple[int, ...]) -> Routes:
    """The routes of a batch, `groups[m + 1]` being the group of modality m (-1, padding, stands first).

    Computed on the host once per forward, and copied to the device of the ids. Where `ctx.modality_ids` lie on an
    accelerator that costs the one host sync of all layers; on the CPU there is none. Without ids all is text.
    """
    ids = ctx.modality_ids
    num = max(groups) + 1
    if ids is None:
        return Routes(None, None, (0,) * num)
    return ctx.once(("modality routes", groups), lambda: _routes(ids, groups, num))


def _routes(ids: Tensor, groups: tuple[int, ...], num: int) -> Routes:
    group = torch.tensor(groups)[ids.flatten().cpu() + 1]  # (N,)
    sizes = tuple(int((group == g).sum()) for g in range(num))
    if sizes[0] == len(group):
        return Routes(None, None, sizes)
    order = group.masked_fill(group == NOWHERE, num).argsort(stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    device = ids.device
    return Routes(order.to(device, non_blocking=True), back.to(device, non_blocking=True), sizes)
