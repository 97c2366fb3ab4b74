"""Rows from other ranks, sorted by expert and summed back: as `local`, but of known size, without a tail.

A row that arrives has between 1 and K slots here, most often one or two. Sorted by how many they have,
the rows with a j-th slot are a prefix whose length the senders counted, so a sum reads R rows, not M K.

Shapes: M rows that arrived, K slots per token, R slots that are here, E experts here, D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Arrivals(NamedTuple):
    """Where the slots of M rows stand among the R rows sorted by expert.

    order (R,) the slot m K + k of each; counts (E,); `having` K numbers, how many of the M rows have more
    than j slots here; table (M, K) the places of a row's slots, rows with most slots first; back (M,) the
    line of each row in the table.
    """

    order: Tensor
    counts: Tensor
    having: list[int]
    table: Tensor
    back: Tensor

    @classmethod
    def of(cls, ids: Tensor, num_experts: int, having: list[int]) -> Arrivals:
        """From ids (M, K) int64 in 0..E, E for slots that are elsewhere. No host sync."""
        rows, slots = sum(having), ids.size(1)
        ranked, order = ids.reshape(-1).sort(stable=True)
        order = order[:rows]
        experts = torch.arange(num_experts, device=ids.device)
        ends = torch.searchsorted(ranked, experts, right=True)
        places = order.new_zeros(ids.numel())
        places[order] = torch.arange(rows, device=ids.device)
        here = ids < num_experts
        first = here.sort(dim=1, descending=True, stable=True).indices  # slots here, in their order
        lines = here.sum(1).argsort(descending=True, stable=True)
        back = torch.empty_like(lines)
        back[lines] = torch.arange(lines.numel(), device=ids.device)
        table = places.view(-1, slots).gather(1, first).index_select(0, lines)
        return cls(order, ends.diff(prepend=ends.new_zeros(1)), having, table, back)

    def spread(self, x: Tensor) -> Tensor:
        """Each row x (M, D) once per slot: (R, D) by expert, then by row."""
        rows: Tensor = _Spread.apply(x, self)
        return rows

    def gather(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Sums (M, D) fp32 of weight times row over the slots here, of rows (R, D), weights (M, K)."""
        sums: Tensor = _Gather.apply(rows, weights, self)
        return sums

    def sum(self, rows: Tensor, scale: Tensor | None) -> Tensor:
        """Rows (R, D), times scale (R,) if given, summed in the order of slots: (M, D) fp32."""
        dtype = torch.promote_types(rows.dtype, torch.float32)
        total = rows.new_zeros(self.back.numel(), rows.size(1), dtype=dtype)
        for slot, lines in enumerate(self.having):
            place = self.table[:lines, slot]
            part = rows.index_select(0, place).to(dtype)
            if scale is None:
                total[:lines] += part
            else:
                total[:lines].addcmul_(part, scale.index_select(0, place).unsqueeze(1).to(dtype))
        return total.index_select(0, self.back)


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, arrivals: Arrivals) -> Tensor:
        ctx.arrivals, ctx.dtype = arrivals, x.dtype
        return x.index_select(0, arrivals.order // arrivals.table.size(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.arrivals.sum(grad, None).to(ctx.dtype), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, arrivals: Arrivals) -> Tensor:
        ctx.arrivals = arrivals
        ctx.save_for_backward(rows, weights)
        return arrivals.sum(rows, weights.reshape(-1).index_select(0, arrivals.order))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        order = ctx.arrivals.order
        spread = grad.index_select(0, order // weights.size(1))  # (R, D)
        of_weights = weights.new_zeros(weights.numel())
        of_weights[order] = (spread * rows).sum(dim=1, dtype=weights.dtype)
        spread *= weights.reshape(-1).index_select(0, order).unsqueeze(1)
        return spread.to(rows.dtype), of_weights.view_as(weights), None
