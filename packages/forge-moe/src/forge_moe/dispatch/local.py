"""Dispatch within one process: sort the slots by expert, and sum them back.

Shapes: T tokens, K slots per token, R = T K rows, D width, E experts.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Dispatched(NamedTuple):
    """rows (R, D) sorted by expert; counts (E of this process,) int64 on the device; `meta`, what the same
    strategy's `combine` needs."""

    rows: Tensor
    counts: Tensor
    meta: Any


class LocalMeta(NamedTuple):
    """order (R,): the slot t K + k of each row; places (T, K): the row of each slot, R or more for one that
    has none; weights (T, K)."""

    order: Tensor
    places: Tensor
    weights: Tensor


class LocalDispatch:
    """All experts live here.

        sent = LocalDispatch(num_experts).dispatch(x, weights, ids)
        y = dispatch.combine(experts(sent.rows, sent.counts), sent.meta)     # (T, D) fp32

    Rows of one expert stand in the order of their tokens; slots that go nowhere (id E) form the tail. Both
    directions and both gradients gather by index and sum over slots in a fixed order, in fp32: no atomics,
    the same bits every time. No host sync, no padding: R is T K.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(
        self, x: Tensor, weights: Tensor, ids: Tensor, *, num_rows: int | None = None
    ) -> Dispatched:
        """Rows of tokens x (T, D) for slots ids (T, K) int64 in 0..E.

        Who knows how many slots go somewhere, or a bound on it, gives `num_rows`: then R is that.
        """
        ranked, order = ids.reshape(-1).sort(stable=True)  # (T K,)
        experts = torch.arange(self.num_experts, device=ids.device)
        ends = torch.searchsorted(ranked, experts, right=True)  # (E,)
        counts = ends.diff(prepend=ends.new_zeros(1))
        places = torch.empty_like(order)
        places[order] = torch.arange(order.numel(), device=order.device)
        meta = LocalMeta(order[:num_rows], places.view(ids.shape), weights)
        return Dispatched(Spread.apply(x, meta.order, meta.places), counts, meta)

    def combine(self, rows: Tensor, meta: LocalMeta) -> Tensor:
        """Sum over slots of weight times row: (R, D) -> (T, D) fp32 (fp64 for fp64)."""
        return Gather.apply(rows, meta.weights, meta.order, meta.places)


class Spread(Function):
    """Copy each token to its rows; backward sums a token's rows in the order of its slots, in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, order // places.size(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return sum_slots(grad.contiguous(), places, None), None, None


class Gather(Function):
    """Weighted sum of a token's rows, in fp32 and in the order of its slots."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, places)
        return sum_slots(rows, places, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, order, places = ctx.saved_tensors
        spread = grad.index_select(0, order // places.size(1))  # (R, D)
        by_slot = weights.new_zeros(weights.numel())
        by_slot[order] = torch.linalg.vecdot(spread, rows.to(spread.dtype))  # each slot once
        spread *= weights.reshape(-1)[order].unsqueeze(1)
        return spread.to(rows.dtype), by_slot.view(weights.shape), None, None


def sum_slots(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Rows (R, D) at places (T, K) summed over K in order: (T, D). A place of R or more adds nothing.

    With weights (T, K) fp32 the result is fp32. Without, it has the dtype of the rows, rounded once from an
    fp32 sum.
    """
    dtype = rows.dtype if weights is None else torch.promote_types(rows.dtype, weights.dtype)
    if rows.size(0) == 0:
        return rows.new_zeros(places.size(0), rows.size(1), dtype=dtype)
    if rows.size(0) < places.numel():
        there = (places < rows.size(0)).to(dtype)
        weights = there if weights is None else weights * there
        places = places.clamp(max=rows.size(0) - 1)
    if weights is None or weights.dtype == rows.dtype:
        # One pass over the rows, where index, multiply and add would make three and hold a copy.
        return F.embedding_bag(places, rows, per_sample_weights=weights, mode="sum")
    total = rows.new_zeros(places.size(0), rows.size(1), dtype=dtype)
    for slot in range(places.size(1)):
        # Not in place: in a compiled forward torch 2.11 would lose the gradient of the rows.
        total = torch.addcmul(total, rows.index_select(0, places[:, slot]), weights[:, slot, None])
    return total
