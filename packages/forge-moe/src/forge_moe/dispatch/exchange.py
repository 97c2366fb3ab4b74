"""Exchange tokens between ranks: the plan of an all-to-all, its wire format, and two differentiable exchanges.

Shapes: T tokens of this rank, K slots per token, D width, W ranks of the group, P rows per token at most (min(K, W)), N
rows sent, M rows received. A row is a token on its way to one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from forge_moe.dispatch import row_sums


class WireFormat(NamedTuple):
    """A row as bytes: D elements, K weights, K int32 ids, padded to 16 bytes.

    Methods are views of a (rows, num_bytes) uint8 buffer; no data moves. One buffer means one collective instead of three.
    Gradients are sent without the ids.
    """

    dim: int
    slots: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    with_ids: bool = True

    @property
    def num_bytes(self) -> int:
        ids = 4 * self.slots if self.with_ids else 0
        return _round_up(self._ids_offset + ids, 16)  # kernels load a row in vectors of 16 bytes

    def hidden(self, buffer: Tensor) -> Tensor:
        """(rows, D) in `dtype`."""
        return buffer[:, : self.dim * self.dtype.itemsize].view(self.dtype)

    def weights(self, buffer: Tensor) -> Tensor:
        """(rows, K) in `weight_dtype`."""
        return buffer[:, self._weights_offset : self._ids_offset].view(self.weight_dtype)

    def ids(self, buffer: Tensor) -> Tensor:
        """(rows, K) int32."""
        return buffer[:, self._ids_offset : self._ids_offset + 4 * self.slots].view(torch.int32)

    @property
    def _weights_offset(self) -> int:
        return _round_up(self.dim * self.dtype.itemsize, self.weight_dtype.itemsize)

    @property
    def _ids_offset(self) -> int:
        return self._weights_offset + self.slots * self.weight_dtype.itemsize


def _round_up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


class AllToAllPlan(NamedTuple):
    """The rows that this rank sends: one per token and rank, by rank, then by token.

    token_of_row (N,); row_of_slot (T, K), the row that carries a slot, N for a dropped slot; rows_of_token (T, P), the
    rows of a token by rank, then N; sent, received (W,), rows per rank, empty before `with_sizes`.
    """

    group: dist.ProcessGroup
    token_of_row: Tensor
    row_of_slot: Tensor
    rows_of_token: Tensor
    sent: list[int]
    received: list[int]

    @classmethod
    def of(cls, rank_of_slot: Tensor, group: dist.ProcessGroup) -> AllToAllPlan:
        """The plan for rank_of_slot (T, K) in 0..W, W for dropped slots, without sizes: token_of_row has a tail.

        Device work of O(T W), which needs no size on the host.
        """
        num_tokens, top_k = rank_of_slot.shape
        ranks = dist.get_world_size(group)
        mask = token_rank_mask(rank_of_slot, ranks)  # (T, W)

        # Rows are numbered by rank, then by token: a running count over the transposed mask, whose last one is N.
        flat = mask.t().flatten().cumsum(0)
        num_rows = flat[-1:] if num_tokens else flat.new_zeros(1)
        number = flat.view(ranks, num_tokens).t() - 1
        row = torch.where(mask, number, num_rows)  # (T, W)

        # Pairs of token and rank without a row write to entry N, in the tail.
        tokens = torch.arange(num_tokens, device=row.device).unsqueeze(1).expand_as(row)
        most = num_tokens * min(top_k, ranks)
        token_of_row = row.new_zeros(most + 1).scatter_(0, row.flatten(), tokens.flatten())
        dropped = num_rows.expand(num_tokens, 1)
        row_of_slot = torch.cat((row, dropped), dim=1).gather(1, rank_of_slot)  # (T, K)
        rows = row.topk(min(top_k, ranks), dim=1, largest=False, sorted=True).values  # (T, P)
        return cls(group, token_of_row, row_of_slot, rows, [], [])

    def with_sizes(self, sent: list[int], received: list[int]) -> AllToAllPlan:
        """The plan with the rows per rank, and without the tail."""
        token_of_row = self.token_of_row[: sum(sent)]
        return self._replace(token_of_row=token_of_row, sent=sent, received=received)


def token_rank_mask(rank_of_slot: Tensor, ranks: int) -> Tensor:
    """(T, W) bool: whether a token has a slot on a rank, from rank_of_slot (T, K) in 0..W."""
    num_tokens, device = rank_of_slot.size(0), rank_of_slot.device
    mask = torch.zeros(num_tokens, ranks + 1, dtype=torch.bool, device=device)
    return mask.scatter_(1, rank_of_slot, True)[:, :ranks]


def tokens_with_slot(rank_of_slot: Tensor, ranks: int) -> Tensor:
    """(W, K) int64: tokens that have more than j slots on a rank, j < K; column 0 counts the rows."""
    tokens, top_k = rank_of_slot.shape
    slots = rank_of_slot.new_zeros(tokens, ranks + 1)
    slots = slots.scatter_add_(1, rank_of_slot, torch.ones_like(rank_of_slot))[:, :ranks]  # (T, W)
    return (slots.unsqueeze(2) > torch.arange(top_k, device=slots.device)).sum(0)


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Counts (C, W, n) for each rank -> (C, W, n) from each rank. One small all-to-all."""
    outgoing = counts.transpose(0, 1).contiguous()
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    return incoming.transpose(0, 1)


