"""Dispatch within one process: sort the slots by expert, and sum them back.

Shapes: T tokens, K slots per token, R = T K rows, D width, E experts.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from forge_moe.protocols import Dispatched


class LocalMeta(NamedTuple):
    """slot_of_row (R,): the slot t K + k of each row; row_of_slot (T, K): the row of each slot, R or more
    for a slot without a row; weights (T, K)."""

    slot_of_row: Tensor
    row_of_slot: Tensor
    weights: Tensor


class LocalDispatch:
    """Dispatcher of a process that holds all experts.

        dispatcher = LocalDispatch(num_experts)
        sent = dispatcher.dispatch(x, weights, ids)
        y = dispatcher.combine(experts(sent.rows, sent.counts), sent.meta)     # (T, D) fp32

    Rows of one expert are in the order of their tokens; slots that go nowhere (id E) form the tail. Both
    directions and both gradients gather by index and sum over slots in a fixed order, in fp32: no atomics,
    the same bits every time. No host sync, no padding: R is T K.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(
        self, x: Tensor, weights: Tensor, ids: Tensor, *, num_rows: int | None = None
    ) -> Dispatched:
        """Rows of tokens x (T, D) for slots ids (T, K) int64 in 0..E.

        `num_rows`, an upper bound on the slots that go somewhere, cuts the tail: R is then that.
        """
        # A stable sort keeps the slots of an expert in the order of their tokens.
        sorted_ids, slot_of_row = ids.reshape(-1).sort(stable=True)  # (T K,)
        experts = torch.arange(self.num_experts, device=ids.device)
        ends = torch.searchsorted(sorted_ids, experts, right=True)  # (E,)
        counts = ends.diff(prepend=ends.new_zeros(1))
        row_of_slot = torch.empty_like(slot_of_row)
        row_of_slot[slot_of_row] = torch.arange(slot_of_row.numel(), device=slot_of_row.device)
        meta = LocalMeta(slot_of_row[:num_rows], row_of_slot.view(ids.shape), weights)
        return Dispatched(_Permute.apply(x, meta.slot_of_row, meta.row_of_slot), counts, meta)

    def combine(self, rows: Tensor, meta: LocalMeta) -> Tensor:
        """Sum over slots of weight times row: (R, D) -> (T, D) fp32 (fp64 for fp64)."""
        return _Unpermute.apply(rows, meta.weights, meta.slot_of_row, meta.row_of_slot)


# The backward of an index_select adds with atomics, in an order that changes from run to run. Here each
# direction is written as the gather that is the other's gradient.


class _Permute(Function):
    """Copy each token to its rows; backward sums a token's rows in the order of its slots, in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot_of_row: Tensor, row_of_slot: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_slot)
        return x.index_select(0, slot_of_row // row_of_slot.size(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (row_of_slot,) = ctx.saved_tensors
        return _sum_slots(grad.contiguous(), row_of_slot, None), None, None


class _Unpermute(Function):
    """Weighted sum of a token's rows, in fp32 and in the order of its slots."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, slot_of_row: Tensor, row_of_slot: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, slot_of_row, row_of_slot)
        return _sum_slots(rows, row_of_slot, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, slot_of_row, row_of_slot = ctx.saved_tensors
        grad_rows = grad.index_select(0, slot_of_row // row_of_slot.size(1))  # (R, D)
        grad_weights = weights.new_zeros(weights.numel())
        # A slot has one row at most, so the assignment by index has no collisions.
        grad_weights[slot_of_row] = torch.linalg.vecdot(grad_rows, rows.to(grad_rows.dtype))
        grad_rows *= weights.reshape(-1)[slot_of_row].unsqueeze(1)
        return grad_rows.to(rows.dtype), grad_weights.view(weights.shape), None, None


def _sum_slots(rows: Tensor, row_of_slot: Tensor, weights: Tensor | None) -> Tensor:
    """Rows (R, D) at row_of_slot (T, K) summed over K in order: (T, D). An index of R or more adds nothing.

    With weights (T, K) fp32 the result is fp32. Without, it has the dtype of the rows, rounded once from an
    fp32 sum.
    """
    dtype = rows.dtype if weights is None else torch.promote_types(rows.dtype, weights.dtype)
    if rows.size(0) == 0:
        return rows.new_zeros(row_of_slot.size(0), rows.size(1), dtype=dtype)
    if rows.size(0) < row_of_slot.numel():
        # Slots without a row read the last one with weight 0: shapes stay static, no host sync.
        has_row = (row_of_slot < rows.size(0)).to(dtype)
        weights = has_row if weights is None else weights * has_row
        row_of_slot = row_of_slot.clamp(max=rows.size(0) - 1)
    if weights is None or weights.dtype == rows.dtype:
        # One pass over the rows, where index, multiply and add would make three and hold a copy.
        return F.embedding_bag(row_of_slot, rows, per_sample_weights=weights, mode="sum")
    total = rows.new_zeros(row_of_slot.size(0), rows.size(1), dtype=dtype)
    for slot in range(row_of_slot.size(1)):
        # Not in place: in a compiled forward torch 2.11 would lose the gradient of the rows.
        part = rows.index_select(0, row_of_slot[:, slot])
        total = torch.addcmul(total, part, weights[:, slot, None])
    return total
