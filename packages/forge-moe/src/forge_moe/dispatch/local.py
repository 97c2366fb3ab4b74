"""Permute tokens into the order of their experts, and sum the experts' outputs back.

The backward of an index_select adds with atomics, in an order that changes from run to run. Here each direction is
written as the gather that is the other's gradient, and sums over slots have a fixed order, in fp32: the same bits every
time. On CUDA devices the sums and their gradients are kernels of `row_sums`.

Shapes: T tokens, K slots per token, R routed tokens (one per token and slot) sorted by expert, D width, E experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from forge_moe.dispatch import row_sums
from forge_moe.load_balancing import count_ids
from forge_moe.protocols import Dispatched


class Permutation(NamedTuple):
    """The order of R routed tokens by expert, then by token.

    slot_of_row (R,): the slot t K + k of each row of the sorted tensor.
    row_of_slot (T, K): the row of each slot; R or more for a slot without a row.

    Tokens from other ranks have between 1 and K slots on this rank, most often one or two. `received` orders them by
    their number of slots, most first, and moves the slots of a token to the front: the tokens with a j-th slot are then
    the first `tokens_with_slot[j]` ones, so a sum reads R rows rather than T K, and no size is read from the device. The
    kernels of `row_sums` skip slots without a row, so for them the tokens keep their order.
    line_of_token (T,): the line of a token in that order.
    """

    slot_of_row: Tensor
    row_of_slot: Tensor
    line_of_token: Tensor | None = None
    tokens_with_slot: list[int] | None = None

    @classmethod
    def local(cls, ids: Tensor, num_rows: int | None = None) -> Permutation:
        """From ids (T, K) int64 in 0..E, E for dropped slots, which form the tail; `num_rows` leaves out the rest of it."""
        # A stable sort keeps the slots of an expert in the order of their tokens.
        slot_of_row = ids.reshape(-1).sort(stable=True).indices  # (T K,)
        rows = torch.arange(slot_of_row.numel(), device=ids.device)
        row_of_slot = torch.empty_like(slot_of_row).scatter_(0, slot_of_row, rows)
        return cls(slot_of_row[:num_rows], row_of_slot.view(ids.shape))

    @classmethod
    def received(cls, ids: Tensor, num_experts: int, tokens_with_slot: list[int]) -> Permutation:
        """From ids (T, K) int64 in 0..E of received tokens, E for slots on other ranks; no tail. No host sync.

        The senders have counted the tokens that have more than j slots here, for j < K.
        """
        num_rows = sum(tokens_with_slot)
        if row_sums.in_one_pass(ids.device):
            return cls.local(ids, num_rows)
        # Slots on other ranks have id E and sort last.
        slot_of_row = ids.reshape(-1).sort(stable=True).indices[:num_rows]  # (R,)
        row_of_slot = slot_of_row.new_zeros(ids.numel())
        row_of_slot[slot_of_row] = torch.arange(num_rows, device=ids.device)

        # Within a token, slots on this rank first and in their order; then tokens with most slots first.
        here = ids < num_experts
        slots = here.sort(dim=1, descending=True, stable=True).indices  # (T, K)
        lines = here.sum(1).argsort(descending=True, stable=True)  # (T,)
        line_of_token = torch.empty_like(lines)
        line_of_token[lines] = torch.arange(lines.numel(), device=ids.device)
        row_of_slot = row_of_slot.view(ids.shape).gather(1, slots).index_select(0, lines)
        return cls(slot_of_row, row_of_slot, line_of_token, tokens_with_slot)

    def permute(self, x: Tensor) -> Tensor:
        """Copy each token of x (T, D) to the rows of its slots: (R, D) by expert, then by token."""
        routed: Tensor = _Permute.apply(x, *self)
        return routed

    def unpermute(self, routed: Tensor, weights: Tensor) -> Tensor:
        """Sums over slots of weight times row, of routed (R, D) and weights (T, K): (T, D) fp32 (fp64 for fp64)."""
        sums: Tensor = _Unpermute.apply(routed, weights, *self)
        return sums

    def sum(self, routed: Tensor, weights: Tensor | None) -> Tensor:
        """Rows (R, D), times weights (T, K) if given, summed over the slots of each token in their order: (T, D).

        With weights the result is fp32. Without, it has the dtype of the rows, rounded once from an fp32 sum.
        """
        if self.tokens_with_slot is None:
            return _sum_slots(routed, self.row_of_slot, weights)
        assert self.line_of_token is not None
        dtype = torch.promote_types(routed.dtype, torch.float32)
        total = routed.new_zeros(self.line_of_token.numel(), routed.size(1), dtype=dtype)
        scale = None if weights is None else weights.reshape(-1).index_select(0, self.slot_of_row)

        for slot, num_tokens in enumerate(self.tokens_with_slot):
            rows = self.row_of_slot[:num_tokens, slot]
            outputs = routed.index_select(0, rows).to(dtype)
            if scale is None:
                total[:num_tokens] += outputs
            else:
                factor = scale.index_select(0, rows).unsqueeze(1).to(dtype)
                total[:num_tokens].addcmul_(outputs, factor)
        total = total.index_select(0, self.line_of_token)
        return total.to(routed.dtype) if weights is None else total


class LocalDispatch:
    """Dispatcher of a process that holds all experts.

        dispatcher = LocalDispatch(num_experts)
        sent = dispatcher.dispatch(x, weights, ids)
        y = dispatcher.combine(experts(sent.rows, sent.counts), sent.meta)     # (T, D) fp32

    The routed tokens of one expert are in the order of their tokens; dropped slots (id E) form the tail. No host sync, no
    padding: R is T K.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        *,
        counts: Tensor | None = None,
        num_rows: int | None = None,
    ) -> Dispatched:
        """Routed tokens of x (T, D) for slots ids (T, K) int64 in 0..E.

        `counts`: the ids of each expert (E,), if the caller has counted them. `num_rows`, an upper bound on the slots
        that are not dropped, shortens the tail: R is then that.
        """
        order = Permutation.local(ids, num_rows)
        counts = count_ids(ids, self.num_experts) if counts is None else counts
        return Dispatched(order.permute(x), counts, (order, weights))

    def combine(self, rows: Tensor, meta: tuple[Permutation, Tensor]) -> Tensor:
        """Sum over slots of weight times row: (R, D) -> (T, D) fp32 (fp64 for fp64)."""
        order, weights = meta
        return order.unpermute(rows, weights)