class HostCopy(NamedTuple):
    """Several (C, n) tensors, side by side, on their way to the host; `copied` is recorded after the copy on CUDA."""

    values: Tensor
    widths: list[int]
    copied: torch.cuda.Event | None

    @classmethod
    def start(cls, *counts: Tensor) -> HostCopy:
        """Start one copy of several (C, n) int64 tensors. The host does not wait."""
        joined, copied = torch.cat(counts, 1), None
        widths = [count.size(1) for count in counts]
        if joined.is_cuda:
            pinned = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
            joined, copied = pinned.copy_(joined, non_blocking=True), torch.cuda.Event()
            copied.record()
        return cls(joined, widths, copied)


def to_host(copy: HostCopy) -> list[list[list[int]]]:
    """The tensors of a copy as lists. Waits for it, and for nothing queued later: the only host sync of a dispatch."""
    if copy.copied is not None:
        copy.copied.synchronize()
    return [each.tolist() for each in copy.values.cpu().split(copy.widths, 1)]


@dataclass
class _Transfer:
    """An asynchronous all-to-all. `buffer` holds the received rows, and a zero row after them."""

    buffer: Tensor
    work: Any
    outgoing: Tensor  # referenced until the transfer is over, so that its memory is not reused


def _start(rows: Tensor, plan: AllToAllPlan, *, reverse: bool) -> _Transfer:
    """Start to send rows (n, width) as planned, or from their receivers back to their senders."""
    outgoing, incoming = plan.sent, plan.received
    if reverse:
        outgoing, incoming = incoming, outgoing
    # The zero row is what index N, of a dropped slot, reads.
    buffer = rows.new_empty(sum(incoming) + 1, rows.size(1))
    buffer[-1].zero_()
    work = dist.all_to_all_single(buffer[:-1], rows, incoming, outgoing, plan.group, async_op=True)
    return _Transfer(buffer, work, rows)


def _wait(transfer: _Transfer | None) -> Tensor:
    assert transfer is not None, "an exchange starts before it ends"
    transfer.work.wait()
    return transfer.buffer


def _sum_rows_of_tokens(rows: Tensor, plan: AllToAllPlan, dtype: torch.dtype) -> Tensor:
    """(T, D) in `dtype`: sums of each token's rows of (N + 1, D), lowest rank first."""
    if row_sums.in_one_pass(rows.device) and dtype != torch.float64:
        return row_sums.sum_rows(rows[:-1], plan.rows_of_token, None, dtype)
    total = torch.zeros(plan.rows_of_token.size(0), rows.size(1), dtype=dtype, device=rows.device)
    for index in plan.rows_of_token.unbind(1):
        total += rows.index_select(0, index)
    return total


@dataclass
class Transit:
    """An exchange that is not finished: its plan, its transfers, and the tensor that links its ends in the graph."""

    plan: AllToAllPlan
    format: WireFormat
    experts_per_member: int = 0  # of an exchange to the experts
    tokens: tuple[Tensor, Tensor, Tensor] | None = None  # x, weights, ids before they are sent
    sum_dtype: torch.dtype = torch.float32  # of an exchange back
    in_forward: _Transfer | None = None
    in_backward: _Transfer | None = None
    handle: Tensor | None = None

    def take_handle(self) -> Tensor:
        """Take the empty tensor between the two ends.

        It is not kept: its graph refers to this exchange, and a reference cycle would keep all buffers until
        the garbage collector runs.
        """
        assert self.handle is not None, "an exchange ends once"
        handle, self.handle = self.handle, None
        return handle


def begin_dispatch(
    x: Tensor, weights: Tensor, ids: Tensor, plan: AllToAllPlan, experts_per_member: int
) -> Transit:
    """Begin an exchange of x (T, D), weights (T, K), ids (T, K) by a plan without sizes.

    `start_dispatch` sends the tokens, `finish_dispatch` ends it. What runs between this call and `start_dispatch` has its gradients computed during the transfer of gradients: autograd
    takes the steps in reverse.
    """
    wire = WireFormat(x.size(1), ids.size(1), x.dtype, weights.dtype)
    exchange = Transit(plan, wire, experts_per_member=experts_per_member)
    exchange.handle = _StartDispatch.apply(x, weights, exchange)
    exchange.tokens = x.detach(), weights.detach(), ids
    return exchange


