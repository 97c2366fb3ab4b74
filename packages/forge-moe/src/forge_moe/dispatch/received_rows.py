"""Rows received from other ranks, sorted by expert and summed back: as `local`, without a tail.

A received row has between 1 and K slots on this rank, most often one or two. The rows that have a j-th slot
are a prefix once rows are sorted by their number of slots, and the senders counted its length. So a sum
over slots reads R rows rather than M K, and no size is read from the device.

Shapes: M received rows, K slots per token, R slots on this rank, E local experts, D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class ReceivedRows(NamedTuple):
    """The permutation between M received rows and the R rows sorted by expert.

    slot_of_row (R,): the slot m K + k of each sorted row. counts (E,): sorted rows per expert.
    rows_with_slot, K numbers: received rows that have more than j slots here. row_of_slot (M, K): the
    sorted rows of a received row's slots, for received rows ordered by number of slots, most first.
    line_of_row (M,): the line of each received row in `row_of_slot`.
    """

    slot_of_row: Tensor
    counts: Tensor
    rows_with_slot: list[int]
    row_of_slot: Tensor
    line_of_row: Tensor

    @classmethod
    def of(cls, ids: Tensor, num_experts: int, rows_with_slot: list[int]) -> ReceivedRows:
        """From ids (M, K) int64 in 0..E, E for slots on other ranks. No host sync."""
        num_rows, top_k = sum(rows_with_slot), ids.size(1)
        sorted_ids, slot_of_row = ids.reshape(-1).sort(stable=True)
        slot_of_row = slot_of_row[:num_rows]  # slots on other ranks have id E and sort last
        experts = torch.arange(num_experts, device=ids.device)
        ends = torch.searchsorted(sorted_ids, experts, right=True)
        row_of_slot = slot_of_row.new_zeros(ids.numel())
        row_of_slot[slot_of_row] = torch.arange(num_rows, device=ids.device)
        # Within a row, slots on this rank first and in their order; then rows with most slots first.
        local = ids < num_experts
        slots = local.sort(dim=1, descending=True, stable=True).indices  # (M, K)
        lines = local.sum(1).argsort(descending=True, stable=True)  # (M,)
        line_of_row = torch.empty_like(lines)
        line_of_row[lines] = torch.arange(lines.numel(), device=ids.device)
        row_of_slot = row_of_slot.view(-1, top_k).gather(1, slots).index_select(0, lines)
        counts = ends.diff(prepend=ends.new_zeros(1))
        return cls(slot_of_row, counts, rows_with_slot, row_of_slot, line_of_row)

    def permute(self, x: Tensor) -> Tensor:
        """Each received row x (M, D) once per slot: (R, D) by expert, then by received row."""
        rows: Tensor = _Permute.apply(x, self)
        return rows

    def unpermute(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Sums (M, D) fp32 of weight times row over the slots here, of rows (R, D), weights (M, K)."""
        sums: Tensor = _Unpermute.apply(rows, weights, self)
        return sums

    def sum(self, rows: Tensor, scale: Tensor | None) -> Tensor:
        """Rows (R, D), times scale (R,) if given, summed in the order of slots: (M, D) fp32."""
        dtype = torch.promote_types(rows.dtype, torch.float32)
        total = rows.new_zeros(self.line_of_row.numel(), rows.size(1), dtype=dtype)
        for slot, num_lines in enumerate(self.rows_with_slot):
            index = self.row_of_slot[:num_lines, slot]
            part = rows.index_select(0, index).to(dtype)
            if scale is None:
                total[:num_lines] += part
            else:
                total[:num_lines].addcmul_(
                    part, scale.index_select(0, index).unsqueeze(1).to(dtype)
                )
        return total.index_select(0, self.line_of_row)


class _Permute(Function):
    """Copy each received row to its slots; backward sums them in fp32, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: ReceivedRows) -> Tensor:
        ctx.received, ctx.dtype = received, x.dtype
        return x.index_select(0, received.slot_of_row // received.row_of_slot.size(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.received.sum(grad, None).to(ctx.dtype), None


class _Unpermute(Function):
    """Weighted sum of the slots of each received row; backward gathers."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, received: ReceivedRows) -> Tensor:
        ctx.received = received
        ctx.save_for_backward(rows, weights)
        return received.sum(rows, weights.reshape(-1).index_select(0, received.slot_of_row))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        slot_of_row = ctx.received.slot_of_row
        grad_rows = grad.index_select(0, slot_of_row // weights.size(1))  # (R, D)
        grad_weights = weights.new_zeros(weights.numel())
        grad_weights[slot_of_row] = (grad_rows * rows).sum(dim=1, dtype=weights.dtype)
        grad_rows *= weights.reshape(-1).index_select(0, slot_of_row).unsqueeze(1)
        return grad_rows.to(rows.dtype), grad_weights.view_as(weights), None