# The fields of a Permutation are arguments of their own, so that activation checkpointing sees the tensors among them.


class _Permute(Function):
    """Copy each token to its rows; backward sums a token's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *fields: Any) -> Tensor:
        order = Permutation(*fields)
        ctx.save_for_backward(order.slot_of_row, order.row_of_slot, order.line_of_token)
        ctx.tokens_with_slot = order.tokens_with_slot
        return x.index_select(0, order.slot_of_row // order.row_of_slot.size(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slot_of_row, row_of_slot, line_of_token = ctx.saved_tensors
        order = Permutation(slot_of_row, row_of_slot, line_of_token, ctx.tokens_with_slot)
        return order.sum(grad.contiguous(), None), None, None, None, None


class _Unpermute(Function):
    """Weighted sum of a token's rows; backward gathers."""

    @staticmethod
    def forward(ctx: Any, routed: Tensor, weights: Tensor, *fields: Any) -> Tensor:
        order = Permutation(*fields)
        ctx.save_for_backward(routed, weights, order.slot_of_row, order.row_of_slot)
        return order.sum(routed, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        routed, weights, slot_of_row, row_of_slot = ctx.saved_tensors
        if _in_one_pass(routed):
            gradients = row_sums.sum_rows_backward(grad, routed, row_of_slot, weights)
            return *gradients, None, None, None, None
        grad_routed = grad.index_select(0, slot_of_row // weights.size(1))  # (R, D)

        # A slot has one row at most, so the assignment by index has no collisions.
        products = torch.linalg.vecdot(grad_routed, routed.to(grad_routed.dtype))  # (R,)
        grad_weights = weights.new_zeros(weights.numel())
        grad_weights.scatter_(0, slot_of_row, products.to(weights.dtype))

        grad_routed *= weights.reshape(-1).index_select(0, slot_of_row).unsqueeze(1)
        grad_routed = grad_routed.to(routed.dtype)
        return grad_routed, grad_weights.view_as(weights), None, None, None, None


def _in_one_pass(rows: Tensor) -> bool:
    # fp64 is summed in fp64, which the kernels do not.
    return rows.dtype != torch.float64 and row_sums.in_one_pass(rows.device)


def _sum_slots(routed: Tensor, row_of_slot: Tensor, weights: Tensor | None) -> Tensor:
    """Sum rows (R, D) at row_of_slot (T, K) over K in order: (T, D). An index of R or more adds nothing."""
    dtype = routed.dtype if weights is None else torch.promote_types(routed.dtype, weights.dtype)
    if _in_one_pass(routed):
        return row_sums.sum_rows(routed, row_of_slot, weights, dtype)
    if routed.size(0) == 0:
        return routed.new_zeros(row_of_slot.size(0), routed.size(1), dtype=dtype)
    if routed.size(0) < row_of_slot.numel():
        # Slots without a row read the last one with weight 0: shapes stay static, no host sync.
        has_row = (row_of_slot < routed.size(0)).to(dtype)
        weights = has_row if weights is None else weights * has_row
        row_of_slot = row_of_slot.clamp(max=routed.size(0) - 1)
    if weights is None or weights.dtype == routed.dtype:
        # One pass over the rows, where index, multiply and add would make three and hold a copy.
        return F.embedding_bag(row_of_slot, routed, per_sample_weights=weights, mode="sum")

    total = routed.index_select(0, row_of_slot[:, 0]) * weights[:, :1]
    for slot in range(1, row_of_slot.size(1)):
        # Not in place: in a compiled forward torch 2.11 would lose the gradient of the rows.
        outputs = routed.index_select(0, row_of_slot[:, slot])
        total = torch.addcmul(total, outputs, weights[:, slot, None])
    return total