def start_dispatch(exchange: Transit, sent: list[int], received: list[int]) -> None:
    """Start to send the tokens to their ranks, each of which has `experts_per_member` experts and receives local ids.

    sent, received (W,): rows per rank. One all-to-all in the forward, one in the backward, of the gradients.
    """
    assert exchange.tokens is not None, "an exchange starts once"
    (x, weights, ids), exchange.tokens = exchange.tokens, None
    exchange.plan = plan = exchange.plan.with_sizes(sent, received)
    wire, local = exchange.format, exchange.experts_per_member
    num_rows = plan.token_of_row.size(0)
    packed = torch.empty(num_rows, wire.num_bytes, dtype=torch.uint8, device=x.device)
    torch.index_select(x, 0, plan.token_of_row, out=wire.hidden(packed))

    # A row has all K slots of its token; those that another row carries get weight 0 and the id
    # `experts_per_member`, of a dropped slot.
    row = torch.arange(num_rows, device=x.device).unsqueeze(1)
    carried = plan.row_of_slot.index_select(0, plan.token_of_row) == row  # (N, K)
    of_token = weights.index_select(0, plan.token_of_row)
    wire.weights(packed).copy_(torch.where(carried, of_token, torch.zeros_like(of_token)))
    local_ids = ids.index_select(0, plan.token_of_row) % local
    wire.ids(packed).copy_(torch.where(carried, local_ids, local))
    exchange.in_forward = _start(packed, plan, reverse=False)


def finish_dispatch(exchange: Transit) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, D), weights (M, K), ids (M, K) int64 in 0..experts_per_member of the received rows."""
    return _FinishDispatch.apply(exchange.take_handle(), exchange)


def start_combine(sums: Tensor, dispatched: Transit) -> Transit:
    """Start to send sums (M, D) of received rows back to the ranks of their tokens, in the dtype of x."""
    exchange = Transit(dispatched.plan, dispatched.format, sum_dtype=sums.dtype)
    exchange.handle = _StartCombine.apply(sums, exchange)
    return exchange


def finish_combine(exchange: Transit) -> Tensor:
    """(T, D) in the dtype of the sums sent: the sum of each token's rows, lowest rank first."""
    return _FinishCombine.apply(exchange.take_handle(), exchange)


# Each exchange is two autograd functions with an empty tensor between them, so that other work fits between
# its start and its end, in the backward too: there the finishing function starts the exchange of gradients,
# and the starting function, which autograd runs later, waits for it.


class _StartDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, exchange: Transit) -> Tensor:
        ctx.exchange = exchange
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        packed = _wait(exchange.in_backward)
        wire, exchange.in_backward = exchange.format._replace(with_ids=False), None
        # A token's gradients from several ranks are summed in fp32 at least and rounded once.
        wide = torch.promote_types(wire.dtype, torch.float32)
        x = _sum_rows_of_tokens(wire.hidden(packed), exchange.plan, wide).to(wire.dtype)
        weights = wire.weights(packed).gather(0, exchange.plan.row_of_slot)
        return x, weights, None


class _FinishDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, exchange: Transit) -> tuple[Tensor, Tensor, Tensor]:
        ctx.exchange = exchange
        packed, wire = _wait(exchange.in_forward)[:-1], exchange.format
        exchange.in_forward = None
        ids = wire.ids(packed).long()
        ctx.mark_non_differentiable(ids)
        # Weights are copied: they are saved for the backward, and a view would keep all rows in memory.
        return wire.hidden(packed), wire.weights(packed).contiguous(), ids

    @staticmethod
    def backward(ctx: Any, x: Tensor, weights: Tensor, _: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        wire = exchange.format._replace(with_ids=False)
        packed = torch.empty(x.size(0), wire.num_bytes, dtype=torch.uint8, device=x.device)
        wire.hidden(packed).copy_(x)
        wire.weights(packed).copy_(weights)
        exchange.in_backward = _start(packed, exchange.plan, reverse=True)
        return x.new_empty(0), None


class _StartCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, exchange: Transit) -> Tensor:
        ctx.exchange = exchange
        rows = sums.to(exchange.format.dtype).contiguous()
        exchange.in_forward = _start(rows, exchange.plan, reverse=True)
        return sums.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        rows, ctx.exchange.in_backward = _wait(ctx.exchange.in_backward)[:-1], None
        return rows.to(ctx.exchange.sum_dtype), None


class _FinishCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, exchange: Transit) -> Tensor:
        ctx.exchange = exchange
        rows, exchange.in_forward = _wait(exchange.in_forward), None
        return _sum_rows_of_tokens(rows, exchange.plan, exchange.sum_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        rows = grad.to(exchange.format.dtype).index_select(0, exchange.plan.token_of_row)
        exchange.in_backward = _start(rows, exchange.plan, reverse=False)
        return grad.new_empty(0), None
